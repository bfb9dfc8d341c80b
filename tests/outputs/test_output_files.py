"""Predictions and models as files: what is written is what is read, by their owner alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flower_graph.errors import OutputError
from flower_graph.outputs.files import (
    Predictions,
    SavedModels,
    SparseRows,
    read_models,
    read_predictions,
    role_of,
    write_outputs,
)

LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]])


def _predictions(nodes: object = (5, 6, 7), **more: object) -> Predictions:
    return Predictions.of(LOGITS, [0, 0, 1], nodes, [1, 0, 3], [0, -7, 1], **more)  # type: ignore[arg-type]


def test_predictions_are_the_largest_logit_and_its_probability() -> None:
    found = _predictions()
    assert found.predicted.tolist() == [0, 1, 0]
    assert found.probability == pytest.approx([1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-1)), 0.5])
    assert found.label.tolist() == [0, -1, 1]
    assert found.of_client(1).node.tolist() == [7]


def test_masks_become_roles() -> None:
    masks = (torch.tensor([i == place for i in range(4)]) for place in (1, 2, 3))
    assert role_of(*masks).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("nodes", [(5, 6, 7), ("a", 'b,"', "é")], ids=["numbers", "names"])
@pytest.mark.parametrize("classes", [None, ("cat", "dog, big")])
@pytest.mark.parametrize("fold", [None, (0, 1, 0)])
def test_predictions_are_read_as_written(
    tmp_path: Path, nodes: object, classes: object, fold: object
) -> None:
    written = _predictions(nodes, classes=classes, fold=fold)
    write_outputs(tmp_path / "new", written, [])
    read = read_predictions(tmp_path / "new")
    assert read is not None
    for name, value in vars(written).items():
        assert np.array_equal(getattr(read, name), value), name
    assert read_predictions(tmp_path) is None


def test_predictions_as_a_table(tmp_path: Path) -> None:
    write_outputs(tmp_path, _predictions(("a", 'b,"', "c"), classes=("cat", "dog")), [])
    assert (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines() == [
        "client,node,class,probability,role,label",
        "0,a,cat,0.880797,train,cat",
        '0,"b,""",dog,0.731059,none,',
        "1,c,cat,0.5,test,dog",
    ]


def test_names_beside_numbers_join_as_names() -> None:
    joined = Predictions.join([_predictions(), _predictions(("a", "b", "c"))])
    assert joined.node.tolist() == ["5", "6", "7", "a", "b", "c"]
    assert joined.client.tolist() == [0, 0, 1, 0, 0, 1]


def _models(transposed: bool = False) -> SavedModels:
    first = torch.arange(6.0).reshape(3, 2)  # features in rows
    rows = SparseRows(
        "first.weight",
        torch.tensor([[10.0, 11.0], [20.0, 21.0], [30.0, 31.0]]),
        torch.tensor([0, 0, 2]),
        torch.tensor([0, 1, 3]),
        transposed,
    )
    shared = {"first.weight": first.T.contiguous() if transposed else first}
    own = {"second.bias": torch.tensor([[1.0], [2.0]])}
    return SavedModels("torch.nn.Linear", {"in_features": 3}, [4, 9], shared, own, rows)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_client_has_its_own_rows_of_the_common_matrix(tmp_path: Path, transposed: bool) -> None:
    write_outputs(tmp_path, None, [_models(transposed)])
    (read,) = read_models(tmp_path)
    assert (read.module, read.arguments, read.clients) == (
        "torch.nn.Linear",
        {"in_features": 3},
        [4, 9],
    )
    wanted = {
        4: [[10.0, 11.0], [2.0, 3.0], [4.0, 5.0]],
        9: [[20.0, 21.0], [2.0, 3.0], [30.0, 31.0]],
    }
    for client, first in wanted.items():
        state = read.state_dict(client)
        found = state["first.weight"].T if transposed else state["first.weight"]
        assert found.tolist() == first
        assert state["second.bias"].tolist() == [1.0 if client == 4 else 2.0]
    with pytest.raises(OutputError, match=r"client 5.*4"):
        read.state_dict(5)


def test_one_client_s_file_is_its_module_s_state_dict(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    state = module.state_dict()
    saved = SavedModels("torch.nn.Linear", {"in_features": 3, "out_features": 2}, [7], state, {})
    write_outputs(tmp_path, None, [saved, SavedModels("torch.nn.ReLU", {}, [], {}, {})])
    said = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    assert said["module"] == "torch.nn.Linear" and said["client"] == 7
    (read,) = read_models(tmp_path)
    other = nn.Linear(**read.arguments)
    other.load_state_dict(read.state_dict(7))
    assert torch.equal(other.weight, module.weight)
    # what is written anew replaces it, whatever its form
    write_outputs(tmp_path, None, [_models()])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models.json", "models.safetensors"]


def test_views_of_one_tensor_are_written_apart(tmp_path: Path) -> None:
    both = torch.arange(4.0)
    own = {"a": both[:2].reshape(2, 1), "b": both[2:].reshape(2, 1)}
    write_outputs(tmp_path, None, [SavedModels("m", {}, [0, 1], {}, own)])
    (read,) = read_models(tmp_path)
    assert read.state_dict(1)["a"].item() == 1.0 and read.state_dict(1)["b"].item() == 3.0
