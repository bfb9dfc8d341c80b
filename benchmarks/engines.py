"""Seconds a round through ``flwr run`` on Ray: two SuperNodes, and one SuperNode per client.

Run alone: ``python -m benchmarks.engines [--quick]``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import say, summary
from flower_graph.apps.cli.launch import flwr_run
from flower_graph.data import load_data
from flower_graph.errors import DataError
from flower_graph.method.load import load_config
from flower_graph.records.rounds import RoundReport, read_reports

TARGET = 0.15  # seconds a round with two SuperNodes
WARM_UP = 2  # rounds that are not counted: Ray starts its actors, clients load their data
# SuperNodes, rounds, and whether each hosts one client only
CASES = ((2, 62, False), (100, 12, True), (400, 7, True))
QUICK = ((2, 4, False),)


def measure(name: str, supernodes: int, rounds: int, single: bool) -> dict[str, Any]:
    """Time a run."""
    settings = [f"rounds={rounds}"]
    if single:
        settings += ["data.name=csbm", f"data.nodes={supernodes}", "data.split=random"]
        settings += ["data.ratios=[0.2,0.2,0.6]"]
    reports, total, users = run_rounds(name, settings, supernodes)
    seconds = summary([report.seconds for report in reports[WARM_UP:]])
    entry = {"supernodes": supernodes, "users": users, "round": seconds}
    return entry | {"total-seconds": total, "target": None if single else TARGET}


def run_rounds(
    name: str, settings: list[str], supernodes: int
) -> tuple[list[RoundReport], float, int]:
    """Run a configuration through ``flwr run``."""
    say(f"flwr: {name}, {supernodes} SuperNodes")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, given = Path(folder) / "run", [*settings, "device=cpu"]
        result = flwr_run(name, given, out, supernodes=supernodes, echo=lambda _: None)
        reports = read_reports(out / "metrics.jsonl")
    return reports, time.perf_counter() - started, int(result["clients"])


def main() -> None:
    """Print the result as JSON."""
    name = "nfedgnn/cora"
    config = load_config(name, [])
    try:
        load_data(config.data, seed=config.seed, download=False)
    except DataError:
        name = "nfedgnn/cora-linqs"
    cases = QUICK if "--quick" in sys.argv else CASES
    load = os.getloadavg()[0]
    entries = [measure(name, *case) for case in cases]
    print(json.dumps({"config": name, "load": load, "entries": entries}))


if __name__ == "__main__":
    main()
