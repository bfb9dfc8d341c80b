"""The public nodes of a sum, which every SuperNode computes if the server is not trusted.

The order of nodes decides which rows are added. A server that gives each client other positions can
read every row from the sum, without a lie about masks. So each SuperNode signs which nodes its
clients hold. Every SuperNode gets all claims and computes the same nodes in the same order: the
nodes with so many holders that any sum has two honest ones.

The masks depend on the order and on everything else that decides what a client sends: the round,
and the means to which embeddings are rotated. If clients were told different things, their sum
cannot be read.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from flower_graph.errors import RefusedError
from flower_graph.secure.channel import framed, rows_of
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.parties.identity import SIGNATURE_BYTES, Identity, TrustSettings
from flower_graph.secure.parties.registry import Registry
from flower_graph.strategies.ppfl.messages import (
    EmbeddingEnrolment,
    FloatArray,
    IntArray,
    SumOrder,
    held_nodes,
)
from flower_graph.wire.arrays import pack_integers
from flower_graph.wire.codec import Message
from flower_graph.wire.fields import Block, Bytes, Numbers
from flower_graph.wire.keys import ROLES

Held = Mapping[int, IntArray]  # of each client of a SuperNode, the ids of its public nodes
NOBODYS = np.zeros(0, np.int64)
PURPOSE = b"public-nodes"
UNSIGNED = "its claim of public nodes is not signed with its key"
MEANS = "PPFL-GNN means"  # the purpose of the sums
DIGEST = hashlib.sha256().digest_size
ABSENT = -1  # slot of a node that is not in a sum
NOT_TOLD = NOBODYS, np.zeros((0, DIGEST), np.uint8)  # nodes and means, which a client knows
# Shares of the SuperNodes that may be missing from a sum, and that may collude with the server: the
# same at all, since all must choose the same nodes.
MISSING, COLLUDING = 3, 1  # tenths
# Measurements are summed too: they follow the rows of a vector, then a 1 for each that exists.
MEASURED = ("loss", "disagreement", *ROLES, "precision-1", "precision-5", "precision-10")


def sign_claim(identity: Identity, run_id: int, held: Held) -> Bytes:
    """Sign which public nodes a SuperNode's clients hold, ``[64]``."""
    signature = identity.sign(PURPOSE, *_parts(run_id, held))
    return np.frombuffer(signature, np.uint8)


def is_signed(registry: Registry, party: int, run_id: int, held: Held, signature: Bytes) -> bool:
    """Tell whether a party has signed that its clients hold these public nodes."""
    return registry.verify(party, signature.tobytes(), PURPOSE, *_parts(run_id, held))


def fewest_parties(parties: int) -> int:
    """Return the least number of SuperNodes that hold a summed node."""
    return 2 + MISSING * parties // 10 + COLLUDING * parties // 10


def fewest_holders(clients: int, dropout: float, least: int = LEAST_HOLDERS) -> int:
    """Return how many clients must hold a summed node, if the server is trusted."""
    # At most the share ``dropout`` of the clients may be missing from a sum that is opened, so two
    # are then always in the sum of every node: no row is one client's alone.
    return max(least, 2 + math.floor(dropout * clients))


def agreed_nodes(held: Mapping[int, Held], least: int = LEAST_HOLDERS) -> IntArray:
    """Choose the nodes of the sums by the parties' clients; at least ``least`` hold a node."""
    each = [np.unique(np.concatenate(list(of.values()))) for of in held.values()]
    return common_nodes(each, max(least, fewest_parties(len(each))))


def common_nodes(each: Sequence[IntArray], fewest: int) -> IntArray:
    """Choose the nodes that enough holders have, by ascending id; none has a node twice."""
    nodes, counts = np.unique(np.concatenate([NOBODYS, *each]), return_counts=True)
    return nodes[counts >= fewest]


def find_slots(nodes: IntArray, common: IntArray) -> IntArray:
    """Find nodes ``[p]`` among the ascending common ones; ``ABSENT`` for others."""
    if not common.size:
        return np.full(nodes.shape, ABSENT)
    at = np.searchsorted(common, nodes).clip(max=common.size - 1)
    return np.where(common[at] == nodes, at, ABSENT)


def digests_of(rows: FloatArray) -> Bytes:
    """Hash each row of the common mean, ``[u, 32]``: clients compare all, and see their own."""
    digests = b"".join(hashlib.sha256(row.tobytes()).digest() for row in rows.astype("<f4"))
    return np.frombuffer(digests, np.uint8).reshape(len(rows), DIGEST)


