"""``flower-graph reproduce``: a paper's tables and figures, its numbers beside ours.

Pictures that compare methods are drawn as the YAML's ``pictures`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from flower_graph.apps.reproduce.experiments import (
    Run,
    Runs,
    kept_runs,
    left_to_run,
    run_stages,
    workers_for,
)
from flower_graph.apps.reproduce.page import make_page, matching
from flower_graph.apps.reproduce.privacy import privacy_curve
from flower_graph.apps.reproduce.rows import (
    Row,
    best_experiment,
    find,
    make_rows,
    measured_rows,
    missing_runs,
    shown_runs,
)
from flower_graph.apps.reproduce.table import PRIVACY, Asked, Values, fill, function, read_table
from flower_graph.config.rules import refuse_key
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError, DataError
from flower_graph.report.plots.base import CurveSet, plot_grid
from flower_graph.report.plots.compared import Bar, plot_bars, plot_matrices, plot_points
from flower_graph.storage.files import write_json, write_text


def main(
    paper: str,
    out: Path,
    *,
    only: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None,
    rounds: int | None,
    overrides: Sequence[str] = (),
) -> None:
    """Run a paper's comparison on the data that is there; write tables and pictures."""
    table = read_table(paper)
    chosen = {**table.known(every=True), **choose(only, table.known())}
    if table.privacy and PRIVACY in only.get("table", ()):
        privacy_curve(out, table.privacy, seeds or table.seeds, rounds, overrides)
    asked = Asked(
        table,
        tuple(chosen["data"]),
        tuple(chosen["model"]),
        tuple(
            key for key, one in table.methods.items() if (one.follows or key) in chosen["method"]
        ),
        tuple(key for key in chosen["table"] if key in table.tables),
        tuple(seeds) if seeds else None,
        rounds,
        tuple(overrides),
        frozenset(only),
    )
    if asked.tables:
        there, left_out = available(
            asked.data, lambda data: cached_data(asked.common(data, asked.models[0]))
        )
        _reproduce(replace(asked, data=tuple(there)), out, left_out)


def _reproduce(asked: Asked, out: Path, left_out: Sequence[str]) -> None:
    # The page is written after each seed of a table, so that a run of hours can be read, and
    # stopped, at any time.
    table, folder = asked.table, out / "runs"
    if not asked.groups():
        raise ConfigError("--only: no table has such a row or picture")
    announce(_without_unchosen(asked, asked.runs(), folder), folder, asked.estimate)
    train = function(table.centralised) if table.centralised else None
    write = partial(write_page, out, asked, left_out)
    stages = (_without_unchosen(asked, stage, folder) for stage in asked.stages())
    run_stages(stages, folder, write, train, fresh=table.fresh)
    if measured := measured_rows(asked):
        write(measured)
    print(f"tables and pictures in {out}")


def _without_unchosen(asked: Asked, runs: Sequence[Run], folder: Path) -> list[Run]:
    """Leave out what the first seed, once the folder has all its runs, did not choose."""
    passed_over = set[Run]()
    for group in asked.groups():
        if group.part.choose == "first":
            first = {run for run in group.runs if run.seed == group.seeds[0]}
            kept = kept_runs([*first], folder)
            if len(kept) == len(first):
                best = best_experiment(group, kept)
                passed_over |= {r for r in group.runs if r not in first and r.experiment != best}
    return [run for run in runs if run not in passed_over]


def write_page(
    out: Path, asked: Asked, left_out: Sequence[str], measured: Sequence[Row] = ()
) -> None:
    """Write tables and pictures of the runs that the folder has, which may not be all."""
    runs = kept_runs(asked.runs(), out / "runs")
    rows = [*make_rows(asked, runs), *measured]
    pictures = draw(out, asked, runs, rows)
    write_json(out / "table.json", rows)
    missing = [*left_out, *missing_runs(asked, runs)]
    write_text(out / "table.md", make_page(asked, runs, rows, missing, pictures))


def choose(
    only: Mapping[str, Sequence[str]], known: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Apply ``--only`` to what there is."""
    for key, values in only.items():
        if key not in known:
            refuse_key(key, list(known), " (in --only)")
        for value in values:
            if value not in known[key]:
                allowed = ", ".join(known[key])
                raise ConfigError(f"--only {key}={value}: unknown; allowed are {allowed}")
    return {key: [v for v in values if v in only.get(key, values)] for key, values in known.items()}


def available(names: Sequence[str], load: Callable[[str], object]) -> tuple[list[str], list[str]]:
    """Return the data sets that can be loaded, and why the others cannot."""
    there, left_out = [], []
    for name in names:
        try:
            load(name)
            there.append(name)
        except DataError as error:
            # The whole reason names folders of this machine: not for a page that is passed on.
            left_out.append(f"{name}: not in the data root, and it could not be downloaded")
            print(f"left out: {name}: {error}")
    if not there:
        raise DataError("none of the data sets is there: " + "; ".join(left_out))
    return there, left_out


def announce(runs: Sequence[Run], folder: Path, estimate: Callable[[Sequence[Run]], float]) -> None:
    """Say how many runs there are, and how long those that the folder lacks will take."""
    missing = left_to_run(runs, folder)
    workers = workers_for(missing)
    minutes = estimate(missing) / 60 / workers
    print(
        f"{len(runs)} runs, {len(runs) - len(missing)} of them there already; the others take "
        f"about {minutes:.0f} minutes, {workers} at a time",
        flush=True,
    )


# Pictures ----------------------------------------------------------------------------------------


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
