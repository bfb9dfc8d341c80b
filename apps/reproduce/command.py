"""``flower-graph reproduce``: a paper's tables and figures, its numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flower_graph.apps.reproduce.asked import announce, available, choose
from flower_graph.apps.reproduce.experiments import kept_runs, run_stages
from flower_graph.apps.reproduce.page import make_page
from flower_graph.apps.reproduce.pictures import draw
from flower_graph.apps.reproduce.privacy import privacy_curve
from flower_graph.apps.reproduce.rows import make_rows, measured_rows, missing_runs
from flower_graph.apps.reproduce.table import PRIVACY, Asked, function, read_table
from flower_graph.apps.reproduce.text import Row
from flower_graph.data.cached import cached_data
from flower_graph.errors import ConfigError
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
    chosen = choose(only, table.known())
    if table.privacy and PRIVACY in only.get("table", ()):
        privacy_curve(out, table.privacy, seeds or table.seeds, rounds, overrides)
    wanted = [key for key in chosen.get("table", table.tables) if key in table.tables]
    if not wanted:
        return
    methods = chosen.get("method", table.methods)
    methods = [key for key, one in table.methods.items() if (one.follows or key) in methods]
    asked = Asked(
        table,
        tuple(chosen.get("data", table.data)),
        tuple(chosen.get("model", table.models)),
        tuple(methods),
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
    if not asked.groups():
        raise ConfigError("--only: no table has such a row or picture")
    announce(runs, folder, asked.estimate)
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
