"""Graphs with hidden nodes, and graphs mended by generated neighbours (Zhang et al., 2021).

A generated neighbour has one edge, to its parent. In a mended graph the real nodes come first, then
the generated ones.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.graph import pointers, row_entries


class Impaired(NamedTuple):
    """The visible part of a graph with hidden nodes, and the visible nodes' missing neighbours."""

    kept: Tensor  # [k] places of the nodes that are left
    edge_index: Tensor  # [2, e] edges among them, by place in kept
    missing: Tensor  # [k] how many neighbours of each node are hidden
    # [q] each: a node, by place in kept, and one of its hidden neighbours, by place in the whole
    # graph; sorted by parent
    parent: Tensor
    hidden: Tensor


class Slots(NamedTuple):
    """Places for generated neighbours: the first ``count[v]`` of every node."""

    parent: Tensor  # [r] the node that each hangs on, ascending
    slot: Tensor  # [r] which of the node's neighbours it is, from 0


def impair(edge_index: Tensor, is_hidden: Tensor) -> Impaired:
    """Hide nodes with their edges."""
    # edge_index [2, e], is_hidden [n]
    kept = (~is_hidden).nonzero().flatten()
    place = torch.cumsum(~is_hidden, 0) - 1
    source, target = edge_index
    inside = ~is_hidden[source] & ~is_hidden[target]
    cut = ~is_hidden[source] & is_hidden[target]
    parent, hidden = place[source[cut]], target[cut]
    order = torch.argsort(parent, stable=True)
    missing = torch.bincount(parent, minlength=kept.numel())
    return Impaired(kept, place[edge_index[:, inside]], missing, parent[order], hidden[order])


def slots(count: Tensor) -> Slots:
    """List the first ``count[v]`` slots of every node; ``count`` is ``[n]``."""
    parent = torch.repeat_interleave(torch.arange(count.numel(), device=count.device), count)
    first = count.cumsum(0) - count
    return Slots(parent, torch.arange(parent.numel(), device=count.device) - first[parent])


def mended_edges(edge_index: Tensor, num_nodes: int, parent: Tensor) -> Tensor:
    """Connect generated nodes to their parents."""
    # edge_index [2, e], parent [r]
    child = torch.arange(parent.numel(), device=parent.device) + num_nodes
    links = torch.stack([parent, child])[:, parent >= 0]
    return torch.cat([edge_index, links, links.flip(0)], dim=1)


def nearest_hidden(generated: Tensor, slot: Slots, graph: Impaired, x: Tensor) -> Tensor:
    """Find for each generated neighbour the nearest of its parent's hidden neighbours."""
    # generated [r, f], x [n, f]
    ptr = pointers(graph.parent, graph.missing.numel())
    row, entry = row_entries(ptr, slot.parent)
    candidate = graph.hidden[entry]
    distance = (x[candidate] - generated.detach()[row]).square_().sum(1)
    best = torch.full(slot.parent.shape, torch.inf, device=x.device)
    best = best.scatter_reduce(0, row, distance, "amin")
    hit = (distance == best[row]).nonzero().flatten().flip(0)  # flipped: the first is written last
    result = torch.empty_like(slot.parent)
    result[row[hit]] = candidate[hit]
    return result


def nearest_of_each(generated: Tensor, x: Tensor, ptr: list[int]) -> Tensor:
    """Find for each generated neighbour the nearest node of every client."""
    # generated [r, f], x [n, f] in CSR form
    # ||g - x||^2 without ||g||^2, which is the same for all nodes.
    row = torch.repeat_interleave(x.crow_indices().diff())
    square = x.values().new_zeros(x.shape[0]).index_add_(0, row, x.values().square())
    distance = (x @ generated.T.contiguous()).mul_(-2).add_(square[:, None])
    parts = itertools.pairwise(ptr)
    return torch.stack([distance[first:last].argmin(0) + first for first, last in parts])
