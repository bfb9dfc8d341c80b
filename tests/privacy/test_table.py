"""The table of docs/privacy.md: every adversary, every method, tests that are there."""

from __future__ import annotations

import json
from pathlib import Path

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
# adversary: method and setting: tests that show what it learns
SHOWN: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("adversaries.json").read_text(encoding="utf-8")
)
OF_ALL = ADVERSARIES[-2:]  # which no method changes anything for


def rows() -> list[tuple[str, str, str]]:
    """Read the table: adversary, method, what it learns."""
    page = (DOCS / "privacy.md").read_text(encoding="utf-8")
    part = page.partition("## In one table\n")[2].partition("\n## ")[0]
    found, adversary = list[tuple[str, str, str]](), ""
    for line in [line for line in part.splitlines() if line.startswith("| ") or line[:4] == "|  |"][
        1:
    ]:
        first, method, learns = (cell.strip() for cell in line.strip("|").split("|"))
        adversary = first or adversary
        found.append((adversary, method, learns))
    return found


def test_every_row_says_what_is_learnt_and_has_tests_that_are_there() -> None:
    named = [(adversary, method) for adversary, methods in SHOWN.items() for method in methods]
    assert [(adversary, method) for adversary, method, learns in rows() if learns] == named
    for methods in SHOWN.values():
        for tests in methods.values():
            assert_tests_are_there(tests)


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_every_adversary_meets_every_method(adversary: str) -> None:
    of = [method for who, method, _ in rows() if who == adversary]
    for name in ["all"] if adversary in OF_ALL else NAMES.values():
        assert any(name in method for method in of), name


def test_there_is_no_other_adversary() -> None:
    assert {who for who, *_ in rows()} == set(ADVERSARIES)
