"""Pictures: curves of runs and of tables, points with intervals, matrices, maps of classes.

Figures are drawn without pyplot: no window system is touched and no global state is left behind.
"""

import io
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from flower_graph.records.participation import ANSWERED, FAILED, LEFT_OUT, known_clients, states
from flower_graph.records.rounds import UNITS, WAYS, RoundReport, byte_unit
from flower_graph.storage.reading import Tree
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
SIZE = (4.6, 3.3)  # of a picture of a page, in inches
STYLE: Any = {"svg.fonttype": "none", "font.family": "DejaVu Sans"}  # text stays text
BARS = 30  # most bars of a distribution; smaller ranges have one bar for each number
NAMED = 12  # most classes whose names are written
LETTERS = 16  # of a class's name
LABEL_WIDTH = 42  # most letters of an attack's name in a line
TITLE_WIDTH = 30  # of a panel's title
MOST_CLIENTS = 100  # that have a column of dots each
LARGEST = 200.0  # of a dot, in points squared
MOST_ROWS = 200  # most clients whose rounds are drawn
COLOUR = {ANSWERED: COLOURS[0], FAILED: COLOURS[1], LEFT_OUT: "#C8C8C8"}
NAMES = {ANSWERED: "answered", FAILED: "failed", LEFT_OUT: "left out"}
# By the numbers of the states; unknown states are white.
PALETTE = np.array([to_rgb("white"), *(to_rgb(COLOUR[state]) for state in sorted(COLOUR))])
Curves = Mapping[str, Sequence[Sequence[float]]]  # seeds x rounds, by name
Counts = Sequence[Sequence[int]]  # clients x classes


# Curves ------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One curve: values of several seeds over numbers or words."""

    x: Sequence[float] | Sequence[str]
    values: Sequence[Sequence[float]]  # seeds x numbers; a run that has ended keeps its last value

    def stacked(self) -> NDArray[np.float64]:
        """Return the values, ``[seeds, numbers]``."""
        count = len(self.x)
        return np.array([[*row, *[row[-1]] * (count - len(row))] for row in self.values], float)


class Panel(NamedTuple):
    """Curves of several methods or settings."""

    lines: Mapping[str, Line]  # by name; in all panels of a picture one name has one colour
    label: str = ""  # of the values,
    x_label: str = "round"  # and of what they lie over
    title: str = ""
    levels: Mapping[str, float] = MappingProxyType({})  # figures drawn as grey lines across
    from_zero: bool = False  # whether the values' axis begins at 0


def over_rounds(label: str, curves: Curves, **more: Any) -> Panel:
    """Make a panel of several seeds' curves over the rounds."""
    lines = {n: Line(range(1, 1 + max(map(len, rows))), rows) for n, rows in curves.items()}
    return Panel(lines, label, **more)


def plot_panels(path: Path, grid: Sequence[Sequence[Panel]], title: str = "") -> bool:
    """Draw rows of panels, if there are any: curves are means, with bands of one deviation."""
    if not any(grid):
        return False
    names = list(dict.fromkeys(name for row in grid for panel in row for name in panel.lines))
    are_alike = all(len({panel.label for panel in row}) == 1 for row in grid)
    same_y: Literal["row", False] = "row" if are_alike else False
    figure, axes = panels_of(grid[0], (3.6, 3.1), 0.6, rows=len(grid), same_y=same_y)
    for cells, row in zip(axes, grid, strict=True):
        for cell, panel in zip(cells, row, strict=False):
            draw_panel(cell, panel, names)
    legend_below(figure, [*axes.flat])
    return save(figure, path, title)


def draw_panel(axes: Axes, panel: Panel, names: Sequence[str] = ()) -> None:
    """Draw one panel of a picture with curves of these names, by default its own."""
    names = names or [*panel.lines]
    for name, line in panel.lines.items():
        values, number = line.stacked(), names.index(name)
        mean_band(axes, line.x, values, number, name)
    for place, (name, level) in enumerate(panel.levels.items(), start=len(axes.lines)):
        dashed: Any = DASHES[place % len(DASHES)]  # other dashes than the curves above
        axes.axhline(level, color=GREY, linestyle=dashed, linewidth=1.2, zorder=1, label=name)
    finish(axes, panel.label, panel.x_label)
    axes.set_title(panel.title, fontsize=11)
    if panel.from_zero:
        top = 1.1 * axes.dataLim.y1
        axes.set_ylim(0, top if 0 < top < np.inf else 1)  # also where nothing is known or sent


