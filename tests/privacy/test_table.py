"""The tables of the pages on privacy: every adversary, every method, tests that are there."""

import json
import re
from pathlib import Path

import pytest
from doc_helpers import DOCS, assert_tests_are_there
from federation import NAMES

OF_ALL = ("network in between", "SuperLink that also delivers the app")  # whatever the method
ADVERSARIES = (
    "curious server",
    "deviating server",
    "curious server with *c* SuperNodes",
    "clients alone",
)
# page: adversary: setting: tests that show what it learns
SHOWN: dict[str, dict[str, dict[str, list[str]]]] = json.loads(
    Path(__file__).with_name("adversaries.json").read_text(encoding="utf-8")
)


def rows(page: str) -> list[tuple[str, str, str]]:
    """Read a page's table: adversary, setting, what it learns."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    part = text.partition("| adversary | setting | learns |\n|---|---|---|\n")[2]
    return re.findall(r"^\| *(.+?) *\| *(.+?) *\| *(.*?) *\|$", part.partition("\n\n")[0], re.M)


@pytest.mark.parametrize("page", SHOWN)
def test_every_row_says_what_is_learnt_and_has_tests_that_are_there(page: str) -> None:
    named = [(who, setting) for who, settings in SHOWN[page].items() for setting in settings]
    assert [(who, setting) for who, setting, learns in rows(page) if learns] == named
    for settings in SHOWN[page].values():
        for tests in settings.values():
            assert_tests_are_there(tests)


def test_every_adversary_meets_every_method_and_there_is_no_other() -> None:
    for name in NAMES:
        assert {who for who, *_ in rows(f"privacy/{name}")} == set(ADVERSARIES)
    assert {who for who, *_ in rows("privacy")} - set(ADVERSARIES) == set(OF_ALL)
    assert set(SHOWN) == {"privacy", *(f"privacy/{name}" for name in NAMES)}
