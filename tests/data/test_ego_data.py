"""A client from a graph of its own: what is taken over, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from flower_graph.data.folders.client_folder import ego_from_data
from flower_graph.data.partition.ego_networks import split_per_client
from flower_graph.errors import DataError


def graph(**changes: Any) -> Data:
    """Three nodes: 0 - 1, given in one direction, twice, and a self-loop at 2."""
    given: dict[str, Any] = {
        "x": torch.tensor([[1, 0], [0, 2], [3, 0]]),
        "edge_index": torch.tensor([[1, 1, 2], [0, 0, 2]]),
        "y": torch.tensor([1, -1, 0]),
        "train_mask": torch.tensor([True, False, False]),
        "test_mask": torch.tensor([False, False, True]),
    }
    return Data(**{k: v for k, v in (given | changes).items() if v is not None})


def test_a_client_by_hand() -> None:
    ego = ego_from_data(7, graph(), torch.tensor([30, 10, 20]))
    assert (ego.client, ego.nodes.tolist(), ego.names) == (7, [30, 10, 20], None)
    assert ego.identities == [30, 10, 20]
    assert ego.edge_index.tolist() == [[0, 1], [1, 0]]
    assert ego.x.dtype == torch.float32 and ego.x.tolist() == [[1, 0], [0, 2], [3, 0]]
    assert ego.y.tolist() == [1, -1, 0]
    masks = [mask.tolist() for mask in (ego.train_mask, ego.val_mask, ego.test_mask)]
    assert masks == [[True, False, False], [False] * 3, [False, False, True]]


def test_words_name_the_nodes_instead_of_numbers() -> None:
    ego = ego_from_data(0, graph(), ["b", "c", "a"])
    assert ego.identities == ("b", "c", "a")
    assert ego.nodes.tolist() == [0, 1, 2]


def test_a_graph_without_masks_can_be_split() -> None:
    bare = graph(train_mask=None, test_mask=None, y=torch.tensor([0, 1, -1]))
    ego = ego_from_data(0, bare, [4, 5, 6])
    assert not (ego.train_mask | ego.val_mask | ego.test_mask).any()
    [split] = split_per_client([ego], [0.5, 0.0, 0.5], seed=0)
    assert (split.train_mask | split.test_mask).tolist() == [True, True, False]
    assert split.identities == [4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "identities", "said"),
    [
        ({"x": None}, [1, 2, 3], "no tensor 'x'"),
        ({"x": torch.tensor([[1.0], [torch.nan], [0.0]])}, [1, 2, 3], r"x\[1, 0\] is nan"),
        ({"x": torch.eye(3).to_sparse_csr()}, [1, 2, 3], "must be dense"),
        ({"edge_index": torch.tensor([[0], [3]])}, [1, 2, 3], r"edge_index\[1, 0\] is 3"),
        ({"y": torch.tensor([0.0, 1.0, 0.0])}, [1, 2, 3], "y is torch.float32"),
        ({"y": torch.tensor([0, 1])}, [1, 2, 3], r"must be int64 \[3\]"),
        ({"train_mask": torch.tensor([1, 0, 0])}, [1, 2, 3], "train_mask is torch.int64"),
        ({"val_mask": torch.tensor([False, True, False])}, [1, 2, 3], "val_mask: node 1 has no"),
        ({"val_mask": torch.tensor([True, False, False])}, [1, 2, 3], "val_mask: node 0 has no"),
        ({}, [1, 2], "2 identities for 3 nodes"),
        ({}, [1, "b", 3], "of type int, str"),
        ({}, [1.5, 2.5, 3.5], "of type float"),
    ],
)
def test_what_is_malformed_is_named_with_its_client(
    changes: dict[str, Any], identities: list[Any], said: str
) -> None:
    with pytest.raises(DataError, match=f"client 7: .*{said}"):
        ego_from_data(7, graph(**changes), identities)


def test_identities_that_come_twice_are_counted_and_not_named() -> None:
    # The error travels to the server as the reason for which a SuperNode failed.
    with pytest.raises(DataError, match=r"^client 7: 1 identities are there more than once") as e:
        ego_from_data(7, graph(), ["secret", "secret", "c"])
    assert "secret" not in str(e.value)
