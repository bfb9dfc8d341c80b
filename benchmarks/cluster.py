"""Seconds a round on two raylets of one core, beside one of two, for 4, 16 and 64 SuperNodes.

The raylets stand for machines: they share no folder (``deploy.raylets``). Both clusters are there
all the time, and runs on them take turns.
Run alone: ``python -m benchmarks.cluster [--quick]``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import say, summary
from deploy.raylets import Raylets
from flower_graph.apps.cli.launch import flwr_run
from flower_graph.apps.cli.processes import termination_as_exit
from flower_graph.records.rounds import read_reports

CONFIG = "nfedgnn/cora-linqs"
CLUSTERS = {"one": (2,), "two": (1, 1)}  # name -> processors of each machine
SUPERNODES, ROUNDS, TURNS = (4, 16, 64), 22, 2
WARM_UP = 2  # rounds that are not counted: workers start, clients load their data
TARGET = 1.25  # times the time of one machine


def measure(clusters: dict[str, Raylets], supernodes: int, rounds: int) -> dict[str, Any]:
    """Run on each cluster in turns; return the seconds of their rounds, and the ratio."""
    seconds: dict[str, list[float]] = {name: [] for name in clusters}
    for _ in range(TURNS):
        for name, cluster in clusters.items():
            say(f"cluster: {supernodes} SuperNodes, {len(cluster.machines)} machines")
            seconds[name] += rounds_on(cluster, supernodes, rounds)
    found = {name: summary(times) for name, times in seconds.items()}
    ratio = found["two"]["median"] / found["one"]["median"]
    return {"supernodes": supernodes, **found, "ratio": ratio}


def rounds_on(cluster: Raylets, supernodes: int, rounds: int) -> list[float]:
    """Return the seconds of a run's rounds."""
    settings = [f"rounds={rounds + WARM_UP}", "device=cpu", "save=none"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        flwr_run(
            CONFIG,
            settings,
            out,
            supernodes=supernodes,
            ray_address=cluster.address,
            echo=lambda _: None,
        )
        return [one.seconds for one in read_reports(out / "metrics.jsonl")[WARM_UP:]]


def main() -> None:
    """Print the result as JSON."""
    quick = "--quick" in sys.argv
    load = os.getloadavg()[0]
    with (
        termination_as_exit(),
        Raylets(CLUSTERS["one"]) as one,
        Raylets(CLUSTERS["two"]) as two,
    ):
        sizes, rounds = ((2,), 2) if quick else (SUPERNODES, ROUNDS)
        entries = [measure({"one": one, "two": two}, count, rounds) for count in sizes]
    print(json.dumps({"config": CONFIG, "load": load, "target": TARGET, "entries": entries}))


if __name__ == "__main__":
    main()
