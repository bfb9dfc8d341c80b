"""Products and sums of ragged groups of rows, each group with its own weights.

The rows of all groups are concatenated; group ``g`` owns rows ``ptr[g]`` to ``ptr[g + 1]``. Padding
to the largest group would cost more than the loop: ego-networks differ in size by a factor of a
hundred.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from flower_graph.ops.graph import Saved


@contextmanager
def one_thread(small: bool) -> Iterator[None]:
    """Compute on one thread inside the block if its pieces are small."""
    # A product of one ego-network takes microseconds, as long as waking a thread does: two threads
    # take up to three times as long. A single group may be large, and keeps all threads.
    before = torch.get_num_threads()
    if not small or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def group_sizes(ptr: list[int]) -> list[int]:
    """Return how many rows each group has."""
    return [last - first for first, last in pairwise(ptr)]


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ptr: list[int]) -> Tensor:
    """Multiply each group of rows with the group's own matrix and add its own bias, if any."""
    # x [n, a], weight [g, a, b], bias [g, b]
    return _GroupedLinear.apply(x, weight, bias, ptr)  # type: ignore[no-any-return, no-untyped-call]


def grouped_add(x: Tensor, bias: Tensor, ptr: list[int]) -> Tensor:
    """Add each group's own bias to its rows."""
    # x [n, b], bias [g, b]
    return _GroupedAdd.apply(x, bias, ptr)  # type: ignore[no-any-return, no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Saved, x: Tensor, weight: Tensor, bias: Tensor | None, ptr: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.has_bias = group_sizes(ptr), bias is not None
        out = x.new_empty(x.shape[0], weight.shape[2])
        rows, matrices, into = x.split(ctx.sizes), weight.unbind(), out.split(ctx.sizes)
        with one_thread(len(ctx.sizes) > 1):
            if bias is None:
                for one, matrix, to in zip(rows, matrices, into, strict=True):
                    torch.mm(one, matrix, out=to)
            else:
                for one, matrix, local, to in zip(rows, matrices, bias, into, strict=True):
                    torch.addmm(local, one, matrix, out=to)
        return out

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_weight = torch.empty_like(weight)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        with one_thread(len(ctx.sizes) > 1):
            pieces = grad.split(ctx.sizes)
            for rows, piece, into in zip(x.split(ctx.sizes), pieces, grad_weight, strict=True):
                torch.mm(rows.T, piece, out=into)
            if grad_x is not None:
                for piece, local, into in zip(pieces, weight, grad_x.split(ctx.sizes), strict=True):
                    torch.mm(piece, local.T, out=into)
        return grad_x, grad_weight, _sum_pieces(grad, ctx.sizes) if ctx.has_bias else None, None


class _GroupedAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Saved, x: Tensor, bias: Tensor, ptr: list[int]) -> Tensor:
        ctx.sizes = group_sizes(ptr)
        out = torch.empty_like(x)
        parts = x.split(ctx.sizes), bias.unbind(), out.split(ctx.sizes)
        for rows, local, into in zip(*parts, strict=True):
            torch.add(rows, local, out=into)
        return out

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], _sum_pieces(grads[0], ctx.sizes), None


def _sum_pieces(values: Tensor, sizes: list[int]) -> Tensor:
    """Add up each group's rows, ``[n, b]`` to ``[g, b]``."""
    out = values.new_empty(len(sizes), values.shape[1])
    for piece, into in zip(values.split(sizes), out, strict=True):
        torch.sum(piece, 0, out=into)
    return out


def group_sum(values: Tensor, ptr: list[int]) -> Tensor:
    """Add up each group's rows: ``[n, ...]`` to ``[g, ...]``; a group without rows gives zero."""
    sizes = torch.tensor(ptr, device=values.device).diff()
    index = torch.repeat_interleave(torch.arange(sizes.numel(), device=values.device), sizes)
    return values.new_zeros(sizes.numel(), *values.shape[1:]).index_add_(0, index, values)


# Sums of rows by class or slot, and means of classes (prototypes)


def sums_by(kind: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Add up rows ``[n, h]`` by their kind ``[n]``, such as a class; count them, too."""
    # result [count, h] and [count]
    sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, kind, rows)
    return sums, torch.bincount(kind, minlength=count)


def distance_to_means(rows: Tensor, y: Tensor, means: Tensor) -> Tensor:
    """Return the mean squared distance of each row to its class's mean; 0 where that is NaN."""
    # rows [n, h], y [n], means [k, h], result [n]
    goal = means[y]
    has_goal = ~goal.isnan().any(1)
    return (rows - torch.where(has_goal[:, None], goal, 0.0)).square().mean(1) * has_goal
