"""What clients of the secure consensus add up, and the common mean that they turn to.

Row-vector form throughout: ``X W`` turns the rows of ``X``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.messages.codec import Message
from flower_graph.messages.fields import Flag, Ragged, Whole
from flower_graph.messages.keys import IS_TARGET, ROTATIONS_ONLY, SEED, SLOTS
from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.rng import derive_seed
from flower_graph.strategies.procrustes_alignment.messages import PublicReply, PublicRequest
from flower_graph.strategies.procrustes_alignment.server_state import NEAREST

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
ABSENT = -1  # slot of a node that is not in the sum


@dataclass
class SumOrder(Message, down="train"):
    """Server to client, beside a ``PublicRequest`` whose targets are rows of the common mean."""

    # Of each client that is asked, int64 [p]
    slots: Annotated[
        list[NDArray[np.int64]],
        Ragged(SLOTS, "place of each public node in the sum; −1: it is not in it", shape="rows"),
    ]
    seed: Annotated[int, Whole(SEED, "of the points that all turn to first")]
    is_target: Annotated[
        bool, Flag(IS_TARGET, "whether the common mean may be learnt from; else only turned to")
    ]
    rotations_only: Annotated[bool, Flag(ROTATIONS_ONLY, "leave reflections out")]


def first_points(seed: int, nodes: int, dimension: int) -> Floats:
    """Draw what everybody turns to before there is a mean, ``[u, d]`` normal."""
    # Any fixed points do: clients that embed alike turn alike, and so come to lie on each other.
    rng = np.random.default_rng(derive_seed(seed, "secure-consensus"))
    return rng.standard_normal((nodes, dimension))


def rotation(embeddings: Floats, points: Floats, rotations_only: bool) -> Floats:
    """Find the orthogonal ``W`` that brings a client's rows nearest to common points."""
    # embeddings, points [p, d]
    if not len(embeddings):
        return np.eye(points.shape[1])
    return orthogonal_procrustes(embeddings, points, rotations_only=rotations_only)


class Rotated(NamedTuple):
    """A client's embeddings beside those of the others."""

    rotation: Floats  # ``W_i``
    vector: Floats  # its part of the sum
    precision: Mapping[int, float]  # how near they came to the common mean; empty without one


def rotate(
    request: PublicRequest, order: SumOrder, reply: PublicReply, length: int
) -> dict[int, Rotated]:
    """Bring each client's rows nearest to the common mean, or to the first points without one."""
    start = first_points(order.seed, length // request.dimension, request.dimension)
    result = {}
    for index, client in enumerate(request.clients):
        x, mean, slots = reply.embeddings[index], request.targets[index], order.slots[index]
        if x is None:
            continue
        here, local = slots != ABSENT, x.astype(np.float64)
        points = start[slots[here]] if mean is None else mean[here].astype(np.float64)
        turn, near = rotation(local[here], points, order.rotations_only), dict[int, float]()
        if mean is not None and here.any():
            near = alignment_precision(local[here], points, turn, NEAREST)
        result[client] = Rotated(turn, sum_vector(local @ turn, slots, length), near)
    return result


def sum_vector(turned: Floats, slots: Integers, length: int) -> Floats:
    """Lay a client's turned rows ``[p, d]`` at their slots, zeros elsewhere, ``[length]``."""
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
    """Say how many clients must hold a node for its sum to be asked for."""
    # At most the share ``dropout`` of the clients may be missing from a sum that is opened, so two
    # are in the sum of every node then, however unlucky: no row is one client's alone.
    return 2 + math.floor(dropout * clients)


def common_nodes(
    ids: Mapping[int, Integers], clients: Sequence[int], dropout: float
) -> NDArray[np.int64]:
    """Choose the nodes of a sum: those with enough holders among its clients, ascending ids."""
    if not clients:
        return np.zeros(0, np.int64)
    result, counts = np.unique(
        np.concatenate([ids[client] for client in clients]), return_counts=True
    )
    return result[counts >= fewest_holders(len(clients), dropout)]


def find_slots(nodes: Integers, common: Integers) -> Integers:
    """Find nodes ``[p]`` among the common ones, ascending; ``ABSENT`` where they are not."""
    if not common.size:
        return np.full(nodes.shape, ABSENT)
    at = np.searchsorted(common, nodes).clip(max=common.size - 1)
    return np.where(common[at] == nodes, at, ABSENT)


class CommonMean:
    """The server's mean of the turned embeddings, by node."""

    def __init__(self, dropout: float) -> None:
        self.dropout, self.made = dropout, 0  # sums so far
        self.nodes: Integers = np.zeros(0, np.int64)  # ids of the rows, ascending
        self.rows: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self.slots: dict[int, Integers] = {}  # where each client's nodes are

    def choose(
        self,
        ids: Mapping[int, Integers],
        there: Mapping[int, Iterable[int]],
        clients: Sequence[int],
        dimension: int,
    ) -> None:
        """Choose the nodes of the next sum; those that stay keep their mean."""
        nodes = common_nodes(ids, clients, self.dropout)
        if len(clients) > 1 and not nodes.size:
            raise ValueError(
                f"no public node has {fewest_holders(len(clients), self.dropout)} holders among "
                f"{len(clients)} clients, of which the share {self.dropout:g} may be missing: its "
                "sum could be one client's own embedding; lower dropout, or align in the clear"
            )
        if not np.array_equal(nodes, self.nodes):
            rows = np.zeros((nodes.size, dimension), np.float32)
            at = find_slots(self.nodes, nodes)
            if self.made:
                rows[at[at != ABSENT]] = self.rows[at != ABSENT]
            self.nodes, self.rows = nodes, rows
        everyone = (client for here in there.values() for client in here)
        self.slots = {client: find_slots(ids[client], self.nodes) for client in everyone}

    def of(self, client: int) -> NDArray[np.float32] | None:
        """Give a client's rows; zeros where there is none."""
        if not self.made:
            return None
        slots = self.slots[client]
        return np.where((slots != ABSENT)[:, None], self.rows[slots], np.float32(0))

    def take(self, total: Floats, contributors: Iterable[int]) -> None:
        """Divide a sum by each node's holders."""
        holders = np.zeros(self.nodes.size)
        for client in contributors:
            slots = self.slots[client]
            holders[slots[slots != ABSENT]] += 1
        rows = total.reshape(self.nodes.size, -1)
        self.rows, self.made = (rows / holders[:, None]).astype(np.float32), self.made + 1

    def state_dict(self) -> dict[str, Any]:
        """Return everything that lasts between rounds."""
        arrays = {"nodes": torch.from_numpy(self.nodes), "mean": torch.from_numpy(self.rows)}
        return arrays | {"made": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.nodes, self.rows = state["nodes"].numpy(), state["mean"].numpy()
        self.made = int(state["made"])
