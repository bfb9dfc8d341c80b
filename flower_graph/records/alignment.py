"""Messages of the alignment by blinded identities (``flower_graph.secure.align_server``).

Each message is a dataclass that writes itself into config entries and reads itself from them. The
entries' keys are used by nothing else, so that a message can travel with others in one exchange.
Rows of bytes (points, tokens) of several clients stand one after the other, with their numbers
beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.records.keys import (
    ALIGN_CELLS,
    ALIGN_CLIENTS,
    ALIGN_EPOCH,
    ALIGN_POINTS,
    ALIGN_SIZES,
    ALIGN_STAGE,
    ALIGN_TOKENS,
    IntArray,
    pack_integers,
    unpack_integers,
)

Config = Mapping[str, Any]
Bytes2D = NDArray[np.uint8]

BLIND, EVALUATE, UNION, PUBLISH = "blind", "evaluate", "union", "publish"
POINT, TOKEN = 32, 12  # bytes
MIN_BLOCK = 16  # points of a client


@dataclass
class BlindRequest:
    """Server to client: blind the identities of these clients.

    Attributes
    ----------
    epoch : int
        Number of the alignment within the run; a higher one than before starts anew.
    clients : ndarray
        ``[c]`` client numbers, all hosted there.
    """

    epoch: int
    clients: IntArray

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_STAGE: BLIND,
            ALIGN_EPOCH: self.epoch,
            ALIGN_CLIENTS: pack_integers(self.clients),
        }

    @classmethod
    def from_config(cls, config: Config) -> BlindRequest:
        """Read the message at the client."""
        return cls(_epoch(config), read_clients(config))


@dataclass
class BlindReply:
    """Client to server: blinded identities, filled up with random points.

    Attributes
    ----------
    epoch : int
        The request's.
    clients : ndarray
        ``[c]`` the request's clients.
    sizes : ndarray
        ``[c]`` how many points each has: powers of two.
    points : ndarray
        ``[sum(sizes), 32]`` bytes.
    """

    epoch: int
    clients: IntArray
    sizes: IntArray
    points: Bytes2D

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_EPOCH: self.epoch,
            ALIGN_CLIENTS: pack_integers(self.clients),
            ALIGN_SIZES: pack_integers(self.sizes),
            ALIGN_POINTS: self.points.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> BlindReply:
        """Read the message; ``MalformedReplyError`` if its parts do not fit together."""
        clients = read_clients(config)
        points = unpack_rows(config.get(ALIGN_POINTS), POINT, ALIGN_POINTS)
        sizes = unpack_sizes(config, clients, len(points))
        wrong = (sizes < MIN_BLOCK) | ((sizes & (sizes - 1)) != 0)
        if wrong.any():
            raise MalformedReplyError(
                f"client {clients[wrong][0]}: {sizes[wrong][0]} points; must be a power of two, at "
                f"least {MIN_BLOCK}"
            )
        return cls(_epoch(config), clients, sizes, points)


@dataclass
class EvaluateRequest:
    """Server to key-holders: multiply these points by your shares of the key.

    Attributes
    ----------
    epoch : int
        Number of the alignment.
    holders : ndarray
        ``[h]`` key-holders, all hosted there; their shares are added up.
    points : ndarray
        ``[n, 32]`` bytes, blinded identities of all clients.
    """

    epoch: int
    holders: IntArray
    points: Bytes2D

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_STAGE: EVALUATE,
            ALIGN_EPOCH: self.epoch,
            ALIGN_CLIENTS: pack_integers(self.holders),
            ALIGN_POINTS: self.points.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> EvaluateRequest:
        """Read the message at the client."""
        points = unpack_rows(config.get(ALIGN_POINTS), POINT, ALIGN_POINTS)
        return cls(_epoch(config), read_clients(config), points)


@dataclass
class EvaluateReply:
    """Key-holders to server: the request's points, multiplied.

    Attributes
    ----------
    epoch : int
        The request's.
    points : ndarray
        ``[n, 32]`` bytes.
    """

    epoch: int
    points: Bytes2D

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {ALIGN_EPOCH: self.epoch, ALIGN_POINTS: self.points.tobytes()}

    @classmethod
    def from_config(cls, config: Config) -> EvaluateReply:
        """Read the message; ``MalformedReplyError`` if it cannot be read."""
        return cls(_epoch(config), unpack_rows(config.get(ALIGN_POINTS), POINT, ALIGN_POINTS))


@dataclass
class UnionRequest:
    """Server to client: the key-holders' answers, and the size of the table to add up.

    Attributes
    ----------
    epoch : int
        Number of the alignment.
    clients : ndarray
        ``[c]`` clients whose answers are here; none when a table is only asked for again.
    sizes : ndarray
        ``[c]`` how many points each has.
    points : ndarray
        ``[sum(sizes), 32]`` bytes: every client's blinded points times the whole key.
    cells : int
        Number of cells of the table (``flower_graph.secure.sketch``).
    """

    epoch: int
    clients: IntArray
    sizes: IntArray
    points: Bytes2D
    cells: int

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_STAGE: UNION,
            ALIGN_EPOCH: self.epoch,
            ALIGN_CLIENTS: pack_integers(self.clients),
            ALIGN_SIZES: pack_integers(self.sizes),
            ALIGN_POINTS: self.points.tobytes(),
            ALIGN_CELLS: self.cells,
        }

    @classmethod
    def from_config(cls, config: Config) -> UnionRequest:
        """Read the message at the client."""
        clients = read_clients(config)
        points = unpack_rows(config.get(ALIGN_POINTS), POINT, ALIGN_POINTS)
        sizes = unpack_sizes(config, clients, len(points))
        return cls(_epoch(config), clients, sizes, points, int(config[ALIGN_CELLS]))


@dataclass
class PublishedTokens:
    """Server to client: the tokens that at least two clients hold, in the order of the slots.

    Attributes
    ----------
    epoch : int
        Number of the alignment.
    tokens : ndarray
        ``[s, 12]`` bytes; row *i* is slot *i*. Later messages of an epoch only append.
    """

    epoch: int
    tokens: Bytes2D

    @property
    def num_slots(self) -> int:
        """How many there are."""
        return len(self.tokens)

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_STAGE: PUBLISH,
            ALIGN_EPOCH: self.epoch,
            ALIGN_TOKENS: self.tokens.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> PublishedTokens:
        """Read the message at the client."""
        return cls(_epoch(config), unpack_rows(config.get(ALIGN_TOKENS), TOKEN, ALIGN_TOKENS))


def unpack_rows(data: object, width: int, what: str) -> Bytes2D:
    """Read rows of ``width`` bytes; ``MalformedReplyError`` names ``what`` if it cannot."""
    if not isinstance(data, bytes) or len(data) % width:
        raise MalformedReplyError(f"{what}: expected rows of {width} bytes, got {data!r:.60}")
    return np.frombuffer(data, np.uint8).reshape(-1, width)


def unpack_sizes(config: Config, clients: IntArray, rows: int) -> NDArray[np.int64]:
    """Read how many rows each client has; they must add up."""
    sizes = unpack_integers(config.get(ALIGN_SIZES), ALIGN_SIZES)
    if sizes.shape != clients.shape:
        raise MalformedReplyError(f"{sizes.size} sizes for {clients.size} clients")
    if (sizes < 0).any() or (sizes > rows).any() or sizes.sum() != rows:
        raise MalformedReplyError(f"sizes {sizes.tolist()!s:.60} for {rows} rows in all")
    return sizes


def _epoch(config: Config) -> int:
    epoch = config.get(ALIGN_EPOCH)
    if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 < epoch < 1 << 32:
        raise MalformedReplyError(f"{ALIGN_EPOCH}: expected a positive number, got {epoch!r:.60}")
    return epoch


def read_clients(config: Config) -> NDArray[np.int64]:
    """Read client numbers, none of them twice."""
    clients = unpack_integers(config.get(ALIGN_CLIENTS), ALIGN_CLIENTS)
    if np.unique(clients).size != clients.size:
        raise MalformedReplyError(f"a client twice among {clients.tolist()!s:.60}")
    return clients
