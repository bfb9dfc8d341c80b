"""Runs of a paper's tables without training, and a table of a stranger's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flower_graph.apps.reproduce.command import reproduce, selected
from flower_graph.apps.reproduce.runs import RUNS, Run, settings_kept
from flower_graph.apps.reproduce.table import LAST, TEST, Figure, Line, Paper, Picture, within
from flower_graph.records.rounds import RoundReport
from flower_graph.storage.reading import read_packed

STRATEGIES = {"mine": "structure-fedavg", "other": "fed-gnn"}
GENERATED = ["data.name=csbm", "data.nodes=2000", "partition.clients=5"]


def own_lines(**changes: Any) -> list[Line]:
    """Make a table of two methods on two data sets, with the paper's figure of one."""
    each, more = changes.pop("each", {}), changes.pop("figures", [])
    settings = changes.pop("settings", [])
    figures = {
        "mine": [TEST, Figure("gain", LAST, "other"), "precision", *more],
        "other": [TEST, "precision", *more],
    }
    methods = {
        method: {
            "settings": [f"strategy.name={name}", *settings],
            "figures": figures[method],
            "paper": {TEST: 0.75} if method == "mine" else {},
            **each.get(method, {}),
        }
        for method, name in STRATEGIES.items()
    }
    usual = {"table": "Table one", "config": "fedgls/{data}", "seeds": (0, 1)}
    return Line(**usual | changes).grid(["Cora", "CiteSeer"], methods)


K3, K7, K9 = (["graph.neighbours=3"], ["graph.neighbours=7"], ["graph.neighbours=9"])


def grid_lines(**changes: Any) -> list[Line]:
    """Make lines that choose of two settings each, with patience of one round."""
    each = {"mine": {"tries": [K3, K7]}, "other": {"tries": [K7, K9]}}
    for method, more in changes.pop("each", {}).items():
        each[method] |= more
    usual = {"choosers": (10, 11), "settings": ["patience=1"], "each": each}
    return own_lines(**{**usual, "figures": within("1 rounds", "10 steps", "2.5 MiB"), **changes})


CURVES = Picture("curves-cora.png", {"Table one": None}, ["Cora"])


def run_lines(
    lines: Sequence[Line], out: Path, *, seeds: Sequence[int] | None = None, **only: list[str]
) -> str:
    """Run lines for three rounds, and return the page."""
    paper = Paper("A table of my own", {"one": lines}, pictures=[CURVES])
    reproduce(selected(paper, {"data": ["Cora"], **only}, seeds, 3), out)
    return (out / "table.md").read_text()


def leave(folder: Path, run: Run, settings: dict[str, object] | None = None) -> None:
    """Leave a run's line, as of a command that was stopped before it wrote the one file."""
    kept = run._asdict() | {"settings": settings_kept(run) if settings is None else settings}
    curves = {"scores": {"accuracy": {"val": [0.5], "test": [0.5]}}, "loss": [1.0]}
    with (folder / "runs.jsonl").open("a") as file:
        file.write(json.dumps(kept | {"curves": curves}) + "\n")


def written(out: Path) -> list[dict[str, Any]]:
    """Read the rows that ``reproduce`` left in a folder."""
    found: list[dict[str, Any]] = read_packed(out / RUNS)["rows"]
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
