"""Similarities of known pairs of nodes (equation 13 of FedGLS), and the most similar nodes.

Vectors of nodes are dense or sparse. No array here has the size nodes x nodes or pairs x features:
a pair's similarity is a product of two rows, and its gradient another.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.graph import (
    Adjacency,
    Saved,
    csr,
    csr_tensor,
    pointers,
    propagate,
    sampled_products,
)
from flower_graph.ops.grouped import group_sizes

SIMILARITIES = ("cosine", "euclidean", "inner")
# Numbers of a sparse matrix that are held densely at a time, and the columns it takes at least.
DENSE_NUMBERS, DENSE_COLUMNS = 4_194_304, 64
SQUARE_NUMBERS = 262_144  # pairs of nodes that may be held, all of a small client's
# Similarities that the search holds at a time: few enough for a cache; and the nodes it takes.
BLOCK_NUMBERS, BLOCK_ROWS = 65_536, 32
GROUP = 8  # nodes of a group from which on it is quicker to look for the best groups first
# A squared distance below this share of the squared lengths is the rounding of a zero.
ZERO_SHARE = 1e-13


class SparseRows(NamedTuple):
    """Vectors of nodes that are mostly zero."""

    row: Tensor  # [z] int64 place of each entry, every place at most once; row never falls
    col: Tensor
    value: Tensor  # [z] the entries
    shape: tuple[int, int]  # Rows and columns, n and r


Rows = SparseRows | Tensor  # one vector per node


def split_rows(e: Rows, ptr: list[int]) -> list[Rows]:
    """Split the vectors of several clients' nodes by client; ``ptr`` has the clients' bounds."""
    if not isinstance(e, SparseRows):
        return [*e.split(group_sizes(ptr))]
    starts = torch.searchsorted(e.row, torch.tensor(ptr, device=e.row.device)).tolist()
    parts = zip(*(one.split(group_sizes(starts)) for one in e[:3]), strict=True)
    return [
        SparseRows(row - begin, col, value, (end - begin, e.shape[1]))
        for (begin, end), (row, col, value) in zip(pairwise(ptr), parts, strict=True)
    ]


def kept_similarity(
    e: Rows, neighbours: Tensor, similarity: str, products: Tensor | None = None
) -> Tensor:
    """Compare each node with its kept neighbours (FedGLS, equation 13)."""
    # The nodes may be several clients'. If no node is compared with another client's, the columns
    # of two clients may have the same numbers.
    # e [n, r], neighbours [n, k], products [n, k]
    given, e = _values(e).dtype, comparable(e, similarity)
    places = (e.row, e.col, e.shape[1]) if isinstance(e, SparseRows) else None
    found: Tensor = _KeptProducts.apply(_values(e), places, neighbours, products)  # type: ignore[no-untyped-call]
    if similarity != "euclidean":
        return found
    square = squares(e)
    # The root's gradient is infinite at 0, but what was filled in lets none through.
    # index_select: its gradient is faster than that of square[neighbours]
    others = square.index_select(0, neighbours.reshape(-1)).view(neighbours.shape)
    distance = squared_distance(found, square[:, None], others).sqrt()
    return (1 / (1 + distance)).to(given)


def comparable(e: Rows, similarity: str) -> Rows:
    """Scale the vectors so that products are similarities: to unit length for the cosine."""
    # A distance is a difference of products. It takes float64, or near nodes were all alike.
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity {similarity!r}: allowed are {', '.join(SIMILARITIES)}")
    if similarity == "euclidean":
        return e._replace(value=e.value.double()) if isinstance(e, SparseRows) else e.double()
    if similarity == "inner":
        return e
    square = squares(e)
    none = square == 0
    scale = square.masked_fill(none, 1).rsqrt().masked_fill(none, 0)
    if isinstance(e, SparseRows):
        return e._replace(value=e.value * scale.index_select(0, e.row))
    return e * scale[:, None]


def _values(e: Rows) -> Tensor:
    return e.value if isinstance(e, SparseRows) else e


def squares(e: Rows) -> Tensor:
    """Return each row's squared length, ``[n]``."""
    if isinstance(e, SparseRows):
        return e.value.new_zeros(e.shape[0]).index_add(0, e.row, e.value.square())
    return e.square().sum(1)


