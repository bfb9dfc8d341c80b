"""Pictures that compare methods, drawn as the YAML's ``pictures`` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from flower_graph.apps.reproduce.experiments import Runs
from flower_graph.apps.reproduce.page import matching
from flower_graph.apps.reproduce.rows import shown_runs
from flower_graph.apps.reproduce.table import Asked, Values, fill, function
from flower_graph.apps.reproduce.text import Row, find
from flower_graph.report.plots.base import CurveSet, plot_grid
from flower_graph.report.plots.compared import Bar, plot_bars, plot_matrices, plot_points


def draw(out: Path, asked: Asked, runs: Runs, rows: Sequence[Row]) -> list[str]:
    """Draw what was asked for and run, and return the pictures' names."""
    names = []
    for picture in asked.table.pictures:
        if picture["asked"] in asked.tables:
            for path, values in _files(out, picture, asked):
                if _draw_one(path, {**picture, **values}, asked, runs, rows):
                    names.append(path.name)
    return names


def _draw_one(path: Path, picture: Values, asked: Asked, runs: Runs, rows: Sequence[Row]) -> bool:
    """Draw a kind of picture, or what only one paper has; False if there is nothing to draw."""
    if picture["kind"] in KINDS:
        return bool(KINDS[picture["kind"]](path, picture, asked, runs, rows))
    shown = shown_runs(picture["tables"], picture["data"], asked, runs)
    return bool(function(picture["kind"])(path, shown))


def _files(out: Path, picture: Values, asked: Asked) -> Iterator[tuple[Path, Values]]:
    """List a picture's files: one, or one for each data set."""
    data = [one for one in picture.get("data", asked.data) if one in asked.data]
    each = [{"data": [one]} for one in data] if picture.get("each_data") else [{"data": data}]
    for one in each:
        yield out / fill(picture["file"], {"data": "".join(one["data"][:1])}), one


def curves(path: Path, picture: Values, asked: Asked, runs: Runs, rows: Sequence[Row]) -> bool:
    """Draw accuracy and loss by round, a panel for each data set, a curve for each method."""
    panels: dict[str, dict[str, CurveSet]] = {}
    reference: dict[str, float] = {}
    for one in shown_runs(picture["tables"], picture["data"], asked, runs):
        result = [*one.runs.values()]
        if result and one.centralised:
            reference[one.data] = fmean(run.test_at_best_val for run in result)
        elif result:
            accuracy, loss = [r.test_accuracy for r in result], [r.cross_entropy for r in result]
            panels.setdefault(one.data, {})[one.method] = CurveSet(accuracy, loss)
    if panels:
        plot_grid(path, panels, reference)
    return bool(panels)


def bars(path: Path, picture: Values, asked: Asked, runs: Runs, rows: Sequence[Row]) -> bool:
    """Draw bars by name, a panel for each data set, the paper's figures beside."""
    panels: dict[str, dict[str, Bar]] = {}
    for data in picture["data"]:
        for name, wanted in picture["bars"].items():
            result = find(rows, **{"data": data, **picture["rows"], **(wanted or {"method": name})})
            if result is not None:
                bar = Bar(result["mean"], result["std"], result["paper"])
                panels.setdefault(data, {})[name] = bar
    if panels:
        plot_bars(path, panels, label=picture["label"])
    return bool(panels)


def matrices(path: Path, picture: Values, asked: Asked, runs: Runs, rows: Sequence[Row]) -> bool:
    """Draw figures by two settings, a panel for each metric."""
    panels = {}
    (vertical, ys), (horizontal, xs) = picture["axes"].items()
    for data in picture["data"]:
        for metric, name in picture["metrics"].items():
            here = matching(rows, {**picture["rows"], "data": data, "metric": metric})
            mean = {(r[vertical], r[horizontal]): r["mean"] for r in here}
            if any(map(isfinite, mean.values())):
                fields = [[mean.get((y, x), float("nan")) for x in xs] for y in ys]
                panels[f"{data}, {name}"] = fields
    if panels:
        plot_matrices(path, panels, rows=(vertical, ys), columns=(horizontal, xs))
    return bool(panels)


def points(path: Path, picture: Values, asked: Asked, runs: Runs, rows: Sequence[Row]) -> bool:
    """Draw one figure against another, a panel for each pair, a line for each data set."""
    by_group: dict[tuple[str, int], dict[str, float]] = {}
    for r in matching(rows, picture["rows"]):
        by_group.setdefault((r["data"], r["group"]), {})[r["metric"]] = r["mean"]
    panels: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for metric, (name, scale) in picture["metrics"].items():
        for size in picture["over"] if by_group else ():
            lines = panels.setdefault((size, name), {})
            for (data, _), figures in by_group.items():
                lines.setdefault(data, []).append((figures[size], scale * figures[metric]))
    if panels:
        plot_points(path, panels)
    return bool(panels)


KINDS: dict[str, Any] = {"curves": curves, "bars": bars, "matrices": matrices, "points": points}