def mean_band(
    axes: Axes,
    spent: Sequence[float] | Sequence[str],
    values: NDArray[np.float64],
    place: int,
    name: str,
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


def look(place: int) -> tuple[str, Dashes]:
    """Return the colour and the dashes of a curve, distinct for up to 36 curves."""
    shift = place // len(COLOURS)
    return COLOURS[place % len(COLOURS)], DASHES[(place + shift) % len(DASHES)]


def save_curves(
    path: Path,
    reports: Sequence[RoundReport],
    *,
    title: str,
    baselines: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Draw a run: loss, accuracies beside grey lines for its baselines, bytes, over the rounds."""
    # Errors have units of their own: the first, by which the best round is chosen, is drawn alone
    errors = [name for name in reports[-1].scores if name in VALUE_SCORES]
    first = errors[0] if errors else ACCURACY
    scores = {"validation": (first, "val"), "test": (first, "test")}
    scores |= {} if errors else {f"test {name}": (name, "test") for name in reports[-1].scores}
    curves = {name: [[r.score(*one) for r in reports]] for name, one in scores.items()}
    name = "metrics" if reports[-1].scores and not errors else first
    panels = [
        losses_of([reports])._replace(from_zero=True),
        over_rounds(name, curves, levels=baselines, from_zero=True),
        bytes_of([reports]),
        *learnt_of([reports], "structure"),
        *learnt_of([reports], "alignment"),
    ]
    plot_panels(path, [panels], title)


def losses_of(seeds: Sequence[Sequence[RoundReport]]) -> Panel:
    """Make the panel of loss and cross-entropy over the rounds."""
    curves = {
        name.replace("_", "-"): [[getattr(one, name) for one in reports] for reports in seeds]
        for name in ("loss", "cross_entropy")
    }
    return over_rounds("loss", curves)


def bytes_of(seeds: Sequence[Sequence[RoundReport]]) -> Panel:
    """Make the panel of the bytes sent up and down until each round, in the unit that fits."""
    sent = {
        way: [[sum(one.bytes.get(way, {}).values()) for one in reports] for reports in seeds]
        for way in WAYS
    }
    power = byte_unit(max((v for rows in sent.values() for row in rows for v in row), default=0))
    curves = {k: [[v / 1024**power for v in row] for row in rows] for k, rows in sent.items()}
    return over_rounds(f"payload so far ({UNITS[power]})", curves, from_zero=True)


def learnt_of(seeds: Sequence[Sequence[RoundReport]], group: str) -> list[Panel]:
    """Make panels of what some methods measure of graphs or embeddings: shares, then the rest."""
    names = dict.fromkeys(n for reports in seeds for one in reports for n in getattr(one, group))
    shares, rest = dict[str, list[list[float]]](), dict[str, list[list[float]]]()
    for name in names:
        curves = [[getattr(one, group).get(name, np.nan) for one in reports] for reports in seeds]
        # Counts beside shares would flatten these
        is_share = not any(abs(value) > 1 for row in curves for value in row)
        (shares if is_share else rest)[name] = curves
    panels = {f"{group}, 0 to 1": shares, f"{group}: {', '.join(rest)}": rest}
    return [over_rounds(label, curves) for label, curves in panels.items() if curves]


def curves_panel(given: Panel) -> str:
    """Draw those curves of a panel that have a number, as an SVG element; empty if none has."""
    known = {n: one for n, one in given.lines.items() if np.isfinite([*chain(*one.values)]).any()}

    def draw(axes: Axes) -> None:
        draw_panel(axes, given._replace(lines=known))
        axes.figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)

    return drawn(draw) if known else ""


# Participants ------------------------------------------------------------------------------------


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
    axes.imshow(PALETTE[np.stack(cells, axis=1)], aspect="auto", extent=edges)
    handles = [Patch(color=COLOUR[state], label=name) for state, name in NAMES.items()]
    axes.figure.legend(
        handles=handles, loc="outside upper left", frameon=False, fontsize=8, ncols=3
    )
    finish(axes, "client")
    axes.grid(visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(number))


# Figures beside each other -----------------------------------------------------------------------


class Interval(NamedTuple):
    """One method's figure: mean and deviation, and another figure to mark, if there is one."""

    mean: float
    std: float
    mark: float | None


def plot_intervals(
    path: Path,
    panels: Mapping[str, Mapping[str, Interval]],
    *,
    label: str,
    mark: str = "",
    title: str = "",
    limits: tuple[float | None, float | None] = (None, None),
) -> bool:
    """Draw points with intervals by method, a panel for each data set; diamonds are the marks."""
    if not panels:
        return False
    names = dict.fromkeys(name for figures in panels.values() for name in figures)
    lines = len(names) + sum(name.count("\n") for name in names)
    figure, (row,) = panels_of(panels, (3.2, 0.32 * lines + 1.6), 1.6, same_y=True)
    for cell, (data, figures) in zip(row, panels.items(), strict=True):
        draw_intervals(cell, [*names], figures, label, mark)
        cell.set_title(data, fontsize=11)
        cell.set_xlim(*limits)
    legend_below(figure, row)
    return save(figure, path, title)


def draw_intervals(
    axes: Axes,
    names: Sequence[str],
    figures: Mapping[str, Interval],
    label: str,
    mark: str = "",
) -> None:
    """Draw a point with its interval for each name, and a diamond where there is a mark."""
    # Not bars: their lengths mislead on an axis that does not begin at 0.
    places = [names.index(name) for name in figures]
    how: Any = {"fmt": "o", "color": COLOURS[0], "capsize": 3, "label": "mean ± deviation"}
    ours = [one.mean for one in figures.values()]
    axes.errorbar(ours, places, xerr=[one.std for one in figures.values()], markersize=5, **how)
    marks = {at: one.mark for at, one in zip(places, figures.values(), strict=True)}
    if known := {at: value for at, value in marks.items() if value is not None}:
        others = [*known.values()], [*known]
        axes.plot(*others, "D", color=COLOURS[1], markersize=5, label=mark)
    axes.locator_params(axis="x", nbins=5)  # more labels would touch each other
    axes.set_xlabel(label)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    open_grid(axes)


def save_audit(path: Path, findings: Sequence[Tree], *, title: str) -> None:
    """Draw the success of each attack beside that of a guess, a panel for each setting."""
    panels: dict[str, dict[str, Interval]] = {}
    for one in findings:
        interval = Interval(one["mean"], one["std"] or 0.0, one["chance"])
        name = textwrap.fill(one["attack"], LABEL_WIDTH)
        panels.setdefault(one["setting"], {})[name] = interval
    label, limits = "success (AUC or precision)", (-0.02, 1.02)
    plot_intervals(path, panels, label=label, mark="a guess", title=title, limits=limits)


# Any: data frames
def plot_matrices(path: Path, panels: Mapping[str, Any], *, label: str) -> bool:
    """Draw numbers by two settings as coloured cells; gains and losses have different colours."""
    every = np.array([table.to_numpy(float) for table in panels.values()])
    first = next(iter(panels.values()))
    size = 0.75 * first.shape[1] + 1.2, 0.6 * first.shape[0] + 1.6
    figure, (axes,) = panels_of(panels, size, 1.0, same_y=True)
    low, high, colours = np.nanmin(every), np.nanmax(every), "Blues"
    if low < 0:  # white is 0
        high, colours = np.nanmax(np.abs(every)), "RdBu"
        low = -high
    for cell, (name, table), values in zip(axes, panels.items(), every, strict=True):
        image = cell.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto")
        is_dark = np.abs(values) > 0.6 * high if low < 0 else values > (low + high) / 2
        annotate(cell, values, is_dark, "{:.3f}", 9)
        cell.set_xticks(range(first.shape[1]), [f"{v:g}" for v in table.columns])
        cell.set_yticks(range(first.shape[0]), [f"{v:g}" for v in table.index])
        cell.set_xlabel(table.columns.name)
        cell.set_title(textwrap.fill(name, TITLE_WIDTH), fontsize=10)
    axes[0].set_ylabel(first.index.name)
    figure.colorbar(image, ax=list(axes), label=label)
    return save(figure, path)


# Classes and clients -----------------------------------------------------------------------------


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
        finish(cell, "how many" if index == 0 else "", name)
    save(figure, path, title)


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
        annotate(axes, np.where(shares < 0.005, np.nan, 100 * shares), shares > 0.6, "{:.0f}", 7)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("predicted class")
    axes.set_ylabel("class")


def annotate(
    axes: Axes, values: NDArray[np.float64], is_dark: NDArray[np.bool_], form: str, size: int
) -> None:
    """Write the finite numbers into the cells of an image, in white where cells are dark."""
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "white" if is_dark[row, column] else "black"
            how: Any = {"ha": "center", "va": "center", "color": colour, "fontsize": size}
            axes.text(column, row, form.format(value), **how)


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
    axes.set_xlim(-0.7, len(nodes) - 0.3)
    axes.set_ylim(-0.7, nodes.shape[1] - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if nodes.shape[1] <= NAMED:
        places = range(nodes.shape[1])
        axes.set_yticks(places, [str(one)[:LETTERS] for one in (classes or places)], fontsize=8)
    axes.set_xlabel(f"client; the largest dot is {nodes.max():,.0f} nodes")
    axes.set_ylabel("class")


def draw_clients(axes: Axes, label: str, values: Mapping[int, float]) -> None:
    """Draw one figure of each client, the lowest first."""
    heights = sorted(values.values())
    shares = 100 * np.arange(1, len(heights) + 1) / len(heights)
    axes.plot(shares, heights, color=COLOURS[0], linewidth=1.6, drawstyle="steps-mid")
    axes.xaxis.set_major_formatter(PercentFormatter())
    axes.set_xlabel(f"share of {len(heights):,} clients that have this or less")
    mean = float(np.mean(heights))
    axes.axhline(mean, color=GREY, linestyle="--", linewidth=1.1, label=f"mean {mean:.3f}")
    axes.figure.legend(loc="outside upper left", frameon=False, fontsize=8)
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.02)
    open_grid(axes)
    axes.set_axisbelow(True)


# Parts of pictures -------------------------------------------------------------------------------


def panels_of(
    columns: Collection[object],
    size: tuple[float, float],
    margin: float = 0.0,
    *,
    rows: int = 1,
    same_y: bool | Literal["row"] = False,
) -> tuple[Figure, Any]:
    """Make a figure with a column for each entry, ``[rows, columns]`` axes of a size in inches."""
    width, height = size
    figure = Figure((width * len(columns) + margin, height * rows), layout="constrained")
    return figure, figure.subplots(rows, len(columns), squeeze=False, sharey=same_y)


def finish(axes: Axes, label: str, x_label: str = "round") -> None:
    """Name the axes and draw a grid."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    open_grid(axes)


def open_grid(axes: Axes) -> None:
    """Draw a pale grid, and no frame above and to the right."""
    axes.grid(visible=True, color="#E0E0E0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


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
    for text in figure.findobj(Text):
        if isinstance(text, Text):
            text.set_parse_math(False)


def save(figure: Figure, path: Path, title: str = "") -> bool:
    """Write a picture, whole or not at all; return that there is one."""
    if title:
        figure.suptitle(title, fontsize=11)
    # Not by `savefig`, which draws a figure with a layout twice.
    figure.set_dpi(DPI)
    without_formulas(figure)
    canvas: Any = FigureCanvasAgg(figure)  # its method has no types
    with written(path) as stream:
        canvas.print_png(stream)
    return True


def plot(
    path: Path,
    draw: Callable[..., object],
    *given: object,
    title: str,
    size: tuple[float, float] = (7.0, 3.6),
) -> None:
    """Draw a picture by one of the functions ``draw_...``, as a PNG."""
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots(), *given)
    save(figure, path, title)


def drawn(draw: Callable[..., object], *given: object, height: float = SIZE[1], **more: Any) -> str:
    """Draw a panel by one of the functions ``draw_...``, as an SVG element of any width."""
    stream = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.subplots()
    draw(axes, *given, **more)
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