def squared_distance(products: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Return ``|a|^2 + |b|^2 - 2 a.b``; 0 where that is mere rounding."""
    total = own + other
    apart = total - 2 * products
    return apart.masked_fill(apart <= ZERO_SHARE * total, 0)


# The kept products, with gradients


class _KeptProducts(torch.autograd.Function):
    """Products of some pairs of rows; autograd would make a vector for each pair."""

    @staticmethod
    def forward(
        ctx: Saved,
        value: Tensor,
        places: tuple[Tensor, Tensor, int] | None,
        neighbours: Tensor,
        products: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(value, neighbours)
        ctx.places = places
        if products is not None:
            return products.clone()
        n, k = neighbours.shape
        ptr = torch.arange(0, n * k + 1, k, dtype=torch.int32, device=value.device)
        col, result = neighbours.reshape(-1).to(torch.int32), value.new_zeros(n * k)
        for dense, _, _ in _dense_parts(value, places, n):
            result += sampled_products(ptr, col, dense, dense)
        return result.view(n, k)

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        value, neighbours = ctx.saved_tensors
        n, k = neighbours.shape
        if ctx.places is not None and n * n <= SQUARE_NUMBERS:
            columns = ctx.places[2]
            if value.numel() < 2 * k * columns:  # the products of n numbers are fewer
                return _few_nodes(value, ctx.places, neighbours, grads[0]), None, None, None
        local = torch.arange(n, device=value.device).repeat_interleave(k)
        other = neighbours.reshape(-1)
        # A pair's slope goes to both of its ends, each time along the other's vector.
        slope = grads[0].reshape(-1).repeat(2)
        both = csr(torch.cat([local, other]), torch.cat([other, local]), slope, n)
        symmetric = Adjacency(both, both)
        grad = torch.empty_like(value)
        for dense, entries, cells in _dense_parts(value, ctx.places, n):
            moved = propagate(symmetric, dense)
            grad[entries] = moved if cells is None else moved.view(-1)[cells]
        return grad, None, None, None


def _few_nodes(
    value: Tensor, places: tuple[Tensor, Tensor, int], neighbours: Tensor, slope: Tensor
) -> Tensor:
    """Compute the gradient by ``[z]`` sparse values where all pairs of nodes are few numbers."""
    row, col, columns = places
    n = neighbours.shape[0]
    slopes = slope.new_zeros(n, n).scatter_add_(1, neighbours, slope)
    features = value.new_zeros(columns * n)
    features[col * n + row] = value
    ptr, col = pointers(row, n), col.to(torch.int32)
    return sampled_products(ptr, col, slopes + slopes.T, features.view(columns, n))


def _dense_parts(
    value: Tensor, places: tuple[Tensor, Tensor, int] | None, n: int
) -> Iterator[tuple[Tensor, Tensor | slice, Tensor | None]]:
    """Cut vectors by columns into dense parts that fit in memory."""
    # value [z]
    if places is None:
        yield value, slice(None), None
        return
    row, col, columns = places
    width = max(DENSE_COLUMNS, DENSE_NUMBERS // n)
    for first in range(0, columns, width):
        w = min(width, columns - first)
        entries: Tensor | slice = slice(None)
        if w < columns:
            entries = ((col >= first) & (col < first + w)).nonzero().squeeze(1)
        cells = row[entries] * w + (col[entries] - first)
        dense = value.new_zeros(n * w)
        dense[cells] = value[entries]
        yield dense.view(n, w), entries, cells


# The search for each node's most similar others


class Nearest(NamedTuple):
    """Each node's most similar others."""

    neighbours: Tensor  # [n, k] int64 numbers, the most similar first
    # [n, k] products of each node's vector with theirs, as kept_similarity takes them
    products: Tensor


@torch.no_grad()
def nearest(e: Rows, k: int, similarity: str, block: int | None = None) -> Nearest:
    """Find the nodes that are most similar to each node, except the node itself."""
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
    matrix = csr_tensor(pointers(e.row, n), e.col.to(torch.int32), e.value, e.shape)
    starts = [*matrix.crow_indices()[:-1:block].tolist(), e.row.numel()]
    for number, begin in enumerate(range(0, n, block)):
        width, held = min(block, n - begin), slice(starts[number], starts[number + 1])
        turned = e.value.new_zeros(r * width)
        turned[e.col[held] * width + (e.row[held] - begin)] = e.value[held]
        out = e.value.new_empty(n, width)
        yield begin, torch.addmm(out, matrix, turned.view(r, width), beta=0, out=out)


def _most(similarity: Tensor, k: int, begin: int) -> Tensor:
    """Return the k largest of each column by number, ``[b, k]``; column 0 is node ``begin``."""
    n, b = similarity.shape
    node = torch.arange(n, device=similarity.device)
    similarity[node[begin : begin + b], node[:b]] = -torch.inf  # the node itself
    size = math.isqrt(n // k)
    if size < GROUP:
        return _top(similarity.T, node, k)
    # They lie in the k groups of neighbouring nodes with the largest maxima: each of these k groups
    # has a number that is larger than any number of another group, or as large and earlier. So
    # only few numbers need to be put in order.
    groups = n // size
    largest = similarity[: groups * size].view(groups, size, b).amax(1)
    chosen = _top(largest.T, node[:groups], min(k, groups))
    inside = (chosen[:, :, None] * size + node[:size]).flatten(1)
    number = torch.cat([inside, node[groups * size :].expand(b, -1)], dim=1)
    return _top(similarity.T.gather(1, number), number, k)


def _top(similarity: Tensor, number: Tensor, k: int) -> Tensor:
    """Return the numbers of the k largest in each row, ``[b, k]``; of equal values, the lowest."""
    # Similarity and number become one integer, so that no two are equal: above, the float's bits,
    # whose order is that of the floats if the order of the negative ones is turned round; below,
    # the number, counted from the end.
    last = 0xFFFFFFFF
    rows = torch.empty(similarity.shape, dtype=torch.float32, device=similarity.device)
    bits = rows.copy_(similarity).add_(0.0).view(torch.int32)  # + 0.0 makes 0 of -0
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    key = bits.long().bitwise_left_shift_(32).add_(last - number)
    return last - key.topk(k, dim=1).values.bitwise_and_(last)
