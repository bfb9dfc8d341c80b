"""Graph operators against PyG, dense matrices and equation 6 written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.data.graph import to_undirected
from flower_graph.ops import graph
from flower_graph.ops.graph import (
    Adjacency,
    adjacency,
    csr,
    gcn_adjacency,
    laplacian_regulariser,
    laplacian_term,
    propagate,
    with_part,
)

# A triangle 0-1-2 with a tail 2-3; node 4 is alone.
EDGES = torch.tensor([[0, 1, 0, 2, 1, 2, 2, 3], [1, 0, 2, 0, 2, 1, 3, 2]])
DIRECTED = torch.tensor([[0, 0, 2, 3], [1, 2, 1, 0]])
NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw directed edges without self-loops or duplicates, isolated nodes included."""
    n = draw(st.integers(1, 7))
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    kept = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return torch.tensor(kept, dtype=torch.int64).reshape(-1, 2).T.contiguous(), n


def test_a_part_of_a_graph_is_replaced() -> None:
    """Its nodes need not be side by side."""
    nodes = torch.tensor([0, 5, 6, 11, 12])
    others = torch.tensor([1, 2, 3, 4, 7])
    edges = torch.cat([others[EDGES], nodes[DIRECTED]], 1)
    whole, part = gcn_adjacency(edges, 13), gcn_adjacency(EDGES, 5)
    found, wanted = with_part(whole, nodes, part), gcn_adjacency(edges[:, : EDGES.shape[1]], 13)
    dense = wanted.matrix.to_dense()
    dense[nodes[:, None], nodes] = part.matrix.to_dense()
    torch.testing.assert_close(found.matrix.to_dense(), dense)
    torch.testing.assert_close(found.transpose.to_dense(), dense.T)


@given(graph=graphs(), seed=st.integers(0, 100), width=st.sampled_from([3, graph.WIDE + 5]))
def test_propagate_equals_dense(graph: tuple[Tensor, int], seed: int, width: int):
    edge_index, n = graph
    draw = torch.Generator().manual_seed(seed)
    value = torch.rand(edge_index.shape[1], generator=draw)
    dense = torch.zeros(n, n)
    dense[edge_index[1], edge_index[0]] = value
    x, weight = torch.randn(2, n, width, generator=draw)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = propagate(adjacency(edge_index, value, n), ours), dense @ theirs
    torch.testing.assert_close(out, expected)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def equation_6(edge_index: Tensor, x: Tensor) -> Tensor:
    """Write the double sum out, ``N_i`` with the node itself."""
    total, size = x.new_zeros(()), 0
    for i in range(x.shape[0]):
        neighbours = [i] + [s for s, t in edge_index.T.tolist() if t == i]
        size += len(neighbours)
        for j in neighbours:
            total = total + (x[i] - x[j]).square().sum()
    return total / size


@given(graph=graphs(), seed=st.integers(0, 100))
def test_laplacian_equals_the_double_sum(graph: tuple[Tensor, int], seed: int):
    edge_index, n = graph
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    value = laplacian_regulariser(laplacian_term(edge_index, n), ours)
    expected = equation_6(edge_index, theirs)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    value.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_product_reads_nothing_of_the_memory_it_fills(monkeypatch: pytest.MonkeyPatch):
    def new_nan(self: Tensor, *size: int) -> Tensor:
        return self.new_full(size, torch.nan)

    x = torch.arange(10.0).reshape(5, 2).requires_grad_()
    for edges in (EDGES, NO_EDGES):
        graph = gcn_adjacency(edges, 5)
        wanted = graph.matrix.to_dense() @ x.detach()
        monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
        out = propagate(graph, x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        monkeypatch.undo()
        torch.testing.assert_close(out.detach(), wanted)
        assert grad.isfinite().all()
    nothing = csr(*torch.empty(2, 0, dtype=torch.int64), torch.empty(0), 5)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
    assert not propagate(Adjacency(nothing, nothing), x).any()


def test_sorted_edges_give_the_same_matrices() -> None:
    draw = torch.Generator().manual_seed(1)
    n = 10  # node 9 has no edge
    edges = to_undirected(torch.randint(9, (2, 25), generator=draw), n)
    kept = torch.rand(n, generator=draw) < 0.7
    whole = graph.sorted_edges(edges, n)
    assert whole is not None and torch.equal(whole.edge_index, edges)
    some = edges[:, kept[edges[0]] & kept[edges[1]]]
    assert 0 < some.shape[1] < edges.shape[1]
    for ours, theirs in ((whole, edges), (whole.among(kept), some)):
        assert torch.equal(ours.edge_index, theirs)
        pairs = [(graph.gcn_adjacency(ours, n), graph.gcn_adjacency(theirs, n))]
        terms = graph.laplacian_term(ours, n), graph.laplacian_term(theirs, n)
        pairs.append((terms[0].edges, terms[1].edges))
        assert torch.equal(terms[0].degree, terms[1].degree)
        assert terms[0].neighbourhoods == terms[1].neighbourhoods
        for left, right in pairs:
            for one, other in zip(left, right, strict=True):
                assert torch.equal(one.crow_indices(), other.crow_indices())
                assert torch.equal(one.col_indices(), other.col_indices())
                assert torch.equal(one.values(), other.values())
    assert graph.sorted_edges(edges.flip(1), n) is None
    assert graph.sorted_edges(edges[:, [0, 0]], n) is None  # an edge twice
