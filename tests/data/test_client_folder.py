"""Clients of the user's own: what is read of one or from a folder, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from partition_helpers import RATIOS, mask
from torch_geometric.data import Data

from flower_graph.data.folders.client_folder import (
    client_graph_from_data,
    ego_from_data,
    load_folder,
    load_overlapping_folder,
)
from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.errors import DataError


def tensors(nodes: int = 6, **changes: Any) -> dict[str, Any]:
    """Give a graph of which 0 - 1 is an edge, given once; the last node has no label."""
    given: dict[str, Any] = {
        "x": torch.arange(2 * nodes).reshape(nodes, 2),
        "edge_index": torch.tensor([[1, 2], [0, 2]]),
        "y": torch.tensor([0, 1, 0, 1, 0, -1][:nodes]),
    }
    return {key: value for key, value in {**given, **changes}.items() if value is not None}


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


def test_files_become_clients_with_their_masks_or_drawn_ones(folder: Path) -> None:
    first, second, third = load_folder(folder, RATIOS, seed=0)
    assert [graph.client for graph in (first, second, third)] == [0, 1, 2]
    assert [graph.is_graphless for graph in (first, second, third)] == [True, False, True]
    assert second.edge_index is not None
    assert second.edge_index.tolist() == [[0, 1], [1, 0]]
    assert first.hidden_edges is None
    assert second.nodes.tolist() == list(range(6))
    assert second.x.dtype == torch.float32 and second.x[1].tolist() == [2.0, 3.0]
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
    scaled = load_folder(folder, RATIOS, seed=0, features="row")[1].x
    assert plain[1].tolist() == [2.0, 3.0]
    assert scaled[1].tolist() == pytest.approx([0.4, 0.6])


def test_no_graph_other_widths_and_sparse_features_of_one_client_are_named(folder: Path) -> None:
    sparse = client_graph_from_data(0, Data(**tensors(x=torch.eye(6).to_sparse_coo())))
    assert sparse.x.tolist() == torch.eye(6).tolist()
    torch.save(Data(**tensors(x=torch.eye(6))), folder / "c.pt")
    with pytest.raises(DataError, match=r"c\.pt.*6.*a\.pt"):
        load_folder(folder, RATIOS, seed=0)
    (folder / "d.pt").write_bytes(pickle.dumps(tensors(), protocol=2)[:40])
    with pytest.raises(DataError, match=r"d\.pt"):
        load_folder(folder, RATIOS, seed=0)


def test_a_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    for load in (load_folder, load_overlapping_folder):
        with pytest.raises(DataError):
            load(tmp_path / "none", RATIOS, 0)
        with pytest.raises(DataError):
            load(tmp_path, RATIOS, 0)


# Ego-networks -----------------------------------------------------------------------------------


def ego_graph(**changes: Any) -> Data:
    """Three nodes: 0 - 1, given in one direction, twice, and a self-loop at 2."""
    given: dict[str, Any] = {
        "x": torch.tensor([[1, 0], [0, 2], [3, 0]]),
        "edge_index": torch.tensor([[1, 1, 2], [0, 0, 2]]),
        "y": torch.tensor([1, -1, 0]),
        "train_mask": torch.tensor([True, False, False]),
        "test_mask": torch.tensor([False, False, True]),
    }
    return Data(**{k: v for k, v in (given | changes).items() if v is not None})


def test_an_ego_network_by_hand() -> None:
    ego = ego_from_data(7, ego_graph(), torch.tensor([30, 10, 20]))
    assert (ego.client, ego.nodes.tolist(), ego.names) == (7, [30, 10, 20], None)
    assert ego.identities == [30, 10, 20]
    assert ego.edge_index.tolist() == [[0, 1], [1, 0]]
    assert ego.x.dtype == torch.float32 and ego.x.tolist() == [[1, 0], [0, 2], [3, 0]]
    assert ego.y.tolist() == [1, -1, 0]
    masks = [mask.tolist() for mask in (ego.train_mask, ego.val_mask, ego.test_mask)]
    assert masks == [[True, False, False], [False] * 3, [False, False, True]]


def test_words_name_the_nodes_instead_of_numbers() -> None:
    ego = ego_from_data(0, ego_graph(), ["b", "c", "a"])
    assert ego.identities == ("b", "c", "a")
    assert ego.nodes.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "identities", "said"),
    [
        ({"edge_index": None}, [1, 2, 3], "edge_index"),
        ({"val_mask": torch.tensor([False, True, False])}, [1, 2, 3], "val_mask: node 1"),
        ({}, [1, 2], "2.*3"),
        ({}, [1, "b", 3], "int, str"),
        ({}, [1.5, 2.5, 3.5], "float"),
    ],
)
def test_what_an_ego_network_cannot_be_is_named_with_its_client(
    changes: dict[str, Any], identities: list[Any], said: str
) -> None:
    with pytest.raises(DataError, match=f"client 7.*{said}"):
        ego_from_data(7, ego_graph(**changes), identities)


def test_identities_that_come_twice_are_counted_and_not_named() -> None:
    # The error travels to the server as the reason for which a SuperNode failed.
    with pytest.raises(DataError, match=r"^client 7: 1") as e:
        ego_from_data(7, ego_graph(), ["secret", "secret", "c"])
    assert "secret" not in str(e.value)


# Clients that share nodes -----------------------------------------------------------------------

LATE = [0.0, 0.0, 1.0]  # all nodes are judged: what a test needs that is not about roles


def shared(*ids: int, **changes: Any) -> dict[str, Any]:
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
    torch.save(Data(**shared(70, 90, 30)), tmp_path / "b.pt")
    torch.save(shared(30, 10**15), tmp_path / "a.pt")
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
    saved(tmp_path, shared(1, 2, 3, 4), shared(4, 5, 1), shared(5, 6, 7))
    graphs = load_overlapping_folder(tmp_path, LATE, seed=0)
    assert [public(graph) for graph in graphs] == [[1, 4], [1, 4, 5], [5]]
    # What a client holds back is not public elsewhere.
    mine = shared(1, 2, 3, 9, public=flags(0, 1, 1, 1))
    saved(tmp_path, mine, shared(1, 2, 4), shared(3, 4))
    graphs = load_overlapping_folder(tmp_path, LATE, seed=0)
    # Its own word counts at the first client, for 9 too, which nobody else has.
    assert [public(graph) for graph in graphs] == [[2, 3, 9], [2, 4], [3, 4]]


def test_a_drawn_role_is_the_same_everywhere(tmp_path: Path) -> None:
    some, others = list(range(40)), list(range(20, 60))
    saved(tmp_path, shared(*some), shared(*others))
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
    saved(tmp_path, shared(5, 6, 3, 4, **masks), shared(5, 6, 3, 1, 2, 0, y=unlabelled))
    first, second = load_overlapping_folder(tmp_path, [0.5, 0.5, 0], seed=0)
    assert roles(first) == {5: "test", 3: "train", 4: "train"}
    drawn = roles(second)
    # 6 has no role in the masks and no label here; 2, the only one of class 0, trains.
    assert set(drawn) == {5, 3, 1, 2, 0} and (drawn[5], drawn[3]) == ("test", "train")
    assert set(drawn[node] for node in (1, 0)) == {"train", "val"}


def test_shared_features_are_prepared_and_may_be_sparse(tmp_path: Path) -> None:
    sparse = shared(4, 8)["x"].to_sparse_coo()
    saved(tmp_path, shared(4, 8, x=sparse), shared(4, 8))
    plain = load_overlapping_folder(tmp_path, LATE, 0)[0].x
    scaled = load_overlapping_folder(tmp_path, LATE, 0, features="row")[0].x
    assert (plain.tolist(), scaled.tolist()) == ([[4, 12], [8, 24]], [[0.25, 0.75], [0.25, 0.75]])
    with pytest.raises(DataError):
        load_overlapping_folder(tmp_path, LATE, 0, features="presence-row")


def test_a_client_may_have_no_edges_but_not_all(tmp_path: Path) -> None:
    none = torch.empty(2, 0, dtype=torch.int64)
    saved(tmp_path, shared(1, 2, edge_index=none), shared(1, 2))
    assert load_overlapping_folder(tmp_path, LATE, 0)[0].edge_index.shape == (2, 0)
    saved(tmp_path, shared(1, 2, edge_index=none), shared(1, 2, edge_index=none))
    with pytest.raises(DataError):
        load_overlapping_folder(tmp_path, LATE, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_id": None}, "n_id"),
        ({"n_id": torch.tensor([1, 2])}, "2 identities"),
        ({"n_id": torch.tensor([1, -2, 3])}, "-2"),
        ({"n_id": torch.tensor([1, 3, 3])}, "1 identities"),
        ({"n_id": torch.tensor([6, 7, 8])}, "3 nodes"),
        ({"public": flags(1, 0)}, r"public is torch.bool \[2\]"),
        ({"public": flags(0, 0, 0)}, "3 nodes"),
        ({"edge_index": None}, "edge_index"),
        ({"x": torch.ones(3, 5)}, r"x .*0\.pt"),
        ({"train_mask": flags(1, 1)}, r"train_mask is torch.bool \[2\]"),
        ({"val_mask": flags(1, 1, 0)}, "for training"),
        ({"y": torch.full((3,), -1)}, "3 nodes"),
    ],
)
def test_an_unfit_file_of_shared_nodes_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    saved(tmp_path, shared(1, 2, 3), shared(1, 2, 3, **changes), shared(1, 2, 3))
    with pytest.raises(DataError, match=rf"(1\.pt.*|client 1): .*{message}"):
        load_overlapping_folder(tmp_path, [1, 0, 0], 0)


def test_two_roles_of_one_node_are_refused(tmp_path: Path) -> None:
    first = shared(1, 2, 3, train_mask=flags(1, 1, 0))
    saved(tmp_path, first, shared(2, 3, 1, train_mask=flags(0, 1, 0), test_mask=flags(0, 0, 1)))
    with pytest.raises(DataError, match=r"1\.pt: node 1"):
        load_overlapping_folder(tmp_path, RATIOS, 0)
