"""``flower-graph reproduce``: runs a paper's tables, and puts its numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean

from flower_graph.apps.parallel import workers_for
from flower_graph.apps.reproduce.asked import Asked
from flower_graph.apps.reproduce.choice import needed, write_choices
from flower_graph.apps.reproduce.experiments import (
    AXES,
    Experiment,
    InPlace,
    Run,
    Runs,
    Store,
    kept_runs,
    left_to_run,
    run_stages,
)
from flower_graph.apps.reproduce.page import make_page, matching
from flower_graph.apps.reproduce.privacy import privacy_curve
from flower_graph.apps.reproduce.rows import (
    Row,
    Shown,
    find,
    make_rows,
    measured_rows,
    missing_runs,
    shown_runs,
)
from flower_graph.apps.reproduce.table import PRIVACY, read_table
from flower_graph.apps.reproduce.templates import Values, fill, function
from flower_graph.config.rules import refuse_key
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError, DataError
from flower_graph.report.plots.base import CurveSet, plot_grid
from flower_graph.report.plots.compared import (
    Interval,
    Spent,
    plot_intervals,
    plot_matrices,
    plot_spent,
)
from flower_graph.storage.files import FolderLock, write_text
from flower_graph.storage.reading import MOST_RECORD, read_text
from flower_graph.storage.writing import make_folder


def main(
    paper: str,
    out: Path,
    *,
    only: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None,
    rounds: int | None,
    overrides: Sequence[str] = (),
) -> None:
    """Run a paper's comparison on the data sets that can be loaded; write tables and pictures."""
    table = read_table(paper)
    chosen = {**table.known(every=True), **choose(only, table.known())}
    if table.privacy and PRIVACY in only.get("table", ()):
        privacy_curve(out, table.privacy, seeds, rounds, overrides)
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
        loadable, left_out = available(
            asked.data, lambda data: cached_data(asked.common(data, asked.models[0]))
        )
        _reproduce(replace(asked, data=tuple(loadable)), out, left_out)


def _reproduce(asked: Asked, out: Path, left_out: Sequence[str]) -> None:
    # The page is written after each seed of a table, so that a run of hours can be read, and
    # stopped, at any time.
    if not asked.groups():
        raise ConfigError("--only: no table has such a row or picture")
    make_folder(out)
    lock = FolderLock(out)  # two that write one file would lose each other's runs
    try:
        store = Store(out)
        announce(_needed(asked, asked.runs(), store), store)
        write = partial(write_page, store, asked, left_out)
        stages = (_needed(asked, stage, store) for stage in asked.stages())
        run_stages(stages, store, write, in_place(asked))
        if measured := measured_rows(asked):
            write(measured)
    finally:
        lock.release()
    if "\n| " not in read_text(out / "table.md", MOST_RECORD):
        raise ConfigError(
            f"page: no row of {out} matches what it lists; the tables are "
            f"{', '.join(sorted({group.part.table for group in asked.groups()}))}"
        )
    print(f"tables and pictures in {out}")


def in_place(asked: Asked) -> dict[Experiment, InPlace]:
    """Return the functions or baselines that replace federated training in some experiments."""
    result: dict[Experiment, InPlace] = {}
    for group in asked.groups():
        how = asked.table.methods[group.method]
        make = function(how.centralised) if how.centralised else how.baseline
        if make:
            result |= dict.fromkeys((*group.experiments, *group.tried), make)
    return result


def _needed(asked: Asked, runs: Sequence[Run], store: Store) -> list[Run]:
    """Leave out runs whose settings were not chosen; before the choice, keep one of them."""
    kept = needed(asked, store)
    return [run for run in runs if run in kept]


def write_page(
    store: Store, asked: Asked, left_out: Sequence[str], measured: Sequence[Row] = ()
) -> None:
    """Write tables and pictures of the runs that were done so far."""
    out, runs = store.out, kept_runs(asked.runs(), store)
    choices = write_choices(out, asked, runs)
    rows = [*make_rows(asked, runs), *measured]
    pictures = draw(out, asked, runs, rows)
    store.write(rows, choices)
    missing = [*dict.fromkeys([*left_out, *missing_runs(asked, runs)])]
    write_text(out / "table.md", make_page(asked, runs, rows, missing, pictures))


