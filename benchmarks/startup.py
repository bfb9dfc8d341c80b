"""What starting costs: commands that compute little, beside an import that nobody can avoid.

    python benchmarks/startup.py [--against CHECKOUT] [--times 7]

Measures the medians of seconds by the clock and of CPU seconds (user and system, which say more of
a busy machine), and their ratios to the import's, and writes them into
``benchmarks/results.json`` and the pages made of it. Each round runs every command once, with the
other checkout's between. Bytecode is kept from a run that does not count, as an installed package
has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.page import RESULTS, write_pages

TREE = Path(__file__).resolve().parent.parent
TARGETS = {"torch, flwr": 1.7, "numpy": 2.5}  # by the clock of an idle machine
# What each is compared with, and what is run
BASES = {"torch, flwr": ("-c", "import torch, flwr"), "numpy": ("-c", "import numpy")}
COMMANDS = {
    "run nfedgnn/cora-linqs rounds=1": (
        "torch, flwr",
        ("run", "nfedgnn/cora-linqs", "rounds=1", "--out", "{out}"),
    ),
    "run nfedgnn/cora-linqs rounds=2": (
        "torch, flwr",
        ("run", "nfedgnn/cora-linqs", "rounds=2", "--out", "{out}"),
    ),
    "--help": ("numpy", ("--help",)),
    "list": ("numpy", ("list",)),
    "show nfedgnn/cora-linqs": ("numpy", ("show", "nfedgnn/cora-linqs")),
    "a refused key": ("numpy", ("run", "nfedgnn/cora-linqs", "strategy.reg_wieght=1")),
}


def main() -> None:
    """Measure, and write the part ``startup`` of the results and of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measured in turn")
    parser.add_argument("--times", type=int, default=7, metavar="N", help="runs of each command")
    args = parser.parse_args()
    started = time.perf_counter()
    trees = {"after": TREE} | ({} if args.against is None else {"before": args.against.resolve()})
    times = measure(list(trees.values()), args.times)
    entries = []
    for name, (base, _) in COMMANDS.items():
        entry: dict[str, Any] = {"command": name, "beside": base, "target": TARGETS[base]}
        for side, tree in trees.items():
            here, there = times[tree, name], times[tree, base]
            entry[side] = {
                how: {"seconds": seconds, "ratio": seconds / there[how]}
                for how, seconds in here.items()
            }
        entries.append(entry)
        print(entry)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    results["parts"]["startup"] = {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "took-seconds": time.perf_counter() - started,
        "quick": False,
        "load": os.getloadavg()[0],
        "times": args.times,
        "entries": entries,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_pages(results)


def measure(trees: list[Path], times: int) -> dict[tuple[Path, str], dict[str, float]]:
    """Give the seconds, by the clock and of the CPU, by checkout and name."""
    found: dict[tuple[Path, str], list[tuple[float, float]]] = {}
    entries = {tree: entry_point(tree) for tree in trees}
    with tempfile.TemporaryDirectory() as bytecode:
        for number in range(times + 1):
            for name in (*BASES, *COMMANDS):
                for tree in trees:
                    words = BASES.get(name) or (*entries[tree], *COMMANDS[name][1])
                    seconds = run(tree, words, bytecode)
                    if number:  # the first has to compile the library
                        found.setdefault((tree, name), []).append(seconds)
    return {
        key: {"clock": statistics.median(clock), "cpu": statistics.median(cpu)}
        for key, seconds in found.items()
        for clock, cpu in [zip(*seconds, strict=True)]
    }


def entry_point(tree: Path) -> tuple[str, str]:
    """Say how Python starts the command of a checkout, wherever its module lies."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["flower-graph"].partition(":")
    return "-c", f"import sys; from {module} import {function}; sys.exit({function}())"


def run(tree: Path, command: tuple[str, ...], bytecode: str) -> tuple[float, float]:
    """Run Python once in an empty folder; give seconds by the clock, and of the CPU."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        words = [sys.executable, *(word.format(out=f"{folder}/out") for word in command)]
        child = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, _, usage = os.wait4(child.pid, 0)
        child.returncode = 0  # it is over: nobody else waits for it
        clock = time.perf_counter() - started
    return clock, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
