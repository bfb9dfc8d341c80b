"""Messages of the alignment by blinded identities (``flower_graph.secure.align.server``).

The entries' keys are used by nothing else, so that a message can travel with others in one
exchange. Rows of bytes (points, tokens) of several clients stand one after the other, with their
numbers beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.messages.arrays import IntArray
from flower_graph.messages.codec import Entries, Message
from flower_graph.messages.fields import Block, Clients, Sizes, Whole
from flower_graph.messages.keys import ALIGN_STAGE

Bytes2D = NDArray[np.uint8]

BLIND, EVALUATE, UNION, PUBLISH = "blind", "evaluate", "union", "publish"
POINT, TOKEN = 32, 12  # bytes
MIN_BLOCK = 16  # points of a client


EPOCH = Whole("align-epoch", "number of the alignment", least=1, most=(1 << 32) - 1)
CLIENTS = Clients("align-clients", "clients, all hosted there", shape="c", may_be_none=True)
POINTS = Block("align-points", "blinded identities, or the products", shape=f"n {POINT}")
SIZES = Sizes("align-sizes", "points of each", shape="c")


@dataclass
class BlindRequest(Message, down="train.align", fixed={ALIGN_STAGE: BLIND}):
    """Server to client: blind the identities of these clients."""

    epoch: Annotated[int, EPOCH]  # a higher one than before starts anew
    clients: Annotated[IntArray, CLIENTS]


@dataclass
class BlindReply(Message, up="train.align"):
    """Client to server: blinded identities, filled up with random points."""

    epoch: Annotated[int, EPOCH]
    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]  # powers of two
    points: Annotated[Bytes2D, POINTS]

    def check(self, known: Entries) -> None:
        """Refuse numbers of points that would show how many identities a client has."""
        sizes = self.sizes
        wrong = (sizes < MIN_BLOCK) | ((sizes & (sizes - 1)) != 0)
        if wrong.any():
            raise MalformedReplyError(
                f"client {self.clients[wrong][0]}: {sizes[wrong][0]} points; must be a power of "
                f"two, at least {MIN_BLOCK}"
            )


@dataclass
class EvaluateRequest(Message, down="train.align", fixed={ALIGN_STAGE: EVALUATE}):
    """Server to key-holders: multiply these points by your shares of the key."""

    epoch: Annotated[int, EPOCH]
    holders: Annotated[IntArray, CLIENTS]  # key-holders; their shares are added up
    points: Annotated[Bytes2D, POINTS]  # of all clients


@dataclass
class EvaluateReply(Message, up="train.align"):
    """Key-holders to server: the request's points, multiplied."""

    epoch: Annotated[int, EPOCH]
    points: Annotated[Bytes2D, POINTS]


@dataclass
class UnionRequest(Message, down="train.union", fixed={ALIGN_STAGE: UNION}):
    """Server to client: the key-holders' answers, and the size of the table to add up."""

    epoch: Annotated[int, EPOCH]
    clients: Annotated[
        IntArray,
        replace(
            CLIENTS, says="clients whose points are back; none if a table is only asked for again"
        ),
    ]
    sizes: Annotated[IntArray, SIZES]
    points: Annotated[Bytes2D, replace(POINTS, says="their points times the whole key")]
    # Of the table (``flower_graph.secure.align.sketch``)
    cells: Annotated[int, Whole("align-cells", "cells of the table")]


@dataclass
class PublishedTokens(Message, down="train", fixed={ALIGN_STAGE: PUBLISH}):
    """Server to client: the tokens that at least two clients hold, in the order of the slots."""

    epoch: Annotated[int, EPOCH]
    # Row *i* is slot *i*. Later messages of an epoch only append
    tokens: Annotated[
        Bytes2D, Block("align-tokens", "tokens in the order of the slots", shape=f"slots {TOKEN}")
    ]

    @property
    def num_slots(self) -> int:
        """How many there are."""
        return len(self.tokens)
