"""A picture of the graphs that graphless clients make for themselves, against their true ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from flower_graph.report.plots.base import finish, line, save

if TYPE_CHECKING:
    from flower_graph.report.rounds import RoundReport

# By label of a panel: which figures of a report it shows, by name of the curve
PANELS = {
    "edges that are right": {"precision": "precision", "recall": "recall"},
    "edges within a class": {"learned": "homophily", "true": "true-homophily"},
    "neighbours of a node": {"learned": "degree", "true": "true-degree"},
}


def save_structure(path: Path, reports: Sequence[RoundReport], *, title: str) -> None:
    """Draw precision, recall, homophily and degree of learned graphs over the rounds."""
    if not any(report.structure for report in reports):
        raise ValueError("reports: no round compares graphs; at least one must have `structure`")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    rounds = [report.round for report in reports]
    for axes, (label, curves) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
        for name, key in curves.items():
            line(axes, rounds, [report.structure.get(key, math.nan) for report in reports], name)
        finish(axes, label, legend=True)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # a curve along the edge is hard to see
    figure.suptitle(title, fontsize=11)
    save(figure, path)
