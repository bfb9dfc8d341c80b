"""Rows of nodes that a run leaves, and the links that it knows, to predict further links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.errors import OutputError

FILE = "links.npz"
Numbers = NDArray[np.generic]


class Embeddings(NamedTuple):
    """Embeddings, in each client's own space: one row for each node of each client.

    Attributes
    ----------
    client, node : ndarray
        ``[r]`` as in ``Predictions``.
    number : ndarray
        ``[r]`` int64, the node's id, common to all clients.
    public : ndarray
        ``[r]`` bool, whether other clients may have the node too.
    embeddings : ndarray
        ``[r, d]`` float32.
    """

    client: Numbers
    node: Numbers
    number: Numbers
    public: Numbers
    embeddings: Numbers

    def of_client(self, client: int) -> Embeddings:
        return Embeddings(*(values[self.client == client] for values in self))

    @classmethod
    def join(cls, parts: Sequence[Embeddings]) -> Embeddings:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


class KnownLinks(NamedTuple):
    """Edges, in both directions, by the nodes' names.

    Attributes
    ----------
    client : ndarray
        ``[e]`` int64, the client in whose graph the edge is; -1 for a server.
    node, other : ndarray
        ``[e]`` the two nodes' names as the user's data have them (str), else numbers (int64).
    """

    client: Numbers
    node: Numbers
    other: Numbers

    def of_client(self, client: int) -> KnownLinks:
        return KnownLinks(*(values[self.client == client] for values in self))

    @classmethod
    def join(cls, parts: Sequence[KnownLinks]) -> KnownLinks:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


def place_of(names: Numbers, wanted: str) -> int:
    """Return the place of a node by its name; ``OutputError`` names the node if it is not there."""
    found = np.flatnonzero(names.astype(str) == wanted)
    if not found.size:
        raise OutputError(f"node {wanted!r}: no row of it; such names are {names[:3].tolist()}")
    return int(found[0])


Decoder = Callable[[Tensor, Tensor], Tensor]  # logits [m] from rows [n, h] and pairs [2, m]


def best_partners(
    rows: Tensor, known: Tensor, node: int, count: int, decoder: Decoder
) -> tuple[Tensor, Tensor]:
    """Return the nodes most likely to be linked with ``node``, the best first.

    Parameters
    ----------
    rows : Tensor
        ``[n, h]``.
    known : Tensor
        Places of nodes that are already linked with it; they and the node itself are left out.
    node, count : int
        The node's place, and the number of partners.
    decoder : callable
        Returns logits of pairs.

    Returns
    -------
    Tensor, Tensor
        ``[count]`` places, and ``[count]`` logits; fewer if there are not so many.
    """
    n = len(rows)
    scores = decoder(rows, torch.stack([torch.full((n,), node), torch.arange(n)])).clone()
    scores[node] = scores[known] = -torch.inf
    left = int(scores.isfinite().sum())
    best = scores.topk(min(count, left))
    return best.indices, best.values
