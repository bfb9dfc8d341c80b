"""All pages: what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))


def anchors(text: str) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_to_headings_and_files_that_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        if target.startswith("http") or "results/" in name:
            continue  # pages that a command writes
        other = page.parent / name if name else page
        assert other.is_file(), target
        assert not anchor or anchor in anchors(other.read_text(encoding="utf-8")), target
