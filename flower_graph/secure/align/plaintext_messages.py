"""Messages of the two alignments that hide nothing: the paper's polynomials, and plain identities.

Written and read as those in ``flower_graph.secure.align.messages``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.messages.arrays import IntArray
from flower_graph.messages.codec import Entries, Message, Reading
from flower_graph.messages.fields import Block, Exact, Sizes, Whole, Word
from flower_graph.messages.keys import ALIGN_STAGE
from flower_graph.secure.align.messages import CLIENTS, Bytes2D

POLYNOMIALS, PAIRS, SECTIONS = "polynomials", "pairs", "sections"
IDENTITIES, ORDER = "identities", "order"
Residues = NDArray[np.uint64]


@dataclass(frozen=True)
class Modular(Exact):
    """Numbers below a prime of 31 bits, which the message or its reader has."""

    type = "bytes (uint32)"

    def encode(self, value: Any) -> bytes:
        """Write the numbers row by row."""
        data: bytes = value.astype("<u4").tobytes()
        return data

    def unpack(self, value: Any) -> Residues:
        """Read the bytes."""
        if not isinstance(value, bytes) or len(value) % 4:
            raise self.refuse("rows of 4 bytes", value)
        return np.frombuffer(value, "<u4").astype(np.uint64)

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Refuse what is not below the prime."""
        numbers = super().decode(value, name, reading)
        prime = reading.values.get("prime", reading.known.get("prime"))
        if numbers.size and numbers.max() >= prime:
            raise MalformedReplyError(f"the coefficient {numbers.max()} is not below {prime}")
        return numbers


@dataclass(frozen=True)
class Names(Word):
    """A list of different words for each client, as JSON."""

    def encode(self, value: Any) -> str:
        """Write the lists."""
        return json.dumps(value)

    def write(self, value: Any, to: Any) -> None:
        """Write the lists, even if there are none."""
        to.config[self.key] = self.encode(value)

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Refuse what is no list of lists of words; whose they are is checked by the message."""
        try:
            return json.loads("" if value is None else value)
        except (TypeError, ValueError, RecursionError) as error:
            raise MalformedReplyError(f"{self.key} cannot be read: {error}") from error


PRIME = Whole("align-prime", "the modulus", least=1)
SIZES = Sizes("align-sizes", "rows of each client in what follows", shape="c")
COEFFICIENTS = "align-coefficients"


@dataclass
class PolynomialRequest(Message, down="train.align", fixed={ALIGN_STAGE: POLYNOMIALS}):
    """Server to client: the polynomials of these clients modulo ``prime``."""

    prime: Annotated[int, PRIME]
    clients: Annotated[IntArray, CLIENTS]


@dataclass
class PolynomialReply(Message, up="train.align"):
    """Client to server: coefficients of the clients, ``sizes`` each, below ``prime``."""

    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]
    coefficients: Annotated[Residues, Modular(COEFFICIENTS, "`polynomials`")]


@dataclass
class PairRequest(Message, down="train.align", fixed={ALIGN_STAGE: PAIRS}):
    """Server to client: each client's polynomial added to those of all others."""

    prime: Annotated[int, PRIME]
    clients: Annotated[IntArray, CLIENTS]
    places: Annotated[
        IntArray, Exact("align-slots", "`pairs`: the clients' places among all `m`", shape="c")
    ]
    # The client itself is not among the *m - 1*
    sums: Annotated[
        Residues,
        Modular(
            COEFFICIENTS,
            "`pairs`: sums with the others' polynomials",
            shape="c o d",
            sent=(
                ("o", Whole("align-peers", "`pairs`: `o = m − 1`", least=0)),
                ("d", Whole("align-counts", "`pairs`: coefficients of a polynomial", least=0)),
            ),
        ),
    ]


@dataclass
class PatternReply(Message, up="train.align"):
    """Client to server: how many of its identities each set of clients has in common."""

    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]
    # Bits: which of all *m* clients hold them; the reader knows ``w``, ``ceil(m / 8)``
    patterns: Annotated[
        Bytes2D,
        Block("align-patterns", "`pairs`: which clients hold something together", shape="n w"),
    ]
    counts: Annotated[
        IntArray, Exact("align-counts", "`pairs`: how many identities each pattern has", shape="m")
    ]

    def check(self, known: Entries) -> None:
        """Refuse patterns without a count above zero each."""
        if self.counts.size != len(self.patterns) or (self.counts < 1).any():
            raise MalformedReplyError(
                f"{self.counts.size} counts for {len(self.patterns)} patterns"
            )


@dataclass
class SectionOrder(Message, down="train", fixed={ALIGN_STAGE: SECTIONS}):
    """Server to client: the first slot of every pattern; how many slots in all."""

    num_slots: Annotated[int, Whole("align-counts", "`sections`, `order`: how many slots")]
    patterns: Annotated[
        Bytes2D,
        Block(
            "align-patterns",
            "`sections`: the patterns",
            shape="n w",
            sent=(("w", Whole("align-peers", "`sections`: bytes of a pattern", least=1)),),
        ),
    ]
    first: Annotated[IntArray, Exact("align-slots", "`sections`: first slot of each pattern")]


@dataclass
class PlainRequest(Message, down="train.align", fixed={ALIGN_STAGE: IDENTITIES}):
    """Server to client: the identities of these clients, as they are."""

    clients: Annotated[IntArray, CLIENTS]


@dataclass
class PlainReply(Message, up="train.align"):
    """Client to server: each client's identities, written as ``i:5`` or ``s:abc``."""

    clients: Annotated[IntArray, CLIENTS]
    identities: Annotated[
        list[list[str]],
        Names("align-identities", "`identities`: JSON, a list of strings for each client"),
    ]

    def check(self, known: Entries) -> None:
        """Refuse what is not one list for each client, and an identity that comes twice at one."""
        if not isinstance(self.identities, list) or len(self.identities) != self.clients.size:
            raise MalformedReplyError("align-identities: not one list for each client")
        for client, local in zip(self.clients.tolist(), self.identities, strict=True):
            if not isinstance(local, list) or not all(isinstance(name, str) for name in local):
                raise MalformedReplyError(f"client {client}: its identities are no list of strings")
            if len(set(local)) < len(local):
                raise MalformedReplyError(f"client {client} has an identity twice")


@dataclass
class PlainOrder(Message, down="train", fixed={ALIGN_STAGE: ORDER}):
    """Server to client: the slots of the clients' nodes, and how many slots in all."""

    num_slots: Annotated[int, Whole("align-counts", "`sections`, `order`: how many slots")]
    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]
    slots: Annotated[IntArray, Exact("align-slots", "`order`: slot of each of the clients' nodes")]
