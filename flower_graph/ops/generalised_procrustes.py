"""One reference space for the embeddings of many clients (generalised Procrustes)."""

from __future__ import annotations

from typing import Generic, NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.procrustes import (
    Embeddings,
    Held,
    as_given,
    checked_clients,
    columns,
    nearest_orthogonal,
    rank_tolerance,
    squares,
)


class Consensus(NamedTuple, Generic[Embeddings]):
    """The reference space, and each client's map to it and back.

    Attributes
    ----------
    reference : ndarray or Tensor
        ``[u, d]`` mean ``R`` of ``X_i W_i`` over the clients that hold a node; zero if none does.
    rotations : ndarray or Tensor
        ``[m, d, d]`` orthogonal maps ``W_i`` from each client's space into the reference's.
    aligned : ndarray or Tensor
        ``[m, u, d]`` the reference in each client's space, ``X'_i = R W_i^T``; zero where a client
        does not hold the node.
    change : float
        The last iteration's move of the reference of shared nodes, relative to its size.
    """

    reference: Embeddings
    rotations: Embeddings
    aligned: Embeddings
    change: float


class _Clients(NamedTuple):
    side: Tensor  # [u, m * d] as ``columns`` gives it
    given: Tensor  # the same in the dtype of what was given
    held: Tensor  # [m, u] float64
    shared: Tensor  # [u, 1] 1 for nodes that several clients hold, 0 for others
    size: Tensor  # [m] length of each client's embeddings of shared nodes
    relative: float
    rotations_only: bool


@torch.no_grad()
def consensus(
    x: Embeddings,
    held: Held = None,
    *,
    rotations_only: bool = False,
    iterations: int = 20,
    tolerance: float = 1e-3,
) -> Consensus[Embeddings]:
    """Bring all clients' embeddings to one reference space, with one map for each client.

    The reference begins as the embeddings of the client with the most nodes, the first of several.
    Each iteration maps every client to the reference, and makes the reference their mean:
    ``sum_i ||X_i W_i - R||^2`` over the nodes held never grows. Nodes of a single client affect no
    map. Groups of clients without a chain of common nodes have separate references, which share the
    array but no space. Time and memory grow with ``m``.

    Parameters
    ----------
    x : ndarray or Tensor
        ``[m, u, d]`` float32 or float64 embeddings of ``u`` nodes by ``m`` clients.
    held : ndarray or Tensor, optional
        As in ``align_pairs``.
    rotations_only : bool
        Whether to leave out reflections.
    iterations : int
        The most iterations, at least 1.
    tolerance : float
        The change, relative to the reference's size, at which to stop, at least 0.

    Returns
    -------
    Consensus
        Reference, maps, and the reference in each client's space (Gower, 1975).

    Raises
    ------
    ValueError
        As ``align_pairs``, and for ``iterations`` or ``tolerance`` that are not allowed.
    """
    if iterations < 1 or not tolerance >= 0:
        raise ValueError(
            f"iterations = {iterations}, tolerance = {tolerance}: at least 1 and at least 0 are "
            "needed"
        )
    values, mask = checked_clients(x, held)
    side, shared = columns(values, mask), (mask.sum(0) > 1).double()[:, None]
    size = (squares(side, len(values)) * shared).sum(0).sqrt()
    given, relative = side.to(values.dtype), rank_tolerance(values)
    clients = _Clients(side, given, mask.double(), shared, size, relative, rotations_only)
    reference, maps, change = _settled(clients, iterations, tolerance)
    stack = maps.flatten(0, 1).T.contiguous()  # back into each client's space, [d, m * d]
    torch.mm(reference, stack, out=clients.side)
    back = clients.side.view(len(reference), len(maps), -1).transpose(0, 1)
    aligned = values.new_empty(values.shape).copy_(back.masked_fill_(~mask[:, :, None], 0))
    return Consensus(as_given(reference, x), as_given(maps, x), as_given(aligned, x), change)


def _settled(clients: _Clients, iterations: int, tolerance: float) -> tuple[Tensor, Tensor, float]:
    """Iterate until the reference settles; return it, the maps to it, and its last change."""
    before = _first_reference(clients)
    product = _products(before, clients, clients.side)
    maps = _maps_to(before, product, clients)
    reference = _mean(maps, clients, clients.side)
    moved, size = _lengths(reference - before, reference, clients)
    for _ in range(iterations - 1):
        if moved <= tolerance * size:
            break
        # Only what moved is multiplied, in the precision of what was given: its rounding is as
        # small beside the whole as the move is.
        product += _products(reference - before, clients, clients.given)
        turned = _maps_to(reference, product, clients)
        before, reference = reference, reference + _mean(turned - maps, clients, clients.given)
        maps = turned
        moved, size = _lengths(reference - before, reference, clients)
    return reference, maps, moved / size if size else 0.0


def _lengths(move: Tensor, reference: Tensor, clients: _Clients) -> tuple[float, float]:
    """Return the move and the length of the reference, over the shared nodes."""
    moved, size = (float((part * clients.shared).norm()) for part in (move, reference))
    return moved, size


def _products(reference: Tensor, clients: _Clients, side: Tensor) -> Tensor:
    """Multiply every client's embeddings of shared nodes with ``[u, d]``; ``[m, d, d]``."""
    # Few rows times many columns: BLAS takes twice as long for many rows times few columns.
    product = (reference * clients.shared).T.to(side.dtype) @ side
    return product.double().view(len(product), -1, len(product)).permute(1, 2, 0)


def _maps_to(reference: Tensor, product: Tensor, clients: _Clients) -> Tensor:
    """Map every client to the reference ``[u, d]``, whose ``_products`` are ``[m, d, d]``."""
    square = (reference * clients.shared).square().sum(1)
    size = clients.size * (clients.held @ square).sqrt()
    only = clients.rotations_only
    return nearest_orthogonal(product, clients.relative * size, rotations_only=only)


def _mean(maps: Tensor, clients: _Clients, side: Tensor, joined: Tensor | None = None) -> Tensor:
    """Average the mapped embeddings over each node's holders, ``[u, d]``."""
    # ``joined`` ``[m]`` float64 has 0 for clients that are not counted.
    if joined is None:
        joined = clients.size.new_ones(len(maps))
    stack = (maps * joined[:, None, None]).flatten(0, 1)
    total = stack.T.to(side.dtype) @ side.T  # [d, u], for the same reason as the products
    return (total / (joined @ clients.held).clamp(min=1)).T


def _first_reference(clients: _Clients) -> Tensor:
    """Build a reference from one client, then the clients that share nodes with it, and so on."""
    held, dimension = clients.held, clients.side.shape[1] // len(clients.held)
    maps = torch.eye(dimension).to(held).repeat(len(held), 1, 1)
    joined, nodes = held.new_zeros(len(held)), held.sum(1)
    reference = held.new_zeros(held.shape[1], dimension)
    while not joined.all():
        near = (held @ (joined @ held) > 0) & (joined == 0)
        if near.any():
            product = _products(reference, clients, clients.side)
            maps[near] = _maps_to(reference, product, clients)[near]
            joined[near] = 1
            reference = _mean(maps, clients, clients.side, joined)
        else:  # at the beginning, and if no client is left that shares a node
            first = int((nodes * (1 - joined)).argmax())
            joined[first] = 1
            reference = reference + clients.side.view(len(reference), -1, dimension)[:, first]
    return reference
