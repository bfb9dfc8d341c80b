"""Pictures that compare figures: intervals, two settings, costs, budgets, attacks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from flower_graph.report.plots.base import (
    COLOURS,
    DASHES,
    GREY,
    finish,
    legend_below,
    look,
    mean_band,
    open_grid,
    panels_of,
    save,
    staying,
)
from flower_graph.storage.reading import Tree

MARKERS = ("o", "s", "^", "D", "v", "P")
LABEL_WIDTH = 42  # most letters of an attack's name in a line
TITLE_WIDTH = 30  # of a panel's title
GREY_LINE: dict[str, object] = {"color": "#B0B0B0", "linewidth": 0.9, "label": "_"}
LEAST_ROOM = 0.04  # in accuracy
ZOOM = 3.0  # room below the marked curves, as a multiple of the range of their ends
BAR, GAP = 0.8, 0.35  # height of a bar, and room between attacks


class Interval(NamedTuple):
    """One method's figure: our mean and deviation, and the paper's figure, if there is one."""

    mean: float
    std: float
    paper: float | None


def plot_intervals(path: Path, panels: Mapping[str, Mapping[str, Interval]], *, label: str) -> None:
    """Draw points with intervals by method, a panel for each data set; diamonds are the paper's."""
    if not any(panels.values()):
        raise ValueError("panels: empty; at least one figure is needed")
    names = list(dict.fromkeys(name for figures in panels.values() for name in figures))
    figure, (row,) = panels_of(panels, (3.2, 0.32 * len(names) + 1.6), 1.6, same_y=True)
    row[0].set_yticks(range(len(names)), names, fontsize=9)
    row[0].invert_yaxis()
    for cell, (data, figures) in zip(row, panels.items(), strict=True):
        draw_intervals(cell, names, figures)
        cell.set_title(data, fontsize=11)
        cell.set_xlabel(label)
    legend_below(figure, row)
    save(figure, path)


def draw_intervals(axes: Axes, names: Sequence[str], figures: Mapping[str, Interval]) -> None:
    """Draw a point with its interval for each name, and a diamond where the paper has a figure."""
    # Not bars: their lengths mislead on an axis that does not begin at 0.
    places = [names.index(name) for name in figures]
    how: Any = {"fmt": "o", "color": COLOURS[0], "capsize": 3, "label": "mean ± deviation"}
    ours = [one.mean for one in figures.values()]
    axes.errorbar(ours, places, xerr=[one.std for one in figures.values()], markersize=5, **how)
    marks = {at: one.paper for at, one in zip(places, figures.values(), strict=True)}
    if known := {at: paper for at, paper in marks.items() if paper is not None}:
        papers = [*known.values()], [*known]
        axes.plot(*papers, "D", color=COLOURS[1], markersize=5, label="paper")
    axes.locator_params(axis="x", nbins=5)  # more labels would touch each other
    open_grid(axes)


def plot_matrices(
    path: Path,
    panels: Mapping[str, Sequence[Sequence[float]]],
    *,
    rows: tuple[str, Sequence[float]],
    columns: tuple[str, Sequence[float]],
    label: str,
) -> None:
    """Draw numbers by two settings as coloured cells; gains and losses have different colours."""
    size = 0.75 * len(columns[1]) + 1.2, 0.6 * len(rows[1]) + 1.6
    figure, (axes,) = panels_of(panels, size, 1.0, same_y=True)
    every = np.array([*panels.values()], dtype=np.float64)
    low, high, colours = np.nanmin(every), np.nanmax(every), "Blues"
    if low < 0:  # white is 0
        high, colours = np.nanmax(np.abs(every)), "RdBu"
        low = -high
    for cell, (name, values) in zip(axes, zip(panels, every, strict=True), strict=True):
        image = cell.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                is_dark = abs(value) > 0.6 * high if low < 0 else value > (low + high) / 2
                colour = "white" if is_dark else "black"
                cell.text(x, y, f"{value:.3f}", ha="center", va="center", color=colour, fontsize=9)
        cell.set_xticks(range(len(columns[1])), [f"{v:g}" for v in columns[1]])
        cell.set_yticks(range(len(rows[1])), [f"{v:g}" for v in rows[1]])
        cell.set_xlabel(columns[0])
        cell.set_title(textwrap.fill(name, TITLE_WIDTH), fontsize=10)
    axes[0].set_ylabel(rows[0])
    figure.colorbar(image, ax=list(axes), label=label)
    save(figure, path)


