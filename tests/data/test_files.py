"""Graphs saved by the user: what is read, and that nothing in a file is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from flower_graph.data.sources.pyg import load_file
from flower_graph.errors import DataError


def tensors(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "x": torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        "edge_index": torch.tensor([[0, 1], [1, 2]]),
        "y": torch.tensor([0, 1, 0]),
        "train_mask": torch.tensor([True, False, False]),
    }
    return {**parts, **changes}


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("wrap", [lambda **parts: Data(**parts), dict])
def test_a_data_and_a_dict_are_the_same_graph(wrap: Any, tmp_path: Path) -> None:
    graph = load_file(save(tmp_path / "graph.pt", wrap(**tensors(note="a string is ignored"))))
    expected = tensors()
    for key in ("x", "edge_index", "y", "train_mask"):
        assert torch.equal(getattr(graph, key), expected[key])
    assert graph.val_mask is None
    assert graph.num_classes == 2


@pytest.mark.parametrize("classes", [5, torch.tensor(5)])
def test_a_number_of_classes_in_the_file_counts(classes: Any, tmp_path: Path) -> None:
    graph = load_file(save(tmp_path / "a.pt", Data(**tensors(num_classes=classes))))
    assert graph.num_classes == 5
    with pytest.raises(DataError, match=r"y\[1\] is 1: labels must be 0 to 0"):
        load_file(save(tmp_path / "b.pt", tensors(num_classes=1)))


def test_sparse_features_and_labels_in_a_column_are_read(tmp_path: Path) -> None:
    parts = tensors()
    content = tensors(x=parts["x"].to_sparse_coo(), y=parts["y"].unsqueeze(1))
    graph = load_file(save(tmp_path / "graph.pt", content))
    assert torch.equal(graph.x, parts["x"])
    assert torch.equal(graph.y, parts["y"])


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    content = tensors(extra=Harmful(proof))
    saved = save(tmp_path / "saved.pt", content)
    (tmp_path / "pickled.pt").write_bytes(pickle.dumps(content, protocol=2))
    for path in (saved, tmp_path / "pickled.pt", save(tmp_path / "data.pt", Data(**content))):
        with pytest.raises(DataError, match="not a graph that can be loaded safely"):
            load_file(path)
    assert not proof.exists()
    torch.load(saved, weights_only=False)  # the same file would have done it
    assert proof.exists()


def test_loading_allows_no_class_for_good(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    assert Data in before  # PyG's own doing, which must last
    load_file(save(tmp_path / "graph.pt", Data(**tensors())))
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(3), "holds a Tensor, not a Data or a dict"),
        ({"x": torch.ones(3, 2), "y": torch.zeros(3)}, "has no edge_index"),
        (tensors(x=[[1.0]]), "x is a list, not a tensor"),
        (tensors(num_classes="two"), "num_classes is 'two'"),
        (tensors(y=torch.zeros(3, 4, dtype=torch.int64)), "several labels"),
        (tensors(y=torch.tensor([0, 1])), r"\[2\]: must be int64 \[3\]"),
    ],
)
def test_unfit_content_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_file(save(tmp_path / "graph.pt", content))


def test_missing_empty_and_cut_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        load_file(tmp_path / "absent.pt")
    whole = save(tmp_path / "whole.pt", tensors()).read_bytes()
    for name, content in (("empty.pt", b""), ("cut.pt", whole[: len(whole) // 2])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"file .*{name} is not a graph"):
            load_file(tmp_path / name)
