"""The graph learner of a client: from features to a graph, and how that compares with the true one.

``Â = P(Gen(X; φ))`` (FedGLS, equation 5). ``Gen`` encodes the features (equations 14 and 15) and
compares the nodes (13); ``P`` keeps each node's ``k`` most similar others (16; both in
``similarity.py``) and makes a symmetric, normalised adjacency of them (17 and 18):
``σ(A) = ReLU(A)``, ``A <- (σ(A) + σ(A)^T) / 2``, ``A <- D^(-1/2) (A + I) D^(-1/2)``.

The paper's k counts the node itself, whose cosine with itself is 1: here it is the self-loop of a
GCN, the ``I``, and k counts others. The clients of a cohort lie one behind the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flower_graph.ops.context import Saved
from flower_graph.ops.graph import Adjacency, csr_tensor, pointers, propagate
from flower_graph.ops.grouped import group_sizes, grouped_linear
from flower_graph.ops.similarity import SparseRows, order_of, sampled_products


def attentive_encode(x: SparseRows, weights: Tensor) -> SparseRows:
    """Weight the features, layer by layer: ``E^(l) = ReLU(E^(l-1) ⊙ w^(l))``, row by row."""
    # A zero stays zero, so only values change. With weights of one, features that are not negative
    # come out as they are.
    # x [n, r], weights [L, r]
    value = x.value
    for weight in weights.unbind():
        value = F.relu(value * weight.index_select(0, x.col))
    return x._replace(value=value)


def mlp_encode(x: Adjacency, first: Tensor, rest: Tensor, ptr: list[int]) -> Tensor:
    """Encode the features by MLPs without biases: ``E^(l) = ReLU(E^(l-1) W^(l))``."""
    # x [n, r], first [r, d], rest [c, L - 1, d, d]
    e = F.relu(propagate(x, first))
    none = rest.new_zeros(rest.shape[0], rest.shape[-1])
    for weight in rest.unbind(1):
        e = F.relu(grouped_linear(e, weight, none, ptr))
    return e


class Pattern(NamedTuple):
    """Where a learned graph has entries, and which kept similarity is in each."""

    # [2, 2nk + n] row and column, sorted by row, then by column. Every kept pair is there in both
    # directions, so twice in each if the two keep each other; and all self-loops
    edge_index: Tensor
    kept: Tensor  # [2nk + n] number of the similarity, counted row by row; nk for a self-loop
    num_nodes: int  # n


def symmetric_pattern(neighbours: Tensor) -> Pattern:
    """Lay out the symmetric graph of each node's kept neighbours."""
    # neighbours [n, k]
    n, k = neighbours.shape
    node = torch.arange(n, device=neighbours.device)
    local, other = node.repeat_interleave(k), neighbours.reshape(-1)
    number = torch.arange(n * k, device=neighbours.device)
    row, col = torch.cat([node, local, other]), torch.cat([node, other, local])
    kept = torch.cat([number.new_full((n,), n * k), number, number])
    order = order_of(row * n + col)
    return Pattern(torch.stack([row[order], col[order]]), kept[order], n)


def learned_adjacency(values: Tensor, pattern: Pattern) -> Tensor:
    """Compute the entries of the normalised learned adjacency."""
    # values [n, k]
    row, col = pattern.edge_index
    half = F.relu(values).reshape(-1) / 2
    weight = torch.cat([half, half.new_ones(1)]).index_select(0, pattern.kept)
    degree = weight.new_zeros(pattern.num_nodes).index_add(0, row, weight)
    root = degree.rsqrt()  # the self-loop keeps every degree above 0
    return weight * (root.index_select(0, row) * root.index_select(0, col))


def weighted_propagate(edge_index: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Sum the neighbours' vectors over a symmetric graph whose weights have gradients."""
    # edge_index [2, e], weight [e], x [n, h]
    ptr, col = pointers(edge_index[0], x.shape[0]), edge_index[1].to(torch.int32)
    return _WeightedProduct.apply(weight, x.contiguous(), ptr, col)  # type: ignore[no-any-return, no-untyped-call]


class _WeightedProduct(torch.autograd.Function):
    """``A x`` for a symmetric ``A``; the gradient by entry ``ij`` is ``g_i . x_j``."""

    @staticmethod
    def forward(ctx: Saved, weight: Tensor, x: Tensor, ptr: Tensor, col: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x, ptr, col)
        return propagate(_symmetric(ptr, col, weight), x)

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        weight, x, ptr, col = ctx.saved_tensors
        grad, grad_x = grads[0].contiguous(), None
        if ctx.needs_input_grad[1]:
            grad_x = propagate(_symmetric(ptr, col, weight), grad)
        return sampled_products(ptr, col, grad, x), grad_x, None, None


def _symmetric(ptr: Tensor, col: Tensor, weight: Tensor) -> Adjacency:
    n = ptr.numel() - 1
    matrix = csr_tensor(ptr, col, weight, (n, n))
    return Adjacency(matrix, matrix)


def to_adjacency(edge_index: Tensor, weight: Tensor, n: int) -> Adjacency:
    """Make the constant operator of a learned graph, for ``propagate``."""
    # edge_index [2, e], weight [e]
    row, col = edge_index
    return _symmetric(pointers(row, n), col.to(torch.int32), weight.detach())


# Learned edges against the true ones


def distinct_edges(edge_index: Tensor, weight: Tensor, n: int) -> Tensor:
    """Return the edges of a learned graph, each direction once."""
    # edge_index [2, e], weight [e]
    row, col = edge_index
    key = torch.unique_consecutive((row * n + col)[(weight > 0) & (row != col)])
    return torch.stack([key // n, key % n])


def edge_agreement(learned: Tensor, true: Tensor, y: Tensor, ptr: list[int]) -> dict[str, Tensor]:
    """Compare learned edges with true ones, client by client."""
    # learned, true [2, e], y [n]
    n, sizes = y.numel(), torch.tensor(group_sizes(ptr), device=y.device)
    owner = torch.arange(sizes.numel(), device=y.device).repeat_interleave(sizes)

    def count(edges: Tensor, *conditions: Tensor) -> Tensor:
        """Count edges, and those that meet each condition, by client: ``[1 + conditions, c]``."""
        marks = torch.stack([torch.ones_like(edges[0], dtype=torch.bool), *conditions])
        sums = torch.zeros(len(marks), sizes.numel(), dtype=torch.float64, device=y.device)
        return sums.index_add_(1, owner[edges[0]], marks.double())

    def alike(edges: Tensor) -> tuple[Tensor, Tensor]:
        """Say which edges join two nodes with labels, and which of these the same."""
        one, other = y[edges[0]], y[edges[1]]
        is_labelled = (one >= 0) & (other >= 0)
        return is_labelled, is_labelled & (one == other)

    learned_key, true_key = (row * n + col for row, col in (learned, true))
    sentinel = learned_key.new_full((1,), n * n)  # larger than any key
    found_key = torch.cat([learned_key, sentinel])[torch.searchsorted(learned_key, true_key)]
    result, found_known, found_alike = count(learned, *alike(learned))
    wanted, true_known, true_alike, both = count(true, *alike(true), found_key == true_key)
    return {
        "precision": both / result,
        "recall": both / wanted,
        "homophily": found_alike / found_known,
        "true-homophily": true_alike / true_known,
        "degree": result / sizes,
        "true-degree": wanted / sizes,
    }
