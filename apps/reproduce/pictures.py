"""The pictures of a paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from flower_graph.apps.reproduce.page import Results, Row
from flower_graph.apps.reproduce.runs import AXES, Curves, Store
from flower_graph.apps.reproduce.table import TEST, Paper, function
from flower_graph.report import plots

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


def draw(out: Path, paper: Paper, results: Results, store: Store) -> list[str]:
    """Draw pictures, and return the names of those for which there was anything."""
    names = []
    present = dict.fromkeys(line.data for line in paper.lines)
    for picture in paper.pictures:
        kind = KINDS.get(picture.kind) or function(picture.kind)
        data = [name for name in picture.data or present if name in present]
        for of_file in [[one] for one in data] if "{data}" in picture.file else [data]:
            shown = []
            for name, (table, methods) in product(of_file, picture.tables.items()):
                here = [line for line in results if (line.table, line.data) == (table, name)]
                for method in methods or dict.fromkeys(line.method for line in here):
                    for line in [line for line in here if line.method == method]:
                        about = table, *line.names, bool(line.trained)
                        shown.append(Shown(*about, store.runs(line), results[line]))
            file = picture.file.replace("{data}", "".join(of_file[:1]).lower())
            if kind(out / file, shown, {**picture.options, "data": of_file}):
                names.append(file)
    return names


def curves(path: Path, shown: Drawing, _: Options) -> bool:
    """Draw accuracy and loss by round, a panel for each data set, a curve for each method."""
    accuracy, loss = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    reference: dict[str, dict[str, float]] = {}
    for one in shown:
        runs = [*one.runs.values()]
        if runs and one.centralised:
            level = fmean(run.test_at_best_val for run in runs)
            reference[one.data] = {"centralised": level}
        elif runs:
            accuracy.setdefault(one.data, {})[one.method] = [run.test_accuracy for run in runs]
            loss.setdefault(one.data, {})[one.method] = [run.cross_entropy for run in runs]
    upper = [
        plots.over_rounds("test accuracy", rows, title=data, levels=reference.get(data, {}))
        for data, rows in accuracy.items()
    ]
    lower = [plots.over_rounds("loss", rows) for rows in loss.values()]
    return plots.plot_panels(path, [upper, lower])


def intervals(path: Path, shown: Drawing, options: Options) -> bool:
    """Draw means with deviations, a panel for each data set, and the paper's figures beside.

    ``also`` has more points of a method: their names, and the figures that they show.
    """
    panels: dict[str, dict[str, plots.Interval]] = {}
    for one in shown:
        also = options.get("also", {}).get(one.method, {})
        for name, metric in {one.method: options.get("metric", TEST), **also}.items():
            for row in [row for row in one.rows if row["metric"] == metric][:1]:
                interval = plots.Interval(row["mean"], row["std"], row["paper"])
                panels.setdefault(one.data, {}).setdefault(name, interval)
    return plots.plot_intervals(path, panels, label=options.get("label", "test accuracy"))


def matrices(path: Path, shown: Drawing, options: Options) -> bool:
    """Draw a matrix of figures by two settings, a panel for each metric, all on one scale."""
    y, x = options["axes"]
    rows = [row for one in shown for row in one.rows]
    sides = {name: [*dict.fromkeys(row[name] for row in rows)] for name in (y, x)}
    panels = {}
    for metric, name in options["metrics"].items():
        mean = {(row[y], row[x]): row["mean"] for row in rows if row["metric"] == metric}
        if any(map(isfinite, mean.values())):
            panels[name] = [[mean.get((v, h), nan) for h in sides[x]] for v in sides[y]]
    by = {"rows": (y, sides[y]), "columns": (x, sides[x])}
    return plots.plot_matrices(path, panels, **by, label=options["label"])


def axes(path: Path, shown: Drawing, options: Options) -> bool:
    """Draw accuracy by rounds, by local steps and by bytes sent, a curve for each method."""
    panels: dict[str, dict[str, plots.Line]] = {}
    for one in shown:
        trained = [curves for curves in one.runs.values() if curves.up and not one.centralised]
        for axis, label in zip(AXES, AXES_NAMES, strict=True) if trained else ():
            spent = max((curves.spent(axis) for curves in trained), key=len)
            name = one.method if one.data in options["data"] else f"{one.method}, {one.data}"
            drawn = plots.Line(spent, [curves.best_so_far for curves in trained])
            panels.setdefault(label, {})[name] = drawn
    row = [plots.Panel(rows, "test accuracy", name, scales="x") for name, rows in panels.items()]
    return plots.plot_panels(path, [row])


KINDS: dict[str, Callable[..., bool]] = {
    one.__name__: one for one in (axes, curves, intervals, matrices)
}
