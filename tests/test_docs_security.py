"""Figures of docs/security.md are those of the corpus that was tried."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
TABLE = (ROOT / "docs" / "results" / "hostile.md").read_text(encoding="utf-8")
LIARS = json.loads((ROOT / "tests" / "hostile" / "liars.json").read_text("utf-8"))
TOTALS = json.loads((ROOT / "docs" / "results" / "hostile.json").read_text("utf-8"))["totals"]
FORMS = json.loads((ROOT / "docs" / "results" / "hostile.json").read_text("utf-8"))["methods"]


def test_the_table_is_the_result() -> None:
    for name, found in TOTALS.items():
        assert f"| {name} | {' | '.join(f'{count:,}' for count in found.values())} |" in TABLE


def test_every_case_has_one_verdict() -> None:
    kinds = [kind for kinds in FORMS.values() for kind in kinds.values()]
    for kind in kinds:
        verdicts = [kind.get(one, []) for one in ("refused", "harmless", "taken", "crashed")]
        names = [name for found in verdicts for name in found]
        assert len(names) == len(set(names)) == kind["counts"]["tried"]
    assert sum(kind["counts"]["tried"] for kind in kinds) == TOTALS["all"]["tried"]


def test_the_corpus_is_large_and_none_of_it_does_harm() -> None:
    found = TOTALS["all"]
    assert found["tried"] >= 1500
    assert all(TOTALS[name]["tried"] >= 150 for name in TOTALS)
    assert {found[one] for one in ("crashed", "differs", "evicted", "costly")} == {0}


def test_each_row_of_the_table_of_liars_has_tests_that_are_there() -> None:
    table = PAGE.partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert [row[:2] for row in rows] == [
        [who, setting] for who, settings in LIARS.items() for setting in settings
    ]
    assert all(learn and stays for *_, learn, stays in rows)
    shown = {who: [*chain(*settings.values())] for who, settings in LIARS.items()}
    # Of a server that more collude with than is assumed there is nothing to show.
    assert [who for who, tests in shown.items() if not tests] == ["a server and more than *k*"]
    assert [name for name in chain(*shown.values()) if not (ROOT / name).is_file()] == []
    assert "(docs/security.md#who-lies-and-what-follows)" in (ROOT / "SECURITY.md").read_text()
