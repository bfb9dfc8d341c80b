"""Pictures: one run over its rounds, participation, and several methods beside each other.

Figures are drawn without pyplot: no window system is touched and no global state is left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from flower_graph.records.participation import ANSWERED, FAILED, LEFT_OUT, known_clients, states
from flower_graph.records.rounds import UNITS, WAYS, RoundReport, byte_unit
from flower_graph.storage.writing import written
from flower_graph.wire.keys import ACCURACY, VALUE_SCORES

# Okabe and Ito's colours, which stay apart for colour-blind eyes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Dashes tell curves apart that coincide.
Dashes = str | tuple[int, tuple[int, ...]]
DASHES: Sequence[Dashes] = (
    *("-", (0, (5, 2)), (0, (2, 2))),
    *((0, (5, 2, 1, 2)), (0, (1, 1)), (0, (8, 3))),
)
GREY = "#707070"
DPI = 150
BARS = 30  # most bars of a distribution; smaller ranges have one bar for each number
NAMED = 12  # most classes whose names are written
LETTERS = 16  # of a class's name

MOST_ROWS = 200  # most rows; with more clients, neighbours share a row
COLOUR = {ANSWERED: COLOURS[0], FAILED: COLOURS[1], LEFT_OUT: "#C8C8C8"}
NAMES = {ANSWERED: "answered", FAILED: "failed", LEFT_OUT: "left out"}
# By the numbers of the states; unknown states are white.
PALETTE = np.array([to_rgb("white"), *(to_rgb(COLOUR[state]) for state in sorted(COLOUR))])
SHARES = LinearSegmentedColormap.from_list("share", [COLOUR[LEFT_OUT], COLOUR[ANSWERED]])
Curves = Mapping[str, Sequence[Sequence[float]]]  # seeds x rounds, by name


# A run's pictures --------------------------------------------------------------------------------


def save_curves(
    path: Path,
    reports: Sequence[RoundReport],
    *,
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Draw a run: loss, accuracies beside grey lines for its baselines, bytes, over the rounds."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, traffic = figure.subplots(1, 3)
    rounds = [report.round for report in reports]
    line(loss, rounds, [report.loss for report in reports], "loss")
    line(loss, rounds, [report.cross_entropy for report in reports], "cross-entropy")
    # Errors have units of their own: the first, by which the best round is chosen, is drawn alone
    errors = [name for name in reports[-1].scores if name in VALUE_SCORES]
    first = errors[0] if errors else ACCURACY
    for role, name in (("val", "validation"), ("test", "test")):
        line(accuracy, rounds, [report.score(first, role) for report in reports], name)
    for name in () if errors else reports[-1].scores:
        line(accuracy, rounds, [report.score(name, "test") for report in reports], f"test {name}")
    draw_levels(accuracy, baselines or {}, 2)
    label, sent = in_unit(bytes_of([reports]))
    for name, (values,) in sent.items():
        line(traffic, rounds, values, name)
    finish(loss, "loss", legend=True)
    finish(accuracy, "metrics" if reports[-1].scores and not errors else first, legend=True)
    finish(traffic, label, legend=True)
    accuracy.set_ylim(0, None if errors else 1)
    loss.set_ylim(bottom=0)
    traffic.set_ylim(bottom=0)
    save(figure, path, title)


def bytes_of(seeds: Sequence[Sequence[RoundReport]]) -> dict[str, list[list[float]]]:
    """Return the bytes sent up and down until each round, ``[seeds][rounds]``."""
    return {
        way: [[float(sum(one.bytes.get(way, {}).values())) for one in reports] for reports in seeds]
        for way in WAYS
    }


def in_unit(curves: Curves) -> tuple[str, dict[str, list[list[float]]]]:
    """Return bytes in the unit that fits, and the axis's name with the unit."""
    power = byte_unit(max((v for rows in curves.values() for row in rows for v in row), default=0))
    scaled = {k: [[v / 1024**power for v in row] for row in rows] for k, rows in curves.items()}
    return f"payload so far ({UNITS[power]})", scaled