def plot_points(
    path: Path,
    panels: Mapping[tuple[str, str], Mapping[str, Sequence[tuple[float, float]]]],
) -> None:
    """Draw points joined by lines, both axes logarithmic."""
    if not panels:
        raise ValueError("panels: empty; at least one is needed")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for cell, ((x_name, y_name), lines) in zip(axes, panels.items(), strict=False):
        for index, (name, points) in enumerate(lines.items()):
            x, y = zip(*sorted(points), strict=True)
            marker, colour = MARKERS[index % len(MARKERS)], COLOURS[index % len(COLOURS)]
            cell.plot(x, y, marker=marker, color=colour, markersize=4, linewidth=1, label=name)
        for axis, scale in ((cell.xaxis, cell.set_xscale), (cell.yaxis, cell.set_yscale)):
            scale("log")
            # Plain numbers at 1, 2, 5, 10 ...: a panel has only one or two powers of ten.
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        cell.set_xlabel(x_name)
        cell.set_ylabel(y_name)
        open_grid(cell)
    legend_below(figure, list(axes[: len(panels)]))
    save(figure, path)


Line = Mapping[str | float, Sequence[float]]  # all seeds' differences, by a number or a word


def plot_lines(path: Path, panels: Mapping[str, Mapping[str, Line]], *, label: str) -> None:
    """Draw differences in points, a panel for each varied setting, and a line at zero."""
    figure, (row,) = panels_of(panels, (3.4, 3.8), same_y=True)
    for cell, (name, lines) in zip(row, panels.items(), strict=True):
        cell.axhline(0, color=GREY, linewidth=1)
        finish(cell, label if cell is row[0] else "", legend=False, x_label=name)
        positions = list(dict.fromkeys(x for one in lines.values() for x in one))
        # Words stand side by side, numbers at their values
        places = {x: at if isinstance(x, str) else x for at, x in enumerate(positions)}
        cell.set_xticks([*places.values()], [*map(str, places)])
        for index, (data, one) in enumerate(lines.items()):
            xs = [places[x] for x in one]
            mean_band(cell, xs, 100 * np.array([*one.values()]).T, index, data)
    legend_below(figure, row)
    save(figure, path)


class Spent(NamedTuple):
    """One method's curves by cost."""

    spent: Sequence[float]  # After each round of the longest run
    accuracy: Sequence[Sequence[float]]  # seeds x rounds; a run that has ended keeps its last value

    @property
    def values(self) -> NDArray[np.float64]:
        """Accuracies after each round of the longest run, ``[seeds, rounds]``."""
        return staying(self.accuracy, len(self.spent))


def plot_spent(
    path: Path, panels: Mapping[str, Mapping[str, Spent]], marked: Sequence[str] = ()
) -> None:
    """Draw accuracy against cost, a panel for each kind of cost, on logarithmic axes.

    If some curves are marked, the others are grey, and the axis shows where the marked ones end.
    """
    figure, (row,) = panels_of(panels, (4.2, 4.2), same_y=True)
    for cell, (label, lines) in zip(row, panels.items(), strict=True):
        rest = [name for name in lines if marked and name not in marked]
        for name in rest:  # first, so that they lie below
            cell.plot(lines[name].spent, lines[name].values.mean(axis=0), **GREY_LINE)
        for index, name in enumerate(name for name in lines if name not in rest):
            _draw_spent(cell, lines[name], index, name)
        cell.set_xscale("log")
        finish(cell, "test accuracy" if cell is row[0] else "", legend=False, x_label=label)
        cell.xaxis.set_major_locator(LogLocator())
        if rest:
            cell.plot([], [], **{**GREY_LINE, "label": "others (the table names them)"})
            _zoom(cell, [one.values for name, one in lines.items() if name not in rest])
    legend_below(figure, row)
    save(figure, path)


