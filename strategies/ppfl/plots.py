"""Pictures of PPFL-GNN's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flower_graph.report.plots import Panel, plot_panels
from flower_graph.strategies.ppfl.config import PRECISIONS
from flower_graph.wire.keys import ACCURACY

# By name of the curve: which figure of a report it shows
CURVES = {f"P@{k}": name for name, k in PRECISIONS.items()}
LABEL, X_LABEL = "alignment precision", "iteration"


# Any: what ``reproduce`` shows, which no method imports
def plot_figures(path: Path, shown: Mapping[Any, Sequence[Any]]) -> bool:
    """Draw Figures 3 to 6 from the rows of tables that were run, by seed."""
    upper, lower = list[Panel](), list[Panel]()
    figures = {line: runs for line, runs in shown.items() if line.table.startswith("Figure")}
    aligned = [line for line in figures if line.method == "FED"]
    for line in sorted(aligned, key=lambda line: line.table):
        runs = figures[line]
        precision = {
            name: [run.alignment[key] for run in runs]
            for name, key in CURVES.items()
            if all(key in run.alignment for run in runs)
        }
        accuracy = {
            one.method: [run.scores[ACCURACY]["test"] for run in own]
            for one, own in figures.items()
            if one.table == line.table
        }
        whole = [
            run.best("test")
            for one, own in shown.items()
            if (one.data, one.model, one.method) == (line.data, line.model, "full graph")
            for run in own
        ]
        title = f"{line.table}: {line.data}, {line.model}"
        upper.append(Panel(precision, LABEL, X_LABEL, title))
        levels = {"full graph": fmean(whole)} if whole else {}
        lower.append(Panel(accuracy, "accuracy", X_LABEL, levels=levels))
    return plot_panels(path, [upper, lower])
