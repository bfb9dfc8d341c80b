"""The page on alignment: its examples run as they stand and say what the page says."""

import re

import pytest
from doc_helpers import DOCS, run_blocks

PAGE = DOCS / "reference" / "alignment.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    space = run_blocks(PAGE, 2, slice(1))
    said = capsys.readouterr().out
    before, after = map(float, re.findall(r"P@1 \w+: ([01]\.\d+)", said))
    assert before < 0.05 < 0.95 < after
    own, pairs, both = map(float, re.findall(r"error (\d\.\d\d)", said))
    assert pairs < 0.6 * own and both == pytest.approx(pairs, abs=0.01)

    run_blocks(PAGE, 2, slice(1, 2), space)
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"means of client 3: \[-?\d\.\d+ +0\. +\]", first), first
    assert last == "clients per node: 3 4"
