"""What a client writes when the server asks for it, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import OutputError
from flower_graph.flower_compat import NumPyClient
from flower_graph.outputs.client import ClientOutputs, KeepReply, KeepRequest
from flower_graph.outputs.files import Predictions, SavedModels, Snapshot, read_predictions
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.exchange import Exchange

RUN = "0123456789abcdef" * 2


def _snapshot(number: int) -> Snapshot:
    """Give what two clients have after a round: its number is the node's."""
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = Predictions.of(logits, [3, 4], [number, number], [1, 2], [0, 0])
    return Snapshot(found, [SavedModels("m", {}, [3, 4], {"w": torch.ones(1)}, {})])


def _context(**config: Any) -> Context:
    return Context(1, 1, {"partition-id": 5, **config}, RecordDict(), {})


def _ask(outputs: ClientOutputs, action: str, number: int, best: int = 0, **more: Any) -> str:
    request = KeepRequest(RUN, number, best, action, **more)
    return outputs.keep(request, lambda: _snapshot(number))


def _measure(outputs: ClientOutputs, number: int) -> None:
    accuracy = np.array([[number / 10, np.nan, 0.5], [0.25, 0.5, 0.75]])
    outputs.measured(number, [3, 4], loss=[1.0, 2.0], accuracy=accuracy, nodes=[10, 20])


def _node(folder: Path) -> int:
    read = read_predictions(folder)
    assert read is not None
    return int(read.node[0])


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    context = _context()
    outputs = ClientOutputs(context, tmp_path)
    _measure(outputs, 1)
    outputs.candidate(1, lambda: _snapshot(1))
    assert list(tmp_path.iterdir()) == [] and not context.state


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"data-folder": "DATA"}, f"DATA/outputs/{RUN}"),
        ({"data-folder": "DATA", "state-dir": "STATE"}, f"DATA/outputs/{RUN}"),
        ({"state-dir": "STATE"}, f"STATE/outputs/{RUN}/5"),
        ({"state-dir": ":memory:"}, "OUT/clients/5"),
        ({}, "OUT/clients/5"),
    ],
    ids=["data-folder", "both", "state-dir", "in process", "simulation"],
)
def test_a_client_writes_where_it_lives(tmp_path: Path, config: dict[str, str], place: str) -> None:
    here = {n: v if v == ":memory:" else str(tmp_path / v) for n, v in config.items()}
    outputs = ClientOutputs(_context(**here), tmp_path / "OUT")
    _ask(outputs, "begin", 0)
    _measure(outputs, 1)
    _ask(outputs, "finish", 1)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert {path.parent for path in files} == {Path(place)}
    assert [path.name for path in files] == [
        "clients.csv", "models.json", "models.safetensors", "outputs.json", "predictions.csv",
        "predictions.npz",
    ]  # fmt: skip
    for path in [tmp_path / place, *(tmp_path / place).iterdir()]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_without_a_place_it_says_so() -> None:
    context = _context()
    with pytest.raises(OutputError):
        _ask(ClientOutputs(context, None), "begin", 0)
    assert not context.state


def test_a_token_names_no_other_folder(tmp_path: Path) -> None:
    outputs = ClientOutputs(_context(), tmp_path)
    request = KeepRequest("../elsewhere", 0, 0, "begin")
    with pytest.raises(ValueError, match="token"):
        outputs.keep(request, lambda: _snapshot(0))


def test_without_models(tmp_path: Path) -> None:
    outputs = ClientOutputs(_context(), tmp_path)
    _ask(outputs, "begin", 0, save="predictions")
    _ask(outputs, "finish", 1, save="predictions")
    names = {path.name for path in (tmp_path / "clients" / "5").iterdir()}
    assert names == {"outputs.json", "predictions.csv", "predictions.npz"}


def test_figures_of_the_last_and_the_best_round(tmp_path: Path) -> None:
    outputs = ClientOutputs(_context(), tmp_path)
    _ask(outputs, "begin", 0)
    for number in (1, 2, 2, 3):  # the second came twice
        _measure(outputs, number)
    _ask(outputs, "finish", 3, best=2, every=2)
    place = tmp_path / "clients" / "5"
    assert (place / "clients.csv").read_text(encoding="utf-8").splitlines() == [
        "client,at,round,nodes,loss,train-accuracy,val-accuracy,test-accuracy,rounds-measured,"
        "bytes-up,bytes-down",
        "3,last,3,10,1.0,0.3,,0.5,3,0,0",
        "3,best,2,10,1.0,0.2,,0.5,3,0,0",
        "4,last,3,20,2.0,0.25,0.5,0.75,3,0,0",
        "4,best,2,20,2.0,0.25,0.5,0.75,3,0,0",
    ]
    curves = (place / "curves.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[:2] for line in curves[1:]] == [
        ["2", "3"], ["2", "4"], ["3", "3"], ["3", "4"],
    ]  # fmt: skip


