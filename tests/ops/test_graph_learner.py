"""Encoders and learned adjacency by hand, against the formulas on dense matrices, and gradients."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from flower_graph.ops.graph import Adjacency, propagate
from flower_graph.ops.graph_learner import LearnedGraph, edge_agreement

# The learned adjacency


@st.composite
def kept(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw each node's neighbours, all others among the cases, and values for all pairs."""
    n = draw(st.integers(2, 7))
    k = draw(st.integers(1, n - 1))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    order = torch.rand(n, n, generator=chance).fill_diagonal_(2).argsort(1)
    return order[:, :k], torch.randn(n, n, generator=chance, dtype=torch.float64)


def slow_adjacency(similarity: Tensor, near: list[list[int]]) -> Tensor:
    """Keep some pairs, make them symmetric, add the self-loops, normalise (17 and 18)."""
    n = similarity.shape[0]
    kept = torch.zeros(n, n, dtype=similarity.dtype)
    for i, others in enumerate(near):
        kept[i, others] = 1
    a = F.relu(similarity * kept)
    a = (a + a.T) / 2 + torch.eye(n, dtype=a.dtype)
    root = a.sum(1).rsqrt()
    return root[:, None] * a * root[None]


def matrix(edge_index: Tensor, weight: Tensor, n: int) -> Tensor:
    """Add up the entries of a graph, ``[n, n]``."""
    return weight.new_zeros(n, n).index_put(tuple(edge_index), weight, accumulate=True)


@given(case=kept())
def test_learned_adjacency_equals_the_formula(case: tuple[Tensor, Tensor]):
    neighbours, values = case
    n, k = neighbours.shape
    learned = LearnedGraph.of(neighbours, values.gather(1, neighbours))
    assert learned.edge_index.shape == (2, 2 * n * k + n)
    assert (learned.edge_index[0].diff() >= 0).all(), "rows rise"
    found = matrix(learned.edge_index, learned.entries, n)
    torch.testing.assert_close(found, slow_adjacency(values, neighbours.tolist()))
    assert torch.equal(learned.edges(), found.fill_diagonal_(0).nonzero().T)
    found = matrix(learned.edge_index, learned.entries, n)
    for one in learned.adjacency():
        torch.testing.assert_close(propagate(Adjacency(one, one), torch.eye(n).double()), found)


# Learned edges against the true ones


def undirected(pairs: list[tuple[int, int]]) -> Tensor:
    both = sorted([*pairs, *((b, a) for a, b in pairs)])
    return torch.tensor(both, dtype=torch.int64).reshape(-1, 2).T


def test_edges_of_two_clients_by_hand():
    """Client 0 has nodes 0 to 3 and learned one of two true edges; client 1 has nodes 4 and 5."""
    y = torch.tensor([0, 0, 1, -1, 1, 0])
    learned, true = undirected([(0, 1), (0, 2), (0, 3)]), undirected([(0, 1), (1, 2), (4, 5)])
    found = edge_agreement(learned, true, y, [0, 4, 6])
    names = ["precision", "recall", "homophily", "true-homophily", "degree", "true-degree"]
    assert list(found) == names
    assert [value[0].item() for value in found.values()] == [
        1 / 3,
        1 / 2,
        1 / 2,
        1 / 2,
        6 / 4,
        4 / 4,
    ]
    undefined, recall, homophily, *rest = (value[1].item() for value in found.values())
    assert math.isnan(undefined) and recall == 0 and math.isnan(homophily)
    assert rest == [0, 0, 1]
