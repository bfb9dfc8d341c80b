"""Clients of one's own that share nodes: ids, public nodes, roles, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from flower_graph.data.folders.client_folder import load_overlapping_folder
from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.errors import DataError

RATIOS = [0.6, 0.2, 0.2]
LATE = [0.0, 0.0, 1.0]  # all nodes are judged: what a test needs that is not about roles


def tensors(*ids: int, **changes: Any) -> dict[str, Any]:
    """Give a client whose nodes are a path in the order of ``ids``, with class ``id % 2``."""
    n = len(ids)
    given: dict[str, Any] = {
        "x": torch.tensor(ids, dtype=torch.float32)[:, None] * torch.tensor([[1.0, 3.0]]),
        "edge_index": torch.stack([torch.arange(n - 1), torch.arange(1, n)]),
        "y": torch.tensor(ids) % 2,
        "n_id": torch.tensor(ids),
    }
    return {key: value for key, value in {**given, **changes}.items() if value is not None}


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def saved(folder: Path, *clients: dict[str, Any]) -> Path:
    for number, client in enumerate(clients):
        torch.save(client, folder / f"{number}.pt")
    return folder


def public(graph: OverlappingGraph) -> list[int]:
    return graph.nodes[graph.public].tolist()


def roles(graph: OverlappingGraph) -> dict[int, str]:
    """Give the role of each node that has one."""
    masks = {"train": graph.train_mask, "val": graph.val_mask, "test": graph.test_mask}
    return {node: role for role, mask in masks.items() for node in graph.nodes[mask].tolist()}


def test_nodes_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    torch.save(Data(**tensors(70, 90, 30)), tmp_path / "b.pt")
    torch.save(tensors(30, 10**15), tmp_path / "a.pt")
    (tmp_path / "README.txt").write_text("not a client", encoding="utf-8")
    first, second = load_overlapping_folder(tmp_path, LATE, seed=0)
    assert (first.client, second.client) == (0, 1)
    assert (first.nodes.tolist(), second.nodes.tolist()) == ([30, 10**15], [30, 70, 90])
    # The path 70 - 90 - 30, both ways, by place.
    assert second.edge_index.tolist() == [[0, 1, 2, 2], [2, 2, 0, 1]]
    assert second.x.tolist() == [[30, 90], [70, 210], [90, 270]]
    assert (second.y.tolist(), second.train_y.tolist()) == ([0, 0, 0], [0, 0, 0])
    assert public(first) == public(second) == [30]


def test_nodes_of_several_clients_are_public(tmp_path: Path) -> None:
    saved(tmp_path, tensors(1, 2, 3, 4), tensors(4, 5, 1), tensors(5, 6, 7))
    graphs = load_overlapping_folder(tmp_path, LATE, seed=0)
    assert [public(graph) for graph in graphs] == [[1, 4], [1, 4, 5], [5]]


def test_a_node_that_a_client_holds_back_is_not_public_elsewhere(tmp_path: Path) -> None:
    mine = tensors(1, 2, 3, 9, public=flags(0, 1, 1, 1))
    saved(tmp_path, mine, tensors(1, 2, 4), tensors(3, 4))
    graphs = load_overlapping_folder(tmp_path, LATE, seed=0)
    # Its own word counts at the first client, for 9 too, which nobody else has.
    assert [public(graph) for graph in graphs] == [[2, 3, 9], [2, 4], [3, 4]]


def test_a_drawn_role_is_the_same_everywhere(tmp_path: Path) -> None:
    some, others = list(range(40)), list(range(20, 60))
    saved(tmp_path, tensors(*some), tensors(*others))
    draws = [load_overlapping_folder(tmp_path, RATIOS, seed) for seed in (0, 0, 1)]
    first, second = (roles(graph) for graph in draws[0])
    assert {node: first[node] for node in range(20, 40)} == {
        node: second[node] for node in range(20, 40)
    }
    merged = first | second
    assert sorted(merged) == list(range(60))
    for parity in (0, 1):  # each class has its shares
        mine = [role for node, role in merged.items() if node % 2 == parity]
        assert [mine.count(role) for role in ("train", "val", "test")] == [18, 6, 6]
    assert roles(draws[1][0]) == first != roles(draws[2][0])


def test_masks_go_before_a_draw(tmp_path: Path) -> None:
    masks = {"train_mask": flags(0, 0, 1, 1), "test_mask": flags(1, 0, 0, 0)}
    unlabelled = torch.tensor([0, -1, 1, 1, 0, 1])
    saved(tmp_path, tensors(5, 6, 3, 4, **masks), tensors(5, 6, 3, 1, 2, 0, y=unlabelled))
    first, second = load_overlapping_folder(tmp_path, [0.5, 0.5, 0], seed=0)
    assert roles(first) == {5: "test", 3: "train", 4: "train"}
    drawn = roles(second)
    # 6 has no role in the masks and no label here; 2, the only one of class 0, trains.
    assert set(drawn) == {5, 3, 1, 2, 0} and (drawn[5], drawn[3]) == ("test", "train")
    assert set(drawn[node] for node in (1, 0)) == {"train", "val"}


def test_label_noise_is_for_training_and_differs_between_clients(tmp_path: Path) -> None:
    same = [tensors(*range(40)) for _ in range(2)]
    saved(tmp_path, *same)
    first, second = load_overlapping_folder(tmp_path, [1, 0, 0], 0, label_noise=0.25)
    for graph in (first, second):
        assert int((graph.train_y != graph.y).sum()) == 10
        assert torch.equal(graph.y, graph.nodes % 2)
    assert not torch.equal(first.train_y, second.train_y)


def test_features_are_prepared_and_may_be_sparse(tmp_path: Path) -> None:
    sparse = tensors(4, 8)["x"].to_sparse_coo()
    saved(tmp_path, tensors(4, 8, x=sparse), tensors(4, 8))
    plain = load_overlapping_folder(tmp_path, LATE, 0)[0].x
    scaled = load_overlapping_folder(tmp_path, LATE, 0, presence=True, normalize=True)[0].x
    assert (plain.tolist(), scaled.tolist()) == ([[4, 12], [8, 24]], [[0.5, 0.5], [0.5, 0.5]])


def test_a_client_may_have_no_edges_but_not_all(tmp_path: Path) -> None:
    none = torch.empty(2, 0, dtype=torch.int64)
    saved(tmp_path, tensors(1, 2, edge_index=none), tensors(1, 2))
    assert load_overlapping_folder(tmp_path, LATE, 0)[0].edge_index.shape == (2, 0)
    saved(tmp_path, tensors(1, 2, edge_index=none), tensors(1, 2, edge_index=none))
    with pytest.raises(DataError, match="no client has an edge"):
        load_overlapping_folder(tmp_path, LATE, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_id": None}, "the graph has no tensor 'n_id'"),
        ({"n_id": torch.tensor([1, 2])}, r"n_id is torch.int64 \[2\]: must be int64 \[3\]"),
        ({"n_id": torch.tensor([1.0, 2, 3])}, r"n_id is torch.float32 \[3\]: must be int64"),
        ({"n_id": torch.tensor([1, -2, 3])}, "n_id has -2: ids must be at least 0"),
        ({"n_id": torch.tensor([1, 3, 3])}, r"n_id has 3 more than once: must be int64 \[3\]"),
        ({"n_id": torch.tensor([6, 7, 8])}, r"no public nodes: of its 3 nodes \(n_id\) none is"),
        ({"public": flags(1, 0)}, r"public is torch.bool \[2\]: must be bool \[3\]"),
        ({"public": torch.ones(3)}, r"public is torch.float32 \[3\]: must be bool"),
        ({"public": flags(0, 0, 0)}, "no public nodes: of its 3 nodes"),
        ({"edge_index": None}, "the graph has no tensor 'edge_index'"),
        ({"edge_index": torch.tensor([[0], [3]])}, r"edge_index\[1, 0\] is 3: must be 0 to 2"),
        ({"x": torch.ones(3, 5)}, "x has 5 features, but that of .*0.pt has 2"),
        ({"x": None}, "the graph has no tensor 'x'"),
        ({"train_mask": flags(1, 1)}, r"train_mask is torch.bool \[2\]: must be bool \[3\]"),
        ({"val_mask": flags(1, 1, 0)}, "train_mask has no node; clients that need none have 0"),
        ({"y": torch.full((3,), -1)}, "client 1: none of its 3 nodes is for training"),
    ],
)
def test_an_unfit_file_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved(tmp_path, tensors(1, 2, 3), tensors(1, 2, 3, **changes), tensors(1, 2, 3))
    with pytest.raises(DataError, match=rf"file .*1\.pt: {message}"):
        load_overlapping_folder(tmp_path, [1, 0, 0], 0)


def test_two_roles_of_one_node_are_refused(tmp_path: Path) -> None:
    first = tensors(1, 2, 3, train_mask=flags(1, 1, 0))
    saved(tmp_path, first, tensors(2, 3, 1, train_mask=flags(0, 1, 0), test_mask=flags(0, 0, 1)))
    message = r"1\.pt: node 1 \(n_id\) is for test, but at an earlier client for training; a node"
    with pytest.raises(DataError, match=message):
        load_overlapping_folder(tmp_path, RATIOS, 0)


def test_a_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder"):
        load_overlapping_folder(tmp_path / "none", RATIOS, 0)
    with pytest.raises(DataError, match=r"the folder has no file \*\.pt, one per client"):
        load_overlapping_folder(tmp_path, RATIOS, 0)
