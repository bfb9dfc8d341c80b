"""PPFL-GNN's messages: embeddings of public nodes up, their aligned means down.

A SuperNode speaks for one or more clients; their rows are concatenated. Ids are sent once, at
enrolment; later messages name them by a fingerprint.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief
from flower_graph.wire import keys
from flower_graph.wire.arrays import largest_size, pack_integers, read_numbers
from flower_graph.wire.codec import Field, Known, Message, Reading, Writing, take
from flower_graph.wire.counts import Counted, Counting
from flower_graph.wire.fields import (
    Block,
    Bytes,
    Flag,
    Handled,
    NotSaved,
    Numbers,
    Ragged,
    Reasons,
    Saves,
    Token,
    Whole,
    split_rows,
)

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

NOT_FINITE = "its embeddings are not finite"
MAX_DIMENSION = 1 << 16
MOST_CLIENTS = 4096  # of one SuperNode: each is checked, even invented ones
MAX_JUDGED = 64  # measurements of a round


def fingerprint(nodes: IntArray) -> int:
    """Return 63 bits that distinguish lists of ids."""
    digest = hashlib.blake2b(pack_integers(nodes), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def held_nodes(prefix: str = "") -> Ragged:
    """Declare the ids of clients' public nodes, one list after the other."""
    counts = Numbers(f"{prefix}{keys.ROWS}", "public nodes of each", whole=True)
    return Ragged(f"{prefix}nodes", "their ids", shape="sum of rows", pointer=counts)


class EmbeddingEnrolment(Message, up="query"):
    """Client to server: its clients, and their public nodes."""

    clients: Annotated[
        list[int], Numbers(keys.CLIENTS, "at most 4096", whole=True, most=MOST_CLIENTS)
    ]
    nodes: Annotated[list[IntArray], held_nodes()]  # of each client [p]
    dimensions: Annotated[
        list[int], Numbers("dimensions", "numbers of an embedding; all the same", whole=True)
    ]
    handled: Handled = None
    signature: Annotated[
        Bytes | None,
        Block("claim-signature", "of clients and ids (Ed25519)", shape="64", optional=True),
    ] = None

    @property
    def held(self) -> dict[int, IntArray]:
        return dict(zip(self.clients, self.nodes, strict=True))

    def check(self, known: Known) -> None:
        clients = self.clients
        if not clients or len(set(clients)) != len(clients) or min(clients) < 0:
            raise MalformedReplyError(
                f"{keys.CLIENTS}: {brief(clients)}: not different numbers >= 0"
            )
        for client, ids, dimension in zip(clients, self.nodes, self.dimensions, strict=True):
            if not 1 <= dimension <= MAX_DIMENSION:
                raise MalformedReplyError(f"client {client} has embeddings of {dimension} numbers")
            if ids.size < 1 or np.unique(ids).size != ids.size:
                raise MalformedReplyError(f"client {client}: {ids.size} nodes, not all different")


@dataclass(frozen=True)
class Fingerprints(Numbers):
    """Fingerprints of each client's nodes, sent instead of the ids."""

    def encode(self, value: Sequence[IntArray]) -> list[int]:
        return [fingerprint(part) for part in value]

    def decode(self, value: object, name: str, reading: Reading) -> list[IntArray]:
        clients, nodes = reading.values["clients"], reading.known["public"]
        prints = super().decode(value, name, reading)
        for client, print_ in zip(clients, prints, strict=True):
            if client not in nodes or fingerprint(nodes[client]) != print_:
                here = f"here are {brief(sorted(nodes))}, whose ids must not change"
                raise ValueError(f"client {client}: not here, or with other public nodes; {here}")
        return [nodes[client] for client in clients]


@dataclass(frozen=True)
class Rows(Field[Sequence[FloatArray | None]]):
    """Rows of all clients, concatenated, and an entry that marks the clients that have rows."""

    turn = 1
    type = "float32 `[rows, d]`"
    marks = Numbers(keys.WITH_TARGETS, "1 for each client whose rows count, else 0", whole=True)

    def write(self, value: Sequence[FloatArray | None], to: Writing) -> None:
        """Write the rows; zeros for a client without, so that the answer has the same shape."""
        # Flower's ``LocalDpMod`` works on the difference of the two.
        self.marks.write([int(part is not None) for part in value], to)
        asked = to.message if isinstance(to.message, PublicRequest) else to.message.request
        if asked.wants_embeddings:
            zeros = [np.zeros((ids.size, asked.dimension), np.float32) for ids in asked.nodes]
            parts = zip(value, zeros, strict=True)
            to.arrays[self.key] = np.concatenate([z if x is None else x for x, z in parts])

    def read(self, name: str, reading: Reading) -> object:
        request, own = reading.known.get("request"), reading.values
        asked: Known = own if request is None else vars(request)
        if request is None:
            own["dimension"] = 0
        marks, sizes = self.marks.required(name, reading), [ids.size for ids in asked["nodes"]]
        if not set(marks) <= {0, 1}:
            raise self.marks.refuse("0 or 1", marks)
        if not asked["wants_embeddings"]:
            return [None] * len(sizes)
        if isinstance(reading.arrays, RecordDict):  # a reply
            shape = (sum(sizes), asked["dimension"])
            rows = read_numbers(reading.arrays, keys.ARRAYS, keys.PUBLIC, shape)
        else:
            reading.sizes["n"] = sum(sizes)
            rows = take(keys.PUBLIC, "n d", reading)
            own["dimension"] = rows.shape[1]
        with np.errstate(over="ignore"):
            parts = split_rows(rows.astype(np.float32), sizes)
        return [part if mark else None for part, mark in zip(parts, marks, strict=True)]


