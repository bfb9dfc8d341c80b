"""Products and sums of ragged groups of rows, each group with its own weights.

The rows of all groups lie one behind the other; group ``g`` owns rows ``ptr[g]`` to
``ptr[g + 1]``. Padding to the largest group would cost more than the loop: ego-networks differ in
size by a factor of a hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.graph import csr_tensor, pointers


@contextmanager
def one_thread(groups: int) -> Iterator[None]:
    """Compute on one thread inside the block if it goes over several groups."""
    # A product of one ego-network takes microseconds, as long as waking a thread does: two threads
    # take up to three times as long. A single group may be large, and keeps all threads.
    before = torch.get_num_threads()
    if groups < 2 or before == 1:
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


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor, ptr: list[int]) -> Tensor:
    """Multiply each group of rows with the group's own matrix and add its own bias."""
    # x [n, a], weight [g, a, b], bias [g, b]
    return _GroupedLinear.apply(x, weight, bias, ptr)  # type: ignore[no-any-return, no-untyped-call]


def grouped_add(x: Tensor, bias: Tensor, ptr: list[int]) -> Tensor:
    """Add each group's own bias to its rows."""
    # x [n, b], bias [g, b]
    return _GroupedAdd.apply(x, bias, ptr)  # type: ignore[no-any-return, no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, ptr: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = group_sizes(ptr)
        out = x.new_empty(x.shape[0], weight.shape[2])
        parts = x.split(ctx.sizes), weight.unbind(), bias.unbind(), out.split(ctx.sizes)
        with one_thread(len(ctx.sizes)):
            for rows, matrix, local, into in zip(*parts, strict=True):
                torch.addmm(local, rows, matrix, out=into)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_weight = torch.empty_like(weight)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        with one_thread(len(ctx.sizes)):
            pieces = grad.split(ctx.sizes)
            for rows, piece, into in zip(x.split(ctx.sizes), pieces, grad_weight, strict=True):
                torch.mm(rows.T, piece, out=into)
            if grad_x is not None:
                for piece, local, into in zip(pieces, weight, grad_x.split(ctx.sizes), strict=True):
                    torch.mm(piece, local.T, out=into)
        return grad_x, grad_weight, _sum_pieces(grad, ctx.sizes), None


class _GroupedAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, ptr: list[int]) -> Tensor:
        ctx.sizes = group_sizes(ptr)
        out = torch.empty_like(x)
        parts = x.split(ctx.sizes), bias.unbind(), out.split(ctx.sizes)
        for rows, local, into in zip(*parts, strict=True):
            torch.add(rows, local, out=into)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
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


# The first layer of many clients: real nodes have few of the features, so their part is a sparse
# product with all clients' matrices below each other; generated nodes have dense features.


class WideRows(NamedTuple):
    """Sparse features of the clients' nodes."""

    matrix: Tensor  # [n, c f] CSR; client i's features are columns i f to (i + 1) f
    transpose: Tensor  # [a, n] CSR, the columns of matrix that are not empty
    active: Tensor  # [a] which columns these are


def wide_rows(x: Tensor, ptr: list[int]) -> WideRows:
    """Prepare ``[n, f]`` dense features of clients whose nodes begin at ``ptr``."""
    n, f = x.shape
    row, feature = x.nonzero(as_tuple=True)
    owner = torch.repeat_interleave(torch.tensor(ptr, device=x.device).diff())
    column, value = owner[row] * f + feature, x[row, feature]
    size = (n, (len(ptr) - 1) * f)
    matrix = csr_tensor(pointers(row, n), column.to(torch.int32), value, size)
    active, place = column.unique(return_inverse=True)
    order = torch.argsort(place, stable=True)
    begin = pointers(place, active.numel())
    by_column = row[order].to(torch.int32)
    return WideRows(matrix, csr_tensor(begin, by_column, value[order], (active.numel(), n)), active)


def wide_linear(real: WideRows, made: Tensor, weight: Tensor, ptr: list[int]) -> Tensor:
    """Multiply real and generated nodes with their clients' matrices."""
    # made [r, f], weight [c, f, h]
    return _WideLinear.apply(made, weight, real, ptr)  # type: ignore[no-any-return, no-untyped-call]


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, weight: Tensor, real: WideRows, ptr: list[int]) -> Tensor:
        ctx.save_for_backward(made, weight)
        ctx.real, ctx.ptr = real, ptr
        n = real.matrix.shape[0]
        out = weight.new_empty(n + made.shape[0], weight.shape[2])
        out[:n] = real.matrix @ weight.reshape(-1, weight.shape[2])
        for client, (first, last) in enumerate(pairwise(ptr)):
            torch.mm(made[first:last], weight[client], out=out[n + first : n + last])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        made, weight = ctx.saved_tensors
        real, n = ctx.real, ctx.real.matrix.shape[0]
        whole = grads[0].contiguous()
        grad = whole[n:]
        grad_made = torch.empty_like(made) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for client, (first, last) in enumerate(pairwise(ctx.ptr)):
            torch.mm(made[first:last].T, grad[first:last], out=grad_weight[client])
            if grad_made is not None:
                torch.mm(grad[first:last], weight[client].T, out=grad_made[first:last])
        flat = grad_weight.view(-1, weight.shape[2])
        flat.index_add_(0, real.active, real.transpose @ whole[:n])
        return grad_made, grad_weight, None, None
