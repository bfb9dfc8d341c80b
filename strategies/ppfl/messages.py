"""PPFL-GNN's messages: embeddings of public nodes up, their aligned means down.

A SuperNode speaks for one or more clients; their rows are concatenated. Ids are sent once, at
enrolment; later messages name them by a fingerprint.

Masked embeddings are summed by node. If the server is not trusted, SuperNodes agree on the order of
nodes without it. The order decides which rows are added: a server that gives each client other
positions can read every row from the sum, without a lie about masks. So each SuperNode signs which
nodes its clients hold. All SuperNodes get all claims and compute the same nodes in the same order:
the nodes with so many holders that any sum has two honest ones. The masks depend on the order and
on everything else that decides what a client sends: the round, and the means to which embeddings
are rotated. If clients were told different things, their sum cannot be read.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, RefusedError, brief
from flower_graph.secure.channel import framed, rows_of
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.parties.identity import SIGNATURE_BYTES, TrustSettings
from flower_graph.strategies.ppfl.config import CLASSIFIERS, JUDGED, PRECISIONS
from flower_graph.wire import keys
from flower_graph.wire.arrays import pack_integers
from flower_graph.wire.codec import (
    Block,
    Bytes,
    Field,
    Flag,
    Handled,
    Known,
    Message,
    NotSaved,
    Numbers,
    Ragged,
    Reading,
    Reasons,
    Saves,
    Tensor,
    Token,
    Whole,
    Writing,
    split_rows,
)
from flower_graph.wire.counts import Counted, Counting

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
Held = Mapping[int, IntArray]  # of each client of a SuperNode, the ids of its public nodes

UNUSABLE = "its embeddings are not finite, or too large"
MAX_DIMENSION = 1 << 16
MOST_CLIENTS = 4096  # of one SuperNode: each is checked, even invented ones
ABSENT = -1  # slot of a node that is not in a sum
UNSIGNED = "its claim of public nodes is not signed with its key"
DIGEST = hashlib.sha256().digest_size
NOT_TOLD = np.zeros(0, np.int64), np.zeros((0, DIGEST), np.uint8)  # nodes, means: a client knows
MEANS = "PPFL-GNN means"  # the purpose of the sums
# Measurements are summed too: they follow the rows of a vector, then a 1 for each that exists.
MEASURED = ("loss", "disagreement", *keys.ROLES, *PRECISIONS)
# What judges measure, by role and by classifier, and how near a secure client is to the mean
SHARES = (*keys.ROLES, *(f"{one}-{role}" for one in CLASSIFIERS for role in JUDGED), *PRECISIONS)
# Largest size of a number in an embedding, and the step to which it is rounded
RING_SIZE: dict[str, Any] = {"limit": 32.0, "resolution": 2.0**-16}
# Shares of the SuperNodes that may be missing from a sum, and that may collude with the server: the
# same at all, since all must choose the same nodes.
MISSING, COLLUDING = 3, 1  # tenths


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

    # at most 4096
    clients: Annotated[list[int], Numbers(keys.CLIENTS, whole=True, most=MOST_CLIENTS)]
    nodes: Annotated[list[IntArray], held_nodes()]  # of each client [p]
    dimension: Annotated[int, Whole(least=1, most=MAX_DIMENSION)]  # numbers of an embedding
    handled: Handled = None
    # of clients and ids (Ed25519)
    signature: Annotated[Bytes | None, Block("claim-signature", shape="64")] = None

    @property
    def held(self) -> Held:
        return dict(zip(self.clients, self.nodes, strict=True))

    def check(self, known: Known) -> None:
        if not self.clients or len(self.held) != len(self.clients) or min(self.clients) < 0:
            why = "not different numbers >= 0"
            raise MalformedReplyError(f"{keys.CLIENTS}: {brief(self.clients)}: {why}")
        for client, ids in self.held.items():
            if not 1 <= np.unique(ids).size == ids.size:
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
class Rows(Tensor):
    """Rows of all clients, concatenated, and an entry that marks the clients that have rows."""

    shape: str = "n d"
    marks: ClassVar = Numbers(
        keys.WITH_TARGETS, "1 for each client whose rows count, else 0", whole=True
    )
    type = "float32 `[rows, d]`"

    # Any: each client's rows, or None
    def write(self, value: Any, to: Writing) -> None:
        """Write the rows; zeros for a client without, so that the answer has the same shape."""
        # Flower's ``LocalDpMod`` works on the difference of the two.
        self.marks.write([int(part is not None) for part in value], to)
        asked: PublicRequest = getattr(to.message, "request", to.message)
        if asked.wants_embeddings:
            zeros = [np.zeros((ids.size, asked.dimension), np.float32) for ids in asked.nodes]
            parts = zip(value, zeros, strict=True)
            to.arrays[self.key] = np.concatenate([z if x is None else x for x, z in parts])

    def read(self, name: str, reading: Reading) -> object:
        request, marks = reading.known.get("request"), self.marks.read(name, reading)
        asked: Known = reading.values if request is None else vars(request)
        sizes = [ids.size for ids in asked["nodes"]]
        if not asked["wants_embeddings"]:
            return [None] * len(sizes)
        reading.sizes["n"] = sum(sizes)
        rows: Any = super().read(name, reading)
        if request is None:
            reading.values["dimension"] = rows.shape[1]
        parts = split_rows(rows.astype(np.float32), sizes)
        return [part if mark else None for part, mark in zip(parts, marks, strict=True)]


class PublicRequest(Message, down="train"):
    """Server to client: the aligned means of the last round."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND)]  # the round
    # The clients that are asked, all at one SuperNode
    clients: Annotated[list[int], Numbers(keys.CLIENTS, whole=True)]  # who is asked
    # of each client's ids: the first 63 bits of BLAKE2b-64 (big-endian) over them as in `nodes`; as
    # they said themselves
    nodes: Annotated[list[IntArray], Fingerprints("fingerprints", whole=True)]
    # means of public nodes; in the secure form the common mean
    targets: Annotated[list[FloatArray | None], Rows("arrays/public")]
    dimension: int = 0  # numbers of an embedding
    is_last: Annotated[bool, Flag(keys.IS_LAST)] = False  # whether no round follows
    # false where clients train alone; then no array travels
    wants_embeddings: Annotated[bool, Flag()] = True
    # whether these clients had earlier rounds: their state
    follows: Annotated[bool, Flag()] = False
    saves: Saves = False
    run: Token = ""  # if they are to save
    counting: Counting = ""


