"""Pictures: curves of runs and of tables, points with intervals, matrices, maps of classes.

A picture is a grid of panels, and a panel is a function that draws into matplotlib's axes. Figures
are drawn without pyplot: no window system is touched and no global state is left behind.
"""

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain
from operator import attrgetter, methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from flower_graph.records.participation import ANSWERED, FAILED, LEFT_OUT, known_clients, states
from flower_graph.records.rounds import UNITS, WAYS, RoundReport, byte_unit
from flower_graph.storage.files import written
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import ROLES

# Okabe and Ito's colours, which stay apart for colour-blind eyes
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Dashes tell curves apart that coincide
DASHES: Any = (
    *("-", (0, (5, 2)), (0, (2, 2))),
    *((0, (5, 2, 1, 2)), (0, (1, 1)), (0, (8, 3))),
)
GREY = "#707070"
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "errorbar.capsize": 3,
    "figure.constrained_layout.use": True,
    "figure.dpi": 150,
    "figure.titlesize": 11,
    "font.family": "DejaVu Sans",
    "grid.color": "#E0E0E0",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # two dollar signs in a name make no formula
}
SIZE = (4.6, 3.3)  # of a picture of a page, in inches
BARS = 30  # most bars of a distribution; smaller ranges have one bar for each number
NAMED = 12  # most classes whose names are written
LETTERS = 16  # of a class's name
LABEL_WIDTH = 42  # most letters of an attack's name in a line
MOST_CLIENTS = 100  # that have a column of dots each
LARGEST = 200.0  # of a dot, in points squared
MOST_ROWS = 200  # most clients whose rounds are drawn
COLOUR = {ANSWERED: COLOURS[0], FAILED: COLOURS[1], LEFT_OUT: "#C8C8C8"}
NAMES = {ANSWERED: "answered", FAILED: "failed", LEFT_OUT: "left out"}
Curves = Mapping[str, Sequence[Sequence[float]]]  # seeds x rounds, by name
Counts = Sequence[Sequence[int]]  # clients x classes
Draw = Callable[[Axes], object]  # draws one panel


# Pictures ----------------------------------------------------------------------------------------


def plot(
    path: Path,
    grid: Sequence[Sequence[Draw]],
    title: str = "",
    *,
    size: tuple[float, float] = (7.0, 3.6),
    same_y: bool = False,
) -> bool:
    """Draw rows of panels, each of a size in inches, as a PNG; return whether there are any."""
    if not any(grid):
        return False
    with rc_context(STYLE):
        save(picture(grid, size, title, same_y=same_y), path)
    return True


