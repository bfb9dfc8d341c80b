"""``flower-graph reproduce``: runs a paper's tables, and puts its numbers beside ours."""

import argparse
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from flower_graph.apps.cli.run import default_folder
from flower_graph.apps.parallel import in_parallel, loaded, workers_for
from flower_graph.apps.reproduce.page import (
    Results,
    Row,
    all_rows,
    choices,
    choices_page,
    draw,
    make_page,
    make_rows,
    markdown,
    measured_rows,
    missing_runs,
    value_of,
)
from flower_graph.apps.reproduce.runs import RUNS, Run, Store, curves_of, run_all, steps_of
from flower_graph.apps.reproduce.table import TEST, Paper, read_paper
from flower_graph.apps.run import simulate_whole
from flower_graph.config.rules import refuse_key
from flower_graph.data.sources.datasets import cached_data
from flower_graph.engine.machine import processor
from flower_graph.errors import ConfigError, DataError
from flower_graph.storage.files import folder_lock, write_json, write_text
from flower_graph.storage.reading import read_packed, reading
from flower_graph.storage.writing import make_folder, named

KEYS = ("data", "model", "method")
READ = "How to read this: [README.md](README.md)."
LEAST = 0.001  # that a row's figure may differ by when it is run again, besides two deviations
METRICS = (TEST, "micro-f1")  # of rows that can be run again


def reproduce_command(args: argparse.Namespace) -> int:
    """Run the experiments of a paper, or a table's rows again."""
    if args.rounds is not None and (args.rounds < 1 or args.again):
        allowed = "--again takes those of the table" if args.again else "at least 1 is needed"
        raise ConfigError(f"--rounds {args.rounds}: {allowed}")
    only: dict[str, list[str]] = {}
    for text in args.only:
        key, _, value = text.partition("=")
        if not (key and value):
            raise ConfigError(f"--only {text!r}: write KEY=VALUE, such as data=Cora")
        only.setdefault(key, []).append(value)
    out = named(args.out or default_folder(args.paper, "reproduce-"))
    if args.again:
        return 0 if run_again(args.paper, args.again, out, only, args.seeds or ()) else 1
    reproduce(selected(read_paper(args.paper), only, args.seeds, args.rounds), out)
    return 0


def reproduce(paper: Paper, out: Path) -> None:
    """Run the selected lines of a paper, and write tables and pictures."""
    paper, left_out = available(paper)
    make_folder(out)
    with folder_lock(out):  # two that write one file would lose each other's runs
        store = Store(out)
        runs = [*dict.fromkeys(run for stage in store.stages(paper.asked) for run in stage)]
        missing = store.left(runs)
        print(
            f"{len(runs)} runs, {len(runs) - len(missing)} of them done before; "
            f"{workers_for(missing)} run at a time",
            flush=True,
        )
        for stage in store.stages(paper.asked):
            if runs := store.left(stage):
                # The page is written after each seed of a table, so that a run of hours can be
                # read, and stopped, at any time.
                try:
                    run_all(runs, store)
                finally:
                    write_page(store, paper, left_out)
        write_page(store, paper, left_out, measured_rows(paper.lines))
    print(f"tables and pictures in {out}")


def selected(
    paper: Paper,
    only: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
) -> Paper:
    """Select by ``--only``, and lay seeds and rounds over the lines."""
    allowed = {key: [*dict.fromkeys(getattr(one, key) for one in paper.lines)] for key in KEYS}
    allowed |= {"table": [*paper.tables]}
    for key, value in [(key, value) for key, values in only.items() for value in values]:
        if key not in allowed:
            refuse_key(key, list(allowed), " (in --only)")
        if value not in allowed[key]:
            words = ", ".join(allowed[key])
            raise ConfigError(f"--only {key}={value}: unknown; allowed are {words}")
    changed = {
        line: replace(line, seeds=seeds or line.seeds, rounds=rounds or line.rounds)
        for line in paper.lines
        if all(getattr(line, key) in only.get(key, allowed[key]) for key in KEYS)
    }
    tables = {key: paper.tables[key] for key in only.get("table", paper.tables)}
    chosen = replace(paper, tables=tables).having(changed)
    if not chosen.lines:
        raise ConfigError("--only: no table has such a line")
    chosen.check()
    return replace(chosen, on_request=() if "table" in only else paper.on_request)


