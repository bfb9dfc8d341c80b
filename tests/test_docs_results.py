"""The page of what was found: its figures are those of the tables that it links."""

import re

import pytest
from doc_helpers import DOCS

PAGE = DOCS / "results" / "README.md"
FIGURE = re.compile(r"(?<![\d.])\d+\.\d+ ± \d\.\d+")


def test_every_figure_stands_in_a_table_of_its_section() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) == 8
    for section in sections:
        tables = [PAGE.parent / link for link in re.findall(r"\]\((\S+?/table\.md)\)", section)]
        known = {one for table in tables for one in FIGURE.findall(table.read_text("utf-8"))}
        figures = set(FIGURE.findall(" ".join(section.split())))
        assert figures and not figures - known, section.splitlines()[0]


@pytest.mark.parametrize(
    "method", ["nfedgnn", "ppfl", "fedscem", "fedgls", "personalised", "links"]
)
def test_figures_and_chances_of_a_method_s_page_stand_in_its_table(method: str) -> None:
    folder = PAGE.parent / method
    said = " ".join((folder / "README.md").read_text("utf-8").split())
    pages = [*folder.glob("*.md"), *PAGE.parent.glob(f"{method}-steady/table.md")]
    table = " ".join(one.read_text("utf-8") for one in pages if one.name != "README.md")
    for figure in (FIGURE, re.compile(r"Holm (?!1\b)[\de.-]*\d")):
        found = set(figure.findall(said))
        assert found and not found - set(figure.findall(table))