def picture(
    grid: Sequence[Sequence[Draw]],
    size: tuple[float, float],
    title: str = "",
    *,
    same_y: bool = False,
) -> Figure:
    """Draw rows of panels with one legend below them."""
    rows, columns = len(grid), max(map(len, grid))
    figure = Figure((size[0] * columns, size[1] * rows))
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row" if same_y else False)
    for cells, row in zip(axes, grid, strict=True):
        for cell, draw in zip(cells, row, strict=False):
            draw(cell)
    handles: dict[str, Artist] = {}
    for cell in axes.flat:
        for handle, name in zip(*cell.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(name), handle)
    if handles:
        (width, height), entry = figure.get_size_inches(), 0.6 + 0.075 * max(map(len, handles))
        columns = max(1, min(len(handles), int(width / entry)))  # as many as fit
        figure.set_size_inches(width, height + 0.18 * (-(-len(handles) // columns) - 1))
        shown = [*handles.values()], [*handles]
        figure.legend(*shown, loc="outside lower center", ncols=columns)
    if title:
        figure.suptitle(title)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a picture as a PNG, whole or not at all."""
    # Not by `savefig`, which draws a figure with a layout twice
    canvas: Any = FigureCanvasAgg(figure)  # its method has no types
    with written(path) as stream:
        canvas.print_png(stream)


def svg(draw: Draw, height: float = SIZE[1]) -> str:
    """Draw a panel as an SVG element, to which the page's style gives a width."""
    stream = io.StringIO()
    with rc_context(STYLE):
        figure = picture([[draw]], (SIZE[0], height))
        # Names of clipped parts must differ between the pictures of one page, not between runs
        salt = sha256(repr([axes.get_ylabel() for axes in figure.axes]).encode()).hexdigest()
        with rc_context({"svg.hashsalt": salt}):
            canvas: Any = FigureCanvasSVG(figure)  # its method has no types
            without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            canvas.print_svg(stream, metadata=without)
    text = stream.getvalue()
    # Groups are named alike in all pictures; nothing refers to these names.
    return re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])


# Curves ------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """Curves of several methods or settings over the rounds."""

    lines: Curves  # a run that has ended keeps its last value
    label: str = ""  # of the values,
    x_label: str = "round"  # and of what they lie over
    title: str = ""
    levels: Mapping[str, float] = MappingProxyType({})  # figures drawn as grey lines across
    from_zero: bool = False  # whether the values' axis begins at 0


def plot_panels(path: Path, grid: Sequence[Sequence[Panel]], title: str = "") -> bool:
    """Draw rows of panels, if there are any: curves are means, with bands of one deviation.

    One name has one colour in all panels.
    """
    names = list(dict.fromkeys(name for row in grid for panel in row for name in panel.lines))
    cells = [[partial(draw_panel, panel=panel, names=names) for panel in row] for row in grid]
    same_y = all(len({panel.label for panel in row}) == 1 for row in grid)
    return plot(path, cells, title, size=(3.7, 3.2), same_y=same_y)


def draw_panel(axes: Axes, panel: Panel, names: Sequence[str] = ()) -> None:
    """Draw one panel of a picture with curves of these names, by default its own."""
    names = names or [*panel.lines]
    for name, rows in panel.lines.items():
        place, count = names.index(name), max(map(len, rows))
        # Up to 36 curves look different
        colour = COLOURS[place % len(COLOURS)]
        dashes = DASHES[(place + place // len(COLOURS)) % len(DASHES)]
        values = np.array([[*row, *[row[-1]] * (count - len(row))] for row in rows], float)
        known = np.isfinite(values.mean(axis=0))  # a curve skips what some seed leaves out
        x, values = 1 + known.nonzero()[0], values[:, known]
        mean = values.mean(axis=0)
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(mean))
        marker = "o" if len(x) == 1 else ""  # a single round has no line
        axes.plot(x, mean, color=colour, linestyle=dashes, marker=marker, label=name)
        if spread.any():
            axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)
        if spread.any() and marker:
            axes.errorbar(x, mean, spread, fmt="none", ecolor=colour)
    for place, (name, level) in enumerate(panel.levels.items(), start=len(axes.lines)):
        dashes = DASHES[place % len(DASHES)]  # other dashes than the curves above
        axes.axhline(level, color=GREY, linestyle=dashes, zorder=1, label=name)
    axes.set(xlabel=panel.x_label, ylabel=panel.label, title=panel.title)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.from_zero:
        top = 1.1 * axes.dataLim.y1
        axes.set_ylim(0, top if 0 < top < np.inf else 1)  # also where nothing is known or sent


def panels_of(
    seeds: Sequence[Sequence[RoundReport]],
    metrics: Sequence[str],
    levels: Mapping[str, float] = MappingProxyType({}),
) -> list[Panel]:
    """Make the panels of a run's rounds; ``levels`` are of the first metric."""

    def rows(of: Callable[[RoundReport], float]) -> list[list[float]]:
        return [[of(one) for one in reports] for reports in seeds]

    losses = {n.replace("_", "-"): rows(attrgetter(n)) for n in ("loss", "cross_entropy")}
    panels = [Panel(losses, "loss", from_zero=True)]
    for metric in metrics:
        curves = {role: rows(methodcaller("score", metric, role)) for role in ROLES}
        shown = levels if metric == metrics[0] else {}
        panels.append(Panel(curves, metric, levels=shown, from_zero=True))
    # Bytes until each round, in the unit that fits
    sent = [
        [{k: sum(v.values()) for k, v in one.bytes.items()} for one in reports] for reports in seeds
    ]
    power = byte_unit(max(max(one.values(), default=0) for few in sent for one in few))
    curves = {
        k: [[one.get(k, 0) / 1024**power for one in reports] for reports in sent] for k in WAYS
    }
    panels.append(Panel(curves, f"payload so far ({UNITS[power]})", from_zero=True))
    counts = {name: rows(attrgetter(name)) for name in ("asked", "answered")}
    panels.append(Panel(counts, "clients", from_zero=True))
    for group in ("structure", "alignment"):  # of learnt graphs, of spaces
        learnt: dict[str, dict[str, list[list[float]]]] = {}
        names = (name for reports in seeds for one in reports for name in getattr(one, group))
        for name in dict.fromkeys(names):
            values = [
                [getattr(one, group).get(name, np.nan) for one in reports] for reports in seeds
            ]
            # Counts beside shares would flatten these
            is_share = not any(abs(value) > 1 for row in values for value in row)
            learnt.setdefault(f"{group}, 0 to 1" if is_share else group, {})[name] = values
        panels += [Panel(curves, label) for label, curves in learnt.items()]
    return panels


def curves_panel(panel: Panel) -> str:
    """Draw those curves of a panel that have a number, as an SVG element; empty if none has."""
    known = {n: rows for n, rows in panel.lines.items() if np.isfinite([*chain(*rows)]).any()}
    return svg(partial(draw_panel, panel=panel._replace(lines=known))) if known else ""


# Figures beside each other -----------------------------------------------------------------------


class Interval(NamedTuple):
    """One method's figure: mean and deviation, and another figure to mark, if there is one."""

    mean: float
    std: float
    mark: float | None = None


def plot_intervals(
    path: Path,
    panels: Mapping[str, Mapping[str, Interval]],
    label: str,
    title: str = "",
    mark: str = "",
) -> bool:
    """Draw points with intervals by method, a panel for each data set; diamonds are the marks."""
    names = list(dict.fromkeys(name for figures in panels.values() for name in figures))
    row = [
        partial(draw_intervals, figures=figures, label=label, names=names, title=data, mark=mark)
        for data, figures in panels.items()
    ]
    lines = len(names) + sum(name.count("\n") for name in names)
    return plot(path, [row], title, size=(4.0, 0.32 * lines + 1.6), same_y=True)


def draw_intervals(
    axes: Axes,
    figures: Mapping[str, Interval],
    label: str,
    *,
    names: Sequence[str] = (),
    title: str = "",
    mark: str = "",
) -> None:
    """Draw a point with its interval for each name, and a diamond where there is a mark."""
    # Not bars: their lengths mislead on an axis that does not begin at 0.
    names = names or [*figures]
    places = [names.index(name) for name in figures]
    mean, std, marks = np.array([*figures.values()], float).reshape(-1, 3).T  # None is NaN
    axes.errorbar(mean, places, xerr=std, fmt="o", color=COLOURS[0], label="mean ± deviation")
    axes.plot(marks, places, "D", color=COLOURS[1], markersize=5, label=mark)
    if mark:  # figures with a mark are shares
        axes.set_xlim(-0.02, 1.02)
    axes.locator_params(axis="x", nbins=5)  # more labels would touch each other
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set(xlabel=label, title=title, ylim=(len(names) - 0.5, -0.5))


def save_audit(path: Path, findings: Sequence[Tree], *, title: str) -> None:
    """Draw the success of each attack beside that of a guess, a panel for each setting."""
    panels: dict[str, dict[str, Interval]] = {}
    for one in findings:
        interval = Interval(one["mean"], one["std"] or 0.0, one["chance"])
        name = textwrap.fill(one["attack"], LABEL_WIDTH)
        panels.setdefault(one["setting"], {})[name] = interval
    plot_intervals(path, panels, "success (AUC or precision)", title, "a guess")


# Classes and clients -----------------------------------------------------------------------------


def draw_participation(axes: Axes, reports: Sequence[RoundReport]) -> None:
    """Draw which clients answered, failed or were left out in each round."""
    clients = known_clients(report.participation for report in reports)
    # Of many clients some, evenly chosen
    shown = np.linspace(0, clients.size - 1, min(clients.size, MOST_ROWS)).astype(int)
    records = [report.participation for report in reports]
    cells = [result[shown] for result in states(records, clients)]

    def number(at: float, _: object) -> str:
        return str(clients[shown[int(at)]]) if 0 <= at < len(shown) else ""

    edges = (reports[0].round - 0.5, reports[-1].round + 0.5, len(shown) - 0.5, -0.5)
    palette = np.array([to_rgb(COLOUR.get(state, "white")) for state in range(len(COLOUR) + 1)])
    axes.imshow(palette[np.stack(cells, axis=1)], aspect="auto", extent=edges)
    for state, name in NAMES.items():
        axes.plot([], [], "s", color=COLOUR[state], label=name)
    axes.grid(visible=False)
    axes.set(xlabel="round", ylabel="client")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(number))


