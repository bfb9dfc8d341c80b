"""Messages of the two alignments that hide nothing: the paper's polynomials, and plain identities.

Written and read as those in ``flower_graph.records.alignment``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.records.alignment import (
    Bytes2D,
    Config,
    read_clients,
    unpack_rows,
    unpack_sizes,
)
from flower_graph.records.keys import (
    ALIGN_CLIENTS,
    ALIGN_COEFFICIENTS,
    ALIGN_COUNTS,
    ALIGN_IDENTITIES,
    ALIGN_PATTERNS,
    ALIGN_PEERS,
    ALIGN_PRIME,
    ALIGN_SIZES,
    ALIGN_SLOTS,
    ALIGN_STAGE,
    IntArray,
    pack_integers,
    unpack_integers,
)

POLYNOMIALS, PAIRS, SECTIONS = "polynomials", "pairs", "sections"
IDENTITIES, ORDER = "identities", "order"
Residues = NDArray[np.uint64]


@dataclass
class PolynomialRequest:
    """Server to client: the polynomials of these clients ``[c]`` modulo ``prime``."""

    prime: int
    clients: IntArray

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_STAGE: POLYNOMIALS,
            ALIGN_PRIME: self.prime,
            ALIGN_CLIENTS: pack_integers(self.clients),
        }

    @classmethod
    def from_config(cls, config: Config) -> PolynomialRequest:
        """Read the message at the client."""
        return cls(int(config[ALIGN_PRIME]), read_clients(config))


@dataclass
class PolynomialReply:
    """Client to server: coefficients ``[sum(sizes)]`` of the clients ``[c]``, ``sizes`` each."""

    clients: IntArray
    sizes: IntArray
    coefficients: Residues

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_CLIENTS: pack_integers(self.clients),
            ALIGN_SIZES: pack_integers(self.sizes),
            ALIGN_COEFFICIENTS: _pack_residues(self.coefficients),
        }

    @classmethod
    def from_config(cls, config: Config, prime: int) -> PolynomialReply:
        """Read the message; every coefficient must be below the prime."""
        clients = read_clients(config)
        coefficients = _unpack_residues(config, prime)
        return cls(clients, unpack_sizes(config, clients, coefficients.size), coefficients)


@dataclass
class PairRequest:
    """Server to client: each client's polynomial added to those of all others.

    Attributes
    ----------
    prime : int
        The modulus.
    clients, places : ndarray
        ``[c]`` client numbers and their places among all *m*.
    sums : ndarray
        ``[c, m - 1, d]`` coefficients; the client itself is not among the *m - 1*.
    """

    prime: int
    clients: IntArray
    places: IntArray
    sums: Residues

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_STAGE: PAIRS,
            ALIGN_PRIME: self.prime,
            ALIGN_CLIENTS: pack_integers(self.clients),
            ALIGN_SLOTS: pack_integers(self.places),
            ALIGN_PEERS: self.sums.shape[1],
            ALIGN_COUNTS: self.sums.shape[2],
            ALIGN_COEFFICIENTS: _pack_residues(self.sums),
        }

    @classmethod
    def from_config(cls, config: Config) -> PairRequest:
        """Read the message at the client."""
        prime, clients = int(config[ALIGN_PRIME]), read_clients(config)
        sums = _unpack_residues(config, prime)
        shape = (clients.size, int(config[ALIGN_PEERS]), int(config[ALIGN_COUNTS]))
        places = unpack_integers(config.get(ALIGN_SLOTS), ALIGN_SLOTS)
        return cls(prime, clients, places, sums.reshape(shape))


@dataclass
class PatternReply:
    """Client to server: how many of its identities each set of clients has in common.

    Attributes
    ----------
    clients, sizes : ndarray
        ``[c]`` client numbers and how many patterns each has.
    patterns : ndarray
        ``[sum(sizes), ceil(m / 8)]`` bits: which clients hold them.
    counts : ndarray
        ``[sum(sizes)]`` how many identities have that pattern.
    """

    clients: IntArray
    sizes: IntArray
    patterns: Bytes2D
    counts: IntArray

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_CLIENTS: pack_integers(self.clients),
            ALIGN_SIZES: pack_integers(self.sizes),
            ALIGN_PATTERNS: self.patterns.tobytes(),
            ALIGN_COUNTS: pack_integers(self.counts),
        }

    @classmethod
    def from_config(cls, config: Config, width: int) -> PatternReply:
        """Read the message; patterns have ``width`` bytes."""
        clients = read_clients(config)
        patterns = unpack_rows(config.get(ALIGN_PATTERNS), width, ALIGN_PATTERNS)
        counts = unpack_integers(config.get(ALIGN_COUNTS), ALIGN_COUNTS)
        if counts.size != len(patterns) or (counts < 1).any():
            raise MalformedReplyError(f"{counts.size} counts for {len(patterns)} patterns")
        return cls(clients, unpack_sizes(config, clients, len(patterns)), patterns, counts)


@dataclass
class SectionOrder:
    """Server to client: the first slot ``[p]`` of every pattern ``[p, w]``; how many in all."""

    num_slots: int
    patterns: Bytes2D
    first: IntArray

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_STAGE: SECTIONS,
            ALIGN_COUNTS: self.num_slots,
            ALIGN_PEERS: self.patterns.shape[1],
            ALIGN_PATTERNS: self.patterns.tobytes(),
            ALIGN_SLOTS: pack_integers(self.first),
        }

    @classmethod
    def from_config(cls, config: Config) -> SectionOrder:
        """Read the message at the client."""
        width = int(config[ALIGN_PEERS])
        patterns = unpack_rows(config.get(ALIGN_PATTERNS), width, ALIGN_PATTERNS)
        return cls(
            int(config[ALIGN_COUNTS]), patterns, unpack_integers(config[ALIGN_SLOTS], ALIGN_SLOTS)
        )


@dataclass
class PlainRequest:
    """Server to client: the identities of these clients ``[c]``, as they are."""

    clients: IntArray

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {ALIGN_STAGE: IDENTITIES, ALIGN_CLIENTS: pack_integers(self.clients)}

    @classmethod
    def from_config(cls, config: Config) -> PlainRequest:
        """Read the message at the client."""
        return cls(read_clients(config))


@dataclass
class PlainReply:
    """Client to server: each client's identities, written as ``i:5`` or ``s:abc``."""

    clients: IntArray
    identities: list[list[str]]

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_CLIENTS: pack_integers(self.clients),
            ALIGN_IDENTITIES: json.dumps(self.identities),
        }

    @classmethod
    def from_config(cls, config: Config) -> PlainReply:
        """Read the message; no identity may come twice at a client."""
        clients = read_clients(config)
        try:
            identities = json.loads(config.get(ALIGN_IDENTITIES, ""))
        except (TypeError, ValueError) as error:
            raise MalformedReplyError(f"{ALIGN_IDENTITIES} cannot be read: {error}") from error
        if not isinstance(identities, list) or len(identities) != clients.size:
            raise MalformedReplyError(f"{ALIGN_IDENTITIES}: not one list for each client")
        for client, own in zip(clients.tolist(), identities, strict=True):
            if not isinstance(own, list) or not all(isinstance(name, str) for name in own):
                raise MalformedReplyError(f"client {client}: its identities are no list of strings")
            if len(set(own)) < len(own):
                raise MalformedReplyError(f"client {client} has an identity twice")
        return cls(clients, identities)


