"""Clients of the user's own: what is read from a folder, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from flower_graph.data.folders.client_folder import client_graph_from_data, load_folder
from flower_graph.errors import DataError

RATIOS = [0.6, 0.2, 0.2]


def tensors(nodes: int = 6, **changes: Any) -> dict[str, Any]:
    """Give a graph of which 0 - 1 is an edge, given once; the last node has no label."""
    given: dict[str, Any] = {
        "x": torch.arange(2 * nodes).reshape(nodes, 2),
        "edge_index": torch.tensor([[1, 2], [0, 2]]),
        "y": torch.tensor([0, 1, 0, 1, 0, -1][:nodes]),
    }
    return {key: value for key, value in {**given, **changes}.items() if value is not None}


def mask(*places: int) -> torch.Tensor:
    return torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(places), True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save three clients: one split by us, one graphless with masks, one of a dict."""
    made = tmp_path / "clients"
    made.mkdir()
    masks = {"train_mask": mask(0, 1), "test_mask": mask(4)}
    torch.save(Data(**tensors()), made / "b.pt")
    torch.save(Data(**tensors(edge_index=None, **masks)), made / "a.pt")
    torch.save({**tensors(), "edge_index": None}, made / "c.pt")
    (made / "README.txt").write_text("not a client", encoding="utf-8")
    return made


def test_files_become_clients_in_the_order_of_their_names(folder: Path) -> None:
    first, second, third = load_folder(folder, RATIOS, seed=0)
    assert [graph.client for graph in (first, second, third)] == [0, 1, 2]
    assert [graph.is_graphless for graph in (first, second, third)] == [True, False, True]
    assert second.edge_index is not None
    assert second.edge_index.tolist() == [[0, 1], [1, 0]]
    assert first.hidden_edges is None
    assert second.nodes.tolist() == list(range(6))
    assert second.x.dtype == torch.float32 and second.x[1].tolist() == [2.0, 3.0]


def test_masks_that_are_there_are_used_and_others_drawn(folder: Path) -> None:
    first, second, third = load_folder(folder, RATIOS, seed=0)
    assert first.train_mask.nonzero().flatten().tolist() == [0, 1]
    assert not first.val_mask.any()
    assert first.test_mask.nonzero().flatten().tolist() == [4]
    for drawn in (second, third):
        masks = torch.stack([drawn.train_mask, drawn.val_mask, drawn.test_mask])
        assert masks.sum(1).tolist() == [3, 1, 1]
        assert masks.sum(0).tolist() == [1, 1, 1, 1, 1, 0]
    draws = [load_folder(folder, RATIOS, seed)[1].train_mask.tolist() for seed in range(6)]
    assert draws[0] == second.train_mask.tolist()
    assert any(draw != draws[0] for draw in draws)


def test_features_are_scaled_on_demand_and_may_be_sparse(folder: Path) -> None:
    torch.save(Data(**tensors(x=tensors()["x"].float().to_sparse_coo())), folder / "b.pt")
    plain = load_folder(folder, RATIOS, seed=0)[1].x
    scaled = load_folder(folder, RATIOS, seed=0, normalize=True)[1].x
    assert plain[1].tolist() == [2.0, 3.0]
    assert scaled[1].tolist() == pytest.approx([0.4, 0.6])


def test_no_edges_at_all_is_a_graph_too() -> None:
    none = torch.empty(2, 0, dtype=torch.int64)
    client = client_graph_from_data(3, Data(**tensors(edge_index=none)))
    assert not client.is_graphless
    assert client.client == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": None}, "no tensor 'x'"),
        ({"x": torch.full((6, 2), torch.nan)}, r"x\[0, 0\] is nan"),
        ({"edge_index": [[0], [1]]}, "no tensor 'edge_index'|edge_index is a list"),
        ({"edge_index": torch.tensor([[0], [6]])}, r"edge_index\[1, 0\] is 6"),
        ({"y": None}, "no tensor 'y'"),
        ({"y": torch.zeros(6)}, "y is torch.float32"),
        ({"y": torch.full((6,), -1)}, r"nodes: 6, with a label: 0"),
        ({"train_mask": mask(5)}, "train_mask: node 5 has no label"),
        ({"train_mask": mask(0), "test_mask": mask(0)}, "test_mask: node 0 .* in another mask"),
        ({"test_mask": mask(0)}, "none of its 6 nodes is for training"),
        ({"edge_index": None, "x": torch.ones(6, 2)}, "constant features on all its 6 nodes"),
    ],
)
def test_an_unfit_graph_is_refused_with_client_and_file(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    content = tensors(**changes)
    with pytest.raises(DataError, match=f"client 9[: ].*({said})"):
        client_graph_from_data(9, Data(**content))
    torch.save(content, folder / "b.pt")
    with pytest.raises(DataError, match=f"file .*b.pt:? .*({said})"):
        load_folder(folder, RATIOS, seed=0)


def test_sparse_features_of_one_client_are_refused_with_what_to_do() -> None:
    with pytest.raises(DataError, match=r"client 0: x has the layout .*: must be dense"):
        client_graph_from_data(0, Data(**tensors(x=torch.eye(6).to_sparse_coo())))


def test_clients_must_have_the_same_features(folder: Path) -> None:
    torch.save(Data(**tensors(x=torch.eye(6))), folder / "c.pt")
    with pytest.raises(DataError, match=r"c\.pt: x has 6 features, but that of .*a\.pt has 2"):
        load_folder(folder, RATIOS, seed=0)


def test_a_folder_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        load_folder(tmp_path / "absent", RATIOS, seed=0)
    with pytest.raises(DataError, match=r"no file \*\.pt, one per client"):
        load_folder(tmp_path, RATIOS, seed=0)


def test_a_file_that_is_no_graph_is_named(folder: Path) -> None:
    (folder / "d.pt").write_bytes(pickle.dumps(tensors(), protocol=2)[:40])
    with pytest.raises(DataError, match=r"d\.pt is not a graph that can be loaded safely"):
        load_folder(folder, RATIOS, seed=0)