class PublicRequest(Message, down="train"):
    """Server to client: the aligned means of the last round."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND, "the round")]
    # The clients that are asked, all at one SuperNode
    clients: Annotated[list[int], Numbers(keys.CLIENTS, "who is asked", whole=True)]
    nodes: Annotated[  # as they said themselves
        list[IntArray],
        Fingerprints(
            "fingerprints",
            "of each client's ids: the first 63 bits of BLAKE2b-64 (big-endian) over them as in "
            "`nodes`",
            whole=True,
        ),
    ]
    # [p, d] of each client; None for one that has no means yet
    targets: Annotated[
        list[FloatArray | None],
        Rows("arrays/public", "means of public nodes; in the secure form the common mean"),
    ]
    dimension: int  # numbers of an embedding
    is_last: Annotated[bool, Flag(keys.IS_LAST, "whether no round follows")] = False
    wants_embeddings: Annotated[
        bool, Flag("wants-embeddings", "false where clients train alone; then no array travels")
    ] = True
    follows: Annotated[
        bool,
        Flag("follows", "whether these clients had earlier rounds: their state", optional=True),
    ] = False
    saves: Saves = False
    run: Token = ""  # if they are to save
    counting: Counting = ""


@dataclass(frozen=True)
class Judged(Field[Mapping[str, Sequence[float]]]):
    """Further measurements by name, each a number for every client."""

    is_number = True
    type = "list of float"

    def write(self, value: Mapping[str, Sequence[float]], to: Writing) -> None:
        to.config |= {keys.MEASURED + name: numbers for name, numbers in value.items()}

    def read(self, name: str, reading: Reading) -> object:
        """Refuse invalid measurements, since their names get into the result."""
        found = [key for key in reading.metrics if key.startswith(keys.MEASURED)]
        if len(found) > MAX_JUDGED:
            raise MalformedReplyError(f"{len(found)} measurements, at most {MAX_JUDGED}")
        judged = {}
        for key in found:
            what, values = key.removeprefix(keys.MEASURED), Numbers(key).required(name, reading)
            is_share = what.endswith(keys.ROLES) or what.startswith("precision")
            good = not is_share or all(math.isnan(v) or 0 <= v <= 1 for v in values)
            if not (good and re.fullmatch(r"[a-z0-9-]{1,40}", what)):
                raise MalformedReplyError(f"{key!a:.60}: {brief(values)}: no share, or no name")
            judged[what] = values
        return judged


class PublicReply(Message, up="train"):
    """Client to server: embeddings of public nodes, and what the clients measured."""

    request: PublicRequest  # that it answers; the server knows it
    # [p, d] of each client that was asked, in order; None for one that is left out
    embeddings: Annotated[
        list[FloatArray | None],
        Rows("arrays/public", "embeddings, in the same order. Not in the secure form"),
    ]
    # Its model's own loss
    loss: Annotated[list[float], Numbers(keys.LOSS, "of each client")]
    disagreement: Annotated[
        list[float],
        Numbers("disagreement", "of each: mean of 1 − cos of embeddings and means; NaN without"),
    ]
    judged: Annotated[
        dict[str, list[float]],
        Judged(f"{keys.MEASURED}*", "`judged-val`, `judged-test`, …, of each client or NaN"),
    ] = field(default_factory=dict)
    left_out: Annotated[
        dict[int, str],
        Reasons(keys.LEFT_OUT, "`number:reason` for each that is not to be used"),
    ] = field(default_factory=dict)
    not_saved: NotSaved = ""
    counts: Counted = None

    @property
    def examples(self) -> int:
        return max(1, sum(part.size for part in self.request.nodes))

    @classmethod
    def from_record(
        cls, content: RecordDict, request: PublicRequest, classes: int = 0
    ) -> PublicReply:
        asked = {"request": request, "classes": classes, "counting": request.counting}
        return cls.read(content, c=len(request.clients), **asked)

    def check(self, known: Known) -> None:
        """Leave out a client whose rows cannot be used; refuse impossible measurements of any."""
        most = {keys.LOSS: keys.MAX_NUMBER, "disagreement": 2.001}
        for name, largest in most.items():
            if wrong := [v for v in getattr(self, name) if math.isfinite(v) and abs(v) > largest]:
                raise MalformedReplyError(
                    f"{name} is {wrong[0]:g}, at most {largest:g} is possible"
                )
        asked = self.request.clients  # a SuperNode speaks for these alone
        self.left_out = {client: why for client, why in self.left_out.items() if client in asked}
        for index, (client, rows) in enumerate(zip(asked, self.embeddings, strict=True)):
            if rows is None or (size := largest_size(np.abs(rows))) <= keys.MAX_NUMBER:
                continue
            why = f"its embeddings have {size:g}, at most {keys.MAX_NUMBER:g} is possible"
            self.left_out[client] = why if math.isfinite(size) else NOT_FINITE
            self.embeddings[index] = None


class SumOrder(Message, down="train"):
    """Server to client, with a ``PublicRequest`` whose targets are rows of the common mean."""

    # Of each client that is asked, int64 [p]
    slots: Annotated[
        list[NDArray[np.int64]],
        Ragged("slots", "place of each public node in the sum; −1: it is not in it", shape="rows"),
    ]
    seed: Annotated[int, Whole(keys.SEED, "of the points that all turn to first")]
    is_target: Annotated[
        bool,
        Flag("is-target", "whether the common mean may be learnt from; else only turned to"),
    ]
    rotations_only: Annotated[bool, Flag("rotations-only", "leave reflections out")]
