"""Uniform random walks on a graph, all at once, and the pairs of nodes that skip-gram sees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class NeighbourLists(NamedTuple):
    """Each node's neighbours, one list after the other."""

    indptr: Integers  # [n + 1] int64: where each node's list begins, and the last one's end
    neighbours: Integers  # [e] int64 node numbers, ascending within a list


def neighbour_lists(edge_index: Integers, num_nodes: int) -> NeighbourLists:
    """Turn directed edges into lists of neighbours."""
    # edge_index [2, e]
    if edge_index.size and not 0 <= edge_index.min() <= edge_index.max() < num_nodes:
        wrong = edge_index[(edge_index < 0) | (edge_index >= num_nodes)][0]
        raise ValueError(f"an edge names node {wrong}, and nodes are 0 to {num_nodes - 1}")
    degrees = np.bincount(edge_index[0], minlength=num_nodes)
    order = np.lexsort((edge_index[1], edge_index[0]))
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return NeighbourLists(indptr, edge_index[1][order].astype(np.int64))


def random_walks(
    indptr: Integers,
    neighbours: Integers,
    starts: Integers,
    length: int,
    rng: np.random.Generator,
) -> Integers:
    """Walk from some nodes, each step to any neighbour with the same probability."""
    # starts [w]
    if length < 1:
        raise ValueError(f"length = {length} nodes of a walk: at least 1 is allowed")
    walks = np.empty((length, len(starts)), np.int64)  # step by step, so that a step is one row
    walks[0] = starts
    degrees = np.diff(indptr)
    # One neighbour more, for the place after the last list that a node without any looks at.
    padded = np.append(neighbours, 0)
    for step in range(1, length):
        here = walks[step - 1]
        degree = degrees[here]
        # A random number is below 1 by 2^-53 or more, and so the product stays below the degree.
        chosen = (rng.random(len(starts)) * degree).astype(np.int64)
        walks[step] = np.where(degree > 0, padded[indptr[here] + chosen], here)
    return np.ascontiguousarray(walks.T)


def sample_pairs(walks: Integers, window: int, count: int, rng: np.random.Generator) -> Integers:
    """Draw pairs of nodes as often as skip-gram with shrinking windows sees them."""
    # A window is ``window`` or fewer nodes wide, each width with the same probability; hence a node
    # at distance ``o`` is inside ``window + 1 - o`` times out of ``window``.
    # walks [w, length]
    length = walks.shape[1]
    if len(walks) == 0 or length < 2 or window < 1:
        raise ValueError(
            f"{len(walks)} walks of {length} nodes and window = {window} have no pairs: at least "
            "one walk of two nodes and a window of 1 are needed"
        )
    distances = np.arange(1, min(window, length - 1) + 1)
    often = ((window + 1 - distances) * (length - distances)).astype(float)
    distance = rng.choice(distances, size=count, p=often / often.sum())
    first = (rng.random(count) * (length - distance)).astype(np.int64)
    walk = rng.integers(len(walks), size=count)
    pairs = np.stack([walks[walk, first], walks[walk, first + distance]])
    return np.where(rng.random(count) < 0.5, pairs, pairs[::-1])
