"""Clients that live in actors of Ray: who answers a message, and files on other machines."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_graph.apps import server_app
from flower_graph.client import ray_workers, resident
from flower_graph.client.ray_workers import GPUS, Folders, Mirror, RayHome, name_of
from flower_graph.errors import ConfigError, OutputError

ROOT = Path(__file__).resolve().parents[2]
RUN = 77
# A driver, and a task in the place of Flower's actor
DRIVER = """
import os, sys
from pathlib import Path
import ray
from flwr.app import Context, Message, RecordDict
from flower_graph.client.resident import ResidentClientApp
from flower_graph.client.ray_workers import OnRay, ray_workers, wait_for_ray
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
        reply = ResidentClientApp("told_app:app")(message, context)
    except KeyError as error:
        return "KeyError", str(error.__cause__)
    assert "torch" not in sys.modules  # whose import takes longer than all else that is done here
    if reply.has_error():
        return kind_of(reply).name, reply.error.reason
    about = reply.content["about"]
    return int(about["process"]), int(about["asked"]), int(context.state["seen"]["partition"])

def ask(kind, partition):
    return ray.get(answer.remote(kind, partition))

with ray_workers(OnRay({run}, "told_app:app", 3, Path("out").absolute()), {{}}):
    first, second = ask("", 0), ask("", 1)
    assert first[0] != second[0] and first[1:] == (1, 0) and second[1:] == (1, 1)
    assert ask("", 2) == (first[0], 2, 2)  # two workers: the third SuperNode is with the first
    kind, cause = ask(".fail", 1)
    assert kind == "KeyError" and "in fail" in cause, cause
    assert ask("", 1) == (second[0], 2, 1)
    assert ask(".die", 1)[0] == "STATE_LOST"
    again = ask("", 1)
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
    monkeypatch.setattr(resident, "load_app", lambda reference: reference)
    for namespaces, home in ((["other"], str), ([name_of(RUN), "other"], RayHome)):
        actors = [{"name": "one", "namespace": name} for name in namespaces]
        listing = SimpleNamespace(list_named_actors=lambda all_namespaces, found=actors: found)
        monkeypatch.setattr(ray_workers.ray, "util", listing)
        ray_workers.workers_of.cache_clear()
        assert isinstance(resident.home_of("told_app:app", context_of(0)), home)
    ray_workers.workers_of.cache_clear()


@pytest.mark.flwr
def test_a_message_goes_to_the_worker_that_keeps_its_clients(tmp_path: Path) -> None:
    here = Path(__file__).parent  # where `told_app` is
    paths = os.pathsep.join([str(here), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER.format(run=RUN)],
        env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    workers = done.stdout.splitlines()[-1].split()[1:]  # Ray tells of tasks before
    until = time.monotonic() + 30  # Ray ends them, and later
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


# Files on machines without the run's folders ----------------------------------------------------


class Called:
    """The driver's folders, called as Ray calls an actor."""

    def __init__(self, folders: Folders) -> None:
        for name in ("needed", "write"):
            method = getattr(folders, name)
            setattr(self, name, type("Method", (), {"remote": staticmethod(method)}))


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Mirror]:
    """Return the outputs there and here, and the mirror."""
    monkeypatch.setattr(ray_workers.ray, "get", lambda answer: answer)
    there, here = tmp_path / "there", tmp_path / "here"
    folders = [Folders(root / "out", root / "state") for root in (there, here)]
    return there / "out", here / "out", Mirror(folders[1], Called(folders[0]))


BAD = ["../a", "/etc/a", "x/../../a", "", "link/a"]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("data", [b"x", None])
def test_a_remote_worker_changes_no_other_files(
    tmp_path: Path, name: str, data: bytes | None
) -> None:
    folders = Folders(tmp_path / "out", tmp_path / "state")
    (tmp_path / "out").mkdir()
    (tmp_path / "a").write_text("mine")
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    with pytest.raises(OutputError):
        folders.write({("out", name): data})
    assert (tmp_path / "a").read_text() == "mine"


def test_files_go_there_as_they_were_written(sides: tuple[Path, Path, Mirror]) -> None:
    there, here, mirrored = sides
    log, gone = Path("clients/3/measured.bin"), Path("clients/3/snapshots/round-000001/a")
    saved, other = Path("checkpoints/round-000002/client-3.safetensors"), Path("embeddings/7.npz")

    def first() -> Any:
        for path in (log, gone, saved, other):
            (here / path).parent.mkdir(parents=True, exist_ok=True)
            (here / path).write_bytes(b"one")
        return SimpleNamespace(has_error=lambda: False)

    def second() -> Any:
        with (here / log).open("ab") as file:
            file.write(b" two")
        (here / gone).unlink()
        return SimpleNamespace(has_error=lambda: False)

    mirrored.during("3", first)
    assert (there / other).read_bytes() == b"one"
    assert not (here / "checkpoints").exists() and (there / saved).read_bytes() == b"one"
    mirrored.during("3", second)
    assert (there / log).read_bytes() == b"one two"
    assert not (there / gone).exists() and (there / saved).exists()
    assert (there / log).stat().st_mode & 0o777 == 0o600


def test_a_supernode_that_comes_finds_its_files(sides: tuple[Path, Path, Mirror]) -> None:
    there, here, mirrored = sides
    saved = Path("checkpoints/round-000002/client-3.safetensors")
    (there / saved).parent.mkdir(parents=True)
    (there / saved).write_bytes(b"state")
    key = there.parent / "state" / "parties" / "3"
    key.parent.mkdir(parents=True)
    key.write_bytes(b"key")

    def seen(supernode: str, failed: bool = False) -> tuple[bool, bool]:
        """Return whether an answer finds the checkpoint and the key."""
        found: list[bool] = []

        def answer() -> Any:
            found[:] = (here / saved).exists(), (here.parent / "state/parties/3").exists()
            return SimpleNamespace(has_error=lambda: failed)

        mirrored.during(supernode, answer)
        return found[0], found[1]

    assert seen("3") == (True, True)
    assert seen("3", failed=True) == (False, True)  # nobody reads a checkpoint twice ...
    assert seen("3") == (True, True)  # ... but after an error
    assert seen("13") == (False, True)


def test_a_temporary_folder_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from flower_graph.client.ray_workers import TemporaryFolder\n"
        "folder = TemporaryFolder(); (folder.path / 'file').touch()\n"
        "print(folder.path, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "file").exists()
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
