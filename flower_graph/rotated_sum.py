"""The vector that a client of the secure consensus adds: its embeddings, turned to a common mean.

Row-vector form throughout: ``X W`` turns the rows of ``X``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flower_graph.ops import orthogonal_procrustes
from flower_graph.records.rotated_sum import ABSENT
from flower_graph.rng import derive_seed

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def first_points(seed: int, nodes: int, dimension: int) -> Floats:
    """Draw what everybody turns to before there is a mean, ``[u, d]`` normal.

    Any fixed points do: clients that embed alike turn alike, and so come to lie on each other.
    """
    chance = np.random.default_rng(derive_seed(seed, "secure-consensus"))
    return chance.standard_normal((nodes, dimension))


def rotation(embeddings: Floats, points: Floats, rotations_only: bool) -> Floats:
    """Find the orthogonal ``W`` that brings a client's rows nearest to common points.

    Parameters
    ----------
    embeddings, points : ndarray
        ``[p, d]`` rows of the same nodes; points that are zero have no say.
    rotations_only : bool
        Leave reflections out.

    Returns
    -------
    ndarray
        ``[d, d]`` float64; the identity where nothing is common.
    """
    if not len(embeddings):
        return np.eye(points.shape[1])
    return orthogonal_procrustes(embeddings, points, rotations_only=rotations_only)


def sum_vector(turned: Floats, slots: Integers, length: int) -> Floats:
    """Lay a client's turned rows ``[p, d]`` at their slots, zeros elsewhere, ``[length]``.

    Raises
    ------
    ValueError
        If a slot lies outside, or two are the same.
    """
    dimension = turned.shape[1]
    here = slots != ABSENT
    chosen = slots[here]
    count = length // dimension
    if length % dimension or np.unique(chosen).size != chosen.size:
        raise ValueError(f"{length} numbers for rows of {dimension}, or a slot named twice")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < count:
        raise ValueError(f"slots from {chosen.min()} to {chosen.max()}, must be 0 to {count - 1}")
    rows = np.zeros((count, dimension))
    rows[chosen] = turned[here]
    return rows.ravel()


def fewest_holders(clients: int, dropout: float) -> int:
    """Say how many clients must hold a node for its sum to be asked for.

    At most the share ``dropout`` of the clients may be missing from a sum that is opened, so two
    are in the sum of every node then, however unlucky: no row is one client's alone.
    """
    return 2 + math.floor(dropout * clients)


def common_nodes(
    ids: Mapping[int, Integers], clients: Sequence[int], dropout: float
) -> NDArray[np.int64]:
    """Choose the nodes of a sum: those with enough holders among its clients, ascending ids."""
    if not clients:
        return np.zeros(0, np.int64)
    found, counts = np.unique(
        np.concatenate([ids[client] for client in clients]), return_counts=True
    )
    return found[counts >= fewest_holders(len(clients), dropout)]


def find_slots(nodes: Integers, common: Integers) -> Integers:
    """Find nodes ``[p]`` among the common ones, ascending; ``ABSENT`` where they are not."""
    if not common.size:
        return np.full(nodes.shape, ABSENT)
    at = np.searchsorted(common, nodes).clip(max=common.size - 1)
    return np.where(common[at] == nodes, at, ABSENT)