@dataclass
class PlainOrder:
    """Server to client: the slots ``[sum(sizes)]`` of the clients' nodes, and all slots' number."""

    num_slots: int
    clients: IntArray
    sizes: IntArray
    slots: IntArray

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            ALIGN_STAGE: ORDER,
            ALIGN_COUNTS: self.num_slots,
            ALIGN_CLIENTS: pack_integers(self.clients),
            ALIGN_SIZES: pack_integers(self.sizes),
            ALIGN_SLOTS: pack_integers(self.slots),
        }

    @classmethod
    def from_config(cls, config: Config) -> PlainOrder:
        """Read the message at the client."""
        clients = read_clients(config)
        slots = unpack_integers(config.get(ALIGN_SLOTS), ALIGN_SLOTS)
        sizes = unpack_sizes(config, clients, slots.size)
        return cls(int(config[ALIGN_COUNTS]), clients, sizes, slots)


def _pack_residues(values: Residues) -> bytes:
    return values.astype("<u4").tobytes()


def _unpack_residues(config: Config, prime: int) -> Residues:
    rows = unpack_rows(config.get(ALIGN_COEFFICIENTS), 4, ALIGN_COEFFICIENTS)
    values = rows.reshape(-1).view("<u4").astype(np.uint64)
    if values.size and values.max() >= prime:
        raise MalformedReplyError(f"the coefficient {values.max()} is not below {prime}")
    return values
