"""``flower-graph reproduce``: a paper's tables and figures, its numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flower_graph.apps.reproduce.experiments import (
    Run,
    kept_runs,
    left_to_run,
    run_stages,
    workers_for,
)
from flower_graph.apps.reproduce.page import make_page
from flower_graph.apps.reproduce.pictures import draw
from flower_graph.apps.reproduce.privacy import privacy_curve
from flower_graph.apps.reproduce.rows import make_rows, measured_rows, missing_runs
from flower_graph.apps.reproduce.table import PRIVACY, Asked, function, read_table
from flower_graph.apps.reproduce.text import Row
from flower_graph.config.checks import refuse_key
from flower_graph.data.cached import cached_data
from flower_graph.errors import ConfigError, DataError
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
    announce(asked.runs(), folder, asked.estimate)
    train = function(table.centralised) if table.centralised else None
    write = partial(write_page, out, asked, left_out)
    run_stages(asked.stages(), folder, write, train, fresh=table.fresh)
    if measured := measured_rows(asked):
        write(measured)
    print(f"tables and pictures in {out}")


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
