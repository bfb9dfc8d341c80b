"""Orthogonal maps between embeddings of the same nodes (Procrustes), and means over clients.

Each client's embeddings are in a space of its own. A mean is in each client's space, or in one
reference space for all (generalised Procrustes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# What is given decides what comes back: the kind, the dtype and the device are the same.
Embeddings = TypeVar("Embeddings", NDArray[Any], Tensor)

LIMIT = 1e100  # numbers below this in size have squares that float64 can add up
# Distances held at a time, and the part of two squared lengths that counts as no difference.
BLOCK_DISTANCES, SAME = 2**19, 64 * torch.finfo(torch.float64).eps

Held = NDArray[np.generic] | Tensor | None


@torch.no_grad()
def orthogonal_procrustes(
    source: Embeddings, target: Embeddings, *, rotations_only: bool = False
) -> Embeddings:
    """Find the orthogonal ``W`` with the least ``||source W - target||_F``.

    Directions that the data do not determine, as with fewer nodes than dimensions, are chosen so
    that ``W`` is nearest to the identity; without any information ``W`` is the identity. If several
    ``W`` are equally near, the result is one of them.

    Parameters
    ----------
    source, target : ndarray or Tensor
        ``[..., p, d]`` float32 or float64 embeddings of the same ``p`` nodes; the leading axes are
        broadcast.
    rotations_only : bool
        Whether to leave out reflections: then ``det W = 1``.

    Returns
    -------
    ndarray or Tensor
        ``[..., d, d]`` maps ``W``, computed in float64 (PPFL-GNN, section 3.2, where embeddings
        are columns and ``W`` stands to their left).

    Raises
    ------
    ValueError
        If shapes or dtypes do not fit, if there is no node, or for NaN, infinity and numbers as
        large as ``LIMIT``.
    """
    x, y = as_tensor("source", source), as_tensor("target", target)
    if x.shape[-2:] != y.shape[-2:] or x.dtype != y.dtype:
        forms = f"source {tuple(x.shape)} {x.dtype} and target {tuple(y.shape)} {y.dtype}"
        raise ValueError(f"{forms}: the same nodes, dimensions and dtype are needed")
    for name, values in (("source", x), ("target", y)):
        check_numbers(name, values)
    relative = rank_tolerance(x)
    x, y = x.double(), y.double()
    size = torch.linalg.matrix_norm(x) * torch.linalg.matrix_norm(y)
    w = nearest_orthogonal(x.mT @ y, relative * size, rotations_only=rotations_only)
    return as_given(w, source)


def rank_tolerance(x: Tensor) -> float:
    """Return the zero threshold of ``X^T Y`` relative to ``||X|| ||Y||``; ``[..., p, d]``."""
    # That is the rounding of what was given; float64 sums over the nodes add less.
    return x.shape[-1] * torch.finfo(x.dtype).eps


def nearest_orthogonal(product: Tensor, tolerance: Tensor, *, rotations_only: bool) -> Tensor:
    """Find the orthogonal ``W`` with the largest ``trace(W^T product)``."""
    # product [..., d, d], tolerance [...]: singular values up to it are of unknown directions
    left, values, right = torch.linalg.svd(product)
    unknown = values <= tolerance[..., None]
    lacking = unknown.any(-1)
    if lacking.any():
        left[lacking], right[lacking] = _completed(left[lacking], unknown[lacking], right[lacking])
    if rotations_only:
        # The last direction has the smallest singular value: turning it round costs least.
        mirrored = torch.linalg.det(left) * torch.linalg.det(right) < 0
        left[..., -1] = torch.where(mirrored[..., None], -left[..., -1], left[..., -1])
    result: Tensor = left @ right
    return result


def _completed(left: Tensor, unknown: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the singular vectors of unknown directions so that ``left @ right`` is near ``I``."""
    # With ``U_0`` and ``V_0`` for those vectors, ``trace(U_0 Q V_0^T)`` is largest for the
    # orthogonal factor ``Q`` of ``U_0^T V_0``. All other directions have 2 on the diagonal, more
    # than any singular value of ``U_0^T V_0``: they stay as they are, and the unknown ones come
    # last.
    both = unknown[..., :, None] & unknown[..., None, :]
    block = torch.where(both, left.mT @ right.mT, 2 * torch.eye(left.shape[-1]).to(left))
    turn, _, back = torch.linalg.svd(block)
    return left @ turn, back @ right


