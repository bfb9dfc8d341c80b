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

__all__ = ["EmbeddingEnrolment", "PublicReply", "PublicRequest", "fingerprint", "split_rows"]

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


@dataclass
class EmbeddingEnrolment(Message, up="query"):
    """Client to server: its clients, and their public nodes."""

    clients: Annotated[
        list[int],
        Numbers(
            keys.CLIENTS,
            f"numbers of the clients here, at most {MOST_CLIENTS}",
            whole=True,
            most=MOST_CLIENTS,
        ),
    ]
    nodes: Annotated[  # of each client [p]
        list[IntArray],
        Ragged(
            "nodes",
            "ids of these, client by client",
            shape="sum of rows",
            pointer=Numbers(keys.ROWS, "public nodes of each", whole=True),
        ),
    ]
    dimensions: Annotated[
        list[int],
        Numbers("dimensions", "numbers of an embedding, of each client; all the same", whole=True),
    ]
    handled: Handled = None
    signature: Annotated[
        Bytes | None,
        Block(
            "claim-signature",
            "over clients and ids (Ed25519), where the server is not trusted",
            shape="64",
            optional=True,
        ),
    ] = None

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
    """Rows of all clients, concatenated, and an entry that marks which clients' rows count."""

    turn = 1
    type = "float32 `[rows, d]`"

    def write(self, value: Sequence[FloatArray | None], to: Writing) -> None:
        """Write the rows; zeros for a client without, so that the answer has the same shape."""
        # Flower's ``LocalDpMod`` works on the difference of the two.
        to.config[keys.WITH_TARGETS] = [int(part is not None) for part in value]
        asked = to.message if isinstance(to.message, PublicRequest) else to.message.request
        if asked.wants_embeddings:
            zeros = [np.zeros((ids.size, asked.dimension), np.float32) for ids in asked.nodes]
            parts = zip(value, zeros, strict=True)
            to.arrays[self.key] = np.concatenate([z if x is None else x for x, z in parts])


@dataclass(frozen=True)
class Targets(Rows):
    """Means for the clients that have means already."""

    with_targets = Numbers(keys.WITH_TARGETS, "1 for each client that has means yet", whole=True)

    def read(self, name: str, reading: Reading) -> object:
        values = reading.values
        values["dimension"] = 0
        if not values["wants_embeddings"]:
            return [None] * len(values["clients"])
        sizes = [ids.size for ids in values["nodes"]]
        reading.sizes["n"] = sum(sizes)
        rows = take(keys.PUBLIC, "n d", reading).astype(np.float32)
        values["dimension"] = rows.shape[1]
        has = self.with_targets.required(name, reading)
        return [x if flag else None for x, flag in zip(split_rows(rows, sizes), has, strict=True)]


@dataclass
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
            shape="c",
            whole=True,
        ),
    ]
    # [p, d] of each client; None for one that has no means yet
    targets: Annotated[
        list[FloatArray | None],
        Targets(
            "arrays/public",
            "means of the clients' public nodes, zeros where there are none; in the secure form "
            "the common mean",
        ),
    ]
    dimension: int  # numbers of an embedding
    is_last: Annotated[bool, Flag(keys.IS_LAST, "whether no round follows")] = False
    wants_embeddings: Annotated[
        bool, Flag("wants-embeddings", "false where clients train alone; then no array travels")
    ] = True
    follows: Annotated[
        bool,
        Flag(
            "follows",
            "whether the server knows of earlier rounds of these clients; with it a client notices "
            "that it has lost its state",
            optional=True,
        ),
    ] = False
    saves: Saves = False
    run: Token = ""  # if they are to save
    counting: Counting = ""


