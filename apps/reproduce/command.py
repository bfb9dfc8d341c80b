"""``flower-graph reproduce``: runs a paper's tables, and puts its numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flower_graph.apps.parallel import loaded, workers_for
from flower_graph.apps.reproduce.page import choices_page, make_page
from flower_graph.apps.reproduce.pictures import draw
from flower_graph.apps.reproduce.rows import (
    Results,
    all_rows,
    choices,
    make_rows,
    measured_rows,
    missing_runs,
)
from flower_graph.apps.reproduce.runs import Store, run_all, stages
from flower_graph.apps.reproduce.table import Paper, check, read_paper
from flower_graph.config.rules import refuse_key
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError, DataError
from flower_graph.storage.files import FolderLock, write_text
from flower_graph.storage.writing import make_folder

KEYS = ("data", "model", "method")


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
        runs = [*dict.fromkeys(run for stage in stages(paper.asked, store) for run in stage)]
        missing = store.left(runs)
        print(
            f"{len(runs)} runs, {len(runs) - len(missing)} of them done before; "
            f"{workers_for(missing)} run at a time",
            flush=True,
        )
        for stage in stages(paper.asked, store):
            if runs := store.left(stage):
                # The page is written after each seed of a table, so that a run of hours can be
                # read, and stopped, at any time.
                try:
                    run_all(runs, store)
                finally:
                    write_page(store, paper, left_out)
        write_page(store, paper, left_out, measured_rows(paper.lines))
    finally:
        lock.release()
    print(f"tables and pictures in {out}")


def selected(
    paper: Paper,
    only: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    overrides: Sequence[str] = (),
) -> Paper:
    """Select by ``--only``, and lay seeds, rounds and settings over the lines."""
    allowed = {key: [*dict.fromkeys(getattr(one, key) for one in paper.lines)] for key in KEYS}
    allowed |= {"table": [*paper.tables]}
    for key, values in only.items():
        if key not in allowed:
            refuse_key(key, list(allowed), " (in --only)")
        for value in values:
            if value not in allowed[key]:
                words = ", ".join(allowed[key])
                raise ConfigError(f"--only {key}={value}: unknown; allowed are {words}")
    changed = {
        line: replace(
            line,
            seeds=line.seeds if seeds is None else seeds,
            rounds=rounds or line.rounds,
            settings=(*line.settings, *overrides),
        )
        for line in paper.lines
        if all(getattr(line, key) in only.get(key, allowed[key]) for key in KEYS)
    }
    tables = {
        key: [changed[line] for line in paper.tables[key] if line in changed]
        for key in only.get("table", paper.tables)
    }
    on_request = () if "table" in only else paper.on_request
    paper = replace(paper, tables=tables)
    if not paper.lines:
        raise ConfigError("--only: no table has such a line or picture")
    check(paper)
    return replace(paper, on_request=on_request)


def available(paper: Paper) -> tuple[Paper, list[str]]:
    """Leave out the lines whose data cannot be loaded, and say why."""
    left_out = []
    for line in {line.data: line for line in paper.lines}.values():
        try:
            cached_data(loaded(line.config, (*line.settings,)))
        except DataError as error:
            left_out.append(line.data)
            print(f"left out: {line.data}: {error}")
    tables = {
        key: [line for line in lines if line.data not in left_out]
        for key, lines in paper.tables.items()
    }
    if not any(tables.values()):
        raise DataError(f"none of the data sets can be loaded: {', '.join(left_out)}")
    # The whole reason names folders of this machine: not for a page that is passed on.
    why = "not in the data root, and it could not be downloaded"
    return replace(paper, tables=tables), [f"{data}: {why}" for data in left_out]


def write_page(
    store: Store, paper: Paper, left_out: Sequence[str], measured: Results | None = None
) -> None:
    """Write tables and pictures of the runs that were done so far."""
    tried = choices(paper.lines, store)
    if tried:
        write_text(store.out / "choices.md", choices_page(tried, paper.lines))
    results = make_rows(paper.lines, store) | (measured or {})
    drawn = draw(store.out, paper, results, store)
    store.write(all_rows(results), tried)
    of_asked = dict.fromkeys(line for group in paper.asked for line in group)
    missing = [*left_out, *missing_runs([*of_asked], store)]
    write_text(store.out / "table.md", make_page(paper, results, missing, drawn))
