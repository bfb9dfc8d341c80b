"""What a client writes when the server asks for it, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flower_graph.errors import OutputError
from flower_graph.outputs.client import ClientOutputs, KeepRequest
from flower_graph.outputs.files import Predictions, SavedModels, Snapshot

RUN = "0123456789abcdef" * 2
PREDICTED = {"outputs.json", "predictions.csv", "predictions.npz"}


def _snapshot(number: int) -> Snapshot:
    """Give what two clients have after a round: its number is the node's."""
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = Predictions.of(logits, [3, 4], [number, number], [1, 2], [0, 0])
    return Snapshot(found, [SavedModels("m", {}, [3, 4], {"w": torch.ones(1)}, {})])


def _context(**config: Any) -> Context:
    return Context(1, 1, {"partition-id": 5, **config}, RecordDict(), {})


def _ask(outputs: ClientOutputs, action: str, number: int, best: int = 0, **more: Any) -> str:
    request = KeepRequest(more.pop("run", RUN), number, best, action, **more)
    return outputs.keep(request, lambda: _snapshot(number))


def _measure(outputs: ClientOutputs, number: int) -> None:
    accuracy = np.array([[number / 10, np.nan, 0.5], [0.25, 0.5, 0.75]])
    outputs.measured(number, [3, 4], loss=[1.0, 2.0], accuracy=accuracy, nodes=[10, 20])


def _node(folder: Path) -> int:
    read = Predictions.read(folder)
    assert read is not None
    return int(read.node[0])


@pytest.fixture
def outputs(tmp_path: Path) -> ClientOutputs:
    return ClientOutputs(_context(), tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the clients of a simulation write."""
    return tmp_path / "clients" / "5"


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"data-folder": "DATA", "state-dir": "STATE"}, f"DATA/outputs/{RUN}"),
        ({"state-dir": "STATE"}, f"STATE/outputs/{RUN}/5"),
        ({"state-dir": ":memory:"}, "OUT/clients/5"),
        ({}, "OUT/clients/5"),
    ],
)
def test_a_client_writes_where_it_lives(tmp_path: Path, config: dict[str, str], place: str) -> None:
    here = {n: v if v == ":memory:" else str(tmp_path / v) for n, v in config.items()}
    outputs = ClientOutputs(_context(**here), tmp_path / "OUT")
    _ask(outputs, "begin", 0)
    _measure(outputs, 1)
    _ask(outputs, "finish", 1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in files} == {tmp_path / place}
    models = {"clients.csv", "models.json", "models.safetensors"}
    assert {path.name for path in files} == PREDICTED | models
    for path in [tmp_path / place, *files]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_run_has_a_place_and_a_token_names_no_other(outputs: ClientOutputs) -> None:
    context = _context()
    with pytest.raises(OutputError):
        _ask(ClientOutputs(context, None), "begin", 0)
    assert not context.state
    with pytest.raises(ValueError, match="token"):
        _ask(outputs, "begin", 0, run="../elsewhere")


def test_figures_of_the_last_and_the_best_round(outputs: ClientOutputs, place: Path) -> None:
    _ask(outputs, "begin", 0, save="predictions")
    for number in (1, 2, 2, 3):  # the second came twice
        _measure(outputs, number)
    _ask(outputs, "finish", 3, best=2, every=2, save="predictions")
    assert {path.name for path in place.iterdir()} == PREDICTED | {"clients.csv", "curves.csv"}
    assert (place / "clients.csv").read_text(encoding="utf-8").splitlines() == [
        "client,at,round,nodes,loss,train-accuracy,val-accuracy,test-accuracy,rounds-measured,"
        "bytes-up,bytes-down",
        "3,last,3,10,1.0,0.3,,0.5,3,0,0",
        "3,best,2,10,1.0,0.2,,0.5,3,0,0",
        "4,last,3,20,2.0,0.25,0.5,0.75,3,0,0",
        "4,best,2,20,2.0,0.25,0.5,0.75,3,0,0",
    ]
    curves = (place / "curves.csv").read_text(encoding="utf-8").splitlines()
    assert [line[:3] for line in curves[1:]] == ["2,3", "2,4", "3,3", "3,4"]


def test_a_best_round_that_is_not_held_is_told(outputs: ClientOutputs, place: Path) -> None:
    _ask(outputs, "begin", 0, keep="best")
    said = _ask(outputs, "finish", 5, best=4, keep="best")
    assert "round 4" in said and "round 5" in said
    assert _node(place) == 5
    assert json.loads((place / "outputs.json").read_text(encoding="utf-8"))["round"] == 5
