"""Dropout for a batch of networks: what a network loses depends on it and the round alone.

PyTorch's dropout draws from one stream for the whole batch, so that a client's draws would depend
on who shares its cohort. Here every network has a generator of its own for every round, and its
draws for all steps of the round come at once.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.engine.graph_batch import GraphBatch
from flower_graph.ops.graph import Adjacency, csr_tensor


class DropoutMask(NamedTuple):
    """What dropout leaves in each of ``E`` steps: 0, or what makes up for the losses; None: all."""

    inputs: Tensor | None  # [E, z] for each entry of the batch's features, node by node
    hidden: Tensor | None  # [E, n, h] for each number in the hidden layer


def draw_kept(
    batch: GraphBatch,
    chances: Sequence[torch.Generator],
    *,
    steps: int,
    hidden: int,
    input_rate: float,
    hidden_rate: float,
) -> DropoutMask:
    """Draw what a round's dropout leaves."""
    begin = batch.x.matrix.crow_indices()[torch.tensor(batch.ptr, device=batch.y.device)].tolist()
    inputs, inner = [], []
    for place, rng in enumerate(chances):
        if input_rate:
            entries = begin[place + 1] - begin[place]
            inputs.append(draw_mask((steps, entries), input_rate, rng))
        if hidden_rate:
            n = batch.ptr[place + 1] - batch.ptr[place]
            inner.append(draw_mask((steps, n, hidden), hidden_rate, rng))
    device = batch.y.device
    return DropoutMask(
        *(torch.cat(part, 1).to(device) if part else None for part in (inputs, inner))
    )


def draw_mask(shape: tuple[int, ...], rate: float, chance: torch.Generator) -> Tensor:
    """Draw zeros and what makes up for them."""
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
    """Return for each entry of the transpose which entry of the matrix it is, ``[z]``."""
    return x.matrix.col_indices().argsort(stable=True)
