"""``flower-graph reproduce``: runs a paper's tables, and puts its numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flower_graph.apps.parallel import loaded, workers_for
from flower_graph.apps.reproduce.page import choices_page, make_page
from flower_graph.apps.reproduce.pictures import draw
from flower_graph.apps.reproduce.rows import Row, choices, make_rows, measured_rows, missing_runs
from flower_graph.apps.reproduce.runs import Store, run_stages, stages
from flower_graph.apps.reproduce.table import Line, Paper, check, read_paper
from flower_graph.config.rules import refuse_key
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError, DataError
from flower_graph.storage.files import FolderLock, write_text
from flower_graph.storage.writing import make_folder


def main(
    name: str,
    out: Path,
    *,
    only: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None,
    rounds: int | None,
    overrides: Sequence[str] = (),
) -> None:
    """Run a paper's comparison on the data sets that can be loaded; write tables and pictures."""
    reproduce(selected(read_paper(name), only, seeds, rounds, overrides), out)


def reproduce(paper: Paper, out: Path) -> None:
    """Run the selected lines of a paper, and write tables and pictures."""
    paper, left_out = available(paper)
    make_folder(out)
    lock = FolderLock(out)  # two that write one file would lose each other's runs
    try:
        store = Store(out)
        announce(paper, store)
        # The page is written after each seed of a table, so that a run of hours can be read, and
        # stopped, at any time.
        write = partial(write_page, store, paper, left_out)
        run_stages(stages(asked(paper), store), store, write)
        if measured := measured_rows(lines_of(paper)):
            write(measured)
    finally:
        lock.release()
    print(f"tables and pictures in {out}")


def lines_of(paper: Paper) -> list[Line]:
    """List the lines of all tables, each once."""
    return [*dict.fromkeys(line for lines in paper.tables.values() for line in lines)]


def asked(paper: Paper) -> list[Sequence[Line]]:
    """List the groups that are run; the page has the others too, if their runs are there."""
    return [lines for key, lines in paper.tables.items() if key not in paper.on_request]


def selected(
    paper: Paper,
    only: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    overrides: Sequence[str] = (),
) -> Paper:
    """Select by ``--only``, and lay seeds, rounds and settings over the lines."""
    names = {key: dict.fromkeys(getattr(one, key) for one in lines_of(paper)) for key in KEYS}
    allowed = {key: [*values] for key, values in names.items()} | {"table": [*paper.tables]}
    for key, values in only.items():
        if key not in allowed:
            refuse_key(key, list(allowed), " (in --only)")
        for value in values:
            if value not in allowed[key]:
                words = ", ".join(allowed[key])
                raise ConfigError(f"--only {key}={value}: unknown; allowed are {words}")
    changes: dict[str, Any] = {"seeds": seeds, "rounds": rounds}
    given = {key: value for key, value in changes.items() if value is not None}
    changed = {
        line: replace(line, **given, settings=(*line.settings, *overrides))
        for line in lines_of(paper)
        if all(getattr(line, key) in only.get(key, [getattr(line, key)]) for key in KEYS)
    }
    tables = {
        key: [changed[line] for line in paper.tables[key] if line in changed]
        for key in only.get("table", paper.tables)
    }
    paper = replace(paper, tables=tables)
    if not lines_of(paper):
        raise ConfigError("--only: no table has such a line or picture")
    check(paper)
    return replace(paper, on_request=() if "table" in only else paper.on_request)


KEYS = ("data", "model", "method")


def available(paper: Paper) -> tuple[Paper, list[str]]:
    """Leave out the lines whose data cannot be loaded, and say why."""
    left_out: dict[str, str] = {}
    for line in {line.data: line for line in lines_of(paper)}.values():
        try:
            cached_data(loaded(line.config, (*line.settings,)))
        except DataError as error:
            # The whole reason names folders of this machine: not for a page that is passed on.
            left_out[line.data] = "not in the data root, and it could not be downloaded"
            print(f"left out: {line.data}: {error}")
    tables = {
        key: [line for line in lines if line.data not in left_out]
        for key, lines in paper.tables.items()
    }
    words = [f"{data}: {reason}" for data, reason in left_out.items()]
    if not any(tables.values()):
        raise DataError("none of the data sets can be loaded: " + "; ".join(words))
    return replace(paper, tables=tables), words


def announce(paper: Paper, store: Store) -> None:
    """Say how many runs there are, and how many of them are left."""
    runs = [*dict.fromkeys(run for stage in stages(asked(paper), store) for run in stage)]
    missing = store.left(runs)
    print(
        f"{len(runs)} runs, {len(runs) - len(missing)} of them done before; "
        f"{workers_for(missing)} run at a time",
        flush=True,
    )


def write_page(
    store: Store, paper: Paper, left_out: Sequence[str], measured: Sequence[Row] = ()
) -> None:
    """Write tables and pictures of the runs that were done so far."""
    lines, out = lines_of(paper), store.out
    tried = choices(lines, store)
    if tried:
        write_text(out / "choices.md", choices_page(tried, lines))
    rows = [*make_rows(lines, store), *measured]
    pictures = [one for one in paper.pictures if one.group in paper.tables]
    drawn = draw(out, pictures, lines, rows, store)
    store.write(rows, tried)
    of_asked = [*dict.fromkeys(line for group in asked(paper) for line in group)]
    missing = [*left_out, *missing_runs(of_asked, store)]
    write_text(out / "table.md", make_page(paper, lines, rows, missing, drawn))