def choose(
    only: Mapping[str, Sequence[str]], allowed: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Select by ``--only``."""
    for key, values in only.items():
        if key not in allowed:
            refuse_key(key, list(allowed), " (in --only)")
        for value in values:
            if value not in allowed[key]:
                words = ", ".join(allowed[key])
                raise ConfigError(f"--only {key}={value}: unknown; allowed are {words}")
    return {
        key: [v for v in values if v in only.get(key, values)] for key, values in allowed.items()
    }


def available(names: Sequence[str], load: Callable[[str], object]) -> tuple[list[str], list[str]]:
    """Return the data sets that can be loaded, and why the others cannot."""
    loadable, left_out = [], []
    for name in names:
        try:
            load(name)
            loadable.append(name)
        except DataError as error:
            # The whole reason names folders of this machine: not for a page that is passed on.
            left_out.append(f"{name}: not in the data root, and it could not be downloaded")
            print(f"left out: {name}: {error}")
    if not loadable:
        raise DataError("none of the data sets can be loaded: " + "; ".join(left_out))
    return loadable, left_out


def announce(runs: Sequence[Run], store: Store) -> None:
    """Say how many runs there are, and how many of them are left."""
    missing = left_to_run(runs, store)
    print(
        f"{len(runs)} runs, {len(runs) - len(missing)} of them done before; "
        f"{workers_for(missing)} run at a time",
        flush=True,
    )


# Pictures ----------------------------------------------------------------------------------------


def draw(out: Path, asked: Asked, runs: Runs, rows: Sequence[Row]) -> list[str]:
    """Draw the pictures of the selected tables, and return their names."""
    names = []
    for picture in asked.table.pictures:
        if picture["asked"] in asked.tables:
            for path, values in _files(out, picture, asked):
                if _draw_one(path, {**picture, **values}, asked, runs, rows):
                    names.append(path.name)
    return names


def _draw_one(path: Path, picture: Values, asked: Asked, runs: Runs, rows: Sequence[Row]) -> bool:
    """Draw one picture by its kind or its own function; return whether there was anything."""
    kind = picture["kind"]
    drawn = KINDS[kind] if kind in KINDS else function(kind)
    shown = shown_runs(picture.get("tables", {}), picture["data"], asked, runs)
    return bool(drawn(path, shown, rows, picture))


def _files(out: Path, picture: Values, asked: Asked) -> Iterator[tuple[Path, Values]]:
    """List the files of a picture: a single one, or one for each data set."""
    data = [one for one in picture.get("data", asked.data) if one in asked.data]
    each = [{"data": [one]} for one in data] if picture.get("each_data") else [{"data": data}]
    for one in each:
        yield out / fill(picture["file"], {"data": "".join(one["data"][:1])}), one


def curves(path: Path, shown: Sequence[Shown], rows: Sequence[Row], picture: Values) -> bool:
    """Draw accuracy and loss by round, a panel for each data set, a curve for each method."""
    panels: dict[str, dict[str, CurveSet]] = {}
    reference: dict[str, float] = {}
    for one in shown:
        result = [*one.runs.values()]
        if result and one.centralised:
            reference[one.data] = fmean(run.test_at_best_val for run in result)
        elif result:
            accuracy, loss = [r.test_accuracy for r in result], [r.cross_entropy for r in result]
            panels.setdefault(one.data, {})[one.method] = CurveSet(accuracy, loss)
    if panels:
        plot_grid(path, panels, reference)
    return bool(panels)


def intervals(path: Path, shown: Sequence[Shown], rows: Sequence[Row], picture: Values) -> bool:
    """Draw means with deviations, a panel for each data set, and the paper's figures beside."""
    panels: dict[str, dict[str, Interval]] = {}
    for data in picture["data"]:
        for name, wanted in picture["points"].items():
            result = find(rows, **{"data": data, **picture["rows"], **(wanted or {"method": name})})
            if result is not None:
                one = Interval(result["mean"], result["std"], result["paper"])
                panels.setdefault(data, {})[name] = one
    if panels:
        plot_intervals(path, panels, label=picture["label"])
    return bool(panels)


def matrices(path: Path, shown: Sequence[Shown], rows: Sequence[Row], picture: Values) -> bool:
    """Draw a matrix of figures by two settings, a panel for each metric, all on one scale."""
    panels = {}
    (vertical, ys), (horizontal, xs) = picture["axes"].items()
    for data in picture["data"]:
        for metric, name in picture["metrics"].items():
            here = matching(rows, {**picture["rows"], "data": data, "metric": metric})
            mean = {(r[vertical], r[horizontal]): r["mean"] for r in here}
            if any(map(isfinite, mean.values())):
                fields = [[mean.get((y, x), float("nan")) for x in xs] for y in ys]
                panels[fill(name, {"data": data})] = fields
    if panels:
        sides = {"rows": (vertical, ys), "columns": (horizontal, xs)}
        plot_matrices(path, panels, **sides, label=picture["label"])
    return bool(panels)


def axes(path: Path, shown: Sequence[Shown], rows: Sequence[Row], picture: Values) -> bool:
    """Draw accuracy by rounds, by local steps and by bytes sent, a curve for each method."""
    # Of many methods those at stake are `marked`, and the others grey
    panels: dict[str, dict[str, Spent]] = {}
    for one in shown:
        trained = [curves for curves in one.runs.values() if curves.up and not one.centralised]
        for axis, label in zip(AXES, AXES_NAMES, strict=True) if trained else ():
            spent = max((curves.spent(axis) for curves in trained), key=len)
            lines = Spent(spent, [curves.best_so_far for curves in trained])
            name = one.method if one.data in picture["data"] else f"{one.method}, {one.data}"
            panels.setdefault(label, {})[name] = lines
    if panels:
        plot_spent(path, panels, picture.get("marked", ()))
    return bool(panels)


AXES_NAMES = ("rounds", "local steps of a client", "MiB that a client sends")
KINDS: dict[str, Callable[..., bool]] = {
    "axes": axes,
    "curves": curves,
    "intervals": intervals,
    "matrices": matrices,
}
