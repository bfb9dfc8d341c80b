"""The picture of an uneven split: each client's number of nodes of each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flower_graph.report.plots.base import COLOURS, save
from flower_graph.report.plots.page import LETTERS, NAMED, panel, svg

Counts = Sequence[Sequence[int]]  # clients x classes
MOST_CLIENTS = 100  # that have a column of dots each
LARGEST = 200.0  # of a dot, in points squared


def classes_panel(counts: Counts, classes: Sequence[str] | None) -> str:
    """Draw a dot for each client and class, sized by its nodes; empty if unreadable."""
    if not is_drawn(counts):
        return ""
    figure, axes = panel()
    _draw(axes, counts, classes)
    return svg(figure)


def plot_classes(path: Path, counts: Counts, classes: Sequence[str] | None, *, title: str) -> None:
    """Draw the same as a PNG."""
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    _draw(axes, counts, classes)
    axes.set_title(title, fontsize=11, parse_math=False)
    save(figure, path)


def is_drawn(counts: Counts) -> bool:
    """Whether clients and classes are few enough to draw, and at least two each."""
    return 1 < len(counts) <= MOST_CLIENTS and len(counts[0]) > 1


def _draw(axes: Axes, counts: Counts, classes: Sequence[str] | None) -> None:
    nodes = np.array(counts, np.float64)  # [clients, classes]
    client, label = nodes.nonzero()
    # Dots do not cover those of the next client
    largest = min(LARGEST, (300 / len(nodes)) ** 2)
    sizes = largest * nodes[client, label] / nodes.max()
    axes.scatter(client, label, np.maximum(sizes, 0.5), color=COLOURS[0], linewidths=0)
    axes.set_xlim(-0.7, len(nodes) - 0.3)
    axes.set_ylim(-0.7, nodes.shape[1] - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if nodes.shape[1] <= NAMED:
        places = range(nodes.shape[1])
        names = [str(one)[:LETTERS] for one in (classes or places)]
        axes.set_yticks(places, names, fontsize=8, parse_math=False)
    axes.set_xlabel(f"client; the largest dot is {nodes.max():,.0f} nodes")
    axes.set_ylabel("class")
