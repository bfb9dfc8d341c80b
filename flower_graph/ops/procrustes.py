"""Orthogonal maps between two sets of embeddings of the same nodes (Procrustes)."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# What is given decides what comes back: the kind, the dtype and the device are the same.
Embeddings = TypeVar("Embeddings", NDArray[Any], Tensor)

LIMIT = 1e100  # numbers below this in size have squares that float64 can add up


@torch.no_grad()
def orthogonal_procrustes(
    source: Embeddings, target: Embeddings, *, rotations_only: bool = False
) -> Embeddings:
    """Find the orthogonal ``W`` with the least ``||source W - target||_F``.

    What the data do not determine, as with fewer nodes than dimensions, is chosen so that ``W`` is
    nearest to the identity; without any information ``W`` is the identity. If several are equally
    near, ``W`` is one of them.

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
    _check_both(x, y)
    for name, values in (("source", x), ("target", y)):
        check_numbers(name, values)
    relative = rank_tolerance(x)
    x, y = x.double(), y.double()
    size = torch.linalg.matrix_norm(x) * torch.linalg.matrix_norm(y)
    w = nearest_orthogonal(x.mT @ y, relative * size, rotations_only=rotations_only)
    return as_given(w, source)


def rank_tolerance(x: Tensor) -> float:
    """Return what counts as zero in ``X^T Y``, by ``||X|| ||Y||``; ``x`` is ``[..., p, d]``."""
    # That is the rounding of what was given; float64 sums over the nodes add less.
    return x.shape[-1] * torch.finfo(x.dtype).eps


def nearest_orthogonal(product: Tensor, tolerance: Tensor, *, rotations_only: bool) -> Tensor:
    """Find the orthogonal ``W`` with the largest ``trace(W^T product)``."""
    # product [..., d, d], tolerance [...]
    left, values, right = torch.linalg.svd(product)
    unknown = values <= tolerance[..., None]
    lacking = unknown.any(-1)
    if lacking.any():
        left[lacking], right[lacking] = _completed(left[lacking], unknown[lacking], right[lacking])
    if rotations_only:
        # The last direction has the smallest singular value: turning it round costs least.
        mirrored = torch.linalg.det(left) * torch.linalg.det(right) < 0
        left[..., -1] = torch.where(mirrored[..., None], -left[..., -1], left[..., -1])
    return torch.matmul(left, right)


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


def as_tensor(name: str, x: NDArray[Any] | Tensor) -> Tensor:
    """Give float embeddings as a tensor, an array without a copy where that is possible."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.dtype.itemsize in (4, 8):
        # Arrays from messages are read-only, of which PyTorch warns; copies are not.
        x = torch.from_numpy(np.require(x, x.dtype.newbyteorder("="), ["C", "W"]))
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = getattr(x, "dtype", type(x).__name__)
        raise ValueError(f"{name}: {kind} is not allowed; float32 and float64 arrays are")
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} is not allowed: [..., p, d] is, with at least one "
            "node and one dimension"
        )
    return x


def as_given(x: Tensor, example: Embeddings) -> Embeddings:
    """Give a result as what ``example`` is: array or tensor, and of its dtype."""
    if isinstance(example, Tensor):
        return x.to(example.dtype)
    return x.numpy().astype(example.dtype, copy=False)


def check_numbers(name: str, x: Tensor) -> None:
    """Raise ``ValueError`` with the first place of a number that cannot be used."""
    bad = ~(x.abs() < LIMIT)  # so that NaN is bad too
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name}[{', '.join(map(str, place))}] = {float(x[place])}: finite numbers below "
            f"{LIMIT:g} in size are allowed"
        )


def _check_both(x: Tensor, y: Tensor) -> None:
    """Raise ``ValueError`` unless source and target have embeddings of the same nodes."""
    shapes = f"source {tuple(x.shape)} and target {tuple(y.shape)}"
    if x.shape[-2:] != y.shape[-2:]:
        raise ValueError(f"{shapes}: the same nodes and dimensions, [..., p, d], are needed")
    if x.dtype != y.dtype:
        raise ValueError(f"source {x.dtype} and target {y.dtype}: one dtype is needed")
    try:
        torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except RuntimeError:
        raise ValueError(f"{shapes}: leading axes that broadcast are needed") from None