def layout_of(
    nodes: IntArray, means: Bytes, dimension: int, server_round: int, order: SumOrder
) -> bytes:
    """Hash the meaning of a vector's numbers, for the masks: nodes and means."""
    flags = order.is_target, order.rotations_only
    numbers = struct.pack("<qqQ??", dimension, server_round, order.seed, *flags)
    return hashlib.sha256(framed(numbers, pack_integers(nodes), means.tobytes())).digest()


@dataclass
class Claims(Message, down="train"):
    """Server to client, with a ``SumOrder``: what all SuperNodes of the sums have signed."""

    clients: Annotated[list[int], Numbers("claim-clients", "of all these SuperNodes", whole=True)]
    nodes: Annotated[list[IntArray], held_nodes("claim-")]
    signatures: Annotated[
        Bytes, Block("claim-signatures", "of each SuperNode", shape=f"a {SIGNATURE_BYTES}")
    ]
    means: Annotated[
        Bytes,
        Block(
            "claim-means",
            "SHA-256 of each row of the common mean; missing if there is none yet",
            shape=f"u {DIGEST}",
            optional=True,
        ),
    ] = field(default_factory=lambda: NOT_TOLD[1])

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

    def checked(self, registry: Registry, run_id: int, parties: Collection[int]) -> dict[int, Held]:
        """Return the nodes of each party's clients; every party of the sums must have signed."""
        if len(self.signatures) != len(parties):
            raise RefusedError(f"claims of {len(self.signatures)} parties, sums of {len(parties)}")
        every, result = dict(zip(self.clients, self.nodes, strict=True)), dict[int, Held]()
        for party, signature in zip(sorted(parties), self.signatures, strict=True):
            granted = registry.parties[party]
            result[party] = {c: nodes for c, nodes in every.items() if granted.may_host([c])}
            if not is_signed(registry, party, run_id, result[party], signature):
                raise RefusedError(f"party {party}: {UNSIGNED}")
        if sum(map(len, result.values())) != len(self.clients):
            raise RefusedError("claim-clients: one is there twice, or of no party of the sums")
        return result


class SignedClaims(dict[int, EmbeddingEnrolment]):
    """The server's collection of claims, by party, which it shows to all."""

    def __init__(self, registry: Registry, run_id: Callable[[], int]) -> None:
        super().__init__()
        self.registry, self._run_id = registry, run_id  # Flower's, once there is a run

    def take(self, answer: EmbeddingEnrolment) -> str:
        parties = [self.registry.parties[number] for number in self.registry.active]
        party = next((one.number for one in parties if one.may_host(answer.held)), None)
        if party is None or answer.signature is None:
            return "its claim of public nodes is not signed, or no party may host all its clients"
        if not is_signed(self.registry, party, self._run_id(), answer.held, answer.signature):
            return f"party {party}: {UNSIGNED}"
        self[party] = answer
        return ""

    def of(self, parties: Collection[int]) -> dict[int, EmbeddingEnrolment]:
        return {party: self[party] for party in sorted(parties) if party in self}


def check_layout(
    claims: Claims,
    trust: TrustSettings,
    run_id: int,
    parties: Collection[int],
    own: Held,
    least: int = LEAST_HOLDERS,
) -> IntArray:
    """Compute the nodes of these parties' sum; refuse claims that would hide less."""
    count = len(parties)
    if count - trust.minimum > MISSING * count // 10 or int(trust.corrupt * count) > (
        COLLUDING * count // 10
    ):
        raise RefusedError(
            f"trust-minimum: {trust.minimum} of {count}, trust-corrupt: {trust.corrupt:g}: two "
            f"honest holders are sure up to {MISSING} tenths missing and {COLLUDING} colluding"
        )
    held = claims.checked(trust.registry, run_id, parties)
    local = held[trust.identity.party]
    if local.keys() != own.keys() or not all(np.array_equal(local[c], own[c]) for c in own):
        raise RefusedError("what the server shows as this SuperNode's claim is not its claim")
    return agreed_nodes(held, least)


def _parts(run_id: int, held: Held) -> list[bytes]:
    """Return the bytes that are signed: the run, the clients in ascending order, their nodes."""
    clients = np.array(sorted(held), np.int64)
    nodes = [pack_integers(held[client]) for client in clients.tolist()]
    return [struct.pack("<Q", run_id), pack_integers(clients), *nodes]
