"""The page of newcomers' figures, from rows written down by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

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
