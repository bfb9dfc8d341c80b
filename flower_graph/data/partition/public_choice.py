"""Which nodes of a graph all clients are to hold: at random, by degree, or by a greedy cover."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from flower_graph.errors import DataError
from flower_graph.rng import generator

WAYS = ("random", "degree", "cover")


def choose_public(edge_index: Tensor, n: int, count: int, how: str, seed: int) -> Tensor:
    """Choose the public nodes; a smaller number with the same seed are the first of a larger."""
    order = torch.randperm(n, generator=generator(seed, "public-nodes"))
    if how == "random":
        return order[:count]
    degree = torch.bincount(edge_index[0], minlength=n)
    order = order[degree[order].argsort(descending=True, stable=True)]
    if how == "degree":
        return order[:count]
    if how == "cover":
        return greedy_cover(edge_index, order, count)
    raise DataError(f"partition.public = {how!r}: must be one of {', '.join(WAYS)}")


def greedy_cover(edge_index: Tensor, order: Tensor, count: int) -> Tensor:
    """Choose nodes one by one so that as many others as possible have a chosen neighbour."""
    # Each choice is the node that settles most: itself and its neighbours, as far as they are not
    # chosen and have no chosen neighbour. What a choice settles only shrinks as others are chosen,
    # so with the same number of nodes no choice settles more than 1 / (1 - 1/e) as many (Nemhauser
    # et al., 1978). Once all are settled the same begins anew for a second chosen neighbour, and so
    # on; a node that has fewer neighbours than that is settled when all of them are chosen.
    cover = _Cover(edge_index, order)
    while len(cover.chosen) < count and cover.next_level():
        cover.settle(count)
    left = [node for node in order.tolist() if not cover.is_chosen[node]]
    return torch.tensor([*cover.chosen, *left][:count], dtype=torch.int64)


class _Cover:
    """What is chosen so far, and how many chosen neighbours each node has."""

    # Lists rather than tensors: nearly all steps touch a few numbers.

    def __init__(self, edge_index: Tensor, order: Tensor) -> None:
        n = order.numel()
        counts = torch.bincount(edge_index[0], minlength=n).tolist()
        self.neighbours = [part.tolist() for part in edge_index[1].split(counts)]
        self.rank: list[int] = order.argsort().tolist()
        self.order: list[int] = order.tolist()
        self.is_chosen = [False] * n
        self.around = [0] * n  # chosen neighbours of each node
        self.chosen: list[int] = []
        self.open: list[bool] = []  # nodes that this level has still to settle
        self.gain: list[int] = []  # how many of them each node would settle

    def next_level(self) -> bool:
        """Open the nodes that lack a chosen neighbour more; False if none can have one more."""
        lacking = [
            not chosen and around < len(others)
            for chosen, around, others in zip(
                self.is_chosen, self.around, self.neighbours, strict=True
            )
        ]
        level = min((a for a, lacks in zip(self.around, lacking, strict=True) if lacks), default=-1)
        self.open = [
            lacks and around == level for around, lacks in zip(self.around, lacking, strict=True)
        ]
        self.gain = [
            local + sum(self.open[other] for other in others)
            for local, others in zip(self.open, self.neighbours, strict=True)
        ]
        return level >= 0

    def settle(self, count: int) -> None:
        """Choose nodes until this level has no open ones, or so many are chosen."""
        heap = [
            (-gain, self.rank[node])
            for node, gain in enumerate(self.gain)
            if gain and not self.is_chosen[node]
        ]
        heapify(heap)
        while heap and len(self.chosen) < count:
            promised, place = heappop(heap)
            node = self.order[place]
            if self.gain[node] == -promised:
                self._choose(node)
            elif self.gain[node]:
                # Gains only shrink, so a node that comes up with an old one is put back.
                heappush(heap, (-self.gain[node], place))

    def _choose(self, node: int) -> None:
        self.is_chosen[node] = True
        self.chosen.append(node)
        for other in self.neighbours[node]:
            self.around[other] += 1
        for settled in (node, *self.neighbours[node]):
            if self.open[settled]:
                self.open[settled] = False
                self.gain[settled] -= 1
                for other in self.neighbours[settled]:
                    self.gain[other] -= 1
