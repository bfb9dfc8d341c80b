"""The page of what was found: its figures are those of the tables that it links."""

from __future__ import annotations

import re

from doc_helpers import DOCS

PAGE = DOCS / "results" / "README.md"
FIGURE = re.compile(r"(?<![\d.])\d+\.\d+ ± \d\.\d+")


def test_every_figure_stands_in_a_table_of_its_section() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) == 6
    for section in sections:
        tables = [PAGE.parent / link for link in re.findall(r"\]\((\S+?/table\.md)\)", section)]
        known = {one for table in tables for one in FIGURE.findall(table.read_text("utf-8"))}
        figures = set(FIGURE.findall(" ".join(section.split())))
        assert figures and not figures - known, section.splitlines()[0]


def test_every_table_has_the_command_that_makes_it() -> None:
    for line in re.findall(r"^- .*/table\.md\).*$", PAGE.read_text("utf-8"), re.MULTILINE):
        table = re.findall(r"\]\((\S+?)/table\.md\)", line)[0]
        assert f"--out docs/results/{table}" in line or "own rounds" in line
