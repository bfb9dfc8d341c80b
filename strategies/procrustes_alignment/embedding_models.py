"""What PPFL-GNN's client needs of an embedding model, and of the data around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
# Measures the embeddings of all of a client's nodes; is told the round, and whether it is the last
Judge = Callable[[FloatArray, int, bool], Mapping[str, float]]


class EmbeddingModel(Protocol):
    """Anything that embeds the nodes of one client and can be pulled towards targets."""

    # A message may be answered by another process than the one before. So a model that keeps
    # anything from round to round also has PyTorch's ``state_dict`` and ``load_state_dict``
    # (``KeepsState``), and draws random numbers from nothing but a seed, its client and the round.

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        """Train for one round."""
        # rows [p], targets [p, d]

    def embed(self) -> FloatArray:
        """Return the embeddings of all nodes of the client, ``[n, d]``."""


@runtime_checkable
class KeepsState(Protocol):
    """What a model has besides if it keeps anything from round to round."""

    # Names, shapes and types of the tensors stay the same from the model's making on.

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that must last."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Go on from it."""


@dataclass(frozen=True)
class EmbeddingClient:
    """One client of PPFL-GNN.

    Parameters
    ----------
    number
        Number of the client; unique over the run.
    nodes
        Ids of its nodes, int64 ``[n]``; clients know a shared node by the same id.
    rows
        Which of them are public, by their place in ``nodes``, int64 ``[p]``.
    dimension
        Numbers of an embedding.
    build
        Makes the model as it is before the first round.
    judge
        Measures its embeddings; ``val`` and ``test`` of what it returns are the round's
        accuracies. None: nothing is measured.

    Raises
    ------
    ValueError
        If ids or rows are impossible, or there is no public node.
    """

    number: int
    nodes: IntArray
    rows: IntArray
    dimension: int
    build: Callable[[], EmbeddingModel]
    judge: Judge | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be; names the client."""
        who = f"client {self.number}"
        if self.nodes.ndim != 1 or self.nodes.size == 0:
            raise ValueError(f"{who}: nodes has shape {self.nodes.shape}, must be [n] with n > 0")
        if np.unique(self.nodes).size != self.nodes.size:
            raise ValueError(f"{who}: two of its nodes have one id")
        if self.rows.ndim != 1 or self.rows.size == 0:
            raise ValueError(f"{who} has no public node: it shares nothing with anybody")
        if np.unique(self.rows).size != self.rows.size:
            raise ValueError(f"{who}: a public node is named twice")
        if self.rows.min() < 0 or self.rows.max() >= self.nodes.size:
            wrong = self.rows.min() if self.rows.min() < 0 else self.rows.max()
            raise ValueError(f"{who}: row {wrong} is none of its {self.nodes.size} nodes")
        if self.dimension < 1:
            raise ValueError(f"{who}: dimension is {self.dimension}, must be at least 1")

    @property
    def public(self) -> IntArray:
        """Ids of the public nodes, int64 ``[p]``."""
        return self.nodes[self.rows]


def public_rows(nodes: IntArray, public: IntArray) -> IntArray:
    """Find public nodes among a client's nodes by id.

    Parameters
    ----------
    nodes : ndarray
        ``[n]`` ids of the client's nodes.
    public : ndarray
        ``[p]`` ids of the public ones.

    Returns
    -------
    ndarray
        ``[p]`` their places, int64.

    Raises
    ------
    ValueError
        If an id is none of the client's.
    """
    order = np.argsort(nodes, kind="stable")
    at = np.searchsorted(nodes, public, sorter=order).clip(max=nodes.size - 1)
    rows: IntArray = order[at].astype(np.int64)
    strangers = public[nodes[rows] != public]
    if strangers.size:
        raise ValueError(
            f"public nodes {strangers[:5].tolist()} are none of the client's {nodes.size} nodes"
        )
    return rows