def test_a_candidate_becomes_the_snapshot(tmp_path: Path) -> None:
    outputs = ClientOutputs(_context(), tmp_path)
    _ask(outputs, "begin", 0, keep="best")
    for number in (1, 2):
        outputs.candidate(number, lambda at=number: _snapshot(10 + at))  # type: ignore[misc]
        _ask(outputs, "snapshot", number, best=number)  # when the clients have gone on
    outputs.candidate(3, lambda: _snapshot(13))
    _ask(outputs, "finish", 3, best=2, keep="best")
    assert _node(tmp_path / "clients" / "5") == 12


def test_what_a_resumed_run_may_need_stays(tmp_path: Path) -> None:
    outputs = ClientOutputs(_context(), tmp_path)
    _ask(outputs, "begin", 0, keep="best")
    for number in range(1, 6):
        _measure(outputs, number)
        if number in (1, 3, 5):
            _ask(outputs, "snapshot", number, best=number, protected=[1] if number > 1 else [])
    # The run is stopped here, and goes on from its checkpoint of round 2 in another process.
    again = ClientOutputs(_context(), tmp_path)
    _ask(again, "begin", 2, keep="best")
    _measure(again, 3)
    assert _ask(again, "finish", 3, best=1, keep="best", protected=[1], every=1) == ""
    place = tmp_path / "clients" / "5"
    assert _node(place) == 1
    curves = (place / "curves.csv").read_text(encoding="utf-8").splitlines()
    assert [line[0] for line in curves[1:]] == ["1", "1", "2", "2", "3", "3"]
    assert (place / "snapshots" / "round-000001").is_dir()  # and may be gone on with once more


def test_a_best_round_that_is_not_held_is_told(tmp_path: Path) -> None:
    outputs = ClientOutputs(_context(), tmp_path)
    _ask(outputs, "begin", 0, keep="best")
    said = _ask(outputs, "finish", 5, best=4, keep="best")
    assert "round 4" in said and "round 5" in said
    place = tmp_path / "clients" / "5"
    assert _node(place) == 5
    assert json.loads((place / "outputs.json").read_text(encoding="utf-8"))["round"] == 5


class Keeping(NumPyClient):
    """A client that keeps something."""

    def __init__(self, context: Context, out: Path) -> None:
        self.outputs = ClientOutputs(context, out)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {}

    def evaluate(self, parameters: Any, config: Any) -> tuple[float, int, dict[str, Any]]:
        _measure(self.outputs, 1)
        return 0.0, 1, {}

    def snapshot(self) -> Snapshot:
        return _snapshot(1)


class Plain(NumPyClient):
    """A client that does not."""


@pytest.mark.parametrize("kind", [Keeping, Plain])
def test_a_server_asks_by_a_query(tmp_path: Path, kind: type[NumPyClient]) -> None:
    app = make_client_app(
        lambda context: Keeping(context, tmp_path) if kind is Keeping else Plain()
    )
    grid = InProcessGrid(app, num_supernodes=1)
    exchange = Exchange(grid)

    def ask(message_type: str, content: RecordDict) -> Any:
        return exchange.send(
            dict.fromkeys(grid.get_node_ids(), content),
            message_type=message_type,
            server_round=1,
            timeout=5,
            read=lambda _, reply: KeepReply.read(reply),
        )

    found = ask("query.keep", KeepRequest(RUN, 0, 0, "begin").to_record())
    if kind is Plain:
        assert "Plain keeps nothing" in found.rejected[0].reason
        return
    assert found.rejected == []
    ask("evaluate", RecordDict())
    assert ask("query.keep", KeepRequest(RUN, 1, 1, "finish").to_record()).rejected == []
    lines = (tmp_path / "clients" / "0" / "clients.csv").read_text(encoding="utf-8").splitlines()
    up, down = map(int, lines[1].split(",")[-2:])
    assert up > 0 and down == 0  # of the two clients each has half; nothing came down
