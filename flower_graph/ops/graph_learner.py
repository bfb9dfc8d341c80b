"""The graph learner of a client: from features to a graph, and its comparison with the true one.

``Â = P(Gen(X; φ))`` (FedGLS, equation 5). ``Gen`` encodes the features (equations 14 and 15) and
compares the nodes (13); ``P`` keeps each node's ``k`` most similar others (16; both in
``similarity.py``) and makes a symmetric, normalised adjacency of them (17 and 18):
``σ(A) = ReLU(A)``, ``A <- (σ(A) + σ(A)^T) / 2``, ``A <- D^(-1/2) (A + I) D^(-1/2)``.

The paper's k counts the node itself, whose cosine with itself is 1. Here the ``I`` is that
self-loop, and k counts other nodes. The clients of a cohort are concatenated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flower_graph.ops.graph import Adjacency, csr_tensor, propagate, weighted_product
from flower_graph.ops.grouped import group_sizes, grouped_linear
from flower_graph.ops.links import contains
from flower_graph.ops.similarity import SparseRows


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


class LearnedGraph(NamedTuple):
    """The symmetric, normalised graph of each node's kept neighbours, with its gradient."""

    # [2, 2nk + n] row and column, sorted by row, then by column. Every kept pair is there in both
    # directions, so twice in each if the two keep each other; and all self-loops
    edge_index: Tensor
    ptr: Tensor  # [n + 1] int32; the entries of row i are ptr[i] to ptr[i + 1]
    entries: Tensor  # [2nk + n]

    @classmethod
    def of(cls, neighbours: Tensor, similarities: Tensor) -> LearnedGraph:
        # Sorting whole numbers takes a third of finding out what sorts them. So an entry is one
        # number: row, column, the place of its similarity, and whether that is in the column's list
        # neighbours, similarities [n, k]
        n, k = neighbours.shape
        bits, tag_bits = n.bit_length(), (2 * k).bit_length()
        node = torch.arange(n, device=neighbours.device)[:, None]
        tag = 2 * torch.arange(k + 1, device=neighbours.device)
        own = ((node << bits | torch.cat([neighbours, node], 1)) << tag_bits) + tag
        other = ((neighbours << bits | node) << tag_bits) + (tag[:k] + 1)
        key = torch.cat([own.reshape(-1), other.reshape(-1)]).sort().values
        tag = key & ((1 << tag_bits) - 1)
        key >>= tag_bits
        row, col = key >> bits, key & ((1 << bits) - 1)
        keeper = row + (col - row) * (tag & 1)
        ptr = torch.searchsorted(row, torch.arange(n + 1, device=row.device), out_int32=True)
        place = keeper * (k + 1) + (tag >> 1)  # of an entry's similarity, the last for self-loops
        weights = F.pad(F.relu(similarities) / 2, (0, 1), value=1).reshape(-1)
        weight = weights.index_select(0, place)
        root = weight.new_zeros(n).index_add(0, row, weight).rsqrt()  # above 0 by the self-loop
        weight = weight * (root.index_select(0, row) * root.index_select(0, col))
        return cls(torch.stack([row, col]), ptr, weight)

    def propagate(self, x: Tensor) -> Tensor:
        """Sum the neighbours' vectors, ``[n, h]``; the entries have gradients."""
        return weighted_product(self.entries, x, self.ptr, self.edge_index[1].to(torch.int32))

    def adjacency(self) -> Adjacency:
        """Return the constant operator, for ``propagate`` of ``ops.graph``."""
        n, col = self.ptr.numel() - 1, self.edge_index[1].to(torch.int32)
        matrix = csr_tensor(self.ptr, col, self.entries.detach(), (n, n))
        return Adjacency(matrix, matrix)

    def edges(self) -> Tensor:
        """Return the edges ``[2, e]``, each direction once, without self-loops."""
        row, col = self.edge_index
        bits = int(col.max() + 1).bit_length() if col.numel() else 1
        is_edge = (self.entries.detach() > 0) & (row != col)
        key = (row << bits | col).masked_select(is_edge).unique_consecutive()
        return torch.stack([key >> bits, key & ((1 << bits) - 1)])


# Learned edges against the true ones


def edge_agreement(learned: Tensor, true: Tensor, y: Tensor, ptr: list[int]) -> dict[str, Tensor]:
    """Compare learned edges with true ones, client by client."""
    # learned, true [2, e], y [n]
    n, sizes = y.numel(), torch.tensor(group_sizes(ptr), device=y.device)
    clients = sizes.numel()
    owner = torch.arange(clients, device=y.device).repeat_interleave(sizes)

    def count(edges: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count edges by client: all, those between labelled nodes, and those of equal labels."""
        one, other = y.index_select(0, edges[0]), y.index_select(0, edges[1])
        is_labelled = (one >= 0) & (other >= 0)
        kind = 3 * place + is_labelled + (is_labelled & (one == other))
        counts = torch.bincount(kind, minlength=3 * clients).view(clients, 3).double()
        return counts.sum(1), counts[:, 1] + counts[:, 2], counts[:, 2]

    learned_key, true_key = (row * n + col for row, col in (learned, true))
    true_owner = owner.index_select(0, true[0])
    found = true_owner[contains(learned_key, true_key)]
    both = torch.bincount(found, minlength=clients).double()
    result, found_known, found_alike = count(learned, owner.index_select(0, learned[0]))
    wanted, true_known, true_alike = count(true, true_owner)
    return {
        "precision": both / result,
        "recall": both / wanted,
        "homophily": found_alike / found_known,
        "true-homophily": true_alike / true_known,
        "degree": result / sizes,
        "true-degree": wanted / sizes,
    }