def as_tensor(name: str, x: NDArray[np.generic] | Tensor) -> Tensor:
    """Return float embeddings as a tensor, an array without a copy where possible."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.dtype.itemsize in (4, 8):
        # Arrays from messages are read-only, of which PyTorch warns; copies are not.
        x = torch.from_numpy(np.require(x, x.dtype.newbyteorder("="), ["C", "W"]))
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = getattr(x, "dtype", type(x).__name__)
        raise ValueError(f"{name}: {kind} is not allowed; float32 and float64 arrays are")
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"{name} of shape {tuple(x.shape)}: [..., p, d] without zeros is needed")
    return x


def as_given(x: Tensor, example: Embeddings) -> Embeddings:
    """Return a result as array or tensor and with the dtype of ``example``."""
    if isinstance(example, Tensor):
        return x.to(example.dtype)
    return x.numpy().astype(example.dtype, copy=False)


def check_numbers(name: str, x: Tensor) -> None:
    """Raise ``ValueError`` with the first position of an unusable number."""
    least, most = torch.aminmax(x)
    if not (least > -LIMIT and most < LIMIT):  # so that NaN is bad too
        place = tuple((~(x.abs() < LIMIT)).nonzero()[0].tolist())
        text = f"{name}[{', '.join(map(str, place))}] = {float(x[place])}"
        raise ValueError(f"{text}: finite numbers below {LIMIT:g} in size are allowed")


class _Clients(NamedTuple):
    """Embeddings of several clients, in float64."""

    rows: Tensor  # [m, u, d] 0 where a client does not hold the node
    side: Tensor  # [u, m * d] the same side by side
    held: Tensor  # [m, u] 1 or 0
    squares: Tensor  # [m, u] square length of each row
    shared: Tensor  # [u, 1] 1 for nodes that several clients hold, 0 for others
    relative: float
    rotations_only: bool

    @classmethod
    def of(cls, x: NDArray[np.generic] | Tensor, held: Held, *, rotations_only: bool) -> _Clients:
        values, mask = checked_clients(x, held)
        rows = values.double().masked_fill(~mask[:, :, None], 0)
        side = rows.transpose(0, 1).flatten(1)
        shared = (mask.sum(0) > 1).double()[:, None]
        squares, relative = rows.square().sum(2), rank_tolerance(values)
        return cls(rows, side, mask.double(), squares, shared, relative, rotations_only)

    def maps(self, product: Tensor, lengths: Tensor) -> Tensor:
        """Find the maps ``[k, d, d]`` of some clients, by their products ``[k * d, d]``."""
        stack, least = product.view(len(lengths), -1, product.shape[1]), self.relative * lengths
        return nearest_orthogonal(stack, least, rotations_only=self.rotations_only)

    def maps_to(self, reference: Tensor) -> Tensor:
        """Map every client to a reference ``[u, d]``, by the shared nodes."""
        target = reference * self.shared
        lengths = (self.squares @ self.shared[:, 0]).sqrt()
        lengths = lengths * (self.held @ target.square().sum(1)).sqrt()
        # Few rows times many columns: BLAS takes twice as long for many rows times few columns.
        return self.maps((target.T @ self.side).T, lengths)

    def mean(self, maps: Tensor, joined: Tensor | None = None) -> Tensor:
        """Average the mapped embeddings of the clients that joined, of all by default, by node."""
        # joined [m]: 1 or 0
        if joined is None:
            joined = maps.new_ones(len(maps))
        total = self.side @ (maps * joined[:, None, None]).flatten(0, 1)
        return total / (joined @ self.held).clamp(min=1)[:, None]


@torch.no_grad()
def align_pairs(x: Embeddings, held: Held = None, *, rotations_only: bool = False) -> Embeddings:
    """Average, for each client, all clients' embeddings after each was mapped into its space.

    ``X'_i = (1 / m) (X_i + sum_{j != i} X_j W_ji)``, with ``W_ji`` the orthogonal map that brings
    ``X_j`` nearest to ``X_i`` on the nodes that both hold. A node's mean is over the clients that
    hold it. Time and the number of maps grow with ``m^2``; memory is bounded.

    Parameters
    ----------
    x : ndarray or Tensor
        ``[m, u, d]`` float32 or float64 embeddings of ``u`` nodes by ``m`` clients.
    held : ndarray or Tensor, optional
        ``[m, u]`` bool: which nodes each client holds, at least one; without it, all. Rows of
        nodes that a client does not hold are not read.
    rotations_only : bool
        Whether to leave out reflections.

    Returns
    -------
    ndarray or Tensor
        ``[m, u, d]`` means ``X'_i``, zero where a client does not hold the node (PPFL-GNN,
        algorithms 1 and 2).

    Raises
    ------
    ValueError
        If shapes or dtypes do not fit, if a client holds no node, or for NaN, infinity and
        numbers as large as ``LIMIT`` in a row that is held.
    """
    clients = _Clients.of(x, held, rotations_only=rotations_only)
    side, dimension = clients.side, clients.side.shape[1] // len(clients.held)
    owned, squares = clients.held, clients.squares
    total = clients.rows.clone()
    for client in range(len(owned) - 1):  # and all after it; the way back is the transposed map
        own, others = clients.rows[client], side[:, (client + 1) * dimension :]
        # Only the nodes of both: a client's length differs from partner to partner.
        lengths = (squares[client + 1 :] @ owned[client]).sqrt()
        lengths *= (owned[client + 1 :] @ squares[client]).sqrt()
        maps = clients.maps(others.T @ own, lengths)
        total[client] += others @ maps.flatten(0, 1)
        total[client + 1 :] += own @ maps.mT
    total /= owned.sum(0)[:, None]  # NaN for a node that nobody holds: not held, so filled
    return as_given(total.masked_fill_(owned[:, :, None] == 0, 0), x)


def checked_clients(x: NDArray[np.generic] | Tensor, held: Held) -> tuple[Tensor, Tensor]:
    """Check embeddings ``[m, u, d]`` and the holders ``[m, u]``, and return them as tensors."""
    values = as_tensor("x", x)
    if values.ndim != 3:
        raise ValueError(f"x of shape {tuple(values.shape)}: [m, u, d] is needed")
    if held is None:
        check_numbers("x", values)
        return values, torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    mask = torch.as_tensor(held, device=values.device)
    if mask.dtype != torch.bool or mask.shape != values.shape[:2]:
        form, wanted = f"{mask.dtype} of shape {tuple(mask.shape)}", tuple(values.shape[:2])
        raise ValueError(f"held is {form}: bool of shape {wanted} is needed")
    if not mask.any(1).all():
        client = int(mask.any(1).int().argmin())
        raise ValueError(f"held: client {client} holds 0 nodes; at least 1 is needed")
    check_numbers("x", values if mask.all() else values.masked_fill(~mask[:, :, None], 0))
    return values, mask


# One reference space ------------------------------------------------------------------------------


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
        raise ValueError(f"iterations = {iterations}, tolerance = {tolerance}: 1 and 0 at least")
    clients = _Clients.of(x, held, rotations_only=rotations_only)
    reference = _first_reference(clients)
    for _ in range(iterations):
        before, maps = reference, clients.maps_to(reference)
        reference = clients.mean(maps)
        moved, size = (float((r * clients.shared).norm()) for r in (reference - before, reference))
        if moved <= tolerance * size:
            break
    aligned = (reference @ maps.mT).masked_fill_(clients.held[:, :, None] == 0, 0)
    change = moved / size if size else 0.0
    return Consensus(as_given(reference, x), as_given(maps, x), as_given(aligned, x), change)


def _first_reference(clients: _Clients) -> Tensor:
    """Build a reference from one client, then the clients that share nodes with it, and so on."""
    held = clients.held
    maps = torch.eye(clients.rows.shape[2]).to(held).repeat(len(held), 1, 1)
    joined, reference = held.new_zeros(len(held)), torch.zeros_like(clients.rows[0])
    while not joined.all():
        near = (held @ (joined @ held) > 0) & (joined == 0)
        if near.any():
            maps[near] = clients.maps_to(reference)[near]
            joined[near] = 1
            reference = clients.mean(maps, joined)
        else:  # at the beginning, and if no client is left that shares a node
            first = int((held.sum(1) * (1 - joined)).argmax())
            joined[first] = 1
            reference = reference + clients.rows[first]
    return reference


# Quality ----------------------------------------------------------------------------------------


@torch.no_grad()
def alignment_precision(
    source: Embeddings, target: Embeddings, rotation: Embeddings, ks: Sequence[int] = (1, 5, 10)
) -> dict[int, float]:
    """Measure how often a node's own row is among the ``k`` nearest to its mapped row (P@k).

    The distance is Euclidean. Equally near rows share a rank in random order, so that an embedding
    without information has ``k / p``.

    Parameters
    ----------
    source, target : ndarray or Tensor
        ``[p, d]`` embeddings of the same nodes in two spaces.
    rotation : ndarray or Tensor
        ``[d, d]`` map of ``source`` into the space of ``target``.
    ks : sequence of int
        Numbers of nearest rows, each at least 1.

    Returns
    -------
    dict of int to float
        The share of the nodes for each ``k`` (PPFL-GNN, section 4.4).

    Raises
    ------
    ValueError
        If shapes do not fit, for a ``k`` below 1, and for unusable numbers.
    """
    given = {"source": source, "target": target, "rotation": rotation}
    x, y, w = (as_tensor(name, values).double() for name, values in given.items())
    if x.ndim != 2 or x.shape != y.shape or w.shape != (x.shape[1], x.shape[1]):
        shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in given.items())
        raise ValueError(f"{shapes}: [p, d], [p, d] and [d, d] are needed")
    for name, values in (("source", x), ("target", y), ("rotation", w)):
        check_numbers(name, values)
    if min(ks, default=1) < 1:
        raise ValueError(f"k = {min(ks)}: at least 1 is needed")
    nearer, equal = _ranks(x @ w, y)
    return {k: float(((k - nearer).double() / equal).clamp(0, 1).mean()) for k in ks}


def _ranks(query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Count the rows nearer to each query than its own, and those as near, its own included."""
    block = max(1, BLOCK_DISTANCES // len(rows))
    lengths = rows.square().sum(1)
    nearer, equal = [], []
    for begin in range(0, len(rows), block):
        part = slice(begin, begin + block)
        distance = lengths - 2 * query[part] @ rows.T  # and the query's own length, for all alike
        local = distance.diagonal(begin)[:, None]
        # Equal rows may differ by the rounding of the product.
        same = SAME * (query[part].square().sum(1)[:, None] + lengths)
        nearer.append((distance < local - same).sum(1))
        equal.append(((distance - local).abs() <= same).sum(1))
    return torch.cat(nearer), torch.cat(equal)
