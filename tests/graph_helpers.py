"""Small graphs of clients that are given by what a batch needs, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Toy:
    """One client; as a batch wants it."""

    client: int
    x: Tensor
    y: Tensor
    edge_index: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor


def toy(
    client: int,
    x: Sequence[Sequence[float]],
    y: Sequence[int],
    edges: Sequence[tuple[int, int]] = (),
    roles: str = "",
) -> Toy:
    """Make a client by hand; ``roles`` has a letter a node, ``t``, ``v``, ``e`` (test) or ``-``."""
    roles = roles or "t" * len(y)
    both = sorted(pair for edge in edges for pair in (edge, edge[::-1]))
    index = torch.tensor(both, dtype=torch.long).reshape(-1, 2).T
    masks = [torch.tensor([role == letter for role in roles]) for letter in "tve"]
    return Toy(client, torch.tensor(x), torch.tensor(y), index, *masks)


def random_toy(client: int, nodes: int, features: int, seed: int) -> Toy:
    """Draw a client: about a third of its features, and of its edges, are there."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(nodes, features, generator=draw)
    x *= torch.rand(nodes, features, generator=draw) < 0.35
    upper = (torch.rand(nodes, nodes, generator=draw) < 0.35).triu(1)
    y = torch.randint(3, (nodes,), generator=draw)
    everyone = torch.ones(nodes, dtype=torch.bool)
    edges = (upper | upper.T).nonzero().T
    return Toy(client, x, y, edges, everyone, ~everyone, ~everyone)
