"""Clients that live in actors of Ray: where these are, and who answers a message."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_graph.apps import server_app
from flower_graph.client.resident import app as resident
from flower_graph.client.resident import ray_workers, worker
from flower_graph.client.resident.ray_workers import GPUS, RayHome, name_of
from flower_graph.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RUN = 77
# Counts in a global what this process was asked
COUNTING = """
import os
from flwr.app import MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app, seen = ClientApp(), []

@app.train()
def train(message, context):
    seen.append(context.node_id)
    context.state["last"] = MetricRecord({"partition": context.node_config["partition-id"]})
    about = MetricRecord({"process": os.getpid(), "here": len(seen)})
    return Message(RecordDict({"about": about}), reply_to=message)

@app.train("fail")
def fail(message, context):
    raise KeyError("what is missing")

@app.train("die")
def die(message, context):
    os._exit(1)
"""
# A driver, and a task in the place of Flower's actor
DRIVER = """
import os, sys, time
from pathlib import Path
import ray
from flwr.app import Context, Message, RecordDict
from flower_graph.client.resident.app import ResidentClientApp
from flower_graph.client.resident.ray_workers import OnRay, ray_workers, wait_for_ray
from flower_graph.flower_compat import identify, stamp
from flower_graph.wire.client_errors import kind_of

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
wait_for_ray()

@ray.remote(num_cpus=0)
def answer(kind, partition):
    identify({run})
    message = Message(RecordDict(), 5, "train" + kind)
    stamp(message, run_id={run}, message_id="1", src_node_id=1)
    context = Context({run}, partition, dict([("partition-id", partition)]), RecordDict(), {{}})
    try:
        reply = ResidentClientApp("counting:app")(message, context)
    except KeyError as error:
        return "KeyError", str(error.__cause__)
    assert "torch" not in sys.modules  # whose import takes longer than all else that is done here
    if reply.has_error():
        return kind_of(reply).name, reply.error.reason
    about = reply.content["about"]
    return int(about["process"]), int(about["here"]), int(context.state["last"]["partition"])

def ask(kind, partition):
    return ray.get(answer.remote(kind, partition))

with ray_workers(OnRay({run}, "counting:app", 3, Path("out").absolute()), {{}}):
    first, second = ask("", 0), ask("", 1)
    assert first[0] != second[0] and first[1:] == (1, 0) and second[1:] == (1, 1)
    assert ask("", 2) == (first[0], 2, 2)  # two workers: the third SuperNode is with the first
    kind, cause = ask(".fail", 1)
    assert kind == "KeyError" and "in fail" in cause, cause
    assert ask("", 1) == (second[0], 2, 1)
    assert ask(".die", 1)[0] == "STATE_LOST"
    for _ in range(200):
        again = ask("", 1)
        if again[0] != "STATE_LOST":
            break
        time.sleep(0.1)
    assert again[0] != second[0] and again[1:] == (1, 1)  # another process, by the same name
    assert ask("", 0) == (first[0], 3, 0)
print("processes", first[0], again[0])
"""


def context_of(partition: int) -> Context:
    return Context(RUN, 5, {"partition-id": partition}, RecordDict(), {})


def test_workers_are_spread_over_machines_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(name: str, alive: bool, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "Alive": alive, "Resources": resources}

    machines = [
        machine("a", True, CPU=3.0),
        machine("b", False, CPU=8.0),
        machine("c", True, CPU=1.0),
        machine("d", True, GPU=1.0),
    ]
    monkeypatch.setattr(ray_workers.ray, "nodes", lambda: machines)
    assert ray_workers._places(0) == ["a", "c", "a", "a"]
    assert ray_workers._places(0.5) == ["d", "d"]
    with pytest.raises(ConfigError, match="resident-num-gpus: 2"):
        ray_workers._places(2)


def test_clients_live_in_workers_only_if_the_run_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))  # type: ignore[arg-type]
    monkeypatch.setattr(worker, "load_app", lambda reference: reference)
    for namespaces, home in ((["other"], str), ([name_of(RUN), "other"], RayHome)):
        actors = [{"name": "one", "namespace": name} for name in namespaces]
        listing = SimpleNamespace(list_named_actors=lambda all_namespaces, found=actors: found)
        monkeypatch.setattr(ray_workers.ray, "util", listing)
        ray_workers.workers_of.cache_clear()
        assert isinstance(resident.home_of("counting:app", context_of(0)), home)
    ray_workers.workers_of.cache_clear()


@pytest.mark.flwr
def test_a_message_goes_to_the_worker_that_keeps_its_clients(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER.format(run=RUN)],
        env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    workers, until = done.stdout.split()[1:], time.monotonic() + 30  # Ray ends them, and later
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until, workers
        time.sleep(0.1)


def test_how_many_gpus_a_worker_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, given = SimpleNamespace(get_node_ids=lambda: [1, 2]), dict[str, Any]()
    context: Any = SimpleNamespace(run_id=RUN, run_config=given)
    counted = SimpleNamespace(num_clients=lambda config: 2)
    monkeypatch.setattr(server_app, "is_simulation", lambda grid: True)
    monkeypatch.setattr(server_app, "configured", lambda context: (None, None))
    monkeypatch.setattr(server_app, "method_of", lambda config: counted)
    monkeypatch.setattr(ray_workers, "wait_for_ray", lambda: None)
    monkeypatch.setattr(ray_workers, "ray_workers", lambda run, made: run)

    def asked(value: Any) -> Any:
        given[GPUS] = value
        return server_app._workers(grid, context, tmp_path)  # type: ignore[arg-type]

    assert [asked(value).gpus for value in ("", None, "0.5", 2)] == [0, 0, 0.5, 2]
    for wrong in ("half", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match=GPUS):
            asked(wrong)
