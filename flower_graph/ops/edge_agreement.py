"""How well learned edges agree with the true ones."""

from __future__ import annotations

import torch
from torch import Tensor

from flower_graph.ops.grouped import group_sizes


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
        known = (one >= 0) & (other >= 0)
        return known, known & (one == other)

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
