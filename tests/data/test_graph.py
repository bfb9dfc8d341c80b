"""Undirected edges, row normalisation, dense features, and what is refused with which value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import coalesce, remove_self_loops
from torch_geometric.utils import to_undirected as pyg_to_undirected

from flower_graph.data import Graph, check_data
from flower_graph.data.description import read_features
from flower_graph.data.graph import (
    check_dense_size,
    normalize_rows,
    take_rows,
    to_undirected,
)
from flower_graph.data.sources.cache import copy_tree
from flower_graph.errors import DataError


def test_to_undirected_drops_loops_and_duplicates_and_sorts() -> None:
    edges = torch.tensor([[2, 0, 1, 2, 0], [0, 2, 1, 0, 1]])
    assert to_undirected(edges, 3).tolist() == [[0, 0, 1, 2], [1, 2, 0, 0]]
    assert to_undirected(edges[:, 2:3], 2).shape == (2, 0)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40))
def test_to_undirected_is_what_pyg_gives(pairs: list[tuple[int, int]]) -> None:
    edges = torch.tensor(pairs).t()
    expected = coalesce(pyg_to_undirected(remove_self_loops(edges)[0], num_nodes=7), num_nodes=7)
    assert torch.equal(to_undirected(edges, 7), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1), st.data())
def test_rows_of_a_sparse_matrix_are_those_of_the_dense_one(
    numbers: list[list[int]], data: st.DataObject
) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(numbers) - 1), min_size=1)))
    taken = take_rows(x.to_sparse_csr(), rows)
    assert taken.layout == torch.sparse_csr
    assert torch.equal(taken.to_dense(), take_rows(x, rows))
    assert torch.equal(take_rows(x, rows), x[rows])


def test_rows_are_divided_by_their_sum_of_absolute_values() -> None:
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0], [-1.0, 1.0], [0.1, 0.1]])
    expected = torch.tensor([[0.25, 0.75], [0.0, 0.0], [-0.5, 0.5], [0.5, 0.5]])
    torch.testing.assert_close(normalize_rows(x), expected)
    assert x[0, 1] == 3.0  # not in place


@pytest.mark.parametrize("name", ["Cora", "CiteSeer", "PubMed"])
def test_rows_are_normalised_as_pyg_does_it(name: str, data_root: Path, tmp_path: Path) -> None:
    copy_tree(data_root / "Planetoid" / name, tmp_path / name)
    data = Planetoid(str(tmp_path), name)[0]
    torch.testing.assert_close(
        normalize_rows(data.x), NormalizeFeatures()(Data(x=data.x.clone())).x, atol=1e-7, rtol=0
    )


def test_sparse_features_that_would_be_too_large_are_refused_before_anything_is_made() -> None:
    huge = torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.int64), [], (10**6, 10**5), check_invariants=True
    )
    with pytest.raises(DataError, match=r"400\.0.*limit.*2\.0"):
        read_features(huge, [])
    check_dense_size(1_000_000, 500, "")
    with pytest.raises(DataError, match="do that"):
        check_dense_size(1_000_000, 501, "do that")


# Checks before training -------------------------------------------------------------------------


def graph(**changes: Any) -> Graph:
    """Four nodes, one edge, two of them isolated; one node in no part."""
    parts: dict[str, Any] = {
        "x": torch.ones(4, 2),
        "edge_index": torch.tensor([[0, 1], [1, 0]]),
        "y": torch.tensor([0, 1, 0, 1]),
        "num_classes": 2,
        "train_mask": torch.tensor([True, False, False, False]),
        "val_mask": torch.tensor([False, True, False, False]),
        "test_mask": torch.tensor([False, False, True, False]),
    }
    return Graph(**{**parts, **changes})


def test_isolated_nodes_and_unused_nodes_are_allowed() -> None:
    check_data(graph())
    check_data(graph().to_data())
    check_data(graph(edge_index=torch.empty(2, 0, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": torch.tensor([[0, 1]])}, r"\[1, 2\].*int64 \[2, E\]"),
        ({"y": torch.full((4,), 0.5)}, "task=values"),
        ({"train_mask": torch.zeros(4, dtype=torch.bool)}, "train_mask"),
        ({"train_mask": None}, "train_mask"),
    ],
)
def test_bad_graphs_are_refused_with_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_data(graph(**changes))


def test_a_node_without_a_label_may_be_in_no_mask() -> None:
    data = graph(y=torch.tensor([0, 1, 0, -1])).to_data()
    check_data(data)
    data.y[0] = -1
    with pytest.raises(DataError, match="train_mask: node 0"):
        check_data(data)
