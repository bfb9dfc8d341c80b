"""Pictures of PPFL-GNN's tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flower_graph.report.plots import Line, Panel, plot_panels
from flower_graph.strategies.ppfl.config import PRECISIONS

# By name of the curve: which figure of a report it shows
CURVES = {f"P@{k}": name for name, k in PRECISIONS.items()}
LABEL, X_LABEL = "alignment precision", "iteration"


# Any: what ``reproduce`` shows, which no method imports
def plot_figures(path: Path, shown: Sequence[Any], _: object) -> bool:
    """Draw Figures 3 to 6 from the rows of tables that were run, by seed."""
    upper, lower = list[Panel](), list[Panel]()
    figures = [one for one in shown if one.line.table.startswith("Figure") and one.runs]
    for aligned in sorted(figures, key=lambda one: one.line.table):
        (data, model, method), runs = aligned.line.names, [*aligned.runs.values()]
        if method != "FED":
            continue
        precision = {
            name: _over_iterations([run.alignment[key] for run in runs])
            for name, key in CURVES.items()
            if all(key in run.alignment for run in runs)
        }
        accuracy = {
            one.line.method: _over_iterations([run.test_accuracy for run in one.runs.values()])
            for one in figures
            if one.line.table == aligned.line.table
        }
        whole = [
            run.test_at_best_val
            for one in shown
            if one.line.names == (data, model, "full graph")
            for run in one.runs.values()
        ]
        title = f"{aligned.line.table}: {data}, {model}"
        upper.append(Panel(precision, LABEL, X_LABEL, title))
        levels = {"full graph": fmean(whole)} if whole else {}
        lower.append(Panel(accuracy, "accuracy", X_LABEL, levels=levels))
    return plot_panels(path, [upper, lower])


def _over_iterations(values: Sequence[Sequence[float]]) -> Line:
    return Line(range(1, 1 + max(map(len, values))), values)
