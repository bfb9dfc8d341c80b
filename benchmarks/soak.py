"""Long runs: whether memory stays flat, and whether a descriptor or a process is left.

Run alone: ``python -m benchmarks.soak [--quick]``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import say
from flower_graph.apps.cli.launch import flwr_run
from flower_graph.apps.run import run
from flower_graph.method.load import load_config
from flower_graph.records.rounds import RoundReport

GROWTH = 0.05  # share by which memory may grow
ROUNDS = {"in-process": 1000, "flwr": 200}
QUICK = {"in-process": 20, "flwr": 6}
SAMPLES = 20  # of memory, over a run
SETTLED = 0.1  # share of the rounds after which caches are full and growth is counted
ENDS = 10.0  # seconds that processes may take to end


def in_process(rounds: int) -> dict[str, Any]:
    """Measure a run on the in-process engine."""
    _run(2)  # what libraries load once, such as the fonts of pictures, is no leak
    me, samples = psutil.Process(), list[dict[str, float]]()
    before, due = _open_files(me), _due(rounds)

    def sample(report: RoundReport) -> None:
        if report.round in due:
            samples.append({"round": report.round, "bytes": me.memory_full_info().uss})

    started = time.perf_counter()
    _run(rounds, sample)
    seconds = time.perf_counter() - started
    left = sorted(_open_files(me) - before)
    return _entry("in-process", rounds, seconds, samples) | {"left": left}


def _run(rounds: int, progress: Callable[[RoundReport], None] | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = load_config("nfedgnn/cora-linqs", [f"rounds={rounds}", "device=cpu"])
        run(config, Path(folder) / "run", progress=progress)


def on_ray(rounds: int) -> dict[str, Any]:
    """Measure a run through ``flwr run``: all its processes, the memory that they share once."""
    me, samples, due = psutil.Process(), list[dict[str, float]](), _due(rounds)
    before = _open_files(me)

    def sample(line: str) -> None:
        found = re.search(r"round +(\d+)/", line)
        if found and int(found[1]) in due:
            samples.append({"round": int(found[1]), "bytes": _held(me)})

    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        given = [f"rounds={rounds}", "device=cpu"]
        flwr_run("nfedgnn/cora-linqs", given, Path(folder) / "run", supernodes=2, echo=sample)
        seconds = time.perf_counter() - started
    deadline = time.monotonic() + ENDS
    while (alive := me.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = [*sorted(_open_files(me) - before), *(f"process {one.name()}" for one in alive)]
    return _entry("flwr", rounds, seconds, samples) | {"left": left}


def _due(rounds: int) -> set[int]:
    """Choose the rounds after which memory is looked at, from where it counts to the last."""
    first = max(1, round(SETTLED * rounds))
    return {first + (rounds - first) * place // SAMPLES for place in range(SAMPLES + 1)}


def _held(process: psutil.Process) -> float:
    """Add up the memory of a process's descendants; a page that n share counts 1/n for each."""
    total = 0.0
    for one in process.children(recursive=True):
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def _open_files(process: psutil.Process) -> set[str]:
    """List what the process has open: files, sockets and pipes by kind, each with its number."""
    folder = Path(f"/proc/{process.pid}/fd")
    found = set()
    for entry in folder.iterdir():
        try:
            found.add(f"{entry.name} {os.readlink(entry).partition(':')[0]}")
        except FileNotFoundError:  # the listing's own
            continue
    return found


def _entry(
    engine: str, rounds: int, seconds: float, samples: list[dict[str, float]]
) -> dict[str, Any]:
    """Sum up a run: growth is the last quarter of the samples against the first."""
    quarter = max(1, len(samples) // 4)
    held = [one["bytes"] for one in samples]
    first, last = sum(held[:quarter]) / quarter, sum(held[-quarter:]) / quarter
    return {
        "engine": engine,
        "rounds": rounds,
        "seconds": seconds,
        "samples": samples,
        "first-bytes": first,
        "last-bytes": last,
        "growth": last / first - 1,
        "target": GROWTH,
    }


def main() -> int:
    """Run both and print the result."""
    rounds = QUICK if "--quick" in sys.argv else ROUNDS
    load = os.getloadavg()[0]
    entries = []
    for measure, name in ((in_process, "in-process"), (on_ray, "flwr")):
        say(f"soak: {rounds[name]} rounds, {name}")
        entries.append(measure(rounds[name]))
    print(json.dumps({"load": load, "entries": entries}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
