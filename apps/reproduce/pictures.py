"""The pictures of a paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from flower_graph.apps.reproduce.rows import Results, Row
from flower_graph.apps.reproduce.runs import AXES, Curves, Store, runs_of
from flower_graph.apps.reproduce.table import TEST, Paper, Picture, function
from flower_graph.report.plots import (
    CurveSet,
    Interval,
    Panel,
    Spent,
    plot_budgets,
    plot_grid,
    plot_intervals,
    plot_matrices,
    plot_spent,
)

AXES_NAMES = ("rounds", "local steps of a client", "MiB that a client sends")


class Shown(NamedTuple):
    """The runs and the rows of one line, as functions of pictures take them."""

    table: str
    data: str
    model: str
    method: str
    centralised: bool
    runs: dict[int, Curves]
    rows: list[Row]


Drawing = Sequence[Shown]
Options = Mapping[str, Any]  # of a ``Picture``, and its data sets
Plot = tuple[Callable[..., object], Mapping[str, Any], Mapping[str, Any]]  # with its arguments


def draw(out: Path, paper: Paper, results: Results, store: Store) -> list[str]:
    """Draw pictures, and return the names of those for which there was anything."""
    names = []
    present = dict.fromkeys(line.data for line in paper.lines)
    for picture in paper.pictures:
        kind = KINDS.get(picture.kind) or function(picture.kind)
        data = [name for name in picture.data or present if name in present]
        for of_file in [[one] for one in data] if "{data}" in picture.file else [data]:
            shown = [*_shown(picture, of_file, results, store)]
            plot, panels, more = kind(shown, {**picture.options, "data": of_file})
            if panels:
                names.append(picture.file.replace("{data}", "".join(of_file[:1]).lower()))
                plot(out / names[-1], panels, **more)
    return names


def _shown(
    picture: Picture, data: Sequence[str], results: Results, store: Store
) -> Iterator[Shown]:
    for name, (table, methods) in product(data, picture.tables.items()):
        here = [line for line in results if (line.table, line.data) == (table, name)]
        for method in methods or dict.fromkeys(line.method for line in here):
            for line in [line for line in here if line.method == method]:
                runs = runs_of(line, store)
                yield Shown(table, *line.names, bool(line.trained), runs, results[line])


def curves(shown: Drawing, _: Options) -> Plot:
    """Draw accuracy and loss by round, a panel for each data set, a curve for each method."""
    panels: dict[str, dict[str, CurveSet]] = {}
    reference: dict[str, float] = {}
    for one in shown:
        runs = [*one.runs.values()]
        if runs and one.centralised:
            reference[one.data] = fmean(run.test_at_best_val for run in runs)
        elif runs:
            accuracy, loss = [run.test_accuracy for run in runs], [r.cross_entropy for r in runs]
            panels.setdefault(one.data, {})[one.method] = CurveSet(accuracy, loss)
    return plot_grid, panels, {"reference": reference}


def intervals(shown: Drawing, options: Options) -> Plot:
    """Draw means with deviations, a panel for each data set, and the paper's figures beside.

    ``also`` has more points of a method: their names, and the figures that they show.
    """
    panels: dict[str, dict[str, Interval]] = {}
    for one in shown:
        also = options.get("also", {}).get(one.method, {})
        for name, metric in {one.method: options.get("metric", TEST), **also}.items():
            for row in [row for row in one.rows if row["metric"] == metric][:1]:
                interval = Interval(row["mean"], row["std"], row["paper"])
                panels.setdefault(one.data, {}).setdefault(name, interval)
    return plot_intervals, panels, {"label": options.get("label", "test accuracy")}


def matrices(shown: Drawing, options: Options) -> Plot:
    """Draw a matrix of figures by two settings, a panel for each metric, all on one scale."""
    y, x = options["axes"]
    rows = [row for one in shown for row in one.rows]
    sides = {name: [*dict.fromkeys(row[name] for row in rows)] for name in (y, x)}
    panels = {}
    for metric, name in options["metrics"].items():
        mean = {(row[y], row[x]): row["mean"] for row in rows if row["metric"] == metric}
        if any(map(isfinite, mean.values())):
            panels[name] = [[mean.get((v, h), nan) for h in sides[x]] for v in sides[y]]
    more = {"rows": (y, sides[y]), "columns": (x, sides[x]), "label": options["label"]}
    return plot_matrices, panels, more


def axes(shown: Drawing, options: Options) -> Plot:
    """Draw accuracy by rounds, by local steps and by bytes sent, a curve for each method.

    Of many methods those at stake are ``marked``, and the others grey.
    """
    panels: dict[str, dict[str, Spent]] = {}
    for one in shown:
        trained = [curves for curves in one.runs.values() if curves.up and not one.centralised]
        for axis, label in zip(AXES, AXES_NAMES, strict=True) if trained else ():
            spent = max((curves.spent(axis) for curves in trained), key=len)
            name = one.method if one.data in options["data"] else f"{one.method}, {one.data}"
            drawn = Spent(spent, [curves.best_so_far for curves in trained])
            panels.setdefault(label, {})[name] = drawn
    return plot_spent, panels, {"marked": options.get("marked", ())}


def budgets(shown: Drawing, _: Options) -> Plot:
    """Draw accuracy by privacy budget, a panel for each model; lines without one are levels."""
    panels: dict[str, Panel] = {}
    noisy = "with noise"
    for one in shown:
        for row in [row for row in one.rows if row["metric"] == TEST]:
            panel = panels.setdefault(f"{one.data}, {one.model}", Panel({}, {}))
            if row.get("epsilon"):
                panel.budgets[row["epsilon"]], noisy = row["values"], one.method
            else:
                panel.levels[one.method] = row["values"]
    return plot_budgets, panels, {"noisy": noisy}


KINDS: dict[str, Callable[..., Plot]] = {
    one.__name__: one for one in (axes, budgets, curves, intervals, matrices)
}
