"""All pages: what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([page for page in ROOT.glob("docs/**/*.md") if "results" not in page.parts])
WRITTEN = sorted(ROOT.glob("docs/results/**/*.md"))  # by commands, or about what these wrote
# Files that a page has its reader make
MADE = ("my_methods/", "DIR/", "runs/")


def anchors(text: str) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *PAGES, *WRITTEN],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_lead_to_headings_and_files_that_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`([\w-]+/[\w/-]+\.(?:py|sh|yaml|md|json|png))`", page.read_text("utf-8"))
    roots = (ROOT, ROOT / "flower_graph", ROOT / "docs", ROOT / "examples")
    gone = [name for name in named if not any((root / name).is_file() for root in roots)]
    gone = [name for name in gone if not name.startswith(MADE)]
    assert not gone, gone


def test_pages_that_comments_in_yaml_name_are_there() -> None:
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    named = [
        (path.name, name)
        for path in files
        for comment in re.findall(r"#.*", path.read_text("utf-8"))
        for name in re.findall(r"[\w./-]+\.md|docs/[\w/-]+\w(?![\w.])", comment)
    ]
    assert {"docs/results/own-graph.md", "docs/results/nfedgnn-steady"} <= {n for _, n in named}
    assert [one for one in named if not (ROOT / one[1]).exists()] == []


def test_where_to_look_names_files_and_functions_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page.partition("## Where to look")[2].partition("\n## ")[0]
    rows = table.split("|---|---|")[1].strip().splitlines()
    assert len(rows) >= 10
    for row in rows:
        assert re.search(r"`[\w/]+\.py`", row), row
        for function, name in re.findall(r"`(\w+)` in `([\w/]+\.py)`", row):
            path = next(p for p in (ROOT / name, ROOT / "flower_graph" / name) if p.is_file())
            assert f"def {function}(" in path.read_text("utf-8"), row


def test_every_guide_is_in_the_contents_of_the_site() -> None:
    listed = set[Path]()
    for page in PAGES:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            names = [line for line in block.splitlines() if line and line[0] != ":"]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert {page.resolve() for page in PAGES} - listed == {ROOT / "docs" / "index.md"}
    assert all(page.is_file() for page in listed)
