"""Dropout of large matrices, bit-identical to PyTorch's, with less memory.

On a CPU PyTorch keeps a float32 matrix for the backward pass of each dropout; this keeps one byte,
or nothing, a number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flower_graph.ops.graph import Adjacency, Saved, csr_tensor


def dropout(x: Tensor, rate: float, *, training: bool) -> Tensor:
    """Drop a share of the numbers, and scale the others up."""
    if not (training and 0 < rate < 1 and x.is_cpu):
        return functional.dropout(x, rate, training)
    return kept_of(x, torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - rate), rate)


def kept_of(x: Tensor, kept: Tensor, rate: float) -> Tensor:
    """Drop all numbers but those in ``kept``, and scale these up."""
    return _Dropout.apply(x, kept, _scale(x, rate))  # type: ignore[no-any-return, no-untyped-call]


def relu_dropout_(x: Tensor, rate: float, *, training: bool) -> Tensor:
    """Apply ReLU, then dropout, in place."""
    if not (training and 0 < rate < 1 and x.is_cpu):
        return functional.dropout(x.relu_(), rate, training)
    return _ReluDropout.apply(x, rate)  # type: ignore[no-any-return, no-untyped-call]


class _Dropout(torch.autograd.Function):
    """Keeps a byte of each number for the backward pass, since PyTorch has no bits."""

    @staticmethod
    def forward(ctx: Saved, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(kept)
        return torch.mul(x, kept).mul_(scale)

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return torch.mul(grads[0], kept).mul_(ctx.scale), None, None


class _ReluDropout(torch.autograd.Function):
    """Keeps only its result for the backward pass: positive entries passed both steps."""

    @staticmethod
    def forward(ctx: Saved, x: Tensor, rate: float) -> Tensor:
        kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - rate)
        ctx.scale = _scale(x, rate)
        x.relu_().mul_(kept).mul_(ctx.scale)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return torch.mul(grads[0], result > 0).mul_(ctx.scale), None


def _scale(x: Tensor, rate: float) -> float:
    return torch.ones((), dtype=x.dtype).div_(1 - rate).item()


# Of several networks -----------------------------------------------------------------------------

# PyTorch's dropout draws from one stream for all networks, so that a client's draws would depend
# on who shares its cohort. Here every network has a generator of its own for every round, and its
# draws for all steps of the round come at once.


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