def available(paper: Paper) -> tuple[Paper, list[str]]:
    """Leave out the lines whose data cannot be loaded, and say why."""
    left_out = []
    for line in {line.data: line for line in paper.lines}.values():
        try:
            cached_data(loaded(line.config, (*line.settings,)))
        except DataError as error:
            left_out.append(line.data)
            print(f"left out: {line.data}: {error}")
    found = paper.having({line: line for line in paper.lines if line.data not in left_out})
    if not found.lines:
        raise DataError(f"none of the data sets can be loaded: {', '.join(left_out)}")
    # The whole reason names folders of this machine: not for a page that is passed on.
    why = "not in the data root, and it could not be downloaded"
    return found, [f"{data}: {why}" for data in left_out]


def write_page(
    store: Store, paper: Paper, left_out: Sequence[str], measured: Results | None = None
) -> None:
    """Write tables and pictures of the runs that were done so far."""
    if tried := choices(paper.lines, store):
        write_text(store.out / "choices.md", choices_page(tried, paper.lines))
    results = make_rows(paper.lines, store) | (measured or {})
    drawn = draw(store.out, paper, results, store)
    store.write(all_rows(results), tried)
    of_asked = dict.fromkeys(line for group in paper.asked for line in group)
    missing = [*left_out, *missing_runs([*of_asked], store)]
    notes = [READ] if (store.out / "README.md").is_file() else []
    write_text(store.out / "table.md", make_page(paper, results, missing, drawn, notes))


# Rows that are run again -------------------------------------------------------------------------


def run_again(
    paper: str, folder: Path, out: Path, only: Mapping[str, Sequence[str]], seeds: Sequence[int]
) -> bool:
    """Run rows of a folder's table again, write the results, and return whether all are near."""
    path = folder / RUNS
    if not path.is_file():
        raise DataError(f"{path}: there is no such file: name a folder that `reproduce` wrote")
    with reading(path, DataError, "not the table of a `reproduce`"):
        again = runs_of_rows(read_packed(path)["rows"], only, seeds)
    if not again:
        raise ConfigError(f"--only, --seeds: no such row of {path} can be run again")
    print(f"{len(again)} runs", flush=True)
    make_folder(out)
    done: list[Row] = []
    for _, rows, _ in in_parallel(compared, [*again.items()]):
        done += rows
        about = {"paper": paper, "machine": platform.machine(), "processor": processor()}
        write_json(out / "again.json", {**about, "rows": done})
        write_text(out / "again.md", _table(done) + "\n")
        print(_table(rows), flush=True)
    print(f"table in {out}")
    return all(one["near"] for one in done)


def runs_of_rows(
    rows: Sequence[Row], only: Mapping[str, Sequence[str]], seeds: Sequence[int]
) -> dict[Run, list[Row]]:
    """Return the runs behind the selected rows, each with its rows."""
    result: dict[Run, list[Row]] = {}
    for row in rows:
        how = row["settings"]
        asked = all(str(row.get(key, "")) in values for key, values in only.items())
        if row["metric"] not in METRICS or how["centralised"] or "client" in row or not asked:
            continue
        for seed in [one for one in seeds or row["seeds"][:1] if one in row["seeds"]]:
            run = Run(how["config"], (*how["overrides"],), seed, how["rounds"])
            result.setdefault(run, []).append(row)
    return result


def compared(run: Run, rows: Sequence[Row]) -> list[Row]:
    """Do a run, and compare its figure of each row with the committed one."""
    curves = curves_of(*simulate_whole(run.settings), *steps_of(run.settings))
    found = []
    for row in rows:
        committed = row["values"][row["seeds"].index(run.seed)]
        again = value_of(row["metric"], curves, row, run.settings)
        assert again is not None
        keys = ("table", "data", "model", "method", "metric", "classifier", "iteration")
        tolerance = LEAST + 2 * row["std"]
        found.append(
            {key: row[key] for key in keys if key in row}
            | {"seed": run.seed, "settings": row["settings"]}
            | {"committed": committed, "again": again, "deviation over seeds": row["std"]}
            | {"tolerance": tolerance, "near": abs(again - committed) <= tolerance}
        )
    return found


def _table(results: Sequence[Row]) -> str:
    frame = pd.DataFrame(results, dtype=object).drop(columns="settings")
    frame["near"] = frame["near"].map({True: "near", False: "**not near**"})
    return markdown(frame.map(lambda one: f"{one:.4f}" if isinstance(one, float) else one))
