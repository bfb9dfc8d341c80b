"""Orthogonal maps between embeddings of the same nodes (Procrustes), and means over clients.

Each client's embeddings are in a space of its own. A mean is in each client's space, or in one
reference space for all (generalised Procrustes).
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# What is given decides what comes back: the kind, the dtype and the device are the same.
Embeddings = TypeVar("Embeddings", NDArray[Any], Tensor)

LIMIT = 1e100  # numbers below this in size have squares that float64 can add up
# Columns of a block of clients: its products with another block are 2048 x 2048, 32 MiB.
BLOCK_COLUMNS = 2048
# Distances held at a time, and the part of two squared lengths that counts as no difference.
BLOCK_DISTANCES, SAME = 2**19, 64 * torch.finfo(torch.float64).eps
# Distance of ``X^T X`` from ``I`` from which so many of Schulz's steps end at rounding
NEAR, STEPS = 0.5, 6

Held = NDArray[np.generic] | Tensor | None


@torch.no_grad()
def orthogonal_procrustes(source: Embeddings, target: Embeddings) -> Embeddings:
    """Find the orthogonal ``W`` with the least ``||source W - target||_F``.

    Directions that the data do not determine, as with fewer nodes than dimensions, are chosen so
    that ``W`` is nearest to the identity; without any information ``W`` is the identity. If several
    ``W`` are equally near, the result is one of them.

    Parameters
    ----------
    source, target : ndarray or Tensor
        ``[..., p, d]`` float32 or float64 embeddings of the same ``p`` nodes; the leading axes are
        broadcast.

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
    try:
        torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        is_fit = (x.shape[-2:], x.dtype) == (y.shape[-2:], y.dtype)
    except RuntimeError:
        is_fit = False
    if not is_fit:
        forms = f"source {x.dtype} {tuple(x.shape)} and target {y.dtype} {tuple(y.shape)}"
        raise ValueError(f"{forms}: one dtype and [..., p, d] are needed, and axes that broadcast")
    for name, values in (("source", x), ("target", y)):
        check_numbers(name, values)
    relative = rank_tolerance(x)
    x, y = x.double(), y.double()
    size = torch.linalg.matrix_norm(x) * torch.linalg.matrix_norm(y)
    return as_given(nearest_orthogonal(x.mT @ y, relative * size), source)


def rank_tolerance(x: Tensor) -> float:
    """Return the zero threshold of ``X^T Y`` relative to ``||X|| ||Y||``; ``[..., p, d]``."""
    # That is the rounding of what was given; float64 sums over the nodes add less.
    return x.shape[-1] * torch.finfo(x.dtype).eps


def nearest_orthogonal(product: Tensor, tolerance: Tensor) -> Tensor:
    """Find the orthogonal ``W`` with the largest ``trace(W^T product)``."""
    # product [..., d, d], tolerance [...]
    # The polar factor, which Newton's iteration finds in half the time of singular vectors. These
    # are needed where a direction is unknown.
    flat, least = product.flatten(0, -3) if product.ndim > 2 else product[None], tolerance.flatten()
    largest = flat.abs().amax((1, 2))
    scaled = flat / largest[:, None, None]
    inverse = torch.linalg.inv_ex(scaled).inverse
    # No singular value is below 1 / ||inverse||; NaN, of a product of zeros, compares as false.
    regular = largest > least * torch.linalg.matrix_norm(inverse)
    result = torch.empty_like(flat)
    result[regular] = _polar_factor(scaled[regular], inverse[regular])
    if not regular.all():
        others = ~regular
        result[others] = _by_singular_vectors(flat[others], least[others])
    return result.view(product.shape)


def _polar_factor(x: Tensor, inverse: Tensor) -> Tensor:
    """Set all singular values of regular matrices to 1; the singular vectors stay."""
    # Newton's step ``(a X + X^-T / a) / 2``, scaled as Higham does (1986), until Schulz's, which
    # needs no inverse, ``X (3 I - X^T X) / 2``, squares the distance from the end.
    # x, inverse [m, d, d]
    eye, far = torch.eye(x.shape[-1]).to(x), len(x) > 0
    while far:
        root = (torch.linalg.matrix_norm(inverse) / torch.linalg.matrix_norm(x)).sqrt()
        x = (root[:, None, None] * x + inverse.mT / root[:, None, None]) / 2
        far = bool(torch.linalg.matrix_norm(x.mT @ x - eye).max() > NEAR)
        inverse = torch.linalg.inv(x) if far else inverse
    for _ in range(STEPS):
        x = torch.baddbmm(x, x, x.mT @ x, beta=1.5, alpha=-0.5)
    return x


