"""What all benchmarks share: medians, fits, the machine, and parts that run on their own."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from flower_graph.engine.machine import keep_freed_memory, processor

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flwr", "numpy", "ray", "torch", "torch-geometric")


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the extremes and the number of measured times."""
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "count": len(seconds),
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit ``value = a size^b`` by least squares on logarithms and return ``b``."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def keep_bytecode() -> None:
    """Have processes that are started keep bytecode, as an installed package has it."""
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""


def peak_bytes() -> int:
    """Return the most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine() -> dict[str, Any]:
    """Describe the machine and the versions, without the name of a host or a path."""
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory-bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def run_part(module: str, arguments: Sequence[str] = ()) -> Any:
    """Run a module of this folder in a process of its own; its last line is its result."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    # Threads that spin while they wait measure what else the cores do; both sides of every ratio
    # wait without spinning.
    environment = {"OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore", **os.environ}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"benchmarks.{module} ended with code {done.returncode}")
    return json.loads(lines[-1])


def say(text: str) -> None:
    """Report progress, apart from the result on standard output."""
    print(text, file=sys.stderr, flush=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def part_main(cases: Mapping[str, Callable[..., Any]], measure_all: Callable[[bool], Any]) -> None:
    """Be the command line of a part that measures each case in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        keep_freed_memory()
        case, *arguments = json.loads(given.case)
        print(json.dumps(cases[case](*arguments)))
        return
    print(json.dumps(measure_all(given.quick)))
