"""PPFL-GNN with a common mean that the server computes without seeing any client's embeddings.

The consensus form of the alignment (``strategy.py``) needs only the sum of the rotated embeddings.
So each client rotates its own embeddings, and the secure sum of ``flower_graph.secure`` adds them
up. The server learns this sum, and nothing else of the embeddings. ``W_i`` never leaves client
``i``.

Iteration ``t``, two exchanges:

1. server -> client ``i``: ``R``, the common mean of the last iteration, for its public nodes;
2. client: ``X'_i = R W_i^T``, trains with it as in the plain form, and embeds its graph;
3. client: ``W_i``, the orthogonal matrix with the least ``||X_i W_i - R||_F`` (equation 4);
4. client -> server: ``X_i W_i``, masked;
5. server: adds up, and in the second exchange takes the masks off; ``R`` = sum / holders, by node.

The plain form repeats steps 3 and 5 until ``R`` stands still. Here each iteration does them once
and starts from the last ``R``. The server never asks for a second sum of the same embeddings: with
as many sums as clients it could compute each client's part. The first ``R`` is random points. Their
mean is too blurred to learn from: clients rotate to it, and ``X'_i`` begins with iteration 3.

Nodes with too few holders are in no sum; a client keeps its own rows of them.

If the server is not trusted, SuperNodes agree on the order of nodes without it. The order decides
which rows are added: a server that gives each client other positions can read every row from the
sum, without a lie about masks. So each SuperNode signs which nodes its clients hold. All SuperNodes
get all claims and compute the same nodes in the same order: the nodes with so many holders that any
sum has two honest ones. The masks depend on the order and on everything else that decides what a
client sends: the round, and the means to which embeddings are rotated. If clients were told
different things, their sum cannot be read.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from numpy.typing import NDArray

from flower_graph.client.state import Tensors
from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.records.participation import NOT_READY, Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import derive_seed
from flower_graph.secure.channel import framed, rows_of
from flower_graph.secure.client import MaskingClient
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.parties.identity import SIGNATURE_BYTES, Identity, TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import RING
from flower_graph.secure.sum.round import Reason, Skipped
from flower_graph.secure.sum.server import PartySums, SumServer
from flower_graph.secure.sum.service import SecureSum
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.ppfl.cohort_client import EmbeddingClient, PublicNodeClient
from flower_graph.strategies.ppfl.config import PRECISIONS, SECURE, StrategyConfig
from flower_graph.strategies.ppfl.evaluation import GraphJudge
from flower_graph.strategies.ppfl.messages import (
    EmbeddingEnrolment,
    FloatArray,
    IntArray,
    PublicReply,
    PublicRequest,
    SumOrder,
    held_nodes,
)
from flower_graph.strategies.ppfl.strategy import ByClient, ProcrustesAlignment, mean_of
from flower_graph.wire.arrays import Answer, Config, Parameters, decode_array, pack_integers
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.codec import Message
from flower_graph.wire.counts import as_counts, counts_size
from flower_graph.wire.exchange import Replies
from flower_graph.wire.fields import Block, Bytes, Numbers, Resume
from flower_graph.wire.keys import RING_WORD, ROLES

Floats = NDArray[np.float64]
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
LEARNT_FROM = 2  # sums before clients learn from the mean
ROTATIONS = "public-rotations"  # in Context.state: W_i of each client
RUN = "public-run"  # likewise: the run of a SuperNode with a key of its own
ROUNDS = b"public-rounds"  # in its journal
# Largest size of a number in an embedding, and the step to which it is rounded
RING_SIZE: dict[str, Any] = {"limit": 32.0, "resolution": 2.0**-16}


# The nodes of a sum -------------------------------------------------------------------------------


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


def common_nodes(held: Iterable[Held], fewest: int) -> IntArray:
    """Choose the nodes that enough holders have, by ascending id; a holder counts once."""
    each = [np.unique(np.concatenate(list(one.values()))) for one in held]
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
    return common_nodes(held.values(), max(least, fewest_parties(count)))


def _parts(run_id: int, held: Held) -> list[bytes]:
    """Return the bytes that are signed: the run, the clients in ascending order, their nodes."""
    clients = np.array(sorted(held), np.int64)
    nodes = [pack_integers(held[client]) for client in clients.tolist()]
    return [struct.pack("<Q", run_id), pack_integers(clients), *nodes]


# The server --------------------------------------------------------------------------------------


class CommonMean:
    """The server's mean of the rotated embeddings, by node."""

    def __init__(self, dropout: float) -> None:
        self.dropout, self.made = dropout, 0  # sums so far
        self.nodes: IntArray = np.zeros(0, np.int64)  # ids of the rows, ascending
        self.rows: FloatArray = np.zeros((0, 0), np.float32)
        self.slots: dict[int, IntArray] = {}  # the rows of each client's nodes

    def choose(
        self,
        nodes: IntArray,
        ids: Mapping[int, IntArray],
        there: Mapping[int, Iterable[int]],
        dimension: int,
    ) -> None:
        """Set the nodes of the next sum; a node that stays keeps its mean."""
        if not np.array_equal(nodes, self.nodes):
            rows = np.zeros((nodes.size, dimension), np.float32)
            at = find_slots(self.nodes, nodes)
            if self.made:
                rows[at[at != ABSENT]] = self.rows[at != ABSENT]
            self.nodes, self.rows = nodes, rows
        everyone = chain.from_iterable(there.values())
        self.slots = {client: find_slots(ids[client], self.nodes) for client in everyone}

    def of(self, client: int) -> FloatArray | None:
        """Return a client's rows; zeros for missing ones."""
        if not self.made:
            return None
        slots = self.slots[client]
        return np.where((slots != ABSENT)[:, None], self.rows[slots], np.float32(0))

    def take(self, total: Floats, contributors: Iterable[int]) -> None:
        holders = np.zeros(self.nodes.size)
        for client in contributors:
            slots = self.slots[client]
            holders[slots[slots != ABSENT]] += 1
        rows = total.reshape(self.nodes.size, -1)
        self.rows, self.made = (rows / holders[:, None]).astype(np.float32), self.made + 1

    def state_dict(self) -> dict[str, object]:
        arrays = {"nodes": torch.from_numpy(self.nodes), "mean": torch.from_numpy(self.rows)}
        return arrays | {"made": self.made}

    def load_state_dict(self, state: StateDict) -> None:
        self.nodes, self.rows = state["nodes"].numpy(), state["mean"].numpy()
        self.made = int(state["made"])


