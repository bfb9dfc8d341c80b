"""``flower-graph reproduce``: a paper's tables and figures, its numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flower_graph.apps.reproduce import fedscem, nfedgnn, ppfl
from flower_graph.apps.reproduce.asked import announce, available, choose
from flower_graph.apps.reproduce.experiments import kept_runs, run_stages
from flower_graph.apps.reproduce.page import make_page
from flower_graph.apps.reproduce.pictures import draw
from flower_graph.apps.reproduce.rows import make_rows, missing_runs
from flower_graph.apps.reproduce.table import Asked, function, read_table
from flower_graph.apps.reproduce.text import Row
from flower_graph.data.cached import cached_data
from flower_graph.errors import ConfigError
from flower_graph.storage.files import write_json, write_text

_MODULES = {"fedscem": fedscem, "nfedgnn": nfedgnn, "ppfl": ppfl}


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
    if paper in _MODULES:
        asked_for = {key: [*values] for key, values in only.items()}
        _MODULES[paper].reproduce(out, only=asked_for, seeds=seeds, rounds=rounds)
        return
    table = read_table(paper, _MODULES)
    chosen = choose(only, table.known())
    for key in [key for key in table.if_asked if key in only.get("table", ())]:
        special = table.if_asked[key]
        function(special["function"])(out, special, seeds or table.seeds, rounds, overrides)
    wanted = [key for key in chosen.get("table", table.tables) if key in table.tables]
    if not wanted:
        return
    asked = Asked(
        table,
        tuple(chosen.get("data", table.data)),
        tuple(chosen.get("model", table.models)),
        tuple(chosen.get("method", table.methods)),
        tuple(wanted),
        tuple(seeds) if seeds else None,
        rounds,
        tuple(overrides),
        frozenset(only),
    )
    there, left_out = available(
        asked.data, lambda data: cached_data(asked.common(data, asked.models[0]))
    )
    _reproduce(replace(asked, data=tuple(there)), out, left_out)


def _reproduce(asked: Asked, out: Path, left_out: Sequence[str]) -> None:
    # The page is written after each seed of a table, so that a run of hours can be read, and
    # stopped, at any time.
    table, folder = asked.table, out / "runs"
    runs = asked.runs()
    # A table without runs has rows that a function makes.
    if not runs and all(table.tables[key] for key in asked.tables):
        raise ConfigError("--only: no table has such a row or picture")
    announce(runs, folder, asked.estimate)
    train = function(table.centralised) if table.centralised else None
    write = partial(write_page, out, asked, left_out)
    run_stages(asked.stages(), folder, write, train, fresh=table.fresh)
    if table.extra_rows:
        write(function(table.extra_rows)(asked))
    print(f"tables and pictures in {out}")


def write_page(
    out: Path, asked: Asked, left_out: Sequence[str], extra_rows: Sequence[Row] = ()
) -> None:
    """Write tables and pictures of the runs that the folder has, which may not be all."""
    runs = kept_runs(asked.runs(), out / "runs")
    rows = [*make_rows(asked, runs), *extra_rows]
    pictures = draw(out, asked, runs, rows)
    write_json(out / "table.json", rows)
    missing = [*left_out, *missing_runs(asked, runs)]
    write_text(out / "table.md", make_page(asked, runs, rows, missing, pictures))