def save_confusion(path: Path, report: RoundReport, *, title: str) -> None:
    """Draw a confusion matrix of test nodes in one round, as shares of each class."""
    figure = Figure(figsize=(5.2, 4.4), layout="constrained")
    draw_confusion(figure.subplots(), report.confusion)
    save(figure, path, f"{title} · test, round {report.round}")


def draw_confusion(
    axes: Axes, nodes: Sequence[Sequence[float]], classes: Sequence[str] | None = None
) -> None:
    """Draw a confusion matrix ``[k][k]``, by label and prediction, as shares of each class."""
    counts: NDArray[np.float64] = np.array(nodes, np.float64)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, "Blues", vmin=0, vmax=1)
    axes.figure.colorbar(image, ax=axes, label="share of the class (0 to 1)", shrink=0.8)
    if len(shares) <= NAMED:
        names = [str(one)[:LETTERS] for one in (classes or range(len(shares)))]
        is_short = max(map(len, names)) <= 3
        axes.set_xticks(range(len(names)), names, rotation=0 if is_short else 60, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                colour = "white" if share > 0.6 else "black"
                text = f"{100 * share:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("predicted class")
    axes.set_ylabel("class")


def save_participation(path: Path, reports: Sequence[RoundReport], *, title: str) -> None:
    """Draw which clients, and how many, answered, failed or were left out in each round."""
    clients = known_clients(report.participation for report in reports)
    if not clients.size:
        raise ValueError("reports: no round says who took part; at least one must")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    who, how_many = figure.subplots(1, 2, width_ratios=(2, 1))
    rounds = [report.round for report in reports]
    result, counts = cells_of(reports, clients)
    draw_cells(who, result, rounds, clients)
    for state, name in NAMES.items():
        line(how_many, rounds, counts[:, state].tolist(), name)
        how_many.lines[-1].set_color(COLOUR[state])
    finish(how_many, "clients", legend=True)
    how_many.set_ylim(0, 1.05 * clients.size)
    save(figure, path, title)


def cells_of(
    reports: Sequence[RoundReport], clients: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the cells, ``[rows, rounds]``, and clients by state, ``[rounds, 4]``."""
    # A cell is a state, or, if clients share rows, the share of them that answered; NaN in a
    # round that does not say.
    rows = min(clients.size, MOST_ROWS)
    starts = np.arange(rows) * clients.size // rows
    width = np.diff([*starts, clients.size])
    cells, counts = np.full((rows, len(reports)), np.nan), np.full((len(reports), 4), np.nan)
    records = [report.participation for report in reports]
    for index, (record, result) in enumerate(zip(records, states(records, clients), strict=True)):
        if not record:
            continue
        counts[index] = np.bincount(result, minlength=4)
        shared = np.add.reduceat(result == ANSWERED, starts, dtype=np.int64) / width
        cells[:, index] = result if rows == clients.size else shared
    return cells, counts


def draw_cells(
    axes: Axes, cells: NDArray[np.float64], rounds: Sequence[int], clients: NDArray[np.int64]
) -> None:
    """Draw the cells: by the client's state, or by the share that answered."""

    def number(at: float, _: object) -> str:
        return str(clients[int(at)]) if 0 <= at < clients.size else ""

    edges = (rounds[0] - 0.5, rounds[-1] + 0.5, clients.size - 0.5, -0.5)
    if len(cells) == clients.size:
        colours = PALETTE[np.nan_to_num(cells).astype(int)]
        axes.imshow(colours, aspect="auto", extent=edges)
        handles = [Patch(color=COLOUR[state], label=name) for state, name in NAMES.items()]
        legend_above(axes, handles=handles, ncols=3)
    else:
        image = axes.imshow(cells, SHARES, aspect="auto", extent=edges, vmin=0, vmax=1)
        axes.figure.colorbar(image, ax=axes, label="share that answered (0 to 1)")
    finish(axes, "client", legend=False)
    axes.grid(visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(number))


# Figures beside each other -----------------------------------------------------------------------


@dataclass
class CurveSet:
    """One method's curves: a row for each seed, a column for each round."""

    accuracy: Sequence[Sequence[float]]  # seeds x rounds, 0 to 1
    loss: Sequence[Sequence[float]]  # seeds x rounds


def plot_grid(
    path: Path,
    columns: Mapping[str, Mapping[str, CurveSet]],
    reference: Mapping[str, float] | None = None,
) -> None:
    """Draw several methods on several data sets: accuracy above, loss below, over the rounds."""
    names = list(dict.fromkeys(name for curves in columns.values() for name in curves))
    figure, axes = panels_of(columns, (3.6, 3.1), 0.6, rows=2)
    for upper, lower, (data, curves) in zip(*axes, columns.items(), strict=True):
        for name, curve in curves.items():
            band(upper, curve.accuracy, f"{data}, {name}", names.index(name), name)
            band(lower, curve.loss, f"{data}, {name}", names.index(name), name)
        upper.set_title(data, fontsize=11)
        if reference and data in reference:
            upper.axhline(reference[data], color=GREY, linewidth=1.2, label="centralised")
        finish(upper, "test accuracy" if upper is axes[0, 0] else "", legend=False)
        finish(lower, "loss" if upper is axes[0, 0] else "", legend=False)
    legend_below(figure, axes[0])
    save(figure, path)


def plot_counts(path: Path, panels: Mapping[str, Mapping[int, int]], *, title: str) -> None:
    """Draw distributions of whole numbers beside each other."""
    figure, axes = panels_of(panels, (3.2, 3.0))
    for index, (cell, (name, counts)) in enumerate(zip(axes[0], panels.items(), strict=True)):
        values = list(counts)
        low, high = min(values, default=0), max(values, default=0)
        # Every bar covers the same number of whole numbers, else heights would jitter.
        width = -(-(high - low + 1) // BARS)
        edges = np.arange(low, high + width + 1, width) - 0.5
        cell.hist(
            values,
            bins=edges.tolist(),
            weights=list(counts.values()),
            color=COLOURS[index % len(COLOURS)],
            edgecolor="white",  # keeps neighbouring bars of one height apart
            linewidth=0.5,
        )
        cell.set_axisbelow(True)  # the grid goes behind the bars
        cell.yaxis.set_major_locator(MaxNLocator(integer=True))
        finish(cell, "how many" if index == 0 else "", legend=False, x_label=name)
    save(figure, path, title)


def panels_of(
    columns: Mapping[Any, object],
    size: tuple[float, float],
    margin: float = 0.0,
    *,
    rows: int = 1,
    same_y: bool = False,
) -> tuple[Figure, Any]:
    """Make a figure with a column for each entry, ``[rows, columns]`` axes of a size in inches."""
    if not columns:
        raise ValueError("panels: empty; at least one is needed")
    width, height = size
    figure = Figure((width * len(columns) + margin, height * rows), layout="constrained")
    return figure, figure.subplots(rows, len(columns), squeeze=False, sharey=same_y)


# Parts of pictures -------------------------------------------------------------------------------


def band(axes: Axes, rows: Sequence[Sequence[float]], what: str, place: int, name: str) -> None:
    """Draw several seeds' curves as their mean, with a band of one deviation."""
    if not rows or not all(rows):
        raise ValueError(f"{what}: a curve without rounds; each needs at least one")
    rounds = max(map(len, rows))
    mean_band(axes, range(1, rounds + 1), staying(rows, rounds), place, name)


def look(place: int) -> tuple[str, Dashes]:
    """Return the colour and the dashes of a curve, distinct for up to 36 curves."""
    shift = place // len(COLOURS)
    return COLOURS[place % len(COLOURS)], DASHES[(place + shift) % len(DASHES)]


def line(axes: Axes, rounds: Sequence[int], values: Sequence[float], name: str) -> None:
    """Draw the next curve of a panel, in a colour and with dashes of its own."""
    mean_band(axes, rounds, np.array([values], np.float64), len(axes.lines), name)


def mean_band(
    axes: Axes, spent: Sequence[float], values: NDArray[np.float64], place: int, name: str
) -> None:
    """Draw a mean over seeds against a cost, with a band of one deviation."""
    mean = values.mean(axis=0)  # of [seeds, rounds]
    known = np.isfinite(mean)  # rounds that some seed leaves out are drawn through
    spent, mean = np.asarray(spent)[known], mean[known]
    colour, dashes = look(place)
    marker = "o" if len(spent) == 1 else ""  # a single round has no line
    axes.plot(spent, mean, color=colour, linestyle=dashes, marker=marker, linewidth=1.4, label=name)
    if len(values) > 1:
        spread = values[:, known].std(axis=0, ddof=1)
        if marker:
            axes.errorbar(spent, mean, spread, fmt="none", ecolor=colour, capsize=3)
        axes.fill_between(
            spent, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0
        )


def draw_levels(axes: Axes, levels: Mapping[str, float], first: int) -> None:
    """Draw figures without rounds as grey lines, with the dashes of curves from a place on."""
    for place, (name, level) in enumerate(levels.items(), start=first):
        dashes: Any = DASHES[place % len(DASHES)]
        axes.axhline(level, color=GREY, linestyle=dashes, linewidth=1.2, zorder=1, label=name)


def staying(rows: Sequence[Sequence[float]], rounds: int) -> NDArray[np.float64]:
    """Stack the seeds' curves, ``[seeds, rounds]``; a run that has ended keeps its last value."""
    return np.array([[*row, *[row[-1]] * (rounds - len(row))] for row in rows], dtype=np.float64)


def finish(axes: Axes, label: str, *, legend: bool, x_label: str = "round") -> None:
    """Name the axes, draw a grid and, above the axes, a legend."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    open_grid(axes)
    if legend:
        legend_above(axes, ncols=2)


def open_grid(axes: Axes, axis: Literal["both", "x"] = "both") -> None:
    """Draw a pale grid, and no frame above and to the right."""
    axes.grid(visible=True, axis=axis, color="#E0E0E0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def legend_above(axes: Axes, **more: Any) -> None:
    """Put a legend above the axes, where it hides no curve."""
    anchor = (0.0, 1.0)
    axes.legend(loc="lower left", bbox_to_anchor=anchor, frameon=False, fontsize=9, **more)


def legend_below(figure: Figure, axes: Sequence[Axes]) -> None:
    """Put one legend for all columns below them."""
    handles: dict[str, Artist] = {}
    for cell in axes:
        for handle, name in zip(*cell.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(name), handle)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(len(handles), 5),
        frameon=False,
    )


def without_formulas(figure: Figure) -> None:
    """Draw a figure's text literally: two dollar signs in a name make no formula."""
    scaled = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    powers = {  # whose labels matplotlib writes itself, as formulas
        text for axis in scaled if axis.get_scale() == "log" for text in axis.findobj(Text)
    } - {axis.label for axis in scaled}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text not in powers:
            text.set_parse_math(False)


def save(figure: Figure, path: Path, title: str = "") -> None:
    """Write a picture, whole or not at all."""
    if title:
        figure.suptitle(title, fontsize=11)
    # Not by `savefig`, which draws a figure with a layout twice.
    figure.set_dpi(DPI)
    without_formulas(figure)
    canvas: Any = FigureCanvasAgg(figure)  # its method has no types
    with written(path) as stream:
        canvas.print_png(stream)
