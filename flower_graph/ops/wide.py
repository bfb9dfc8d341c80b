"""The first layer of many clients: sparse features of real nodes, dense ones of generated nodes.

Every client has its own ``[f, h]`` matrix. Real nodes have few of the features, so their part is a
sparse product with all clients' matrices below each other.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.graph import csr_tensor, pointers


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
