"""Dropout of large matrices, bit-identical to PyTorch's, with less memory.

On a CPU PyTorch keeps a float32 matrix for the backward pass of each dropout; this keeps one byte,
or nothing, a number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flower_graph.ops.graph import Saved


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
