"""The graph learner's formulas written out on matrices of nodes times nodes, and memory."""

from typing import Any

import torch
from plain.fedgls import similarity_of as slow_similarity
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flower_graph.ops.similarity import SparseRows

__all__ = ["slow_similarity"]


def sparse(x: Tensor) -> SparseRows:
    row, col = x.nonzero(as_tuple=True)
    return SparseRows(row, col, x[row, col], (x.shape[0], x.shape[1]))


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


class Largest(TorchDispatchMode):
    """Notes the most numbers that any one result has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, Tensor):
                held = one.values() if one.layout == torch.sparse_csr else one
                self.numbers = max(self.numbers, held.numel())
        return out
