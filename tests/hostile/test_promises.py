"""The table of docs/security.md: words that a page has, and attacks on them that are there."""

from __future__ import annotations

import re

import pytest
from doc_helpers import DOCS, assert_tests_are_there

HEADING = "## Promises, and the attacks on them\n"
WHOLE = ("security.md", "secure-sum.md")  # pages of which each section that promises is here
PROMISE_NOTHING = {"Parts", HEADING[3:-1]}


def rows() -> list[tuple[str, str, list[str]]]:
    """Read the table: page, words, tests."""
    text = (DOCS / "security.md").read_text(encoding="utf-8")
    part = text.partition(HEADING)[2].partition("\n## ")[0]
    found = list[tuple[str, str, list[str]]]()
    for line in part.splitlines():
        if '| "' in line:
            first, words, tests = (cell.strip() for cell in line.strip("|").split("|"))
            linked = re.search(r"\((\S+)\)", first)
            page = linked[1] if linked else found[-1][0]
            found.append((page, words.strip('"'), re.findall(r"`(tests/[^`]+)`", tests)))
    return found


def said(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}: {row[1]}")
def test_every_promise_is_on_its_page_and_has_attacks_that_are_there(
    row: tuple[str, str, list[str]],
) -> None:
    page, words, tests = row
    text = (DOCS / page).read_text(encoding="utf-8").partition(HEADING)[0]
    assert words in said(text)
    assert_tests_are_there(tests)


@pytest.mark.parametrize("page", WHOLE)
def test_every_section_has_its_promises_in_the_table(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8").partition(HEADING)[0]
    promised = [words for name, words, _ in rows() if name == page]
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        found = any(words in said(body) for words in promised)
        assert found is not (title in PROMISE_NOTHING), title
