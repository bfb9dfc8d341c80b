"""Processor time of a message at a SuperNode: clients in a worker, in each message's process, none.

A SuperLink and SuperNodes on the loopback interface with TLS. The same run is made with
``resident`` as it is and with ``resident=false``, and between them that of an empty ClientApp,
whose time is what Flower itself takes.
Run alone: ``python -m benchmarks.resident [--quick]``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.deployment import partitioned, watch
from benchmarks.measure import keep_bytecode, say, summary
from deploy.loopback import DeploymentError, Loopback
from flower_graph.apps.cli.processes import termination_as_exit

CLIENT, SUPEREXEC, WORKER = "flwr-clientapp", "flower-superexec", "flower_graph.client.resident"
LEAST = 0.1  # processor seconds of a process that has imported Flower
LOOK = 0.05  # seconds between two looks at the processes
# Configuration, settings, exchanges of a round
CASES = (
    ("nfedgnn/cora-linqs", ("rounds=5",), 1),
    ("fedgls/cora-linqs", ("rounds=3", "partition.clients=4"), 2),
)
QUICK = (("nfedgnn/cora-linqs", ("rounds=2",), 1),)
TIMEOUT = 900.0
EMPTY = """
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
import time

client_app = ClientApp()
server_app = ServerApp()

@client_app.query()
def query(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)

@server_app.main()
def main(grid: Grid, context: Context) -> None:
    while len(nodes := list(grid.get_node_ids())) < context.run_config["nodes"]:
        time.sleep(0.2)
    for _ in range(context.run_config["messages"]):
        list(grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes]))
"""
ABOUT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "empty"
version = "1.0.0"
description = "Answers nothing"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "flower-graph"

[tool.flwr.app.components]
serverapp = "empty:server_app"
clientapp = "empty:client_app"

[tool.flwr.app.config]
nodes = 0
messages = 0
"""


class Meter(threading.Thread):
    """Adds up the processor time of one SuperNode's messages while they are answered.

    Flower's processes of single messages are children of its SuperExec, which reaps each only when
    it starts the next: so the last look at one sees all of its time.
    """

    def __init__(self, deployment: Loopback, node: str) -> None:
        super().__init__(daemon=True)
        self._parents: list[psutil.Process] = []
        self._workers: list[psutil.Process] = []
        self._deployment, self._node = deployment, node
        self._done = threading.Event()
        self._own: dict[int, float] = {}  # process of a message -> seconds, in their order
        self._worker: dict[int, float] = {}  # worker -> seconds
        self._after: dict[int, float] = {}  # process of a message -> workers' seconds when it ended

    def run(self) -> None:
        """Look at the processes again and again."""
        while not self._done.wait(LOOK):
            self._look()

    def stop(self) -> list[float]:
        """Return the processor seconds of each message: its process, and its worker's part."""
        self._done.set()
        self.join()
        seconds, before = [], 0.0
        for process, own in self._own.items():
            if own < LEAST:  # SuperExec has others, too
                continue
            after = self._after.get(process, sum(self._worker.values()))
            seconds.append(own + after - before)
            before = after
        return seconds

    def _look(self) -> None:
        if not self._parents:  # looking through all processes of the machine takes time itself
            self._parents = self._deployment.processes_of(self._node, SUPEREXEC)
        if self._own and not self._workers:
            self._workers = self._deployment.processes_of(self._node, WORKER)
        for process in self._workers:
            self._note(process, self._worker)
        for parent in self._parents:
            for process in _children(parent):
                self._note(process, self._own)
                if process.pid not in self._after and _is_zombie(process):
                    self._after[process.pid] = sum(self._worker.values())

    def _note(self, process: psutil.Process, times: dict[int, float]) -> None:
        try:
            used = process.cpu_times()
        except psutil.Error:
            return
        times[process.pid] = used.user + used.system


def _children(parent: psutil.Process) -> list[psutil.Process]:
    try:
        return list(parent.children())
    except psutil.Error:
        return []


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def measure(
    config: str, settings: tuple[str, ...], exchanges: int, supernodes: int
) -> dict[str, Any]:
    """Make a run in both ways and that of the empty app, in one deployment."""
    given = [*settings, f"strategy.min_nodes={supernodes}", "device=cpu"]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        data = partitioned(config, given, folder / "data", supernodes)
        empty = _empty_app(folder / "empty")
        ways: dict[str, Any] = {}
        with Loopback(folder / "deployment") as deployment:
            keys = [deployment.register(f"key-{number}") for number in range(supernodes)]
            for way in ("resident", "empty", "each-message"):
                say(f"resident: {config}, {supernodes} SuperNodes, {way}")
                more = {"resident": False} if way == "each-message" else {}
                names = [f"{way}-{number}" for number in range(supernodes)]
                for one, key, own in zip(names, keys, data, strict=True):
                    deployment.start_node(one, {"data-folder": str(own), **more}, key=key)
                meter = Meter(deployment, names[0])
                meter.start()
                out = folder / f"out-{way}"
                if way == "empty":
                    asked = {"nodes": supernodes, "messages": 5}
                    deployment.start_run(way, asked, empty)
                    deployment.wait(way, TIMEOUT)
                else:
                    run = {
                        "config": config,
                        "overrides": " ".join(given),
                        "output-dir": str(out),
                        "server-folder": str(folder / "data" / "server"),
                    }
                    deployment.start_run(way, run)
                    watch(deployment, way, out / "metrics.jsonl")
                time.sleep(1.0)  # the last process ends
                ways[way] = _entry(meter.stop(), out / "metrics.jsonl", exchanges)
                for one in names:
                    deployment.end(one)
        return {"config": config, "supernodes": supernodes, "ways": ways}


def _empty_app(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(ABOUT, encoding="utf-8")
    (folder / "empty.py").write_text(EMPTY, encoding="utf-8")
    return folder


def _entry(seconds: list[float], metrics: Path, exchanges: int) -> dict[str, Any]:
    """Put the figures together; rounds after the first, with which the app travels."""
    if len(seconds) < 3:
        raise DeploymentError(f"only {len(seconds)} messages were seen")
    found: dict[str, Any] = {"first": seconds[0], "later": summary(seconds[1:])}
    if metrics.exists():
        rounds = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
        found["exchange-seconds"] = summary([one["seconds"] / exchanges for one in rounds[1:]])
        found["losses"] = [one["loss"] for one in rounds]
    return found


def main() -> None:
    """Print the result as JSON."""
    quick = "--quick" in sys.argv
    keep_bytecode()
    load = os.getloadavg()[0]
    with termination_as_exit():  # so that the deployment is ended in any case
        entries = [
            measure(*case, supernodes=2 if quick else 4) for case in (QUICK if quick else CASES)
        ]
    for entry in entries:
        lost = {json.dumps(way.pop("losses")) for way in entry["ways"].values() if "losses" in way}
        entry["same-losses"] = len(lost) == 1
    print(json.dumps({"load": load, "entries": entries}))


if __name__ == "__main__":
    main()