def _draw_spent(cell: Axes, one: Spent, place: int, name: str) -> None:
    # A method without cost has no point on a logarithmic axis: it is a horizontal line.
    if one.spent[-1] > 0:
        mean_band(cell, one.spent, one.values, place, name)
        return
    colour, dashes = look(place)
    level = one.values[:, -1].mean()
    cell.axhline(level, color=colour, linestyle=dashes, linewidth=0.8, label=name)


def _zoom(cell: Axes, curves: Sequence[NDArray[np.float64]]) -> None:
    """Limit the axis to the accuracies that curves end with, and a few times their range below."""
    ends = [values[:, -1].mean() for values in curves]
    highest = max((values.mean(axis=0) + values.std(axis=0)).max() for values in curves)
    room = max(LEAST_ROOM, ZOOM * (max(ends) - min(ends)))
    cell.set_ylim(min(ends) - room, highest + LEAST_ROOM / 4)


Values = Sequence[float]  # one a seed


class Panel(NamedTuple):
    """The drawn figures of one config."""

    budgets: dict[float, Values]  # Accuracies by epsilon
    levels: dict[str, Values]  # Accuracies of runs without noise, by name


def plot_budgets(
    path: Path, panels: Mapping[str, Panel], *, noisy: str = "FED, with noise"
) -> None:
    """Draw accuracy against epsilon, with levels for comparison."""
    # Points and lines are means over the seeds; bars and bands one standard deviation.
    # Below a single panel the legend is wider than the panel.
    figure, (row,) = panels_of(panels, (max(4.6, 7.2 / (len(panels) or 1)), 3.9))
    for cell, (title, panel) in zip(row, panels.items(), strict=True):
        if not panel.budgets or not all(
            map(len, [*panel.budgets.values(), *panel.levels.values()])
        ):
            raise ValueError(f"{title}: every budget and level needs at least one accuracy")
        epsilons = sorted(panel.budgets)
        means, spread = zip(*(_percent(panel.budgets[one]) for one in epsilons), strict=True)
        cell.errorbar(epsilons, means, spread, color=COLOURS[0], marker="o", capsize=3, label=noisy)
        for index, (name, values) in enumerate(panel.levels.items(), 1):
            mean, half = _percent(values)
            cell.axhline(mean, color=COLOURS[index], linestyle=DASHES[index], label=name)
            cell.axhspan(mean - half, mean + half, color=COLOURS[index], alpha=0.15, linewidth=0)
        cell.set_xscale("log")
        cell.set_xlabel("epsilon of the whole run")
        cell.set_title(title, fontsize=11)
        open_grid(cell)
    row[0].set_ylabel("accuracy in percent")
    legend_below(figure, row)
    save(figure, path)


def _percent(values: Values) -> tuple[float, float]:
    return 100 * float(np.mean(values)), 100 * float(np.std(values))


def save_audit(path: Path, findings: Sequence[Tree], *, title: str) -> None:
    """Draw one bar for each attack and setting, and a line for a guess."""
    if not findings:
        raise ValueError("findings: empty; at least one attack is needed")
    attacks = list(dict.fromkeys(one["attack"] for one in findings))
    settings = list(dict.fromkeys(one["setting"] for one in findings))
    step = len(settings) * BAR + GAP
    figure = Figure(figsize=(8.6, 1.4 + 0.32 * len(attacks) * step), layout="constrained")
    axes = figure.subplots()
    for one in findings:
        setting = settings.index(one["setting"])
        position = attacks.index(one["attack"]) * step + setting * BAR
        axes.barh(
            position,
            one["mean"],
            height=BAR * 0.9,
            color=COLOURS[setting % len(COLOURS)],
            xerr=one["std"] or 0,
            error_kw={"elinewidth": 1},
            label=one["setting"],
        )
        ends = [position - BAR / 2, position + BAR / 2]
        axes.plot([one["chance"]] * 2, ends, color=GREY, linewidth=2)
    centres = [index * step + (len(settings) - 1) * BAR / 2 for index in range(len(attacks))]
    axes.set_yticks(centres, [textwrap.fill(attack, LABEL_WIDTH) for attack in attacks], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("success (AUC or precision); grey lines: a guess")
    open_grid(axes, "x")
    axes.set_axisbelow(True)
    legend_below(figure, [axes])
    save(figure, path, title)
