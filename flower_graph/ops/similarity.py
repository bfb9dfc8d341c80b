"""How alike two nodes are, for pairs that are known: the similarities of equation 13 of FedGLS.

Vectors of nodes are dense or sparse. Nothing here is of nodes times nodes, nor of pairs times
features: a pair's similarity is a product of two rows, and its gradient another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.graph import Adjacency, csr, csr_tensor, pointers, propagate

SIMILARITIES = ("cosine", "euclidean", "inner")
# Numbers of a sparse matrix that are held densely at a time, and the columns it takes at least.
DENSE_NUMBERS, DENSE_COLUMNS = 4_194_304, 64
SQUARE_NUMBERS = 262_144  # pairs of nodes that may be held, all of a small client's
# A squared distance below this share of the squared lengths is the rounding of a zero.
ZERO_SHARE = 1e-13


class SparseRows(NamedTuple):
    """Vectors of nodes that are mostly zero."""

    row: Tensor  # [z] int64 place of each entry, every place at most once; row never falls
    col: Tensor
    value: Tensor  # [z] the entries
    shape: tuple[int, int]  # Rows and columns, n and r


Rows = SparseRows | Tensor  # one vector per node


def kept_similarity(
    e: Rows, neighbours: Tensor, similarity: str, products: Tensor | None = None
) -> Tensor:
    """Compare each node with its kept neighbours (FedGLS, equation 13)."""
    # The nodes may be several clients'. If no node is compared with another client's, the columns
    # of two clients may have the same numbers.
    # e [n, r], neighbours [n, k], products [n, k]
    given, e = _values(e).dtype, comparable(e, similarity)
    products = _kept_products(e, neighbours, products)
    if similarity != "euclidean":
        return products
    square = squares(e)
    # The root's gradient is infinite at 0, but what was filled in lets none through.
    distance = squared_distance(products, square[:, None], _take(square, neighbours)).sqrt()
    return (1 / (1 + distance)).to(given)


def comparable(e: Rows, similarity: str) -> Rows:
    """Bring the vectors to where products tell the similarity: unit length for the cosine."""
    # A distance is a difference of products. It takes float64, or near nodes were all alike.
    if similarity not in SIMILARITIES:
        allowed = ", ".join(SIMILARITIES)
        raise ValueError(f"similarity {similarity!r} is unknown: allowed are {allowed}")
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


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[index]``; the gradient of that takes twice as long to add up."""
    return values.index_select(0, index.reshape(-1)).view(index.shape)


def squared_distance(products: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Return ``|a|^2 + |b|^2 - 2 a.b``, and 0 where that is no more than rounding."""
    total = own + other
    apart = total - 2 * products
    return apart.masked_fill(apart <= ZERO_SHARE * total, 0)


def csr_rows(x: SparseRows) -> Tensor:
    """Return the vectors as a sparse CSR matrix, ``[n, r]``."""
    return csr_tensor(pointers(x.row, x.shape[0]), x.col.to(torch.int32), x.value, x.shape)


def sampled_products(ptr: Tensor, col: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute some entries of ``left @ right^T``."""
    # ptr, col [n + 1], left, right [n, h]
    n, m, e = left.shape[0], right.shape[0], col.numel()
    if e > n * m:  # PyTorch's operator knows no more entries than the matrix has places
        row = torch.arange(n, device=col.device).repeat_interleave(ptr.diff())
        return (left[row] * right[col]).sum(1)
    places = csr_tensor(ptr, col, left.new_zeros(e), (n, m))
    products: Tensor = torch.sparse.sampled_addmm(places, left, right.T).values()
    return products


# The kept products, with gradients


def _kept_products(e: Rows, neighbours: Tensor, products: Tensor | None) -> Tensor:
    """Return ``e_i . e_j`` for each node i and its neighbours j, ``[n, k]``."""
    places = (e.row, e.col, e.shape[1]) if isinstance(e, SparseRows) else None
    return _KeptProducts.apply(_values(e), places, neighbours, products)  # type: ignore[no-any-return, no-untyped-call]


class _KeptProducts(torch.autograd.Function):
    """Products of some pairs of rows; autograd would make a vector for each pair."""

    @staticmethod
    def forward(
        ctx: Any,
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
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
    """Cut vectors into dense parts by columns: few enough numbers to stay in memory."""
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