class SecureConsensus(ProcrustesAlignment):
    """The server: adds up embeddings that clients have rotated, and sends the mean back.

    All SuperNodes are asked in every iteration: sums over changing clients could be compared.

    Parameters
    ----------
    settings, seed, checkpoint_dir, checkpoint_every
        As of ``ProcrustesAlignment``; a checkpoint has everything but keys. The seed draws the
        first points, to which all clients rotate.
    dropout : float
        Share of the clients that may be missing from a sum. If more are missing, the iteration has
        no mean. A node is in no sum if only one of its holders might remain.
    **fields
        As of ``ProcrustesAlignment``: also ``registry``, the file of the SuperNodes' keys, where
        clients do not trust the server, ``least_holders`` and ``differ_by``.
    """

    idle = NOT_READY  # all clients are asked that can be in the sum
    forms = (SECURE,)

    # Any: as the base class
    def __init__(
        self, settings: StrategyConfig | None = None, *, dropout: float = 0.3, **given: Any
    ) -> None:
        super().__init__(settings, **given)
        self.mean, self._parties = CommonMean(dropout), None
        self.contributors: list[int] = []  # to the last sum
        self._skipped, self._named = "", 0
        self._parts = 0, 0, 0  # numbers of a sum: rows, measurements, counts
        self._measured = dict[str, float]()
        if (registry := self.settings.registry) is not None:
            differ_by = self.settings.differ_by
            self._parties = PartySums(registry, dropout=dropout, differ_by=differ_by)
            self.claims = SignedClaims(
                self._parties.registry, lambda: self.session.exchange.grid.run.run_id
            )
            self.clients.refused = lambda answer: self.claims.take(answer)

    @cached_property
    def sums(self) -> SecureSum:
        return SecureSum(
            self.session.exchange,
            **RING_SIZE,
            server=self._parties or SumServer(dropout=self.mean.dropout),
            timeout=self.session.timeout,
            min_nodes=self.session.min_nodes,
        )

    def ask(self, server_round: int) -> Mapping[int, PublicRequest]:
        there, mean, known = self.there(server_round), self.mean, self.clients
        nodes, claims = self._nodes(self.sums.prepare(server_round, there))
        mean.choose(nodes, known.ids, there, known.dimension)
        order = SumOrder(
            [], self.session.seed, mean.made >= LEARNT_FROM, self.settings.rotations_only
        )
        told, shown, measured = NOT_TOLD, {}, 0
        if claims is not None:
            claims.means = digests_of(mean.rows) if mean.made else claims.means
            told, shown, measured = (nodes, claims.means), claims.to_config(), 2 * len(MEASURED)
        self._parts = mean.rows.size, measured, counts_size(*self.counted)
        layout = layout_of(*told, known.dimension, server_round, order)
        entries = self.sums.requests(sum(self._parts), MEANS, layout)
        requests, self.entries = dict[int, PublicRequest](), {}
        for node in [node for node in there if node in entries]:
            slots = [mean.slots[client] for client in there[node]]
            self.entries[node] = entries[node] | replace(order, slots=slots).to_config() | shown
            requests[node] = self.request(server_round, there[node], there[node])
        return requests

    def target(self, client: int) -> FloatArray | None:
        return self.mean.of(client)

    def _nodes(self, ready: Sequence[int]) -> tuple[IntArray, Claims | None]:
        """Choose the nodes of the next sum, for untrusting clients with the claims of all."""
        claims, least = None, self.settings.least_holders
        if self._parties is None:
            held: dict[int, Held] = {client: {client: self.clients.ids[client]} for client in ready}
            fewest = fewest_holders(len(held), self.mean.dropout, least)
        else:
            shown = self.claims.of(self._parties.members)
            claims, held = Claims.of(shown.values()), {n: one.held for n, one in shown.items()}
            fewest = max(least, fewest_parties(len(held)))
        holders = len(held)
        nodes = common_nodes(held.values(), fewest) if held else self.mean.nodes
        if holders > 1 and not nodes.size:
            why = "a sum could be one client's embedding; lower dropout, or align in the clear"
            raise ValueError(f"no public node has {fewest} holders among {holders}: {why}")
        return nodes, claims

    def read(self, node: int, content: RecordDict) -> PublicReply:
        # What clients count is in the sum.
        request = replace(self.requests[node], wants_embeddings=False, counting="")
        reply = PublicReply.from_record(content, request)
        self.sums.take(node, content)
        return reply

    def reply_bytes(self, numbers: int = 0) -> int:
        lengths = (int(entries["mask-length"]) for entries in self.entries.values())
        return super().reply_bytes(numbers + max(lengths, default=0))

    def state(self) -> dict[str, object]:
        excluded = sorted(self.sums.server.excluded)
        return super().state() | {"mean": self.mean.state_dict(), "excluded": excluded}

    def load_state(self, state: StateDict) -> None:
        super().load_state(state)
        self.mean.load_state_dict(state["mean"])
        self.sums.server.exclude(state["excluded"])

    def learn(self, server_round: int, replies: Replies[PublicReply]) -> RoundReport:
        for entry in replies.rejected:
            if entry.kind is Kind.STATE_LOST:
                self.sums.forget(entry.node_id)  # its keys are lost too
        self._skipped = ""
        report = super().learn(server_round, replies)
        report.skipped = self._skipped
        blamed = self.sums.server.blamed
        new, self._named = blamed[self._named :], len(blamed)
        report.rejected += [{"client": one.client, "reason": _without_number(one)} for one in new]
        rejected = self.sums.take_rejected()
        report.rejected += [{"node": one.node_id, "reason": one.reason} for one in rejected]
        return report

    def participation(self, answered: Collection[int], failed: Mapping[int, str]) -> Participation:
        # Without a sum, the clients' measurements are still used.
        used = answered if self._skipped else set(answered) & set(self.contributors)
        blamed = self.sums.server.blamed[self._named :]
        local = {one.client: _without_number(one) for one in blamed if one.client is not None}
        return super().participation(used, local | dict(failed))

    def align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        """Do step 5, and return the distances to the mean that clients report."""
        summed = self.sums.close(server_round)
        self.contributors, self._measured = [], {}
        if isinstance(summed, Skipped):
            self._skipped = f"no sum: {_without_number(summed.reason)}"
            return {}
        self.contributors = summed.contributors.tolist()
        rows, measured, counts = np.split(summed.values, np.cumsum(self._parts)[:2])
        self.mean.take(rows, self.contributors)
        if counts.size:  # a node is one step of the sum's numbers
            steps = counts * 2.0 ** Ring.fit(2, **RING_SIZE).fraction_bits
            self.counts = as_counts(np.rint(steps).astype(np.int64), *self.counted)
        if self._parties is None:
            shown = self.clients.measured
            means = {name: mean_of(shown[name].values()) for name in PRECISIONS if name in shown}
        else:
            sums, holders = measured.reshape(2, len(MEASURED)).tolist()
            each = zip(MEASURED, sums, holders, strict=True)
            means = self._measured = {name: one / of for name, one, of in each if of >= 1}
        return {name: means[name] for name in PRECISIONS if name in means}

    def averages(self, measured: ByClient) -> Mapping[str, float]:
        return super().averages(measured) if self._parties is None else self._measured

    def came(self, node: int) -> tuple[str, int]:
        summed = set(self.requests[node].clients) & set(self.contributors)
        return "sums", len(summed) * self.mean.rows.size * (self.entries[node][RING_WORD] // 8)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return ``mean`` ``[u, d]`` and its ids ``nodes`` ``[u]``; empty before the first sum."""
        return {"mean": self.mean.rows, "nodes": self.mean.nodes} if self.mean.made else {}


def _without_number(reason: Reason) -> str:
    """Return a reason without the number of the sum, which is not the round's."""
    return str(replace(reason, round=None))


class SecureConsensusClient(PublicNodeClient, MaskingClient):
    """The clients of one SuperNode: usually one, in a simulation any number.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps models, keys and rotations.
    members : sequence of EmbeddingClient
        The clients; their embedding models are those of ``PublicNodeClient``.
    trust : TrustSettings, optional
        The SuperNode's key and the parties that it trusts, if it does not trust the server.
    least_holders : int
        Least number of SuperNodes that hold a summed node, if the server is not trusted.
    save_to, checkpoint_dir, output_dir : Path, optional
        As of ``PublicNodeClient``; checkpoints have the rotations too, and never keys.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[EmbeddingClient],
        *,
        trust: TrustSettings | None = None,
        least_holders: int = LEAST_HOLDERS,
        save_to: Path | None = None,
        checkpoint_dir: Path | None = None,
        output_dir: Path | None = None,
    ) -> None:
        where = {"checkpoint_dir": checkpoint_dir, "output_dir": output_dir}
        super().__init__(context, members, save_to=save_to, **where)
        MaskingClient.__init__(self, context, list(self.members), trust)
        self._least = least_holders

    def enrolment(self) -> EmbeddingEnrolment:
        here = super().enrolment()
        if self.trust is None:
            return here
        signature = sign_claim(self.trust.identity, self.context.run_id, self.public)
        return replace(here, signature=signature)

    def save(self, server_round: int, run: str) -> str:
        if self.trust is not None and run != self._run():
            raise RefusedError("a checkpoint of another run than this SuperNode takes part in")
        return super().save(server_round, run)

    def beside(self) -> Tensors:
        return {str(client): torch.from_numpy(w) for client, w in self._rotations().items()}

    def resume(self, resume: Resume) -> Tensors | None:
        self._enter(resume)
        turns = super().resume(resume)
        if turns is not None:
            self._keep_rotations({int(client): turn.numpy() for client, turn in turns.items()})
        return turns

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Rotate the mean back, train, embed, measure, rotate and mask (steps 2 to 4)."""
        request = PublicRequest.from_numpy(parameters, config, public=self.public)
        order = SumOrder.from_config(config, sizes=[ids.size for ids in request.nodes])
        self.keys()  # before anything is trained: without keys there is no round
        layout = layout_of(*NOT_TOLD, request.dimension, request.server_round, order)
        if self.trust is not None:
            layout = self._layout(request, order, config)
        kept = self._rotations()
        targets = [
            self._own_space(client, mean, kept.get(client)) if order.is_target else None
            for client, mean in zip(request.clients, request.targets, strict=True)
        ]
        reply = self.round(replace(request, targets=targets))
        ring, counts, reply.counts = RING.from_config(config), reply.counts, None
        # Counts are in the sum with the first client's rows; a node is one step of the ring
        flat = np.zeros(0) if counts is None else counts.flat().numpy() * 2.0**-ring.fraction_bits
        hidden = 0 if self.trust is None else 2 * len(MEASURED)
        rows = int(config["mask-length"]) - flat.size - hidden
        rotated = rotate(request, order, reply, rows)
        near = {client: one.precision for client, one in rotated.items()}
        if any(near.values()):
            for name, k in PRECISIONS.items():
                reply.judged[name] = [near.get(c, {}).get(k, math.nan) for c in request.clients]
        figures = hide_figures(reply, ring.limit) if hidden else {}
        first, none = min(rotated, default=-1), np.zeros(0)
        vectors = {
            c: np.concatenate([one.vector, figures.get(c, none), flat * (c == first)])
            for c, one in rotated.items()
        }
        # The same embeddings with another rotation are the same state.
        state = [one for one in reply.embeddings if one is not None]
        masked, entries = self.masked(config, vectors, MEANS, layout, state)
        if self.trust is not None and masked.left_out:
            # A missing client may leave others alone in the sum, and means may push a client out.
            raise RefusedError("a client here cannot be in the sum: its SuperNode sends nothing")
        self._keep_rotations(kept | {client: one.rotation for client, one in rotated.items()})
        if request.saves:
            reply.not_saved = self.save(request.server_round, request.run)
        reply.request = replace(request, wants_embeddings=False)
        _, weight, metrics = reply.to_numpy()
        return [masked.total], weight, metrics | entries

    # Where the server is not trusted

    def _layout(self, request: PublicRequest, order: SumOrder, config: Config) -> bytes:
        """Return the order of nodes and the points of rotation, once all agree on them."""
        assert self.trust is not None
        claims, epoch = Claims.from_config(config), self.keys().epoch
        if epoch is None:
            raise StateLostError("no epoch has begun under this version of the registry")
        run, parties = self.context.run_id, epoch.parties.tolist()
        nodes = check_layout(claims, self.trust, run, parties, self.public, self._least)
        for ids, slots, mean in zip(request.nodes, order.slots, request.targets, strict=True):
            if not np.array_equal(slots, find_slots(ids, nodes)):
                raise RefusedError("the server orders public nodes otherwise than their holders")
            claims.check_mean(mean, slots)
        judges = [member.judge for member in self.members.values()]
        classes = next((one.num_classes for one in judges if isinstance(one, GraphJudge)), 0)
        size = counts_size(classes, request.counting)
        if config["mask-length"] != nodes.size * request.dimension + 2 * len(MEASURED) + size:
            raise RefusedError("the sum has another length than the nodes that are in it")
        Journal(self.trust.journal).contribute(request.server_round, ROUNDS, self._run().encode())
        return layout_of(nodes, claims.means, request.dimension, request.server_round, order)

    def _run(self) -> str:
        record = self.context.state.config_records.get(RUN, ConfigRecord())
        return str(record.get(RUN, ""))

    def _enter(self, resume: Resume) -> None:
        """Record the run; refuse a second run, and a checkpoint from before its last sum."""
        if self.trust is None:
            return
        if self._run() not in ("", resume.run):
            raise RefusedError("this SuperNode takes part in another run already")
        last = Journal(self.trust.journal).last(ROUNDS, resume.run.encode()) or 0
        if self._state.store.is_due(resume) and resume.server_round < last:
            raise RefusedError(
                f"this SuperNode is in the sum of round {last}: no way back to the checkpoint of "
                f"round {resume.server_round}, as two sums of a round can be compared"
            )
        self.context.state[RUN] = ConfigRecord({RUN: resume.run})

    def _own_space(
        self, client: int, mean: FloatArray | None, turn: NDArray[Any] | None
    ) -> FloatArray | None:
        """Rotate the common mean into a client's space; rows without a mean stay its own."""
        if mean is None or turn is None:
            return None
        target: FloatArray = (mean @ turn.T).astype(np.float32)
        if (missing := ~mean.any(1)).any():
            local = self._state.look(self._makers)[client].embed()[self.members[client].rows]
            target[missing] = local[missing]
        return target

    def _keep_rotations(self, kept: Mapping[int, NDArray[np.generic]]) -> None:
        arrays = {str(client): Array(w) for client, w in kept.items()}
        self.context.state[ROTATIONS] = ArrayRecord(arrays)

    def _rotations(self) -> dict[int, NDArray[np.generic]]:
        record = self.context.state.array_records.get(ROTATIONS, ArrayRecord())
        return {int(name): decode_array(name, array) for name, array in record.items()}


def first_points(seed: int, nodes: int, dimension: int) -> Floats:
    """Draw the points ``[u, d]`` to which clients rotate before there is a mean."""
    # Any fixed points do: clients with similar embeddings get similar rotated embeddings.
    rng = np.random.default_rng(derive_seed(seed, "secure-consensus"))
    return rng.standard_normal((nodes, dimension))


class Rotated(NamedTuple):
    """A client's embeddings in the common space."""

    rotation: Floats  # ``W_i``
    vector: Floats  # its part of the sum
    precision: Mapping[int, float]  # distance to the common mean; empty without one


def rotate(
    request: PublicRequest, order: SumOrder, reply: PublicReply, length: int
) -> dict[int, Rotated]:
    """Rotate each client's rows nearest to the common mean, or to the first points."""
    start = first_points(order.seed, length // request.dimension, request.dimension)
    result = {}
    for index, client in enumerate(request.clients):
        x, mean, slots = reply.embeddings[index], request.targets[index], order.slots[index]
        if x is None:
            continue
        here, local = slots != ABSENT, x.astype(np.float64)
        points = start[slots[here]] if mean is None else mean[here].astype(np.float64)
        turn, near = np.eye(request.dimension), dict[int, float]()
        if here.any():
            turn = orthogonal_procrustes(local[here], points, rotations_only=order.rotations_only)
            if mean is not None:
                near = alignment_precision(local[here], points, turn)
        result[client] = Rotated(turn, sum_vector(local @ turn, slots, length), near)
    return result


def hide_figures(reply: PublicReply, limit: float) -> dict[int, Floats]:
    """Move measurements from a reply into vectors: the server learns no single client's."""
    # Some of them depend on the server's means.
    nothing = [math.nan] * len(reply.loss)
    said = {**reply.judged, "loss": reply.loss, "disagreement": reply.disagreement}
    values = np.array([said.get(name, nothing) for name in MEASURED]).T
    fits = np.abs(values) <= limit  # not if it is NaN
    reply.loss, reply.disagreement, reply.judged = nothing, nothing, {}
    vectors = np.concatenate([np.where(fits, values, 0), fits], 1)
    return dict(zip(reply.request.clients, vectors, strict=True))


def sum_vector(turned: Floats, slots: IntArray, length: int) -> Floats:
    """Place a client's rotated rows ``[p, d]`` at their slots, zeros elsewhere, ``[length]``."""
    dimension = turned.shape[1]
    here, count = slots != ABSENT, length // dimension
    chosen = slots[here]
    is_inside = ((chosen >= 0) & (chosen < count)).all()
    if length % dimension or np.unique(chosen).size != chosen.size or not is_inside:
        given = f"{brief(chosen.tolist())} of {length} numbers in rows of {dimension}"
        raise ValueError(f"slots: {given}; allowed are different ones from 0 to {count - 1}")
    rows = np.zeros((count, dimension))
    rows[chosen] = turned[here]
    return rows.ravel()
