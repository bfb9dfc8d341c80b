"""Every field of every request of a sum, told otherwise: refused, unreadable, or on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deviations import AGREED, HOW, RINGS, Cell, Table, cells, requests
from told_apart import outcome

from flower_graph.secure.sum.messages import SumTerms

PAGE = Path(__file__).parents[2] / "docs" / "results" / "told-otherwise.md"
HEADINGS = {
    False: "## Of a sum whose server may lie",
    True: "## Of a sum whose server is trusted",
}
NEVER = {"reveal-declared"}  # of sums with an alignment: test_told_methods.py, FedSCem
CLOSED = ("-", "refused", "no readable sum")
SAMPLE = [
    *((False, one) for one in (
        Cell("fraction-bits", "one"), Cell("guard-bits", "all"), Cell("mask-length", "replayed"),
        Cell("mask-round-keys", "one"), Cell("unmask-kinds", "all"), Cell("list-parties", "one", 1),
        Cell("epoch-seeds", "run"), Cell("prepare-round", "round"), Cell("limit", "one"),
        Cell("guard-bits", AGREED), Cell("word", AGREED),
    )),
    *((True, one) for one in (
        Cell("prepare-threshold", "one"), Cell("mask-round-keys", "all"), Cell("sum-run", "run"),
        Cell("fraction-bits", "one"), Cell("unmask-kinds", "replayed"), Cell("limit", AGREED),
    )),
]  # fmt: skip
# Some, with entries of all stages, in each of CI's runs; the rest before a release
FIXED = ("fraction-bits", "guard-bits", "limit", "list-parties", "mask-live", "prepare-minimum")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Table]:
    """Make the tables of sums whose server may lie, and of those whose server is trusted."""
    folder = tmp_path_factory.mktemp
    return {trusted: Table(folder(f"deviations-{trusted}"), trusted) for trusted in (False, True)}


def told_by_design(heading: str) -> set[tuple[str, str]]:
    """Read which entries, told how, tell something, as the page has it."""
    section = PAGE.read_text().split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", section, re.MULTILINE)
    return {
        (key, how)
        for keys, told in rows
        for key in re.findall("`(.+?)`", keys)
        for how in told.split(", ")
    }


def is_open(found: str) -> bool:
    return found not in CLOSED


@pytest.mark.parametrize("trusted", [False, True], ids=["malicious-server", "semi-honest"])
def test_the_table_has_every_entry_that_is_declared_and_every_one_that_is_sent(
    trusted: bool, tables: dict[bool, Table]
) -> None:
    table, declared = tables[trusted], set(requests(trusted))
    assert set(table.sent) <= declared
    assert declared - set(table.sent) == (set() if trusted else NEVER)
    for key in table.sent:
        every = {*HOW, AGREED} if key in RINGS else set(HOW)
        assert {cell.how for cell in cells(table, key)} == every
    assert {key for key, _ in told_by_design(HEADINGS[trusted])} <= set(table.sent)


@pytest.mark.parametrize(("trusted", "cell"), SAMPLE, ids=str)
def test_some_entries_told_otherwise(trusted: bool, cell: Cell, tables: dict[bool, Table]) -> None:
    found, listed = outcome(tables[trusted], cell), told_by_design(HEADINGS[trusted])
    assert found in CLOSED or (cell.key, cell.how) in listed, found


def test_the_table_would_find_a_sum_that_is_not_bound(
    tables: dict[bool, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the terms in the masks, finer numbers of one stand above the others' in the sum."""
    monkeypatch.setattr(SumTerms, "digest", lambda *_: bytes(32))
    assert outcome(tables[False], Cell("fraction-bits", "one")).startswith("told apart")


EVERY = [
    (trusted, key) for trusted in (False, True) for key in sorted(set(requests(trusted)) - NEVER)
]


@pytest.mark.parametrize(
    ("trusted", "key"),
    [
        pytest.param(*one, marks=pytest.mark.slow if one[1] in FIXED else pytest.mark.release)
        for one in EVERY
    ],
)
def test_an_entry_told_otherwise(trusted: bool, key: str, tables: dict[bool, Table]) -> None:
    """Each cell is closed or on the page, and what is on the page is so."""
    table = tables[trusted]
    found = {cell: outcome(table, cell) for cell in cells(table, key)}
    assert any(one != "-" for one in found.values())
    listed = {how for entry, how in told_by_design(HEADINGS[trusted]) if entry == key}
    told = {cell: one for cell, one in found.items() if is_open(one)}
    assert {cell.how for cell in told} == listed, told