@dataclass(frozen=True)
class Embeddings(Rows):
    """Embeddings of the clients that take part; zeros of the other clients are not read."""

    present = Numbers(keys.WITH_TARGETS, "0 for a client whose rows are not to be used", whole=True)

    def read(self, name: str, reading: Reading) -> object:
        """Read the rows; a client whose rows are not finite is left out, the others stay."""
        request, left_out = reading.known["request"], reading.values["left_out"]
        present = Numbers(keys.WITH_TARGETS).required(name, reading)
        if not set(present) <= {0.0, 1.0}:
            raise MalformedReplyError(f"{keys.WITH_TARGETS}: expected 0 or 1, got {brief(present)}")
        result: list[FloatArray | None] = [None] * len(request.clients)
        if not request.wants_embeddings:
            return result
        sizes = [part.size for part in request.nodes]
        shape = (sum(sizes), request.dimension)
        assert isinstance(reading.arrays, RecordDict)  # a reply
        values = read_numbers(reading.arrays, keys.ARRAYS, keys.PUBLIC, shape)
        with np.errstate(over="ignore"):
            parts = split_rows(values.astype(np.float32), sizes)
        for index, (client, part) in enumerate(zip(request.clients, parts, strict=True)):
            if not np.isfinite(part).all():
                why = NOT_FINITE
            elif (largest := largest_size(part)) > keys.MAX_NUMBER:
                why = f"its embeddings have {largest:g}, at most {keys.MAX_NUMBER:g} is possible"
            else:
                why, result[index] = "", part if present[index] else None
            if present[index] and why:
                left_out[client] = why
        return result


@dataclass(frozen=True)
class Judged(Field[Mapping[str, Sequence[float]]]):
    """Further measurements by name, each a number for every client."""

    is_number = True
    type = "list of float"

    def write(self, value: Mapping[str, Sequence[float]], to: Writing) -> None:
        to.config |= {keys.MEASURED + name: numbers for name, numbers in value.items()}

    def read(self, name: str, reading: Reading) -> object:
        """Refuse invalid measurements, since their names get into the result."""
        judged = {
            key.removeprefix(keys.MEASURED): Numbers(key).required(name, reading)
            for key in reading.metrics
            if key.startswith(keys.MEASURED)
        }
        if len(judged) > MAX_JUDGED:
            raise MalformedReplyError(f"{len(judged)} measurements, at most {MAX_JUDGED}")
        for what, values in judged.items():
            is_share = what.endswith(keys.ROLES) or what.startswith("precision")
            good = not is_share or all(math.isnan(v) or 0 <= v <= 1 for v in values)
            if not (good and re.fullmatch(r"[a-z0-9-]{1,40}", what)):
                raise MalformedReplyError(
                    f"{keys.MEASURED}{what!a:.60}: {brief(values)}: no share, or no such name"
                )
        return judged


@dataclass
class PublicReply(Message, up="train"):
    """Client to server: embeddings of public nodes, and what the clients measured."""

    request: PublicRequest  # that it answers; the server knows it
    # [p, d] of each client that was asked, in order; None for one that is left out
    embeddings: Annotated[
        list[FloatArray | None],
        Embeddings("arrays/public", "embeddings, in the same order. Not in the secure form"),
    ]
    # Its model's own loss
    loss: Annotated[list[float], Numbers(keys.LOSS, "of each client")]
    disagreement: Annotated[
        list[float],
        Numbers(
            "disagreement",
            "of each client: mean of 1 − cos between embeddings and means; NaN without",
        ),
    ]
    judged: Annotated[
        dict[str, list[float]],
        Judged(
            f"{keys.MEASURED}*",
            "of each client: `judged-val`, `judged-test` and whatever else it measures; NaN where "
            "it does not",
        ),
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
        for name, values, most in (
            (keys.LOSS, self.loss, keys.MAX_NUMBER),
            ("disagreement", self.disagreement, 2.001),
        ):
            if wrong := [v for v in values if math.isfinite(v) and abs(v) > most]:
                raise MalformedReplyError(f"{name} is {wrong[0]:g}, at most {most:g} is possible")
        asked = known["request"].clients  # a SuperNode speaks for these alone
        self.left_out = {client: why for client, why in self.left_out.items() if client in asked}


@dataclass
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
