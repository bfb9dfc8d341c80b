"""Undirected edges, row normalisation, dense features, and what is refused with which value."""

from __future__ import annotations

from dataclasses import replace

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
from flower_graph.data.graph import check_dense_size, normalize_rows, take_rows, to_undirected
from flower_graph.data.sources.cache import copy_tree
from flower_graph.errors import DataError


def test_to_undirected_drops_loops_and_duplicates_and_sorts():
    edges = torch.tensor([[2, 0, 1, 2, 0], [0, 2, 1, 0, 1]])
    assert to_undirected(edges, 3).tolist() == [[0, 0, 1, 2], [1, 2, 0, 0]]
    assert to_undirected(edges[:, 2:3], 2).shape == (2, 0)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40))
def test_to_undirected_is_what_pyg_gives(pairs):
    edges = torch.tensor(pairs).t()
    expected = coalesce(pyg_to_undirected(remove_self_loops(edges)[0], num_nodes=7), num_nodes=7)
    assert torch.equal(to_undirected(edges, 7), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1), st.data())
def test_rows_of_a_sparse_matrix_are_those_of_the_dense_one(numbers, data):
    x = torch.tensor(numbers, dtype=torch.float32)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(numbers) - 1), min_size=1)))
    taken = take_rows(x.to_sparse_csr(), rows)
    assert taken.layout == torch.sparse_csr
    assert torch.equal(taken.to_dense(), take_rows(x, rows))
    assert torch.equal(take_rows(x, rows), x[rows])


def test_rows_are_divided_by_their_sum_of_absolute_values():
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0], [-1.0, 1.0], [0.1, 0.1]])
    expected = torch.tensor([[0.25, 0.75], [0.0, 0.0], [-0.5, 0.5], [0.5, 0.5]])
    torch.testing.assert_close(normalize_rows(x), expected)
    assert x[0, 1] == 3.0  # not in place


@pytest.mark.parametrize("name", ["Cora", "CiteSeer", "PubMed"])
def test_rows_are_normalised_as_pyg_does_it(name, data_root, tmp_path):
    copy_tree(data_root / "Planetoid" / name, tmp_path / name)
    data = Planetoid(str(tmp_path), name)[0]
    torch.testing.assert_close(
        normalize_rows(data.x), NormalizeFeatures()(Data(x=data.x.clone())).x, atol=1e-7, rtol=0
    )


def test_sparse_features_that_would_be_too_large_are_refused_before_anything_is_made():
    huge = torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.int64), [], (10**6, 10**5), check_invariants=True
    )
    with pytest.raises(DataError, match=r"400\.0.*limit.*2\.0"):
        read_features(huge, [])
    check_dense_size(1_000_000, 500, "")
    with pytest.raises(DataError, match="do that"):
        check_dense_size(1_000_000, 501, "do that")


# Checks before training -------------------------------------------------------------------------


def test_a_graph_to_train_on_has_edges_or_not_and_a_labelled_node_in_each_mask():
    train, val, test, _ = torch.eye(4, dtype=torch.bool)
    edges, y = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1, 0, -1])
    graph = Graph(torch.ones(4, 2), edges, y, 2, train, val, test)
    for good in (graph, graph.to_data(), replace(graph, edge_index=edges[:, :0])):
        check_data(good)
    for changes, words in (
        ({"edge_index": edges[:1]}, r"\[1, 2\].*int64 \[2, E\]"),
        ({"y": torch.full((4,), 0.5)}, "task=values"),
        ({"y": -y}, "val_mask: node 1"),
        ({"train_mask": train & val}, "train_mask"),
        ({"train_mask": None}, "train_mask"),
    ):
        with pytest.raises(DataError, match=words):
            check_data(replace(graph, **changes))
