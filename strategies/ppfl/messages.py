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
from flower_graph.wire.arrays import decode_array, largest_size, pack_integers
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


@dataclass(frozen=True)
class Hosted(Numbers):
    """Numbers of a SuperNode's clients; there is a limit to how many."""

    def decode(self, value: object, name: str, reading: Reading) -> list[object]:
        """Refuse too many clients before anything is allocated for them."""
        if isinstance(value, list) and len(value) > MOST_CLIENTS:
            raise MalformedReplyError(f"{len(value)} clients, at most {MOST_CLIENTS} are taken")
        return super().decode(value, name, reading)


@dataclass
class EmbeddingEnrolment(Message, up="query"):
    """Client to server: its clients, and their public nodes."""

    clients: Annotated[
        list[int],
        Hosted(
            keys.CLIENTS,
            f"numbers of the clients here, at most {MOST_CLIENTS}",
            shape="c",
            whole=True,
        ),
    ]
    nodes: Annotated[  # of each client [p]
        list[IntArray],
        Ragged(
            "nodes",
            "ids of these, client by client",
            shape="sum of rows",
            pointer=Numbers(keys.ROWS, "public nodes of each", shape="c", whole=True),
        ),
    ]
    dimensions: Annotated[
        list[int],
        Numbers(
            "dimensions",
            "numbers of an embedding, of each client; all the same",
            shape="c",
            whole=True,
        ),
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
        if not clients:
            raise MalformedReplyError("it hosts no clients")
        if len(set(clients)) != len(clients) or min(clients) < 0:
            raise MalformedReplyError(
                f"its clients {brief(clients)} are not different numbers >= 0"
            )
        for client, ids, dimension in zip(clients, self.nodes, self.dimensions, strict=True):
            if ids.size < 1:
                raise MalformedReplyError(f"client {client} has no public nodes")
            if not 1 <= dimension <= MAX_DIMENSION:
                raise MalformedReplyError(f"client {client} has embeddings of {dimension} numbers")
            if np.unique(ids).size != ids.size:
                raise MalformedReplyError(f"client {client} names a public node twice")


@dataclass(frozen=True)
class Fingerprints(Numbers):
    """Fingerprints of each client's nodes, sent instead of the ids."""

    def encode(self, value: Sequence[IntArray]) -> list[int]:
        return [fingerprint(part) for part in value]

    def decode(self, value: object, name: str, reading: Reading) -> list[IntArray]:
        clients, nodes = reading.values["clients"], reading.known["public"]
        prints = super().decode(value, name, reading)
        for client, print_ in zip(clients, prints, strict=True):
            if client not in nodes:
                raise ValueError(f"client {client} is not here; here are {brief(sorted(nodes))}")
            if fingerprint(nodes[client]) != print_:
                raise ValueError(
                    f"client {client}: the server knows other public nodes of it than it has; "
                    "the ids must stay the same during a run"
                )
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

    with_targets = Numbers(
        keys.WITH_TARGETS, "1 for each client that has means yet", shape="c", whole=True
    )

    def read(self, name: str, reading: Reading) -> object:
        values = reading.values
        values["dimension"] = 0
        if not values["wants_embeddings"]:
            return [None] * len(values["clients"])
        sizes = [ids.size for ids in values["nodes"]]
        reading.sizes["n"] = sum(sizes)
        rows = take(keys.PUBLIC, "n d", reading)
        values["dimension"] = int(rows.shape[1])
        has = self.with_targets.required(name, reading)
        parts = split_rows(rows.astype(np.float32), sizes)
        return [part if flag else None for part, flag in zip(parts, has, strict=True)]


@dataclass
class PublicRequest(Message, down="train"):
    """Server to client: the aligned means of the last round."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND, "the round")]
    # The clients that are asked, all at one SuperNode
    clients: Annotated[list[int], Numbers(keys.CLIENTS, "who is asked", shape="c", whole=True)]
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

    present = Numbers(
        keys.WITH_TARGETS, "0 for a client whose rows are not to be used", shape="c", whole=True
    )

    def read(self, name: str, reading: Reading) -> object:
        """Read the rows; a client whose rows are not finite is left out, the others stay."""
        request, left_out = reading.known["request"], reading.values["left_out"]
        present = Numbers(keys.WITH_TARGETS, shape="c").required(name, reading)
        if not set(present) <= {0.0, 1.0}:
            raise MalformedReplyError(f"{keys.WITH_TARGETS}: expected 0 or 1, got {brief(present)}")
        result: list[FloatArray | None] = [None] * len(request.clients)
        if not request.wants_embeddings:
            return result
        parts = split_rows(_rows(reading.arrays, request), [part.size for part in request.nodes])
        for index, (client, part) in enumerate(zip(request.clients, parts, strict=True)):
            if present[index] and (why := _unfit(part)):
                left_out[client] = why
            elif present[index]:
                result[index] = part
        return result


def _unfit(rows: FloatArray) -> str:
    if not np.isfinite(rows).all():
        return NOT_FINITE
    most = keys.MAX_NUMBER
    if rows.size and (largest := largest_size(rows)) > most:
        return f"its embeddings have a number of size {largest:g}, at most {most:g} is possible"
    return ""


def _rows(content: object, request: PublicRequest) -> FloatArray:
    records = content.array_records if isinstance(content, RecordDict) else {}
    if list(records) != [keys.ARRAYS] or list(records[keys.ARRAYS]) != [keys.PUBLIC]:
        raise MalformedReplyError(f"the array {keys.ARRAYS}/{keys.PUBLIC} is missing, or not alone")
    try:
        value = decode_array(keys.PUBLIC, records[keys.ARRAYS][keys.PUBLIC])
    except (ValueError, TypeError) as error:
        raise MalformedReplyError(f"{keys.PUBLIC} cannot be read: {error}") from error
    shape = (sum(part.size for part in request.nodes), request.dimension)
    if value.shape != shape or value.dtype.kind != "f":
        held = f"shape {value.shape} and type {value.dtype}"
        raise MalformedReplyError(f"{keys.PUBLIC} has {held}, expected numbers {shape}")
    with np.errstate(over="ignore"):
        return value.astype(np.float32)


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
            key.removeprefix(keys.MEASURED): Numbers(key, shape="c").required(name, reading)
            for key in reading.metrics
            if key.startswith(keys.MEASURED)
        }
        if len(judged) > MAX_JUDGED:
            raise MalformedReplyError(
                f"{len(judged)} measurements, at most {MAX_JUDGED} are possible"
            )
        for what, values in judged.items():
            if not re.fullmatch(r"[a-z0-9-]{1,40}", what):
                raise MalformedReplyError(
                    f"{keys.MEASURED}{what!a:.60}: not the name of a measurement"
                )
            is_share = what.endswith(keys.ROLES) or what.startswith("precision")
            wrong = [v for v in values if is_share and not (math.isnan(v) or 0 <= v <= 1)]
            if wrong:
                raise MalformedReplyError(
                    f"{keys.MEASURED}{what} is {wrong[0]:g}, must be from 0 to 1"
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
    loss: Annotated[list[float], Numbers(keys.LOSS, "of each client", shape="c")]
    disagreement: Annotated[
        list[float],
        Numbers(
            "disagreement",
            "of each client: mean of 1 − cos between embeddings and means; NaN without",
            shape="c",
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
        known = {"classes": classes, "counting": request.counting}
        return cls.read(content, c=len(request.clients), request=request, **known)

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
