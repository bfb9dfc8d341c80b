"""Every field of every request of a sum, told otherwise: refused, unreadable, or on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deviations import HOW, Cell, Table, cells, outcome, requests

from flower_graph.secure.sum.terms import SumTerms

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
HEADING = "### Every field, told otherwise"
NEVER = {"reveal-declared"}  # of sums with an alignment: test_lying_sum_server.py
CLOSED = ("-", "refused", "no readable sum")
SAMPLE = (
    Cell("fraction-bits", "one"), Cell("guard-bits", "all"), Cell("mask-length", "replayed"),
    Cell("mask-round-keys", "one"), Cell("unmask-kinds", "all"), Cell("list-parties", "one", 1),
    Cell("epoch-seeds", "run"), Cell("prepare-round", "round"), Cell("limit", "one"),
)  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(tmp_path_factory.mktemp("deviations"))


def told_by_design() -> set[tuple[str, str]]:
    """Read which entries, told how, tell something, as the page has it."""
    section = PAGE.read_text().split(HEADING, 1)[1].split("\n#", 1)[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", section, re.MULTILINE)
    return {
        (key, how)
        for keys, told in rows
        for key in re.findall("`(.+?)`", keys)
        for how in told.split(", ")
    }


def is_open(found: str) -> bool:
    return found not in CLOSED


def test_the_table_has_every_entry_that_is_declared_and_every_one_that_is_sent(
    table: Table,
) -> None:
    assert set(table.sent) <= set(requests())
    assert set(requests()) - set(table.sent) == NEVER
    assert all({cell.how for cell in cells(table, key)} == set(HOW) for key in table.sent)
    assert {key for key, _ in told_by_design()} <= set(table.sent)


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_some_entries_told_otherwise(cell: Cell, table: Table) -> None:
    found = outcome(table, cell)
    assert found in CLOSED or (cell.key, cell.how) in told_by_design(), found


def test_the_table_would_find_a_sum_that_is_not_bound(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the terms in the masks, finer numbers of one stand above the others' in the sum."""
    monkeypatch.setattr(SumTerms, "digest", lambda *_: bytes(32))
    assert outcome(table, Cell("fraction-bits", "one")).startswith("told apart")


@pytest.mark.release
@pytest.mark.parametrize("key", sorted(set(requests()) - NEVER))
def test_an_entry_told_otherwise(key: str, table: Table) -> None:
    """Each cell is closed or on the page, and what is on the page is so."""
    found = {cell: outcome(table, cell) for cell in cells(table, key)}
    assert any(one != "-" for one in found.values())
    listed = {how for entry, how in told_by_design() if entry == key}
    told = {cell: one for cell, one in found.items() if is_open(one)}
    assert {cell.how for cell in told} == listed, told
