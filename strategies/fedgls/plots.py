"""Pictures of learnt graphs in a run, and of FedGLS's tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from flower_graph.report.plots import Line, Panel, finish, line, plot_panels, save
from flower_graph.storage.reading import Tree

if TYPE_CHECKING:
    from flower_graph.records.rounds import RoundReport

# By label of a panel: which figures of a report it shows, by name of the curve
PANELS = {
    "edges that are right": {"precision": "precision", "recall": "recall"},
    "edges within a class": {"learned": "homophily", "true": "true-homophily"},
    "neighbours of a node": {"learned": "degree", "true": "true-degree"},
}


def save_structure(path: Path, reports: Sequence[RoundReport], *, title: str) -> None:
    """Draw a run: learnt graphs beside the true ones, over the rounds."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    rounds = [report.round for report in reports]
    for axes, (label, curves) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
        for name, key in curves.items():
            values = [report.structure.get(key, math.nan) for report in reports]
            line(axes, rounds, values, name)
        finish(axes, label, legend=True)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # a curve along the edge is hard to see
    save(figure, path, title)


# Any: what ``reproduce`` shows, which no method imports
def plot_differences(path: Path, shown: Sequence[Any], picture: Tree) -> bool:
    """Draw a difference by the varied setting, a panel for each table, a line for each data set."""
    panels: dict[str, dict[str, Line]] = {}
    rows = [row for one in shown for row in one.rows if row["metric"] == picture["metric"]]
    for table, data in dict.fromkeys((row["table"], row["data"]) for row in rows):
        here = [row for row in rows if (row["table"], row["data"]) == (table, data)]
        by_seed = [dict(zip(row["seeds"], row["values"], strict=True)) for row in here]
        if shared := set.intersection(*map(set, by_seed)):
            values = [[100 * one[seed] for one in by_seed] for seed in sorted(shared)]
            panels.setdefault(table, {})[data] = Line([row["varied"] for row in here], values)
    row = [
        Panel(lines, picture["label"], table, levels={"_zero": 0.0})
        for table, lines in panels.items()
    ]
    return plot_panels(path, [row])
