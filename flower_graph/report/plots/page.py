"""Pictures of a page about runs: small panels, as SVG that stands in HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flower_graph.records.participation import known_clients
from flower_graph.records.rounds import RoundReport
from flower_graph.report.plots.base import (
    COLOURS,
    GREY,
    LETTERS,
    NAMED,
    Curves,
    cells_of,
    draw_cells,
    draw_confusion,
    draw_levels,
    finish,
    in_unit,
    mean_band,
    open_grid,
    save,
    staying,
    without_formulas,
)
from flower_graph.report.plots.compared import Interval, draw_intervals

SIZE = (4.6, 3.3)  # of a panel, in inches
BARS = 40  # most clients that have a bar each
MOST_CLIENTS = 100  # that have a column of dots each
LARGEST = 200.0  # of a dot, in points squared
STYLE: Any = {"svg.fonttype": "none", "font.family": "DejaVu Sans"}  # text stays text
Counts = Sequence[Sequence[int]]  # clients x classes


def curves_panel(
    label: str,
    curves: Curves,
    levels: Mapping[str, float] | None = None,
    *,
    from_zero: bool = False,
) -> str:
    """Draw curves over the rounds, several seeds as mean and deviation, and levels as grey lines.

    Empty if no curve has a number.
    """
    stacked = {
        name: staying(rows, max(map(len, rows))) for name, rows in curves.items() if any(rows)
    }
    drawn = {name: values for name, values in stacked.items() if np.isfinite(values).any()}
    if not drawn:
        return ""
    figure, axes = panel()
    for place, (name, values) in enumerate(drawn.items()):
        mean_band(axes, range(1, values.shape[1] + 1), values, place, name)
    draw_levels(axes, levels or {}, len(drawn))
    finish(axes, label, legend=False)
    if from_zero:
        axes.set_ylim(0, 1.1 * axes.dataLim.y1 or 1)  # also where nothing was sent
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    return svg(figure)


def bytes_panel(curves: Curves) -> str:
    """Draw bytes over the rounds, in the unit that fits."""
    return curves_panel(*in_unit(curves), from_zero=True)


def participation_panels(reports: Sequence[RoundReport]) -> list[str]:
    """Draw which clients answered in each round; nothing if no round says so."""
    clients = known_clients(report.participation for report in reports)
    if not clients.size:
        return []
    figure, axes = panel()
    cells, _ = cells_of(reports, clients)
    draw_cells(axes, cells, [report.round for report in reports], clients)
    return [svg(figure)]


def clients_panel(label: str, values: Mapping[int, float]) -> str:
    """Draw one figure of each client, the lowest first."""
    known = {client: value for client, value in values.items() if np.isfinite(value)}
    if not known:
        return ""
    ordered = sorted(known, key=lambda client: known[client])
    heights = [known[client] for client in ordered]
    figure, axes = panel()
    if len(ordered) <= BARS:
        axes.bar(range(len(ordered)), heights, color=COLOURS[0], width=0.8)
        size = 9 if len(ordered) <= BARS // 2 else 6
        axes.set_xticks(range(len(ordered)), map(str, ordered), fontsize=size)
        axes.set_xlabel("client")
    else:
        shares = 100 * np.arange(1, len(heights) + 1) / len(heights)
        axes.plot(shares, heights, color=COLOURS[0], linewidth=1.6, drawstyle="steps-mid")
        axes.xaxis.set_major_formatter(PercentFormatter())
        axes.set_xlabel(f"share of {len(heights):,} clients that have this or less")
    mean = float(np.mean(heights))
    axes.axhline(mean, color=GREY, linestyle="--", linewidth=1.1, label=f"mean {mean:.3f}")
    figure.legend(loc="outside upper left", frameon=False, fontsize=8)
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.02)
    open_grid(axes)
    axes.set_axisbelow(True)
    return svg(figure)


def confusion_panel(nodes: Sequence[Sequence[float]], classes: Sequence[str] | None) -> str:
    """Draw a confusion matrix, as shares of each class."""
    figure, axes = panel(height=3.8)
    draw_confusion(axes, nodes, classes)
    return svg(figure)


def intervals_panel(label: str, figures: Mapping[str, tuple[float, float]]) -> str:
    """Draw mean and deviation of each run beside each other."""
    known = {name: Interval(*one, None) for name, one in figures.items() if np.isfinite(one[0])}
    if not known:
        return ""
    figure, axes = panel(height=1.3 + 0.3 * len(known))
    draw_intervals(axes, list(known), known)
    axes.set_yticks(range(len(known)), [name[-28:] for name in known], fontsize=8)
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xlabel(label)
    return svg(figure)


def classes_panel(counts: Counts, classes: Sequence[str] | None) -> str:
    """Draw a dot for each client and class, sized by its nodes; empty if unreadable."""
    if not is_drawn(counts):
        return ""
    figure, axes = panel()
    _draw_classes(axes, counts, classes)
    return svg(figure)


def plot_classes(path: Path, counts: Counts, classes: Sequence[str] | None, *, title: str) -> None:
    """Draw the same as a PNG."""
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    _draw_classes(figure.subplots(), counts, classes)
    save(figure, path, title)


def is_drawn(counts: Counts) -> bool:
    """Whether clients and classes are few enough to draw, and at least two each."""
    return 1 < len(counts) <= MOST_CLIENTS and len(counts[0]) > 1


def _draw_classes(axes: Axes, counts: Counts, classes: Sequence[str] | None) -> None:
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
        axes.set_yticks(places, [str(one)[:LETTERS] for one in (classes or places)], fontsize=8)
    axes.set_xlabel(f"client; the largest dot is {nodes.max():,.0f} nodes")
    axes.set_ylabel("class")


def panel(height: float = SIZE[1]) -> tuple[Figure, Axes]:
    """Make a small panel to draw in."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        return figure, figure.subplots()


def svg(figure: Figure) -> str:
    """Write a figure as an SVG element as wide as its container."""
    stream = io.StringIO()
    # Names of clipped parts must differ between the pictures of one page, and not between runs.
    salt = sha256(repr([axes.get_ylabel() for axes in figure.axes]).encode()).hexdigest()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        without_formulas(figure)
        canvas: Any = FigureCanvasSVG(figure)  # its method has no types
        canvas.print_svg(stream, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head, _, rest = text.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    # Groups are named alike in all pictures; nothing refers to these names.
    return re.sub(r'<g id="[^"]*"', "<g", f"{head}>{rest}")