@dataclass(frozen=True)
class Judged(Field[Mapping[str, Sequence[float]]]):
    """Shares that a client's judge returns, by name, each a number for every client."""

    is_number = True
    type = "list of float"

    def write(self, value: Mapping[str, Sequence[float]], to: Writing) -> None:
        to.config |= {keys.MEASURED + name: numbers for name, numbers in value.items()}

    def read(self, name: str, reading: Reading) -> dict[str, list[float]]:
        judged = {}
        for what in SHARES:
            if (key := keys.MEASURED + what) in reading.config:
                judged[what] = Numbers(key).read(name, reading)
                if wrong := [v for v in judged[what] if not (math.isnan(v) or 0 <= v <= 1)]:
                    raise MalformedReplyError(f"{key}: {wrong[0]:g}; 0 to 1, or NaN, is possible")
        return judged


class PublicReply(Message, up="train"):
    """Client to server: embeddings of public nodes, and what the clients measured."""

    request: PublicRequest  # that it answers; the server knows it
    # embeddings, in the same order. Not in the secure form
    embeddings: Annotated[list[FloatArray | None], Rows("arrays/public")]
    # Its model's own loss
    loss: Annotated[list[float], Numbers(keys.LOSS)]  # of each client
    # of each: mean of 1 − cos of embeddings and means; NaN without
    disagreement: Annotated[list[float], Numbers()]
    # `judged-val`, `judged-test`, …, of each client or NaN
    judged: Annotated[dict[str, list[float]], Judged(f"{keys.MEASURED}*")] = field(
        default_factory=dict
    )
    # `number:reason` for each that is not to be used
    left_out: Annotated[dict[int, str], Reasons(keys.LEFT_OUT)] = field(default_factory=dict)
    not_saved: NotSaved = ""
    counts: Counted = None

    @property
    def examples(self) -> int:
        return max(1, sum(part.size for part in self.request.nodes))

    @classmethod
    def answering(
        cls, request: PublicRequest, content: RecordDict, classes: int = 0
    ) -> PublicReply:
        asked = {"request": request, "classes": classes, "counting": request.counting}
        return cls.read(content, c=len(request.clients), d=request.dimension, **asked)

    def check(self, known: Known) -> None:
        for name, most in ((keys.LOSS, keys.MAX_NUMBER), ("disagreement", 2.001)):
            if wrong := [v for v in getattr(self, name) if math.isfinite(v) and abs(v) > most]:
                raise MalformedReplyError(f"{name}: {wrong[0]:g}; at most {most:g} is possible")
        asked = self.request.clients  # a SuperNode speaks for these alone
        self.left_out = {client: why for client, why in self.left_out.items() if client in asked}


class SumOrder(Message, down="train"):
    """Server to client, with a ``PublicRequest`` whose targets are rows of the common mean."""

    # place of each public node in the sum; −1: it is not in it
    slots: Annotated[list[NDArray[np.int64]], Ragged(shape="rows")]
    seed: Annotated[int, Whole(keys.SEED)]  # of the points that all turn to first
    # whether the common mean may be learnt from; else only turned to
    is_target: Annotated[bool, Flag()]

    def meaning(self, nodes: IntArray, means: Bytes, request: PublicRequest) -> bytes:
        """Hash the meaning of a vector's numbers, for the masks: nodes and means."""
        numbers = request.dimension, request.server_round, self.seed
        packed = struct.pack("<qqQ?", *numbers, self.is_target)
        return hashlib.sha256(framed(packed, pack_integers(nodes), means.tobytes())).digest()


# The nodes of a sum -------------------------------------------------------------------------------


