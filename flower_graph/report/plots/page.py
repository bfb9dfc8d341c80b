"""Pictures of a page about runs: small panels, as SVG that stands in HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from flower_graph.records.participation import known_clients
from flower_graph.records.rounds import UNITS, RoundReport, byte_unit
from flower_graph.report.plots.base import (
    COLOURS,
    DASHES,
    GREY,
    cells_of,
    draw_cells,
    finish,
    look,
    mean_band,
    open_grid,
    staying,
    without_formulas,
)

SIZE = (4.6, 3.3)  # of a panel, in inches
BARS = 40  # most clients that have a bar each
NAMED = 12  # most classes whose names are written
LETTERS = 16  # of a class's name
STYLE: Any = {"svg.fonttype": "none", "font.family": "DejaVu Sans"}  # text stays text
Curves = Mapping[str, Sequence[Sequence[float]]]  # seeds x rounds, by name


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
        rounds = range(1, values.shape[1] + 1)
        if len(rounds) > 1:
            mean_band(axes, rounds, values, place, name)
        else:  # one round has no line
            spread = values.std(axis=0, ddof=1) if len(values) > 1 else None
            mean, (colour, _) = values.mean(axis=0), look(place)
            axes.errorbar(rounds, mean, spread, fmt="o", color=colour, label=name, capsize=3)
    for place, (name, level) in enumerate((levels or {}).items(), start=len(drawn)):
        dashes: object = DASHES[place % len(DASHES)]
        axes.axhline(level, color=GREY, linestyle=dashes, linewidth=1.1, zorder=1, label=name)
    finish(axes, label, legend=False)
    if from_zero:
        axes.set_ylim(0, 1.1 * axes.dataLim.y1 or 1)  # also where nothing was sent
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    return svg(figure)


def bytes_panel(curves: Curves) -> str:
    """Draw bytes over the rounds, in the unit that fits."""
    most = max((value for rows in curves.values() for row in rows for value in row), default=0)
    power = byte_unit(most)
    scaled = {k: [[v / 1024**power for v in row] for row in rows] for k, rows in curves.items()}
    return curves_panel(f"payload so far ({UNITS[power]})", scaled, from_zero=True)


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
    counts: NDArray[np.float64] = np.array(nodes, np.float64)  # [k, k] by label and prediction
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    figure, axes = panel(height=3.8)
    image = axes.imshow(shares, "Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the class", shrink=0.8)
    places = range(len(shares))
    if len(shares) <= NAMED:
        names = [str(one)[:LETTERS] for one in (classes or places)]
        is_short = max(map(len, names)) <= 3
        axes.set_xticks(places, names, rotation=0 if is_short else 60, fontsize=8)
        axes.set_yticks(places, names, fontsize=8)
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                colour = "white" if share > 0.6 else "black"
                text = f"{100 * share:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("predicted class")
    axes.set_ylabel("class")
    return svg(figure)


def intervals_panel(label: str, figures: Mapping[str, tuple[float, float]]) -> str:
    """Draw mean and deviation of each run beside each other."""
    known = {name: one for name, one in figures.items() if np.isfinite(one[0])}
    if not known:
        return ""
    figure, axes = panel(height=1.3 + 0.3 * len(known))
    means, spreads = zip(*known.values(), strict=True)
    places = range(len(known))
    axes.errorbar(means, places, xerr=spreads, fmt="o", color=COLOURS[0], capsize=3, markersize=5)
    axes.set_yticks(places, [name[-28:] for name in known], fontsize=8)
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel(label)
    open_grid(axes)
    return svg(figure)


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
