"""Dropout of several networks.

PyTorch's dropout draws from one stream for all networks, so that a client's draws would depend on
who shares its cohort. Here every network has a generator of its own for every round, and its draws
for all steps of the round come at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.graph import Adjacency, csr_tensor


def kept_of(x: Tensor, kept: Tensor, rate: float) -> Tensor:
    """Drop all numbers but those in ``kept``, and scale these up as PyTorch does."""
    return x.mul(kept).mul_(torch.ones((), dtype=x.dtype).div_(1 - rate).item())


class DropoutMask(NamedTuple):
    """The factors of dropout in each of ``E`` steps: 0 or 1 / (1 - p); None: no dropout."""

    inputs: Tensor | None  # [E, z] for each entry of the batch's features, node by node
    hidden: Tensor | None  # [E, n, h] for each number in the hidden layer


def draw_kept(
    x: Adjacency,
    ptr: list[int],
    chances: Sequence[torch.Generator],
    steps: int,
    hidden: int,
    input_rate: float,
    hidden_rate: float,
) -> DropoutMask:
    """Draw the dropout masks of a round; ``ptr`` has the bounds of the networks' nodes."""
    device = x.matrix.device
    begin = x.matrix.crow_indices()[torch.tensor(ptr, device=device)].tolist()
    inputs, inner = [], []
    for number, rng in enumerate(chances):
        if input_rate:
            entries = begin[number + 1] - begin[number]
            inputs.append(draw_mask((steps, entries), input_rate, rng))
        if hidden_rate:
            n = ptr[number + 1] - ptr[number]
            inner.append(draw_mask((steps, n, hidden), hidden_rate, rng))
    return DropoutMask(
        *(torch.cat(part, 1).to(device) if part else None for part in (inputs, inner))
    )


def draw_mask(shape: tuple[int, ...], rate: float, chance: torch.Generator) -> Tensor:
    """Draw a dropout mask: 0 or 1 / (1 - p)."""
    count = torch.Size(shape).numel()
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=chance)
    threshold = max(1, round(256 * (1 - rate)))
    stays = words.view(torch.uint8)[:count] < threshold if threshold < 256 else torch.ones(count)
    return stays.to(torch.float32).mul_(256 / threshold).reshape(shape)


def with_dropout(x: Adjacency, turn: Tensor, kept: Tensor) -> Adjacency:
    """Multiply each entry of sparse features."""
    # x [n, r], turn [z], kept [z]
    values = x.matrix.values() * kept
    pairs = zip(x, (values, values.index_select(0, turn)), strict=True)
    parts = (
        csr_tensor(one.crow_indices(), one.col_indices(), value, (one.shape[0], one.shape[1]))
        for one, value in pairs
    )
    return Adjacency(*parts)


def turn_of(x: Adjacency) -> Tensor:
    """Return the index into the matrix's entries of each entry of the transpose, ``[z]``."""
    return x.matrix.col_indices().argsort(stable=True)
