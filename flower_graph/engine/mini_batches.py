"""Mini-batches: each step of an epoch uses some of each client's nodes.

The order of a client's nodes depends on its own generator only, not on the other clients of its
cohort. Step ``s`` of all clients is one tensor program; a client with fewer batches than others
skips the last steps.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.engine.cohort import GraphOnDevice
from flower_graph.rng import generator

NO_BATCH = -1


class MiniBatch(NamedTuple):
    """The nodes of one step; None: all nodes, and every client takes the step."""

    nodes: Tensor | None = None  # [n] whether a node is in its client's batch
    moves: Tensor | None = None  # [c] whether a client has such a batch


def epochs_of(
    graph: GraphOnDevice,
    among: Tensor,
    size: int | None,
    epochs: int,
    seed: int,
    purpose: str,
    server_round: int,
) -> Iterator[list[MiniBatch]]:
    """Divide nodes into batches, anew in every epoch.

    Parameters
    ----------
    graph : GraphOnDevice
        The clients' graph.
    among : Tensor
        ``[n]`` bool, the nodes to divide.
    size : int or None
        Nodes of a client's batch; None: all at once.
    epochs : int
        Number of epochs; each has every node once.
    seed, purpose, server_round
        What the order depends on, besides the client.

    Yields
    ------
    list of MiniBatch
        The steps of an epoch. A client without such nodes has one empty batch: it takes the first
        step as it does without batches.
    """
    if size is None:
        yield from ([MiniBatch()] for _ in range(epochs))
        return
    chances = [generator(seed, "batches", purpose, one, server_round) for one in graph.clients]
    here = among.cpu()
    nodes = [first + here[first:last].nonzero().flatten() for first, last in pairwise(graph.ptr)]
    steps = torch.tensor([max(1, -(-own.numel() // size)) for own in nodes])
    for _ in range(epochs):
        number = torch.full(among.shape, NO_BATCH)
        for own, chance in zip(nodes, chances, strict=True):
            drawn = torch.randperm(own.numel(), generator=chance)
            number[own[drawn]] = torch.arange(own.numel()) // size
        number = number.to(among.device)
        yield [MiniBatch(number == s, steps > s) for s in range(int(steps.max()))]
