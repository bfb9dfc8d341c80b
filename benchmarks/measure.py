"""Tools of all benchmarks: tables, fits, the machine, and parts that run on their own."""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from flower_graph.engine.machine import processor
from flower_graph.records.rounds import format_bytes

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flwr", "numpy", "ray", "torch", "torch-geometric")


class Table(TypedDict):
    """A table of figures as the page shows it; cells are text."""

    title: str
    about: str
    head: list[str]
    rows: list[list[str]]


def table(title: str, about: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Make a table; cells are written by ``str``."""
    cells = [[str(cell) for cell in row] for row in rows]
    return {"title": title, "about": " ".join(about.split()), "head": [*head], "rows": cells}


def duration(seconds: float) -> str:
    """Write seconds, or milliseconds below one second."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def spread(seconds: Sequence[float]) -> str:
    """Write the median of some times, and in brackets the fastest and the slowest."""
    ends = f"{duration(min(seconds))} – {duration(max(seconds))}"
    return f"{duration(statistics.median(seconds))} ({ends})"


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit ``value = a size^b`` by least squares on logarithms and return ``b``."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def machine() -> dict[str, Any]:
    """Describe the machine and the versions, without the name of a host or a path."""
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def run_module(module: str, arguments: Sequence[str] = ()) -> Any:
    """Run a module of this folder in its own process; its last line is JSON."""
    # Threads that spin while they wait measure what else the cores do; both sides of every ratio
    # wait without spinning.
    environment = {"OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore", **os.environ}
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"benchmarks.{module} ended with code {done.returncode}")
    return json.loads(lines[-1])


def command_of(tree: Path) -> list[str]:
    """Return how Python starts the command of a checkout, wherever its module lies."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["flower-graph"].partition(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", code]


def environment_of(tree: Path, threads: int, bytecode: str) -> dict[str, str]:
    """Return the environment of a process that imports a checkout and keeps bytecode elsewhere."""
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
    return {**os.environ, **own, **kept, "PYTHONWARNINGS": "ignore"}


def say(text: str) -> None:
    """Report progress, apart from the result on standard output."""
    print(text, file=sys.stderr, flush=True)
