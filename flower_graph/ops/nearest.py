"""The search for each node's most similar others, without a matrix of nodes times nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flower_graph.ops.similarity import (
    Rows,
    SparseRows,
    comparable,
    csr_rows,
    squared_distance,
    squares,
)

# Similarities that are held at a time, few enough to stay in a cache, and the nodes it takes.
BLOCK_NUMBERS, BLOCK_ROWS = 65_536, 32


class Nearest(NamedTuple):
    """Each node's most similar others."""

    neighbours: Tensor  # [n, k] int64 numbers, the most similar first
    # [n, k] products of each node's vector with theirs, as kept_similarity takes them
    products: Tensor


@torch.no_grad()
def nearest(e: Rows, k: int, similarity: str, block: int | None = None) -> Nearest:
    """Find the nodes that are most similar to each node, the node itself left out."""
    # Of similarities that are equal, as float32, the lower number comes first; those of two equal
    # vectors are. The result does not depend on ``block``.
    # e [n, r]
    n = e.shape[0]
    if not 1 <= k < n:
        raise ValueError(f"k = {k} neighbours of {n} nodes: 1 to {n - 1} are possible")
    block = block or max(BLOCK_ROWS, BLOCK_NUMBERS // n)
    e = comparable(e, similarity)
    square, neighbours, kept = squares(e), [], []
    for begin, products in _product_blocks(e, block):
        compared = products
        if similarity == "euclidean":
            local = square[begin : begin + block]
            compared = -squared_distance(products, square[:, None], local)
        neighbours.append(_most(compared, k, begin))
        kept.append(products.T.gather(1, neighbours[-1]))
    return Nearest(torch.cat(neighbours), torch.cat(kept).to(square.dtype))


def _product_blocks(e: Rows, block: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the first node of each block, and all nodes' products with the block's, ``[n, b]``."""
    # Sparse products add up a pair's common features in their order, whatever the block, and so
    # equal vectors have equal products. A dense product's rounding depends on the block: float64
    # keeps that out of what is left in float32.
    n, r = e.shape
    if not isinstance(e, SparseRows):
        e = e.double()
        yield from ((begin, e @ e[begin : begin + block].T) for begin in range(0, n, block))
        return
    matrix = csr_rows(e)
    starts = [*matrix.crow_indices()[:-1:block].tolist(), e.row.numel()]
    for number, begin in enumerate(range(0, n, block)):
        width, held = min(block, n - begin), slice(starts[number], starts[number + 1])
        turned = e.value.new_zeros(r * width)
        turned[e.col[held] * width + (e.row[held] - begin)] = e.value[held]
        out = e.value.new_empty(n, width)
        yield begin, torch.addmm(out, matrix, turned.view(r, width), beta=0, out=out)


def _most(similarity: Tensor, k: int, begin: int) -> Tensor:
    """Return the k largest of each column by number, ``[b, k]``; column 0 is node ``begin``."""
    # They lie in the k groups of neighbouring nodes that have the largest maxima: for whoever lies
    # in another group, each of these k has one that is larger, or as large and earlier. So only few
    # numbers need to be put in order.
    n, b = similarity.shape
    node = torch.arange(n, device=similarity.device)
    similarity[node[begin : begin + b], node[:b]] = -torch.inf  # the node itself
    size = max(1, math.isqrt(n // k))
    groups = n // size
    largest = similarity[: groups * size].view(groups, size, b).amax(1)
    chosen = _top(largest.T, node[:groups], min(k, groups))
    inside = (chosen[:, :, None] * size + node[:size]).flatten(1)
    number = torch.cat([inside, node[groups * size :].expand(b, -1)], dim=1)
    return _top(similarity.T.gather(1, number), number, k)


def _top(similarity: Tensor, number: Tensor, k: int) -> Tensor:
    """Return the numbers of the k largest in each row, ``[b, k]``; of equal ones, the lowest."""
    # Similarity and number become one integer, so that no two are equal: above, the float's bits,
    # whose order is that of the floats if the order of the negative ones is turned round; below,
    # the number, counted from the end.
    last = 0xFFFFFFFF
    bits = (similarity.float() + 0.0).view(torch.int32)  # + 0.0 makes 0 of -0
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    key = key.bitwise_left_shift_(32).add_(last - number)
    return last - (largest_of(key, k) & last)


# Sorting whole numbers: NumPy does it several times as fast as PyTorch on a CPU


def order_of(key: Tensor) -> Tensor:
    """Return what sorts some numbers."""
    # key [n]
    if key.device.type == "cpu":
        return torch.from_numpy(np.argsort(key.numpy()))
    return key.argsort()


def largest_of(key: Tensor, k: int) -> Tensor:
    """Return the largest numbers of each row."""
    # key [b, n]
    if key.device.type != "cpu":
        return key.topk(k, dim=1).values
    below = key.shape[1] - k
    kept = np.partition(key.numpy(), below, axis=1)[:, below:]
    return torch.from_numpy(np.sort(kept, axis=1)).flip(1)
