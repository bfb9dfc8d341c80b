"""The pictures of a paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from flower_graph.apps.reproduce.rows import Row
from flower_graph.apps.reproduce.runs import AXES, Curves, Store, runs_of
from flower_graph.apps.reproduce.table import Line, Picture, function
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
Options = Mapping[str, Any]  # of a ``Picture``, and its data sets


class Shown(NamedTuple):
    """The runs of one line, as functions of pictures take them."""

    table: str
    data: str
    model: str
    method: str
    centralised: bool
    runs: dict[int, Curves]


def draw(
    out: Path,
    pictures: Sequence[Picture],
    lines: Sequence[Line],
    rows: Sequence[Row],
    store: Store,
) -> list[str]:
    """Draw pictures, and return the names of those for which there was anything."""
    names = []
    for picture in pictures:
        draw_it = KINDS[picture.kind] if picture.kind in KINDS else function(picture.kind)
        for path, data in _files(out, picture, lines):
            shown = [*_shown(picture, data, lines, store)]
            if draw_it(path, shown, rows, {**picture.options, "data": data}):
                names.append(path.name)
    return names


def _files(
    out: Path, picture: Picture, lines: Sequence[Line]
) -> Iterator[tuple[Path, Sequence[str]]]:
    """List the files of a picture: a single one, or one for each data set."""
    present = [*dict.fromkeys(line.data for line in lines)]
    data = [name for name in picture.data or present if name in present]
    for names in [[one] for one in data] if "{data}" in picture.file else [data]:
        yield out / picture.file.replace("{data}", "".join(names[:1]).lower()), names


def _shown(
    picture: Picture, data: Sequence[str], lines: Sequence[Line], store: Store
) -> Iterator[Shown]:
    for name in data:
        for table, methods in picture.tables.items():
            here = [line for line in lines if (line.table, line.data) == (table, name)]
            for method in methods or dict.fromkeys(line.method for line in here):
                for line in here:
                    if line.method == method:
                        shown, runs = line.names, runs_of(line, store)
                        yield Shown(table, *shown, bool(line.trained), runs)


def curves(path: Path, shown: Sequence[Shown], rows: Sequence[Row], options: Options) -> bool:
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
    if panels:
        plot_grid(path, panels, reference)
    return bool(panels)


def intervals(path: Path, shown: Sequence[Shown], rows: Sequence[Row], options: Options) -> bool:
    """Draw means with deviations, a panel for each data set, and the paper's figures beside."""
    panels: dict[str, dict[str, Interval]] = {}
    for data in options["data"]:
        for name, wanted in options["points"].items():
            place = {"data": data, **options["rows"], **(wanted or {"method": name})}
            for row in [row for row in rows if place.items() <= _flat(row).items()][:1]:
                one = Interval(row["mean"], row["std"], row["paper"])
                panels.setdefault(data, {})[name] = one
    if panels:
        plot_intervals(path, panels, label=options["label"])
    return bool(panels)


def _flat(row: Row) -> Row:
    return {key: value for key, value in row.items() if not isinstance(value, list | dict)}


def matrices(path: Path, shown: Sequence[Shown], rows: Sequence[Row], options: Options) -> bool:
    """Draw a matrix of figures by two settings, a panel for each metric, all on one scale."""
    panels = {}
    (vertical, ys), (horizontal, xs) = options["axes"].items()
    for metric, name in options["metrics"].items():
        place = {**options["rows"], "metric": metric}
        here = [
            r for r in rows if r["data"] in options["data"] and place.items() <= _flat(r).items()
        ]
        mean = {(r[vertical], r[horizontal]): r["mean"] for r in here}
        if any(map(isfinite, mean.values())):
            panels[name] = [[mean.get((y, x), nan) for x in xs] for y in ys]
    if panels:
        sides = {"rows": (vertical, ys), "columns": (horizontal, xs)}
        plot_matrices(path, panels, **sides, label=options["label"])
    return bool(panels)


def axes(path: Path, shown: Sequence[Shown], rows: Sequence[Row], options: Options) -> bool:
    """Draw accuracy by rounds, by local steps and by bytes sent, a curve for each method."""
    # Of many methods those at stake are `marked`, and the others grey
    panels: dict[str, dict[str, Spent]] = {}
    for one in shown:
        trained = [curves for curves in one.runs.values() if curves.up and not one.centralised]
        for axis, label in zip(AXES, AXES_NAMES, strict=True) if trained else ():
            spent = max((curves.spent(axis) for curves in trained), key=len)
            lines = Spent(spent, [curves.best_so_far for curves in trained])
            name = one.method if one.data in options["data"] else f"{one.method}, {one.data}"
            panels.setdefault(label, {})[name] = lines
    if panels:
        plot_spent(path, panels, options.get("marked", ()))
    return bool(panels)


def budgets(path: Path, shown: Sequence[Shown], rows: Sequence[Row], options: Options) -> bool:
    """Draw accuracy by privacy budget, a panel for each model."""
    panels: dict[str, Panel] = {}
    for row in rows:
        if (row["table"], row["metric"]) == ("Privacy", options["metric"]):
            panel = panels.setdefault(f"{row['data']}, {row['model']}", Panel({}, {}))
            if row["epsilon"]:
                panel.budgets[row["epsilon"]] = row["values"]
            else:
                panel.levels[row["method"]] = row["values"]
    if panels:
        plot_budgets(path, panels, noisy=options["noisy"])
    return bool(panels)


KINDS: dict[str, Callable[..., bool]] = {
    "axes": axes,
    "budgets": budgets,
    "curves": curves,
    "intervals": intervals,
    "matrices": matrices,
}
