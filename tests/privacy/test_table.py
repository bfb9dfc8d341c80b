"""The table of docs/privacy.md: every adversary, every method, tests that are there."""

from __future__ import annotations

import re

import pytest
from doc_helpers import DOCS, assert_tests_are_there
from federation import NAMES

ADVERSARIES = (
    "curious server",
    "deviating server",
    "curious server with *c* SuperNodes",
    "clients alone",
    "network in between",
    "SuperLink that also delivers the app",
)
OF_ALL = ADVERSARIES[-2:]  # which no method changes anything for


def rows() -> list[tuple[str, str, str, list[str]]]:
    """Read the table: adversary, method, what it learns, tests."""
    page = (DOCS / "privacy.md").read_text(encoding="utf-8")
    part = page.partition("## In one table\n")[2].partition("\n## ")[0]
    found, adversary = list[tuple[str, str, str, list[str]]](), ""
    for line in [line for line in part.splitlines() if line.startswith("| ") or line[:4] == "|  |"][
        1:
    ]:
        first, method, learns, shown = (cell.strip() for cell in line.strip("|").split("|"))
        adversary = first or adversary
        found.append((adversary, method, learns, re.findall(r"`(tests/[^`]+)`", shown)))
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}, {row[1]}")
def test_every_cell_has_tests_that_are_there(row: tuple[str, str, str, list[str]]) -> None:
    _, _, learns, tests = row
    assert learns
    assert_tests_are_there(tests)


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_every_adversary_meets_every_method(adversary: str) -> None:
    of = [method for who, method, _, _ in rows() if who == adversary]
    for name in ["all"] if adversary in OF_ALL else NAMES.values():
        assert any(name in method for method in of), name


def test_there_is_no_other_adversary() -> None:
    assert {who for who, *_ in rows()} == set(ADVERSARIES)
