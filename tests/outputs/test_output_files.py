"""What a run leaves: predictions, models, tables of its clients; written, read, joined, built."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from flower_graph.config.foreign import OWN
from flower_graph.errors import OutputError
from flower_graph.outputs.build import build_module, form_of
from flower_graph.outputs.client import HEAD, ClientOutputs, KeepRequest, merge_clients, spread
from flower_graph.outputs.files import (
    Predictions,
    SavedModels,
    Snapshot,
    SparseRows,
    read_models,
    role_of,
    table_of,
)

LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]])


def _predictions(nodes: object = (5, 6, 7), **more: object) -> Predictions:
    return Predictions.of(LOGITS, [0, 0, 1], nodes, [1, 0, 3], [0, -7, 1], **more)  # type: ignore[arg-type]


def test_predictions_are_the_largest_logit_and_its_probability() -> None:
    found = _predictions()
    assert (found.predicted.tolist(), found.label.tolist()) == ([0, 1, 0], [0, -1, 1])
    assert found.probability == pytest.approx([1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-1)), 0.5])
    masks = (torch.tensor([i == place for i in range(4)]) for place in (1, 2, 3))
    assert role_of(*masks).tolist() == [0, 1, 2, 3]
    joined = Predictions.join([found, _predictions(("a", "b", "c"))])  # names beside numbers
    assert joined.node.tolist() == ["5", "6", "7", "a", "b", "c"]
    assert joined.client.tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("nodes", [(5, 6, 7), ("a", 'b,"', "é")], ids=["numbers", "names"])
@pytest.mark.parametrize(("classes", "fold"), [(None, (0, 1, 0)), (("cat", "dog, big"), None)])
def test_predictions_are_read_as_written(
    tmp_path: Path, nodes: object, classes: object, fold: object
) -> None:
    written = _predictions(nodes, classes=classes, fold=fold)
    Snapshot(written).write(tmp_path / "new")
    read = Predictions.read(tmp_path / "new")
    assert read is not None
    for name, value in vars(written).items():
        assert np.array_equal(getattr(read, name), value), name
    assert Predictions.read(tmp_path) is None


def test_predictions_as_a_table(tmp_path: Path) -> None:
    Snapshot(_predictions(("a", 'b,"', "c"), classes=("cat", "dog"))).write(tmp_path)
    assert (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines() == [
        "client,node,class,probability,role,label",
        "0,a,cat,0.880797,train,cat",
        '0,"b,""",dog,0.731059,none,',
        "1,c,cat,0.5,test,dog",
    ]
    rows, values = np.arange(2), np.array([-1.0, np.nan], np.float32)
    table = table_of(Predictions(rows, rows, values, values, np.zeros(2, np.int8), values))
    assert [table[name].tolist() for name in ("value", "target")] == [["-1", ""]] * 2


@pytest.mark.parametrize("transposed", [False, True])
def test_a_client_has_its_own_rows_of_the_common_matrix(tmp_path: Path, transposed: bool) -> None:
    first = torch.arange(6.0).reshape(3, 2)  # features in rows
    values = torch.tensor([[10.0, 11.0], [20.0, 21.0], [30.0, 31.0]])
    ptr = torch.tensor([0, 1, 3])
    rows = SparseRows("first.weight", values, torch.tensor([0, 0, 2]), ptr, transposed)
    shared = {"first.weight": first.T.contiguous() if transposed else first}
    own = {"second.bias": torch.tensor([[1.0], [2.0]])}
    about = "torch.nn.Linear", {"in_features": 3}, [4, 9]
    Snapshot(None, [SavedModels(*about, shared, own, rows)]).write(tmp_path)
    (read,) = read_models(tmp_path)
    assert (read.module, read.arguments, read.clients) == about
    wanted = {4: [[10, 11], [2, 3], [4, 5]], 9: [[20, 21], [2, 3], [30, 31]]}
    for bias, (client, matrix) in enumerate(wanted.items(), start=1):
        state = read.state_dict(client)
        found = state["first.weight"].T if transposed else state["first.weight"]
        assert found.tolist() == matrix and state["second.bias"].tolist() == [bias]
    with pytest.raises(OutputError, match=r"client 5.*4"):
        read.state_dict(5)


