"""The table of faults is what the tests noted, and it is whole."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reliability

ROOT = Path(__file__).resolve().parents[1]
FAULTS: dict[str, dict[str, Any]] = json.loads(reliability.RESULTS.read_text(encoding="utf-8"))
# Only these have sums that nobody can take apart
SECURE = {"a client is killed between the stages of a secure sum": {"FedSCem", "PPFL-GNN"}}


def test_the_page_has_the_table_of_the_results() -> None:
    page = reliability.PAGE.read_text(encoding="utf-8")
    written = page.partition(reliability.BEGIN)[2].partition(reliability.END)[0]
    assert written.strip() == reliability.table(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_method_was_tried(fault: str) -> None:
    assert set(FAULTS[fault]) >= SECURE.get(fault, set(reliability.METHODS))


def test_every_test_that_is_named_is_there() -> None:
    named = {one["test"] for methods in FAULTS.values() for one in methods.values()}
    for test in named:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        reliability.write_page(page, FAULTS)


def test_methods_to_which_the_same_happened_share_a_row_in_their_order() -> None:
    one = {"happened": "nothing", "test": "tests/contracts/test_x.py::test_y"}
    other = {"happened": "something", "test": "tests/contracts/test_x.py::test_y"}
    text = reliability.table({"a fault": {"PPFL-GNN": one, "FedSCem": other, "nFedGNN": one}})
    assert text.splitlines() == [
        "### A fault",
        "",
        "| methods | what happened | test |",
        "| --- | --- | --- |",
        "| nFedGNN; PPFL-GNN | nothing | `test_x.py::test_y` |",
        "| FedSCem | something | `test_x.py::test_y` |",
    ]
