"""tests/hostile/promises.json: words that a guide has, and attacks on them that are there."""

import json
from pathlib import Path

import pytest
from doc_helpers import DOCS, assert_tests_are_there

# guide: words that promise something: tests that attack it
PROMISES: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("promises.json").read_text(encoding="utf-8")
)
WHOLE = ("security", "secure-sum")  # guides of which each section that promises is here
PROMISE_NOTHING = {"Parts", "Supply chain"}


def one_line(text: str) -> str:
    """Return a text with single spaces in the place of line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_is_on_its_page_and_has_attacks_that_are_there(page: str) -> None:
    text = one_line((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert [words for words in PROMISES[page] if words not in text] == []
    for tests in PROMISES[page].values():
        assert_tests_are_there(tests)


@pytest.mark.parametrize("page", WHOLE)
def test_every_section_has_its_promises_in_the_table(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        promises = any(words in one_line(body) for words in PROMISES[page])
        assert promises is not (title in PROMISE_NOTHING), title