def plot_counts(path: Path, panels: Mapping[str, Mapping[int, int]], *, title: str) -> None:
    """Draw distributions of whole numbers beside each other."""

    def draw(axes: Axes, name: str, counts: Mapping[int, int]) -> None:
        low, high = min(counts, default=0), max(counts, default=0)
        # Every bar covers the same number of whole numbers, else heights would jitter.
        width = -(-(high - low + 1) // BARS)
        edges = np.arange(low, high + width + 1, width) - 0.5
        # White edges keep neighbouring bars of one height apart
        how: Any = {"color": COLOURS[0], "edgecolor": "white", "linewidth": 0.5}
        axes.hist([*counts], bins=edges.tolist(), weights=[*counts.values()], **how)
        axes.set(xlabel=name, ylabel="how many")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True))

    row = [partial(draw, name=name, counts=counts) for name, counts in panels.items()]
    plot(path, [row], title, size=(3.2, 3.0))


def draw_confusion(
    axes: Axes, nodes: Sequence[Sequence[float]], classes: Sequence[str] | None = None
) -> None:
    """Draw a confusion matrix ``[k][k]``, by label and prediction, as shares of each class."""
    counts: NDArray[np.float64] = np.array(nodes, np.float64)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, "Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes, label="share of the class (0 to 1)")
    if len(shares) <= NAMED:
        for (row, column), value in np.ndenumerate(shares):
            colour = "white" if value > 0.6 else "black"
            how: Any = {"ha": "center", "va": "center", "color": colour, "fontsize": 8}
            axes.text(column, row, f"{value:.0%}" if value >= 0.005 else "", **how)
        names = [str(one)[:LETTERS] for one in (classes or range(len(shares)))]
        axes.set_xticks(range(len(names)), names, rotation=60, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="predicted class", ylabel="class")


