"""A new graph beside a trained run: it trains at home, and one alignment puts it beside the others.

It needs the embeddings of public nodes as they are in some client's space, or the server's means,
once; nothing leaves it, and nobody else does anything.

This file needs neither Flower nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.rng import derive_seed

NEAREST = (1, 5, 10)
HELD_BACK = 0.2  # share of the common nodes on which the alignment is measured
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Learner(Protocol):
    """An embedding model, as those of ``PublicNodeClient``."""

    def learn(self, rows: Integers, targets: Floats | None, server_round: int) -> float:
        """Train for one round."""

    def embed(self) -> Floats:
        """Return the embeddings of all nodes, ``[n, d]``."""


class Space(NamedTuple):
    """Public nodes where a client, or all of them, have them."""

    nodes: Integers  # [p] their ids
    embeddings: Floats  # [p, d]

    def common(self, nodes: Integers) -> tuple[Integers, Integers]:
        """Find the nodes of both: their places in ``nodes``, and here; none is an error."""
        _, here, there = np.intersect1d(nodes, self.nodes, return_indices=True)
        if not here.size:
            raise ValueError(
                f"none of the {nodes.size} new nodes is among the {self.nodes.size} public ones: "
                "without a common node nothing says how the two spaces lie to each other"
            )
        return here, there


class Joined(NamedTuple):
    """A new graph's embeddings among those of others.

    Attributes
    ----------
    embeddings : ndarray
        ``[n, d]`` of all its nodes, in the space that was joined.
    rotation : ndarray
        ``[d, d]`` the orthogonal map from its own space.
    common : int
        Public nodes that it was found by.
    precision : dict of int to float
        P@1, 5 and 10 of nodes that were held back from a second alignment; empty where there
        were fewer than two.
    """

    embeddings: Floats
    rotation: Floats
    common: int
    precision: Mapping[int, float]


def join_space(
    embeddings: Floats,
    nodes: Integers,
    space: Space,
    *,
    held_back: float = HELD_BACK,
    rotations_only: bool = False,
    seed: int = 0,
) -> Joined:
    """Turn a new graph's embeddings into an existing space, by the public nodes of both.

    Parameters
    ----------
    embeddings : ndarray
        ``[n, d]`` float32, of all nodes of the new graph, in its own space.
    nodes : ndarray
        ``[n]`` ids of these.
    space : Space
        Public nodes in the space to join: of a client's file of embeddings, or ``means-N`` of the
        server's weights.
    held_back : float
        Share of the common nodes that measure the alignment of the others. The alignment that is
        returned has all of them.
    rotations_only : bool
        Leave reflections out.
    seed : int
        Says which are held back.

    Returns
    -------
    Joined
        The embeddings there, and how precise the alignment is.

    Raises
    ------
    ValueError
        If no node is common, or the numbers of an embedding differ.
    """
    here, there = space.common(nodes)
    source, target = embeddings[here], space.embeddings[there]
    rng = np.random.default_rng(derive_seed(seed, "held-back"))
    order, count = rng.permutation(len(here)), round(held_back * len(here))
    held, rest = order[:count], order[count:]
    precision = {}
    if held.size > 1 and rest.size:
        turn = orthogonal_procrustes(source[rest], target[rest], rotations_only=rotations_only)
        precision = alignment_precision(source[held], target[held], turn, NEAREST)
    rotation = orthogonal_procrustes(source, target, rotations_only=rotations_only)
    return Joined(embeddings @ rotation, rotation, len(here), precision)


def learn_beside(
    model: Learner,
    nodes: Integers,
    space: Space | None,
    rounds: int,
    *,
    rotations_only: bool = False,
) -> None:
    """Train a new graph's model at home, alone or pulled to public nodes that stay where they are.

    With a ``space`` each round does both halves of an iteration (``strategy.py``): it turns the
    public nodes into the model's own space, where they are its targets.
    """
    here, there = (np.empty(0, np.int64),) * 2 if space is None else space.common(nodes)
    targets: Floats | None = None
    for number in range(1, rounds + 1):
        model.learn(here, targets, number)
        if space is not None:
            known = space.embeddings[there]
            turn = orthogonal_procrustes(known, model.embed()[here], rotations_only=rotations_only)
            targets = known @ turn
