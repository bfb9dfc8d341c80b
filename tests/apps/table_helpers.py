"""Runs of a paper's tables without training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flower_graph.apps.reproduce.asked import Asked
from flower_graph.apps.reproduce.experiments import RUNS, Curves, Run, Runs
from flower_graph.apps.reproduce.table import read_table
from flower_graph.records.rounds import RoundReport
from flower_graph.storage.reading import read_packed

OWN = """
title: A table of my own
config: fedgls/{data!l}
only: [data, method, table]
seeds: [0, 1]
data: {Cora: {}, CiteSeer: {}}
methods:
  mine: {settings: [strategy.name=structure-fedavg]}
  other: {settings: [strategy.name=fed-gnn]}
tables:
  one:
    - table: Table one
      rows:
        - {metric: test-accuracy-at-best-val, paper: true}
        - {metric: gain, of: test-accuracy-last, over: other}
        - precision
      paper: {Cora: {mine: 0.75}}
page:
  - text: Seeds {seeds}.
  - heading: "{data}"
    for: [data]
    rows: {table: Table one}
    each: [method]
    columns:
      - [method, "{method}"]
      - [ours, accuracy, test-accuracy-at-best-val]
      - [paper, paper:.2f, test-accuracy-at-best-val]
      - [gain, points, gain]
      - [n, seeds, test-accuracy-at-best-val]
"""

GRAPH = ("precision", "recall", "homophily", "true-homophily", "degree", "true-degree")


def asked_of(name: str, **changes: Any) -> Asked:
    """Ask for everything, two seeds and three rounds."""
    table = read_table(name)
    everything: dict[str, Any] = {
        "data": tuple(table.data),
        "models": tuple(table.models),
        "methods": tuple(table.methods),
        "tables": tuple(table.tables),
        "seeds": (0, 1),
        "rounds": 3,
    }
    return Asked(table, **(everything | changes))


def made_up(asked: Asked) -> Runs:
    """Give every run its own figures: best validation in round 2, where test is 0.5 and more."""
    runs: Runs = {}
    for run in asked.runs():
        runs.setdefault(run.experiment, {})[run.seed] = curves_of_run(run)
    return runs


def curves_of_run(run: Run) -> Curves:
    drawn = random.Random(repr(run))
    test = 0.5 + drawn.random() / 4
    curves = Curves([2.0, 1.5, 1.0], [0.1, 0.4, 0.3], [0.2, test, test - 0.1], {"a": 2**20})
    curves.seconds_per_round, curves.run_seconds = 0.25, 9.0
    if run.experiment.method.startswith(("FedGLS", "Fed-GNN_k")):
        curves.structure = {name: drawn.random() for name in GRAPH}
    if run.experiment.config.startswith("ppfl/"):
        count = 1 if "partition.clients=1" in run.experiment.overrides else 4
        curves.judged = {
            name: {role: [test - 0.01 * n for n in range(count)] for role in ("val", "test")}
            for name in ("mlp", "svc")
        }
        if run.experiment.method == "FED":
            curves.alignment = {f"precision-{k}": [0.25, 0.5, 0.75] for k in (1, 5, 10)}
    return curves


def written(out: Path, what: str = "rows") -> list[dict[str, Any]]:
    """Read the rows, choices or runs that ``reproduce`` left in a folder."""
    found: list[dict[str, Any]] = read_packed(out / RUNS)[what]
    return found


def only_row(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = (r for r in rows if all(r.get(k) == v for k, v in wanted.items()))
    return found


def report(number: int, val: float, test: float) -> RoundReport:
    """Make a round of two clients, each of which sent a MiB."""
    made = RoundReport(number, 1.0, 1.0, 0.0, 0.9, val, test, 2, 2)
    made.bytes = {"up": {"weights": number * 2**21}}
    made.scores = {name: {"train": 0.9, "val": val, "test": test} for name in ("auc", "mse")}
    made.structure = {"precision": 0.1 * number, "recall": float("nan")}
    return made