def is_drawn(counts: Counts) -> bool:
    """Whether clients and classes are few enough to draw, and at least two each."""
    return 1 < len(counts) <= MOST_CLIENTS and len(counts[0]) > 1


def draw_classes(axes: Axes, counts: Counts, classes: Sequence[str] | None) -> None:
    """Draw a dot for each client and class, sized by its nodes."""
    nodes = np.array(counts, np.float64)  # [clients, classes]
    client, label = nodes.nonzero()
    # Dots do not cover those of the next client
    largest = min(LARGEST, (300 / len(nodes)) ** 2)
    sizes = largest * nodes[client, label] / nodes.max()
    axes.scatter(client, label, np.maximum(sizes, 0.5), color=COLOURS[0], linewidths=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if nodes.shape[1] <= NAMED:
        places = range(nodes.shape[1])
        axes.set_yticks(places, [str(one)[:LETTERS] for one in (classes or places)], fontsize=8)
    axes.set(xlabel=f"client; the largest dot is {nodes.max():,.0f} nodes", ylabel="class")


def draw_clients(axes: Axes, values: Mapping[int, float]) -> None:
    """Draw one accuracy of each client, the lowest first."""
    heights = sorted(values.values())
    shares = 100 * np.arange(1, len(heights) + 1) / len(heights)
    axes.plot(shares, heights, color=COLOURS[0], drawstyle="steps-mid")
    axes.xaxis.set_major_formatter(PercentFormatter())
    mean = float(np.mean(heights))
    axes.axhline(mean, color=GREY, linestyle="--", label=f"mean {mean:.3f}")
    words = f"share of {len(heights):,} clients that have this or less"
    axes.set(xlabel=words, ylabel="accuracy", ylim=(0, 1.02))
