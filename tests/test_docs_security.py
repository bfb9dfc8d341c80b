"""Figures of docs/security.md are those of the corpus that was tried."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
TABLE = (ROOT / "docs" / "results" / "hostile.md").read_text(encoding="utf-8")
TOTALS = json.loads((ROOT / "docs" / "results" / "hostile.json").read_text("utf-8"))["totals"]
COLUMNS = ("tried", "refused", "proven", "harmless", "taken", "differs", "crashes")


def test_the_table_is_the_result() -> None:
    for name, found in TOTALS.items():
        cells = " | ".join(f"{found[column]:,}" for column in COLUMNS)
        assert f"| {name} | {cells} |" in TABLE


def test_the_page_has_its_sums() -> None:
    tried, refused, proven, harmless, taken, *_ = (TOTALS["all"][column] for column in COLUMNS)
    said = " ".join(PAGE.split())
    assert f"{tried:,} malformed replies" in said
    assert f"{refused} were refused ({proven} of them as proven lies" in said
    assert f"{harmless} changed nothing that is read, and {taken} were well-formed" in said


def test_the_corpus_is_large_and_ends_no_run() -> None:
    papers = [name for name in TOTALS if name != "all"]
    assert len(papers) == 4
    assert all(TOTALS[name]["tried"] >= 200 for name in papers)
    assert TOTALS["all"]["crashes"] == TOTALS["all"]["differs"] == 0


def test_the_packages_to_audit_are_those_with_hashes() -> None:
    text = (ROOT / "constraints-hashes.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^[A-Za-z0-9._-]+==", text, re.MULTILINE)
    assert f"Of the {len(pinned)} packages that it has" in PAGE