def test_one_client_s_file_is_its_module_s_state_dict(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    sizes = {"in_features": 3, "out_features": 2}
    saved = SavedModels("torch.nn.Linear", sizes, [7], module.state_dict(), {})
    Snapshot(None, [saved, SavedModels("torch.nn.ReLU", {}, [], {}, {})]).write(tmp_path)
    said = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    assert said["module"] == "torch.nn.Linear" and said["client"] == 7
    (read,) = read_models(tmp_path)
    other = nn.Linear(**read.arguments)
    other.load_state_dict(read.state_dict(7))
    assert torch.equal(other.weight, module.weight)
    # What is written anew replaces it, whatever its form; views of one tensor are written apart.
    own = dict(zip("ab", torch.arange(4.0).reshape(2, 2, 1), strict=True))
    Snapshot(None, [SavedModels("m", {}, [0, 1], {}, own)]).write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models.json", "models.safetensors"]
    (read,) = read_models(tmp_path)
    assert read.state_dict(1)["a"].item() == 1.0 and read.state_dict(1)["b"].item() == 3.0


class Own(nn.Module):
    """A module as somebody writes one."""

    def __init__(self, width: int, *, sizes: tuple[int, ...] = (), **more: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)


class Telling(Own):
    @property
    def arguments(self) -> dict[str, Any]:
        return {"width": self.linear.in_features}


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (partial(Own, 3), {"width": 3}),
        (partial(Own, width=3, sizes=(1, 2), name="x"), {"width": 3, "sizes": [1, 2], "name": "x"}),
        (partial(Own, 3, act=torch.relu), {}),  # which JSON cannot say
        (lambda: Own(3), {}),
        (partial(Own, 3, rate=float("nan")), {}),
        (lambda: Telling(3), {"width": 3}),
    ],
)
def test_a_module_with_arguments_loads_or_says_how(
    make: Callable[[], nn.Module], arguments: dict[str, Any]
) -> None:
    form = replace(form_of(make(), make, 0), trust=OWN)
    assert form.module == f"{__name__}.{type(make()).__name__}" and form.arguments == arguments
    assert form.state_dict(0).keys() == {"linear.weight", "linear.bias"}
    if arguments:
        assert isinstance(build_module(form), Own)
    else:
        with pytest.raises(OutputError, match=r"width"):
            build_module(form)


def test_what_is_alike_is_kept_once() -> None:
    make = partial(Own, 3)
    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    torch.nn.init.ones_(other.linear.bias)
    (saved,) = SavedModels.join([form_of(one, make, 7), form_of(other, make, 9)])
    assert saved.shared.keys() == {"linear.weight"} and saved.own.keys() == {"linear.bias"}
    assert torch.equal(saved.state_dict(9)["linear.bias"], torch.ones(2))
    assert saved.clients == [7, 9]


def _table(folder: Path, accuracies: dict[int, str]) -> None:
    folder.mkdir(parents=True)
    lines = [f"{c},last,9,10,1.5,,,{text},9,8,7" for c, text in accuracies.items()]
    (folder / "clients.csv").write_text("\n".join([",".join(HEAD), *lines]) + "\n")


def test_clients_tables_are_put_together_and_compared(tmp_path: Path, recwarn: Any) -> None:
    # Of eleven clients two are the worst tenth; one has no test nodes.
    _table(tmp_path / "clients" / "0", {0: "0.5", 10: "0.0", 2: ""})
    _table(tmp_path / "clients" / "1", {c: "0.5" for c in (1, 3, 4, 5, 6, 7, 8, 9, 11)})
    deviation = pytest.approx(0.5 * math.sqrt(10) / 11)
    expected = {"last": {"test": {"worst-tenth": pytest.approx(0.25), "deviation": deviation}}}
    assert merge_clients(tmp_path) == expected
    lines = (tmp_path / "clients.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [str(c) for c in range(12)]
    assert merge_clients(tmp_path / "elsewhere") == {}
    _table(tmp_path / "nobody", {})
    assert spread(tmp_path / "nobody" / "clients.csv") == {} and not recwarn.list


# At the clients -----------------------------------------------------------------------------------

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
    outputs.measured(
        number, torch.tensor([3, 4]), loss=[1.0, 2.0], accuracy=accuracy, nodes=[10, 20]
    )


@pytest.fixture
def outputs(tmp_path: Path) -> ClientOutputs:
    return ClientOutputs(_context(), tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
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


def test_a_run_has_a_place_and_a_token_names_no_other() -> None:
    context = _context()
    with pytest.raises(OutputError):
        _ask(ClientOutputs(context, None), "begin", 0)
    assert not context.state
    with pytest.raises(ValueError, match="token"):
        KeepRequest.from_config(KeepRequest("../elsewhere", 0, 0, "begin").to_config())


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
    read = Predictions.read(place)
    assert read is not None and read.node[0] == 5
    assert json.loads((place / "outputs.json").read_text(encoding="utf-8"))["round"] == 5
