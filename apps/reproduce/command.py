"""``flower-graph reproduce``: runs a paper's tables, and puts its numbers beside ours."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from flower_graph.apps.cli.run import default_folder
from flower_graph.apps.parallel import in_parallel, loaded, workers_for
from flower_graph.apps.reproduce import page
from flower_graph.apps.reproduce.runs import RUNS, Run, Store, run_all, train
from flower_graph.apps.reproduce.table import TEST, Line, Paper, read_paper
from flower_graph.config.rules import refuse_key
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError, DataError
from flower_graph.storage.files import folder_lock, make_folder, named, write_text

KEYS = ("data", "model", "method")
READ = "How to read this: [README.md](README.md)."
AGAIN = (TEST, "micro-f1")  # figures of lines that can be run again
LEAST = 0.001  # that a row's figure may differ by when it is run again, besides two deviations


def reproduce_command(args: argparse.Namespace) -> int:
    """Run the experiments of a paper, or a table's rows again."""
    if args.rounds is not None and args.again:
        raise ConfigError(f"--rounds {args.rounds}: --again takes those of the table")
    only: dict[str, list[str]] = {}
    for text in args.only:
        key, _, value = text.partition("=")
        if not (key and value):
            raise ConfigError(f"--only {text!r}: write KEY=VALUE, such as data=Cora")
        only.setdefault(key, []).append(value)
    out = named(args.out or default_folder(args.paper, "reproduce-"))
    paper = selected(read_paper(args.paper), only, args.seeds, args.rounds)
    if args.again:
        return 0 if run_again(paper, args.again, out, all_seeds=bool(args.seeds)) else 1
    reproduce(paper, out)
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
        write_page(store, paper, left_out)
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
    for line in [line for lines in chosen.asked for line in lines if line.choices != [()]]:
        if both := sorted({*line.choosers} & {*line.seeds}):
            raise ConfigError(f"seeds: {line.words} has {both}, which choose its settings")
        if not line.choices:
            raise ConfigError(f"{line.words}: tries: at least one setting is needed")
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


def write_page(store: Store, paper: Paper, left_out: Sequence[str]) -> None:
    """Write tables and pictures of the runs that were done so far."""
    if text := page.choices_page(paper.lines, store):
        write_text(store.out / "choices.md", text)
    results = page.make_rows(paper.lines, store)
    drawn = page.draw(store.out, paper, store)
    store.write(page.all_rows(results))
    of_asked = dict.fromkeys(line for group in paper.asked for line in group)
    missing = [*left_out, *page.missing_runs([*of_asked], store)]
    notes = [READ] if (store.out / "README.md").is_file() else []
    write_text(store.out / "table.md", page.make_page(paper, results, missing, drawn, notes))


# Rows that are run again -------------------------------------------------------------------------


def run_again(paper: Paper, folder: Path, out: Path, *, all_seeds: bool = False) -> bool:
    """Run lines of a folder's table again, write the results, and return whether all are near.

    Each line is run with its first seed, or with all of them.
    """
    if not (folder / RUNS).is_file():
        raise DataError(f"{folder / RUNS}: there is no such file: name a folder of `reproduce`")
    store = Store(folder)
    tasks = [
        (line, store.run(line, seed), results)
        for (line, _), results in page.make_rows(paper.lines, store).items()
        if not line.trained and any(one.name in AGAIN for one in line.wanted)
        for seed in (line.seeds if all_seeds else line.seeds[:1])
    ]
    if not tasks:
        raise ConfigError(f"--only, --seeds: no such row of {folder / RUNS} can be run again")
    print(f"{len(tasks)} runs", flush=True)
    make_folder(out)
    done = pd.DataFrame()
    for _, rows, *_ in in_parallel(compared, tasks):
        done = pd.concat([done, pd.DataFrame(rows)])
        print(page.markdown(pd.DataFrame(rows)), flush=True)
        write_text(out / "again.md", page.markdown(done) + "\n")
    print(f"table in {out}")
    return set(done[""]) == {"near"}


def compared(line: Line, run: Run, rows: Mapping[str, page.Row]) -> list[dict[str, str]]:
    """Do a run, and compare its figures with the committed rows of its line."""
    curves, found = train(run.settings), []
    for figure in line.wanted:
        row = rows.get(figure.label)
        if row is None or figure.name not in AGAIN or run.seed not in row["seeds"]:
            continue
        committed = row["values"][row["seeds"].index(run.seed)]
        again = page.value_of(figure.name, curves, figure.keys)
        assert again is not None
        tolerance = LEAST + 2 * row["std"]
        found.append(
            {key: row[key] for key in ("table", "data", "model", "method")}
            | {"figure": figure.label, "seed": str(run.seed)}
            | {"committed": f"{committed:.4f}", "again": f"{again:.4f}"}
            | {"tolerance": f"{tolerance:.4f}"}
            | {"": "near" if abs(again - committed) <= tolerance else "**not near**"}
        )
    return found
