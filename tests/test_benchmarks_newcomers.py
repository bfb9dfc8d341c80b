"""The page of newcomers' figures, from rows written down by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.newcomers import ppfl
from benchmarks.newcomers.common import START, Row, page, write


def test_rows_become_a_file_and_a_line_each(tmp_path: Path) -> None:
    rows = [
        Row("Cora", 0, 3, "alone", 20, 0.5, math.nan, 1000),
        Row("Cora", 1, 3, "alone", 20, 0.7, math.nan, 3000),
        Row("Cora", 0, 3, START, 200, 0.8, 0.9, 40_000, {"P@1": 0.25}),
    ]
    path = write("nFedGNN", "A tenth of the users.", rows, folder=tmp_path)
    assert path.name == "nfedgnn.json"
    assert json.loads(path.read_text())["rows"][0]["others"] is None
    text = (tmp_path / "README.md").read_text()
    assert text == page(tmp_path)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["Cora", "alone", "20", "2", "60.0 ± 14.1", "–", "–", "2,000"] in lines
    assert ["Cora", START, "200", "1", "80.0", "90.0", "25.0", "40,000"] in lines


@pytest.mark.slow
def test_a_graph_that_comes_later_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppfl, "ROUNDS", (0, 2))
    monkeypatch.setattr(ppfl, "SHARES", [*ppfl.SHARES, "rounds=2"])
    rows = list(ppfl.measure("GAT", "cora-linqs", 0))
    assert [(row.setting, row.rounds) for row in rows] == [
        *((setting, rounds) for setting in (ppfl.ALONE, ppfl.PULLED) for rounds in (0, 2)),
        (START, 2),
    ]
    untrained, alone, _, pulled, start = rows
    assert untrained.newcomers < 0.5 < min(alone.newcomers, pulled.newcomers, start.newcomers)
    assert untrained.more["P@10"] < alone.more["P@10"] < pulled.more["P@10"]
    # Numbers and ids of 4/5 of the 1,083 public nodes, once; from the start three times all of ten
    assert alone.bytes == pulled.bytes == 866 * (16 * 4 + 8)
    assert start.bytes == 3 * 10 * 1083 * 16 * 4
