"""Training of a new graph after a run, and its alignment with a client's space.

The new graph needs, once, the embeddings of public nodes in some client's space, or the server's
means. It sends nothing, and no other client takes part. In training its model may be pulled to
these nodes.

This file needs neither Flower nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import DataError
from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.rng import derive_seed

NEAREST = (1, 5, 10)
HELD_BACK = 0.2  # share of the common nodes on which the alignment is measured
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Learner(Protocol):
    """An embedding model, as for ``PublicNodeClient``."""

    def learn(self, rows: Integers, targets: Floats | None, server_round: int) -> float:
        """Train for one round."""

    def embed(self) -> Floats:
        """Return the embeddings of all nodes, ``[n, d]``."""


class PublicSpace(NamedTuple):
    """Public nodes in a client's space, or in the common one.

    Attributes
    ----------
    nodes : ndarray
        ``[p]`` their ids, or names.
    embeddings : ndarray
        ``[p, d]`` float32: of a client's file of embeddings, or ``means-N`` of the server's
        weights.
    """

    nodes: NDArray[np.generic]
    embeddings: Floats

    def common(self, nodes: NDArray[np.generic]) -> tuple[Integers, Integers]:
        """Find the common nodes: their indices in ``nodes``, and here."""
        _, here, there = np.intersect1d(nodes, self.nodes, return_indices=True)
        return here, there

    def split(
        self, nodes: NDArray[np.generic], share: float, seed: int
    ) -> tuple[PublicSpace, PublicSpace]:
        """Return the nodes that a new graph has too; hold a share of them out."""
        _, there = self.common(nodes)
        if not there.size:
            raise DataError(
                f"none of the new graph's {nodes.size} nodes is among the {self.nodes.size} public "
                "ones: without a common node the two spaces cannot be aligned"
            )
        order = np.random.default_rng(derive_seed(seed, "held-back")).permutation(there)
        count = round(share * len(order))
        held, rest = (PublicSpace(self.nodes[rows], self.embeddings[rows])
                      for rows in (order[:count], order[count:]))  # fmt: skip
        return rest, held


class Joined(NamedTuple):
    """A new graph's embeddings in a client's space."""

    embeddings: Floats  # [n, d] of all its nodes, in the space that was joined
    rotation: Floats  # [d, d] the orthogonal map from its own space
    common: int  # number of public nodes that were aligned
    # P@1, 5 and 10 of the public nodes that were held back; empty with fewer than two
    precision: Mapping[int, float]


def learn_beside(
    model: Learner,
    nodes: NDArray[np.generic],
    space: PublicSpace | None,
    rounds: Iterable[int],
    *,
    rotations_only: bool = False,
) -> None:
    """Train a new graph's model locally: alone, or pulled to fixed public nodes.

    Parameters
    ----------
    model : EmbeddingModel
        Of the new graph; trained in place.
    nodes : ndarray
        ``[n]`` ids of its nodes.
    space : PublicSpace or None
        The space to which the model is pulled. From the second round on the space is rotated into
        the model's own, and a round does both halves of an iteration (``strategy.py``). None: the
        model learns alone.
    rounds : iterable of int
        The numbers of its rounds, from 1 on.
    rotations_only : bool
        Leave reflections out.
    """
    here, there = (np.empty(0, np.int64),) * 2 if space is None else space.common(nodes)
    for number in rounds:
        targets: Floats | None = None
        if space is not None and number > 1:
            shared, own = space.embeddings[there], model.embed()[here]
            targets = shared @ orthogonal_procrustes(shared, own, rotations_only=rotations_only)
        model.learn(here, targets, number)


def join_space(
    embeddings: Floats,
    nodes: NDArray[np.generic],
    space: PublicSpace,
    held: PublicSpace | None = None,
    *,
    rotations_only: bool = False,
) -> Joined:
    """Rotate a new graph's embeddings into an existing space, by the common public nodes.

    Parameters
    ----------
    embeddings : ndarray
        ``[n, d]`` float32, of all nodes of the new graph, in its own space.
    nodes : ndarray
        ``[n]`` ids of these.
    space : PublicSpace
        Public nodes in the space to join.
    held : PublicSpace, optional
        Other public nodes, which measure the alignment (``PublicSpace.split``).
    rotations_only : bool
        Leave reflections out.

    Returns
    -------
    Joined
        The embeddings in that space, and the precision of the alignment.

    Raises
    ------
    ValueError
        If no node is common, or embeddings have different lengths.
    """
    here, there = space.common(nodes)
    rotation = orthogonal_procrustes(
        embeddings[here], space.embeddings[there], rotations_only=rotations_only
    )
    precision = dict[int, float]()
    if held is not None and held.nodes.size > 1:
        local, other = held.common(nodes)
        points = held.embeddings[other]
        precision = alignment_precision(embeddings[local], points, rotation, NEAREST)
    return Joined(embeddings @ rotation, rotation, len(here), precision)
