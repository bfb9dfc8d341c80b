"""PPFL-GNN: the server's alignment, DeepWalk beside gensim, and whole iterations.

Every case is measured in a process of its own. Run alone: ``python -m benchmarks.ppfl [--quick]``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

from benchmarks.measure import part_main, run_part
from benchmarks.ppfl_deepwalk import TARGET, WORK, measure_deepwalk
from benchmarks.ppfl_rounds import (
    IDLE,
    ROUNDS,
    above_own,
    measure_exchange,
    measure_ray,
    measure_rounds,
)
from benchmarks.ppfl_server import (
    FORMS,
    GOAL,
    QUICK_GOAL,
    TARGETS,
    THREADS,
    fitted,
    goal_cases,
    growth_cases,
    measure_alignment,
)
from flower_graph.method.load import load_config

# The server's goals; an iteration in parts of gensim's time; seconds above the clients' own work,
# and of the last iteration, where the MLP judges too
GOALS = {**TARGETS, "deepwalk": TARGET, "flwr": 0.5, "last": 2.5}
CONFIGS = ("ppfl/cora-linqs-deepwalk", "ppfl/cora-linqs-gat")
TINY = [*IDLE, "partition.ratios=[0.8,0.1,0.1]", "judge.folds=2"]  # few nodes to judge
PACKAGES = ("gensim", "scikit-learn")
CASES: dict[str, Callable[..., Any]] = {
    "alignment": measure_alignment,
    "exchange": measure_exchange,
    "deepwalk": measure_deepwalk,
    "rounds": measure_rounds,
}


def _part(case: str, *arguments: object) -> Any:
    """Measure a case in a process of its own."""
    return run_part("ppfl", ["--case", json.dumps([case, *arguments])])


def measure_server(quick: bool) -> dict[str, Any]:
    """Measure the alignment: against its goals, how it grows, and inside whole iterations."""
    growth = [_part("alignment", *case) for case in growth_cases(quick)]
    size = QUICK_GOAL if quick else GOAL
    return {
        "goals": [_part("alignment", *case) for case in goal_cases(quick)],
        "growth": growth,
        "fits": fitted(growth),
        "exchange": [
            _part("exchange", form, size, THREADS[-1], 4 if quick else 8) for form in FORMS
        ],
    }


def measure_walking(quick: bool) -> list[dict[str, Any]]:
    """Measure DeepWalk with one pass over the walks, and with the shipped number of them."""
    config = load_config(CONFIGS[0], [])
    work, turns = (TINY, 1) if quick else (WORK, 7)
    passes = sorted({1, config.deepwalk.epochs})[: 1 if quick else 2]
    return [_part("deepwalk", CONFIGS[0], [*work, f"deepwalk.epochs={n}"], turns) for n in passes]


def measure_iterations(quick: bool) -> list[dict[str, Any]]:
    """Measure whole iterations in process, as shipped and with next to nothing to do."""
    if quick:
        return [_part("rounds", name, TINY, 1, 4) for name in CONFIGS]
    return [
        _part("rounds", name, settings, threads, ROUNDS)
        for name in CONFIGS
        for settings, threads in (([], 1), ([], 2), (IDLE, 1))
    ]


def measure_flwr(iterations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure ``flwr run``, for everything that was measured in process on one thread."""
    alone = [entry for entry in iterations if entry["threads"] == 1]
    return [above_own(measure_ray(e["config"], e["settings"], ROUNDS), e) for e in alone]


def measure_all(quick: bool) -> dict[str, Any]:
    """Measure everything; the tiny run leaves Ray out."""
    load = os.getloadavg()[0]
    iterations = measure_iterations(quick)
    return {
        "load": load,
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "server": measure_server(quick),
        "deepwalk": measure_walking(quick),
        "iterations": iterations,
        "flwr": [] if quick else measure_flwr(iterations),
        "targets": GOALS,
    }


if __name__ == "__main__":
    part_main(CASES, measure_all)
