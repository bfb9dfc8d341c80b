"""The graph learner's formulas written out on matrices of nodes times nodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flower_graph.ops.similarity import SparseRows


def sparse(x: Tensor) -> SparseRows:
    """Take the entries of a matrix that are not zero."""
    row, col = x.nonzero(as_tuple=True)
    return SparseRows(row, col, x[row, col], (x.shape[0], x.shape[1]))


def slow_similarity(e: Tensor, similarity: str) -> Tensor:
    """Compare all nodes, ``[n, n]`` (equation 13)."""
    if similarity == "cosine":
        return F.cosine_similarity(e[:, None], e[None], dim=2, eps=1e-30)
    if similarity == "inner":
        return (e[:, None] * e[None]).sum(2)
    square = (e[:, None] - e[None]).square().sum(2)
    none = square == 0
    return 1 / (1 + square.masked_fill(none, 1).sqrt().masked_fill(none, 0))


def slow_nearest(similarity: Tensor, k: int) -> list[list[int]]:
    """Sort each node's others by similarity, ties by number, and keep k (equation 16)."""
    rows = similarity.tolist()
    return [
        sorted((j for j in range(len(row)) if j != i), key=lambda j: (-row[j], j))[:k]
        for i, row in enumerate(rows)
    ]


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
