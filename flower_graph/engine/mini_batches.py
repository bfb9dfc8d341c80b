"""Mini-batches: each step of an epoch uses some of each client's nodes.

The order of a client's nodes depends on its own generator only, not on the other clients of its
cohort. Step ``s`` of all clients is one tensor program; a client with fewer batches than others
skips the last steps.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.grouped import group_sum
from flower_graph.rng import generator

NO_BATCH = -1


class MiniBatch(NamedTuple):
    """The nodes of one step; None: all nodes, and every client takes the step."""

    nodes: Tensor | None = None  # [n] whether a node is in its client's batch
    moves: Tensor | None = None  # [c] whether a client has such a batch


class BatchOrder(NamedTuple):
    """The size of batches, and the seeds of their order."""

    size: int | None  # nodes of a client's batch; None: all at once
    seed: int
    server_round: int
    purpose: str  # of the steps, which have an order of their own


def epochs_of(
    among: Tensor, ptr: list[int], clients: Sequence[int], order: BatchOrder, *, epochs: int
) -> Iterator[list[MiniBatch]]:
    """Divide nodes into batches, anew in every epoch.

    Parameters
    ----------
    among : Tensor
        ``[n]`` bool, the nodes to divide.
    ptr : list of int
        ``c + 1`` bounds of the clients' nodes.
    clients : sequence of int
        The clients' numbers, ``c``.
    order : BatchOrder
        Size and seeds.
    epochs : int
        Number of epochs; each has every node once.

    Yields
    ------
    list of MiniBatch
        The steps of an epoch. A client without such nodes has one empty batch: it takes the first
        step as it does without batches.
    """
    if order.size is None:
        yield from ([MiniBatch()] for _ in range(epochs))
        return
    chances = [
        generator(order.seed, "batches", order.purpose, client, order.server_round)
        for client in clients
    ]
    counts = group_sum(among.long(), ptr)
    steps = ((counts + order.size - 1) // order.size).clamp(min=1).cpu()
    for _ in range(epochs):
        number = _numbers(among.cpu(), ptr, order.size, chances).to(among.device)
        yield [MiniBatch(number == s, steps > s) for s in range(int(steps.max()))]


def _numbers(
    among: Tensor, ptr: list[int], size: int, chances: Sequence[torch.Generator]
) -> Tensor:
    """Draw the batch of each node within its client, ``[n]``."""
    number = torch.full(among.shape, NO_BATCH)
    for (first, last), chance in zip(pairwise(ptr), chances, strict=True):
        own = first + among[first:last].nonzero().flatten()
        drawn = torch.randperm(own.numel(), generator=chance)
        number[own[drawn]] = torch.arange(own.numel()) // size
    return number