def fewest_parties(parties: int) -> int:
    """Return the least number of SuperNodes that hold a summed node."""
    return 2 + MISSING * parties // 10 + COLLUDING * parties // 10


def fewest_holders(clients: int, dropout: float, least: int = LEAST_HOLDERS) -> int:
    """Return how many clients must hold a summed node, if the server is trusted."""
    # At most the share ``dropout`` of the clients may be missing from a sum that is opened, so two
    # are then always in the sum of every node: no row is one client's alone.
    return max(least, 2 + math.floor(dropout * clients))


def common_nodes(held: Iterable[Held], fewest: int) -> IntArray:
    """Choose the nodes that enough holders have, by ascending id; a holder counts once."""
    each = [np.unique(np.concatenate(list(one.values()))) for one in held]
    nodes, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *each]), return_counts=True)
    return nodes[counts >= fewest]


def find_slots(nodes: IntArray, common: IntArray) -> IntArray:
    """Find nodes ``[p]`` among the ascending common ones; ``ABSENT`` for others."""
    at = np.searchsorted(common, nodes)
    return np.where(np.isin(nodes, common), at, ABSENT)


def digests_of(rows: FloatArray) -> Bytes:
    """Hash each row of the common mean, ``[u, 32]``: clients compare all, and see their own."""
    digests = [hashlib.sha256(row.tobytes()).digest() for row in rows.astype("<f4")]
    return rows_of(digests, -1, DIGEST)


def claim_parts(run_id: int, held: Held) -> list[bytes]:
    """Return what a SuperNode signs: the run, its clients in ascending order, their nodes."""
    clients = np.array(sorted(held), np.int64)
    nodes = [pack_integers(held[client]) for client in clients.tolist()]
    return [b"public-nodes", struct.pack("<Q", run_id), pack_integers(clients), *nodes]


class Claims(Message, down="train"):
    """Server to client, with a ``SumOrder``: what all SuperNodes of the sums have signed."""

    clients: Annotated[list[int], Numbers("claim-clients", whole=True)]  # of all these SuperNodes
    nodes: Annotated[list[IntArray], held_nodes("claim-")]
    # of each SuperNode
    signatures: Annotated[Bytes, Block("claim-signatures", shape=f"a {SIGNATURE_BYTES}")]
    # SHA-256 of each row of the common mean; missing if there is none yet
    means: Annotated[Bytes, Block("claim-means", shape=f"u {DIGEST}")] = field(
        default_factory=lambda: NOT_TOLD[1]
    )

    @classmethod
    def of(cls, answers: Iterable[EmbeddingEnrolment]) -> Claims:
        every = {client: nodes for one in answers for client, nodes in one.held.items()}
        signed = [one.signature.tobytes() for one in answers if one.signature is not None]
        return cls(list(every), list(every.values()), rows_of(signed, -1, SIGNATURE_BYTES))

    def check_mean(self, mean: FloatArray | None, slots: IntArray) -> None:
        """Refuse means for a client, ``[p, d]``, that differ from the means shown to all."""
        if mean is None and not self.means.size:
            return
        here = slots >= 0
        if mean is None or slots.max() >= len(self.means) or mean[~here].any():
            raise RefusedError("the server has means for some clients and not for others")
        if not np.array_equal(digests_of(mean[here]), self.means[slots[here]]):
            raise RefusedError("the means that the server sends are not those that it shows to all")

    def agreed(
        self,
        trust: TrustSettings,
        run_id: int,
        parties: Collection[int],
        own: Held,
        least: int = LEAST_HOLDERS,
    ) -> IntArray:
        """Compute the nodes of these parties' sum; refuse claims that would hide less."""
        count, every = len(parties), dict(zip(self.clients, self.nodes, strict=True))
        missing, colluding = count - trust.minimum, int(trust.corrupt * count)
        if missing > MISSING * count // 10 or colluding > COLLUDING * count // 10:
            raise RefusedError(
                f"trust-minimum: {trust.minimum} of {count}, trust-corrupt: {trust.corrupt:g}: two "
                f"honest holders are sure up to {MISSING} tenths missing, {COLLUDING} colluding"
            )
        if len(self.signatures) != count:
            raise RefusedError(f"claims of {len(self.signatures)} parties, sums of {count}")
        held, registry = dict[int, Held](), trust.registry
        for party, signature in zip(sorted(parties), self.signatures, strict=True):
            granted = registry.parties[party]
            held[party] = {c: nodes for c, nodes in every.items() if granted.may_host([c])}
            parts = claim_parts(run_id, held[party])
            if not registry.verify(party, signature.tobytes(), *parts):
                raise RefusedError(f"party {party}: {UNSIGNED}")
        if sum(map(len, held.values())) != len(self.clients):
            raise RefusedError("claim-clients: one is there twice, or of no party of the sums")
        if claim_parts(run_id, held[trust.identity.party]) != claim_parts(run_id, own):
            raise RefusedError("what the server shows as this SuperNode's claim is not its claim")
        return common_nodes(held.values(), max(least, fewest_parties(count)))