def _by_singular_vectors(product: Tensor, tolerance: Tensor) -> Tensor:
    """Find the same where a direction may be unknown."""
    # product [m, d, d], tolerance [m]
    left, values, right = torch.linalg.svd(product)
    unknown = values <= tolerance[:, None]
    if (lacking := unknown.any(-1)).any():
        # The singular vectors of unknown directions are turned so that ``left @ right`` is near
        # ``I``. With ``U_0`` and ``V_0`` for those vectors, ``trace(U_0 Q V_0^T)`` is largest for
        # the orthogonal factor ``Q`` of ``U_0^T V_0``. All other directions have 2 on the diagonal,
        # more than any singular value of ``U_0^T V_0``: they stay, and the unknown ones come last.
        both = unknown[lacking, :, None] & unknown[lacking, None, :]
        block = left[lacking].mT @ right[lacking].mT
        turn, _, back = torch.linalg.svd(
            torch.where(both, block, 2 * torch.eye(len(left[0])).to(left))
        )
        left[lacking], right[lacking] = left[lacking] @ turn, back @ right[lacking]
    return torch.matmul(left, right)


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


@torch.no_grad()
def align_pairs(x: Embeddings, held: Held = None) -> Embeddings:
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
    values, mask = checked_clients(x, held)
    clients, _, dimension = values.shape
    size = max(1, BLOCK_COLUMNS // dimension)
    blocks = [slice(begin, begin + size) for begin in range(0, clients, size)]
    total = values.new_zeros(values.shape)
    for number, first in enumerate(blocks):
        left = columns(values[first], mask[first])
        for second in blocks[number:]:
            same = second == first
            right = left if same else columns(values[second], mask[second])
            holders = mask[first].double(), mask[second].double()
            maps = _maps(left, right, holders, rank_tolerance(values), same)
            total[second] += _by_client(left @ maps, dimension)
            if not same:  # back, by the transposed maps
                total[first] += _by_client(right @ maps.T, dimension)
    total /= mask.sum(0)[:, None]  # NaN for a node that nobody holds: not held, so filled
    return as_given(total.masked_fill_(~mask[:, :, None], 0), x)


def _maps(
    left: Tensor,
    right: Tensor,
    held: tuple[Tensor, Tensor],
    relative: float,
    same: bool,
) -> Tensor:
    """Stack the maps from the clients of one block to those of another, ``[a * d, b * d]``."""
    # left [u, a * d], right [u, b * d], held [a, u] and [b, u]
    a, b = map(len, held)
    product = (left.T @ right).view(a, left.shape[1] // a, b, -1).transpose(1, 2)
    # Only the nodes of both: a client's square length differs from partner to partner.
    local = (squares(left, a).T @ held[1].T).sqrt()
    tolerance = relative * local * (held[0] @ squares(right, b)).sqrt()
    # Inside one block (``same``) half of them are needed: the way back is the transposed one, and a
    # client's map to itself is the identity.
    if not same:
        maps = nearest_orthogonal(product, tolerance)
    else:
        i, j = torch.triu_indices(a, a, 1, device=product.device)
        result = nearest_orthogonal(product[i, j], tolerance[i, j])
        maps = torch.eye(product.shape[2]).to(product).repeat(a, a, 1, 1)
        maps[i, j], maps[j, i] = result, result.mT
    return maps.transpose(1, 2).reshape(left.shape[1], right.shape[1])


def columns(x: Tensor, held: Tensor) -> Tensor:
    """Put clients' embeddings ``[m, u, d]`` side by side, ``[u, m * d]`` float64, 0 if not held."""
    side = torch.empty(x.shape[1], len(x), x.shape[2], dtype=torch.float64, device=x.device)
    side.copy_(x.transpose(0, 1)).masked_fill_(~held.T[:, :, None], 0)
    return side.view(x.shape[1], -1)


def squares(side: Tensor, clients: int) -> Tensor:
    """Return the square length of each embedding of ``columns``, ``[u, m]``."""
    return torch.square(torch.linalg.vector_norm(side.view(len(side), clients, -1), dim=2))


def _by_client(side: Tensor, dimension: int) -> Tensor:
    return side.view(len(side), -1, dimension).transpose(0, 1)


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


class _Clients:
    """Clients that are brought to one reference ``[u, d]``."""

    def __init__(self, values: Tensor, mask: Tensor) -> None:
        self.side = columns(values, mask)  # [u, m * d]
        self.given = self.side.to(values.dtype)
        self.held = mask.double()  # [m, u]
        # [u, 1] 1 for nodes that several clients hold, 0 for others
        self.shared = (mask.sum(0) > 1).double()[:, None]
        # [m] length of each client's embeddings of shared nodes, and its part that is rounding
        size = (squares(self.side, len(values)) * self.shared).sum(0).sqrt()
        self.tolerance = rank_tolerance(values) * size

    def products(self, reference: Tensor, side: Tensor) -> Tensor:
        """Multiply every client's embeddings of shared nodes with the reference; ``[m, d, d]``."""
        # Few rows times many columns: BLAS takes twice as long for many rows times few columns.
        product = (reference * self.shared).T.to(side.dtype) @ side
        return product.double().view(len(product), -1, len(product)).permute(1, 2, 0)

    def maps(self, reference: Tensor, product: Tensor) -> Tensor:
        """Map every client to the reference; ``product`` is of all clients and it."""
        square = (reference * self.shared).square().sum(1)
        return nearest_orthogonal(product, self.tolerance * (self.held @ square).sqrt())

    def mean(self, maps: Tensor, side: Tensor, joined: Tensor) -> Tensor:
        """Average the mapped embeddings over each node's holders, ``[u, d]``."""
        # ``joined`` ``[m]`` float64 has 0 for clients that are not counted.
        stack = (maps * joined[:, None, None]).flatten(0, 1)
        total = stack.T.to(side.dtype) @ side.T  # [d, u], for the same reason as the products
        return (total / (joined @ self.held).clamp(min=1)).T

    def first(self) -> Tensor:
        """Build a reference from one client, then those that share nodes with it, and so on."""
        held, side = self.held, self.side.view(self.side.shape[0], len(self.held), -1)
        maps = torch.eye(side.shape[2]).to(held).repeat(len(held), 1, 1)
        joined, nodes = held.new_zeros(len(held)), held.sum(1)
        reference = held.new_zeros(held.shape[1], side.shape[2])
        while not joined.all():
            near = (held @ (joined @ held) > 0) & (joined == 0)
            if near.any():
                maps[near] = self.maps(reference, self.products(reference, self.side))[near]
                joined[near] = 1
                reference = self.mean(maps, self.side, joined)
            else:  # at the beginning, and if no client is left that shares a node
                first = int((nodes * (1 - joined)).argmax())
                joined[first] = 1
                reference = reference + side[:, first]
        return reference


@torch.no_grad()
def consensus(
    x: Embeddings,
    held: Held = None,
    *,
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
    values, mask = checked_clients(x, held)
    clients = _Clients(values, mask)
    everyone = clients.held.new_ones(len(values))
    before = clients.first()
    product = clients.products(before, clients.side)
    maps = clients.maps(before, product)
    reference = clients.mean(maps, clients.side, everyone)
    for step in range(iterations):
        both = reference - before, reference
        moved, size = (float((part * clients.shared).norm()) for part in both)
        if moved <= tolerance * size or step == iterations - 1:
            break
        # Only what moved is multiplied, in the precision of what was given: its rounding is as
        # small beside the whole as the move is.
        product += clients.products(reference - before, clients.given)
        turned = clients.maps(reference, product)
        move = clients.mean(turned - maps, clients.given, everyone)
        before, reference, maps = reference, reference + move, turned
    stack = maps.flatten(0, 1).T.contiguous()  # back into each client's space, [d, m * d]
    torch.mm(reference, stack, out=clients.side)
    back = clients.side.view(len(reference), len(maps), -1).transpose(0, 1)
    aligned = values.new_empty(values.shape).copy_(back.masked_fill_(~mask[:, :, None], 0))
    change = moved / size if size else 0.0
    return Consensus(as_given(reference, x), as_given(maps, x), as_given(aligned, x), change)


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
    # How many rows are nearer to each mapped row than its own, and as near, its own included
    query, lengths = x @ w, y.square().sum(1)
    block, shares = max(1, BLOCK_DISTANCES // len(y)), dict.fromkeys(ks, 0.0)
    for begin in range(0, len(y), block):
        part = query[begin : begin + block]
        distance = lengths - 2 * part @ y.T  # and the query's own length, for all alike
        local = distance.diagonal(begin)[:, None]
        # Equal rows may differ by the rounding of the product.
        same = SAME * (part.square().sum(1)[:, None] + lengths)
        nearer = (distance < local - same).sum(1)
        equal = ((distance - local).abs() <= same).sum(1)
        for k in ks:
            shares[k] += float(((k - nearer).double() / equal).clamp(0, 1).sum())
    return {k: share / len(y) for k, share in shares.items()}
