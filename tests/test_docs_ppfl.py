"""The page on PPFL-GNN: its example runs as it stands, and what it says of it is so."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_helpers import DOCS, run_blocks

from flower_graph.apps.run import run
from flower_graph.method.load import load_config
from flower_graph.simulation import InProcessGrid

PAGE, BLOCKS = DOCS / "ppfl.md", 3
TEXT = PAGE.read_text(encoding="utf-8")
OUTPUTS = (DOCS / "reference" / "outputs.md").read_text(encoding="utf-8")


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


def save_clients(folder: Path) -> None:
    """Save three rings of 150 nodes, of which 90 are the same people."""
    folder.mkdir()
    for place, name in enumerate(("bern", "genf", "zug")):
        draw = torch.Generator().manual_seed(place)
        ids = torch.cat([torch.arange(90), 1000 * (place + 1) + torch.arange(60)])
        y, node = ids % 3, torch.arange(150)
        x = (
            torch.rand(150, 9, generator=draw) < 0.2 + 0.3 * (torch.arange(9) // 3 == y[:, None])
        ).float()
        ring = torch.stack([node, (node + 3) % 150])
        torch.save({"x": x, "edge_index": ring, "y": y, "n_id": ids}, folder / f"{name}.pt")


@pytest.mark.usefixtures("pictures")
def test_clients_of_a_folder_write_what_the_page_on_outputs_says(tmp_path: Path) -> None:
    save_clients(tmp_path / "clients")
    quick = ["rounds=2", "device=cpu", "gat.epochs=2", "judge.folds=2"]
    config = load_config("ppfl/cora-gat", [f"data.name={tmp_path / 'clients'}/", *quick])
    result = run(config, tmp_path / "run")
    assert (result["clients"], result["rejected"]) == (3, 0)
    check_outputs(tmp_path / "run", result)


def check_outputs(folder: Path, result: dict[str, Any]) -> None:
    """Compare what a run wrote with what the page on outputs says."""
    saved = sorted(path.name for path in (folder / "embeddings").iterdir())
    assert saved == ["client-0.npz", "client-1.npz", "client-2.npz"]
    (table,) = re.findall(r"^### embeddings\n(.*?)^#", OUTPUTS, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (\w+) `\[(.*?)\]`", table, re.MULTILINE)
    sizes = {"n": 150, "d": 16}
    for file in saved:
        with np.load(folder / "embeddings" / file) as arrays:
            found = {key: (array.dtype.name, array.shape) for key, array in arrays.items()}
        assert found == {
            key: (kind, tuple(sizes[letter] for letter in shape.split(", ")))
            for key, kind, shape in rows
        }
    assert (folder / "alignment.png").read_bytes().startswith(b"\x89PNG")
    keys = re.findall(r"^\| `alignment` \|(.*?)\|", OUTPUTS, re.MULTILINE)[0]
    assert set(result["alignment"]) == set(re.findall(r"`(precision-\d+)`", keys))
    (judged,) = re.findall(r"^\| `judged` \| (.*?);", OUTPUTS, re.MULTILINE)
    assert re.findall(r"`(\w+)`", judged) == [*result["judged"], *result["judged"]["svc"]]
    for roles in result["judged"].values():
        assert {role: len(values) for role, values in roles.items()} == {"val": 3, "test": 3}
