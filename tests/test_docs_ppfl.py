"""The page on PPFL-GNN: its example runs as it stands, and what it says of it is so."""

import re
import runpy
from functools import cache
from typing import Any

import pytest
from doc_helpers import DOCS, run_blocks

from flower_graph.simulation import InProcessGrid

PAGE, BLOCKS = DOCS / "ppfl.md", 3
TEXT = PAGE.read_text(encoding="utf-8")


@cache
def defined() -> dict[str, Any]:
    """Run the page's first block of code: data, model and both halves of the app."""
    return run_blocks(PAGE, BLOCKS, slice(1))


def test_the_example_learns_from_others(capsys: pytest.CaptureFixture[str]) -> None:
    space = run_blocks(PAGE, BLOCKS, slice(1, 2), defined())
    said = re.fullmatch(r"accuracy (0\.\d\d)\nalone (0\.\d\d)\n", capsys.readouterr().out)
    assert said is not None
    together, alone = map(float, said.groups())
    assert alone < 0.82 < 0.87 < together
    ((first, second),) = re.findall(r"^It prints (0\.\d+) and (0\.\d+)\.", TEXT, re.MULTILINE)
    assert (together, alone) == pytest.approx((float(first), float(second)), abs=0.03)

    known = defined()["KNOWN"].tolist()
    arrays = space["result"].arrays
    assert set(arrays) == {f"{what}-{club}" for what in ("means", "nodes") for club in range(4)}
    assert arrays["means-2"].numpy().shape == (120, 4)
    assert arrays["nodes-2"].numpy().tolist() == known
    metrics = space["result"].evaluate_metrics_clientapp[20]
    accuracies = {f"{role}-accuracy" for role in ("train", "val", "test")}
    assert set(metrics) == accuracies | {"precision-1", "precision-5", "precision-10"}


def test_the_secure_form_learns_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    space = {**defined(), "InProcessGrid": InProcessGrid}
    space = run_blocks(PAGE, BLOCKS, slice(2, 3), space)
    (said,) = re.findall(r"^secure (0\.\d\d)$", capsys.readouterr().out, re.MULTILINE)
    (printed,) = re.findall(r"^It prints (0\.\d\d)\. `result.arrays`", TEXT, re.MULTILINE)
    assert float(said) == pytest.approx(float(printed), abs=0.03)
    arrays = space["result"].arrays
    assert set(arrays) == {"mean", "nodes"}
    assert arrays["nodes"].numpy().tolist() == defined()["KNOWN"].tolist()


@pytest.mark.slow
def test_a_module_of_pytorch_is_a_model_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    space = runpy.run_path(
        str(DOCS.parent / "examples" / "graphsage_for_ppfl.py"), run_name="__main__"
    )
    accuracy = float(capsys.readouterr().out.removeprefix("GraphSAGE "))
    assert 0.75 < accuracy <= 1
    metrics = space["result"].train_metrics_clientapp
    assert [metrics[number]["answered"] for number in range(1, 6)] == [4] * 5
    assert metrics[5]["loss"] < 0.5 * metrics[1]["loss"]
