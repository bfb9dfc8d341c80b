"""Messages that set the secure sum up: channel keys, and the ring of a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.records import keys
from flower_graph.records.fields import (
    Config,
    read_block,
    read_clients,
    read_integer,
    read_run,
)
from flower_graph.records.keys import pack_integers
from flower_graph.secure.channel import KEY_BYTES
from flower_graph.secure.ring import WORDS, Ring

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]


@dataclass
class KeyRequest:
    """Server to client: make channel keys for a run.

    Attributes
    ----------
    run_id : bytes
        16 bytes, fresh for the run.
    """

    run_id: bytes

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {keys.SUM_RUN: self.run_id}

    @classmethod
    def from_config(cls, config: Config) -> KeyRequest:
        """Read the message at the client."""
        return cls(read_run(config, keys.SUM_RUN))


@dataclass
class KeyReply:
    """Client to server: who is here, and their public channel keys.

    Attributes
    ----------
    run_id : bytes
        The run.
    clients : ndarray
        ``[p]`` client numbers.
    channel_keys : ndarray
        ``[p, 32]`` public keys.
    """

    run_id: bytes
    clients: Integers
    channel_keys: Bytes

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            keys.SUM_RUN: self.run_id,
            keys.SUM_CLIENTS: pack_integers(self.clients),
            keys.SUM_CHANNEL_KEYS: self.channel_keys.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> KeyReply:
        """Read and check the reply."""
        clients = read_clients(config, keys.SUM_CLIENTS)
        channel_keys = read_block(config, keys.SUM_CHANNEL_KEYS, (clients.size, KEY_BYTES))
        return cls(read_run(config, keys.SUM_RUN), clients, channel_keys)


def write_ring(ring: Ring) -> dict[str, Any]:
    """Return the config entries of a ring."""
    return {
        keys.RING_WORD: ring.word,
        keys.RING_FRACTION: ring.fraction_bits,
        keys.RING_GUARD: ring.guard_bits,
        keys.RING_LIMIT: ring.limit,
    }


def read_ring(config: Config) -> Ring:
    """Read what ``write_ring`` wrote."""
    word, limit = read_integer(config, keys.RING_WORD), config.get(keys.RING_LIMIT)
    if word not in WORDS or not isinstance(limit, float):
        raise MalformedReplyError(f"a ring of {word} bits with the limit {limit!r:.60}")
    return Ring(
        word,
        read_integer(config, keys.RING_FRACTION),
        read_integer(config, keys.RING_GUARD),
        limit,
    )
