"""The PPFL-GNN clients of one SuperNode: they carry the client's half of ``algorithm.py``.

A SuperNode speaks for one or more clients; their rows are concatenated. Ids are sent once, at
enrolment.

*If the server is not trusted*, SuperNodes agree on the order of the summed nodes without it. The
order decides which rows are added: a server that gives each client other positions can read every
row from the sum, without a lie about masks. So each SuperNode signs which nodes its clients hold.
All SuperNodes get all claims and compute the same nodes in the same order: the nodes with so many
holders that any sum has two honest ones. The masks depend on the order and on everything else that
decides what a client sends: the round, and the means to which embeddings are rotated. If clients
were told different things, their sum cannot be read.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch import Tensor

from flower_graph.client.state import CohortState, Tensors, forms_of
from flower_graph.errors import MalformedReplyError, RefusedError, StateLostError, brief
from flower_graph.flower_compat import NumPyClient
from flower_graph.ops.procrustes import alignment_precision
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import Embeddings, Predictions, SavedModels, Snapshot
from flower_graph.secure.channel import framed, rows_of
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.parties.registry import SIGNATURE_BYTES, TrustSettings
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import MaskingClient
from flower_graph.strategies.ppfl.algorithm import (
    ABSENT,
    DoubleArray,
    EmbeddingModel,
    FloatArray,
    IntArray,
    RowsAndMeans,
    common_nodes,
    find_slots,
    first_points,
    rotated,
    rotated_back,
    train_and_embed,
)
from flower_graph.strategies.ppfl.config import CLASSIFIERS, JUDGED, PRECISIONS
from flower_graph.strategies.ppfl.evaluation import GraphJudge
from flower_graph.strategies.ppfl.modules import GATCohort
from flower_graph.wire import codec, keys
from flower_graph.wire.arrays import Answer, Config, Parameters, pack_integers
from flower_graph.wire.codec import Block, Bytes, Flag, Message, Numbers, Whole, split_rows
from flower_graph.wire.counts import Counted, Counting, added, counts_size
from flower_graph.wire.keys import CHECKPOINT, MAX_NUMBER, ROLES, RUN_TOKEN

Held = Mapping[int, IntArray]  # of each client of a SuperNode, the ids of its public nodes

UNUSABLE = "its embeddings are not finite, or too large"
MAX_DIMENSION = 1 << 16
MOST_CLIENTS = 4096  # of one SuperNode: each is checked, even invented ones
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


class HeldNodes(Message):
    """Clients, and the ids of the public nodes that each of them holds."""

    clients: Annotated[list[int], Numbers(whole=True)]  # whose the nodes are
    rows: Annotated[list[int], Numbers(whole=True)]  # public nodes of each
    nodes: Annotated[IntArray, codec.Exact(shape="n")]  # their ids, one client's after the other's

    @classmethod
    def of_clients(cls, held: Held, *more: Any) -> Self:  # more: the other fields
        sizes = [ids.size for ids in held.values()]
        return cls([*held], sizes, np.concatenate([NOT_TOLD[0], *held.values()]), *more)

    @property
    def held(self) -> Held:
        return dict(zip(self.clients, split_rows(self.nodes, self.rows), strict=True))

    def check(self, known: codec.Known) -> None:
        if self.nodes.size != sum(self.rows) or min(self.rows, default=0) < 0:
            why = f"{self.nodes.size} ids, but {keys.ROWS} {brief(self.rows)}"
            raise MalformedReplyError(f"nodes: {why}")


class EmbeddingEnrolment(HeldNodes, up="query"):
    """Client to server: its clients, at most 4096, and their public nodes."""

    dimension: Annotated[int, Whole(least=1, most=MAX_DIMENSION)]  # numbers of an embedding
    handled: codec.Handled = None
    # of clients and ids (Ed25519)
    signature: Annotated[Bytes | None, Block("claim-signature", shape="64")] = None

    def check(self, known: codec.Known) -> None:
        super().check(known)
        is_several = 0 < len(self.held) == len(self.clients) <= MOST_CLIENTS
        if not is_several or min(self.clients) < 0:
            why = f"not at most {MOST_CLIENTS} different numbers >= 0"
            raise MalformedReplyError(f"{keys.CLIENTS}: {brief(self.clients)}: {why}")
        for client, ids in self.held.items():
            if not 1 <= np.unique(ids).size == ids.size:
                raise MalformedReplyError(f"client {client}: {ids.size} nodes, not all different")


def joined(
    parts: Sequence[FloatArray | None], nodes: Sequence[IntArray], dimension: int
) -> tuple[list[int], FloatArray]:
    """Return which clients have rows, and all rows ``[n, d]``: zeros of a client without any."""
    # So both directions have one shape: Flower's ``LocalDpMod`` works on the difference.
    rows = [
        np.zeros((ids.size, dimension), np.float32) if x is None else x
        for x, ids in zip(parts, nodes, strict=True)
    ]
    return [int(x is not None) for x in parts], np.concatenate(rows)


def parted(
    rows: FloatArray | None, marks: Sequence[int], nodes: Sequence[IntArray]
) -> list[FloatArray | None]:
    """Undo ``joined``; without rows no client has any."""
    if rows is None:
        return [None] * len(nodes)
    # A copy: rows that were read cannot be written, and a model may write to its targets.
    parts = split_rows(rows.astype(np.float32), [ids.size for ids in nodes])
    return [part if mark else None for part, mark in zip(parts, marks, strict=True)]


MARKS = Numbers(keys.WITH_TARGETS, "1 for each client whose rows count, else 0", whole=True)
PUBLIC = codec.Tensor("arrays/public", shape="n d", when="wants_embeddings")


class PublicRequest(Message, down="train"):
    """Server to client: the aligned means of the last round."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND)]  # the round
    # The clients that are asked, all at one SuperNode
    clients: Annotated[list[int], Numbers(keys.CLIENTS, whole=True)]  # who is asked
    nodes: list[IntArray]  # ids of each client's public nodes, which both sides know
    dimension: int  # numbers of an embedding
    marks: Annotated[list[int], MARKS]
    # means of public nodes; in the secure form the common mean
    targets: Annotated[FloatArray | None, PUBLIC] = None
    is_last: Annotated[bool, Flag(keys.IS_LAST)] = False  # whether no round follows
    # false where clients train alone; then no array travels
    wants_embeddings: Annotated[bool, Flag()] = True
    # whether these clients had earlier rounds: their state
    follows: Annotated[bool, Flag()] = False
    saves: codec.Saves = False
    run: codec.Token = ""  # if they are to save
    counting: Counting = ""

    @property
    def sizes(self) -> list[int]:
        return [ids.size for ids in self.nodes]

    @cached_property
    def means(self) -> list[FloatArray | None]:
        """The means of each client, ``[p, d]``."""
        return parted(self.targets, self.marks, self.nodes)


@dataclass(frozen=True)
class Judged(codec.Field[Mapping[str, Sequence[float]]]):
    """Shares that a client's judge returns, by name, each a number for every client."""

    is_number = True
    type = "list of float"

    def write(self, value: Mapping[str, Sequence[float]], to: codec.Writing) -> None:
        to.config |= {keys.MEASURED + name: numbers for name, numbers in value.items()}

    def read(self, name: str, reading: codec.Reading) -> dict[str, list[float]]:
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
    marks: Annotated[list[int], MARKS]
    # Its model's own loss
    loss: Annotated[list[float], Numbers(keys.LOSS)]  # of each client
    # of each: mean of 1 − cos of embeddings and means; NaN without
    disagreement: Annotated[list[float], Numbers()]
    # embeddings, in the same order. Not in the secure form
    rows: Annotated[FloatArray | None, PUBLIC] = None
    # `judged-val`, `judged-test`, …, of each client or NaN
    judged: Annotated[dict[str, list[float]], Judged(f"{keys.MEASURED}*")] = field(
        default_factory=dict
    )
    # `number:reason` for each that is not to be used
    left_out: Annotated[dict[int, str], codec.Reasons(keys.LEFT_OUT)] = field(default_factory=dict)
    not_saved: codec.NotSaved = ""
    counts: Counted = None

    @cached_property
    def embeddings(self) -> list[FloatArray | None]:
        """The embeddings of each client, ``[p, d]``."""
        return parted(self.rows, self.marks, self.request.nodes)

    @classmethod
    def answering(
        cls, request: PublicRequest, content: RecordDict, classes: int = 0
    ) -> PublicReply:
        sizes = {"c": len(request.clients), "n": sum(request.sizes), "d": request.dimension}
        return cls.read(content, request=request, classes=classes, **sizes, **vars(request))

    def check(self, known: codec.Known) -> None:
        for name, most in ((keys.LOSS, keys.MAX_NUMBER), ("disagreement", 2.001)):
            if wrong := [v for v in getattr(self, name) if math.isfinite(v) and abs(v) > most]:
                raise MalformedReplyError(f"{name}: {wrong[0]:g}; at most {most:g} is possible")
        asked = self.request.clients  # a SuperNode speaks for these alone
        self.left_out = {client: why for client, why in self.left_out.items() if client in asked}


class SumOrder(Message, down="train"):
    """Server to client, with a ``PublicRequest`` whose targets are rows of the common mean."""

    # place of each public node in the sum; −1: it is not in it
    slots: Annotated[IntArray, codec.Exact(shape="n")]
    seed: Annotated[int, Whole(keys.SEED)]  # of the points that all turn to first
    # whether the common mean may be learnt from; else only turned to
    is_target: Annotated[bool, Flag()]

    def meaning(self, nodes: IntArray, means: Bytes, request: PublicRequest) -> bytes:
        """Hash the meaning of a vector's numbers, for the masks: nodes and means."""
        numbers = request.dimension, request.server_round, self.seed
        packed = struct.pack("<qqQ?", *numbers, self.is_target)
        return hashlib.sha256(framed(packed, pack_integers(nodes), means.tobytes())).digest()


# The nodes of a sum -------------------------------------------------------------------------------


def fewest_parties(parties: int, least: int) -> int:
    """Return how many SuperNodes must hold a summed node, if the server is not trusted."""
    return max(least, 2 + MISSING * parties // 10 + COLLUDING * parties // 10)


def digests_of(rows: FloatArray) -> Bytes:
    """Hash each row of the common mean, ``[u, 32]``: clients compare all, and see their own."""
    digests = [hashlib.sha256(row.tobytes()).digest() for row in rows.astype("<f4")]
    return rows_of(digests, -1, DIGEST)


def claim_parts(run_id: int, held: Held) -> list[bytes]:
    """Return what a SuperNode signs: the run, its clients in ascending order, their nodes."""
    clients = np.array(sorted(held), np.int64)
    nodes = [pack_integers(held[client]) for client in clients.tolist()]
    return [b"public-nodes", struct.pack("<Q", run_id), pack_integers(clients), *nodes]


class Claims(HeldNodes, down="train", prefix="claim-"):
    """Server to client, with a ``SumOrder``: what all SuperNodes of the sums have signed."""

    # of each SuperNode
    signatures: Annotated[Bytes, Block(shape=f"a {SIGNATURE_BYTES}")]
    # SHA-256 of each row of the common mean; missing if there is none yet
    means: Annotated[Bytes, Block(shape=f"u {DIGEST}")] = field(default_factory=lambda: NOT_TOLD[1])

    @classmethod
    def of(cls, answers: Iterable[EmbeddingEnrolment]) -> Claims:
        every = {client: nodes for one in answers for client, nodes in one.held.items()}
        signed = [one.signature.tobytes() for one in answers if one.signature is not None]
        return cls.of_clients(every, rows_of(signed, -1, SIGNATURE_BYTES))

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
        count, every = len(parties), self.held
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
        return common_nodes(held.values(), fewest_parties(count, least))


# Evaluates the embeddings of all of a client's nodes, given the round and whether it is the last
Judge = Callable[[FloatArray, int, bool], Mapping[str, float]]
RUN = "public-run"  # in Context.state: the run of a SuperNode with a key of its own
NODES = "public-nodes"  # in Context.state: a hash of the ids that it has enrolled with
TURNS = "turns"  # key of the rotations among what is kept
ROUNDS = b"public-rounds"  # in its journal


@dataclass(frozen=True)
class EmbeddingClient:
    """One client of PPFL-GNN.

    Parameters
    ----------
    number
        Number of the client; unique over the run.
    nodes
        Ids of its nodes, int64 ``[n]``; a shared node has the same id at all clients.
    rows
        Indices of the public ones in ``nodes``, int64 ``[p]``.
    dimension
        Dimensions of an embedding.
    build
        Makes the model as it is before the first round.
    judge
        Evaluates its embeddings; returns the accuracies ``val`` and ``test``.

    Raises
    ------
    ValueError
        If ids or rows are impossible, or there is no public node.
    """

    number: int
    nodes: IntArray
    rows: IntArray
    dimension: int
    build: Callable[[], EmbeddingModel]
    judge: Judge | None = None

    def __post_init__(self) -> None:
        n, is_fit = self.nodes.size, self.dimension >= 1
        for values in (self.nodes, self.rows):
            is_fit &= values.ndim == 1 and 0 < values.size == np.unique(values).size
        if not is_fit or not np.isin(self.rows, np.arange(n)).all():
            given = f"{n} nodes, rows {brief(self.rows.tolist())}, dimension {self.dimension}"
            allowed = f"different nodes, different rows from 0 to {n - 1}, dimension 1 or more"
            raise ValueError(f"client {self.number}: {given}; allowed are {allowed}")

    @property
    def public(self) -> IntArray:
        return self.nodes[self.rows]


def public_rows(nodes: IntArray, public: IntArray) -> IntArray:
    """Return the indices in ``nodes`` of public ids ``[p]``; ``ValueError`` for an unknown id."""
    if (strangers := public[~np.isin(public, nodes)]).size:
        raise ValueError(f"public: {strangers[:5].tolist()} are none of the {nodes.size} nodes")
    order = np.argsort(nodes, kind="stable")
    return order[np.searchsorted(nodes, public, sorter=order)]


class SingleModels:
    """Models of any kind, which train one after the other."""

    def __init__(self, members: Iterable[EmbeddingClient], tensors: Tensors | None = None) -> None:
        self._members = {member.number: member for member in members}
        self._models = {number: member.build() for number, member in self._members.items()}
        for number, model in self._models.items():
            if tensors is not None and hasattr(model, "load_state_dict"):
                start = f"{number}."
                own = {n: v.clone() for n, v in tensors.items() if n.startswith(start)}
                model.load_state_dict({n.removeprefix(start): value for n, value in own.items()})
        self.tensors = self._copied()

    def train(self, asked: RowsAndMeans, server_round: int) -> dict[int, float]:
        each = asked.items()
        losses = {c: float(self._models[c].learn(*given, server_round)) for c, given in each}
        now = self._copied()
        if forms_of(now) != forms_of(self.tensors):
            raise ValueError("state_dict: names, shapes and types must stay as `build` made them")
        for name, value in now.items():
            self.tensors[name].copy_(value)
        return losses

    def outputs(self, clients: Sequence[int]) -> dict[int, tuple[FloatArray, None]]:
        return {one: (self._embedded(self._members[one]), None) for one in clients}

    def saved(self) -> list[SavedModels]:
        return []

    def _embedded(self, member: EmbeddingClient) -> FloatArray:
        rows = np.asarray(self._models[member.number].embed(), np.float32)
        if rows.shape != (member.nodes.size, member.dimension):
            raise ValueError(f"client {member.number}: its model embeds as {rows.shape}")
        return rows

    def _copied(self) -> Tensors:
        return {
            f"{number}.{name}": value.detach().clone()
            for number, model in self._models.items()
            for name, value in getattr(model, "state_dict", dict)().items()
        }


Models = SingleModels | GATCohort


class LearntState(NamedTuple):
    """What a SuperNode keeps from message to message."""

    models: Models
    turns: Tensor  # [c, d, d] ``W_i`` in the secure form; NaN before a client has one


class PublicNodeClient(NumPyClient):
    """The clients of one SuperNode: usually one, in a simulation any number.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps the models' state.
    members : sequence of EmbeddingClient
        The clients.
    models : callable, optional
        Makes a ``GATCohort`` of what lasted, or of ``None`` before the first round. By default each
        client makes its own model, and they train one by one.
    checkpoint_dir : Path, optional
        Where to save the models when the server asks for a checkpoint.
    outputs : ClientOutputs, optional
        Where outputs go, if the SuperNode has no folder of its own.
    """

    turns = False  # whether it keeps rotations

    def __init__(
        self,
        context: Context,
        members: Sequence[EmbeddingClient],
        *,
        models: Callable[[Tensors | None], Models] | None = None,
        checkpoint_dir: Path | None = None,
        outputs: ClientOutputs | None = None,
    ) -> None:
        numbers, dimensions = [one.number for one in members], {one.dimension for one in members}
        if len(dimensions) != 1 or len(set(numbers)) != len(numbers):
            given = f"client numbers {brief(numbers)}, dimensions {brief(sorted(dimensions))}"
            raise ValueError(f"members: {given}; allowed are different numbers, one dimension")
        self.context, self.members = context, dict(zip(numbers, members, strict=True))
        (self.dimension,) = dimensions
        self.public = {number: member.public for number, member in self.members.items()}
        self.outputs = outputs or ClientOutputs(context)
        judges = {number: member.judge for number, member in self.members.items()}
        self._judges = {n: one for n, one in judges.items() if isinstance(one, GraphJudge)}
        self._make = models or partial(SingleModels, members)
        self._state = CohortState[LearntState](context, numbers, checkpoint_dir, self._made)

    def get_properties(self, config: Config) -> Config:
        if config.get(CHECKPOINT, False):
            return {**self._state.save_asked(config)}
        self._state.restore(codec.Resume.from_config(config))
        return self.enrolment().to_config()

    def enrolment(self) -> EmbeddingEnrolment:
        self.context.state[NODES] = ConfigRecord({NODES: self._digest()})
        return EmbeddingEnrolment.of_clients(self.public, self.dimension, self._state.processed())

    def asked(self, parameters: Parameters, config: Config) -> PublicRequest:
        """Read a request; refuse it if the public nodes have changed since the enrolment."""
        enrolled = self.context.state.config_records.get(NODES)
        if enrolled is not None and enrolled[NODES] != self._digest():
            raise RefusedError("public nodes: other ids, or another order, than at the enrolment")
        about: dict[str, Any] = {"nodes": [], "dimension": self.dimension}
        request = PublicRequest.from_numpy(parameters, config, **about)
        if strange := set(request.clients) - self.public.keys():
            raise ValueError(f"clients {brief(sorted(strange))} are not hosted here")
        if len(set(request.clients)) != len(request.clients):
            raise ValueError(f"clients {brief(request.clients)}: each may be there once")
        request.nodes = [self.public[client] for client in request.clients]
        means, shape = request.targets, (sum(request.sizes), self.dimension)
        if means is not None and (means.shape != shape or not np.isfinite(means).all()):
            raise ValueError(f"means {means.shape}: finite ones of {shape} are allowed")
        return request

    def _digest(self) -> bytes:
        return hashlib.sha256(framed(*claim_parts(0, self.public))).digest()

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        request = self.asked(parameters, config)
        with self._state.opened(follows=request.follows) as held:
            reply = self.trained(held, request, request.means)
        return self.saved(reply).to_numpy()

    def saved(self, reply: PublicReply) -> PublicReply:
        if reply.request.saves:
            reply.not_saved = self._state.save(reply.request.server_round, reply.request.run)
        return reply

    def snapshot(self) -> Snapshot:
        models, placed, predictions = self._state.look().models, [], []
        for number, (embeddings, logits) in models.outputs([*self.members]).items():
            member, judge = self.members[number], self._judges.get(number)
            nodes = member.nodes if judge is None else judge.named
            if judge is not None and np.isfinite(embeddings).all():
                predictions.append(judge.predict(embeddings, logits))
            client, public = np.full(nodes.size, number), np.isin(member.nodes, member.public)
            placed.append(Embeddings(client, nodes, member.nodes, public, embeddings))
        joined = Predictions.join(predictions) if predictions else None
        return Snapshot(joined, models.saved(), Embeddings.join(placed))

    def trained(
        self, held: LearntState, request: PublicRequest, targets: Sequence[FloatArray | None]
    ) -> PublicReply:
        """Train towards the means of public nodes; embed, and measure (steps 2 and 3)."""
        asked = {
            client: (self.members[client].rows, means)
            for client, means in zip(request.clients, targets, strict=True)
        }
        number = request.server_round
        learnt = train_and_embed(held.models, asked, number)
        left_out = {
            client: UNUSABLE
            for client, one in learnt.items()
            if not np.isfinite(one.embeddings).all() or np.abs(one.public).max() > MAX_NUMBER
        }
        judged = dict[int, Mapping[str, float]]()
        for client, one in learnt.items():
            judge = None if client in left_out else self.members[client].judge
            judged[client] = {} if judge is None else judge(one.embeddings, number, request.is_last)
        parts = [None if client in left_out else one.public for client, one in learnt.items()]
        marks, rows = joined(parts, request.nodes, self.dimension)
        names = dict.fromkeys(name for one in judged.values() for name in one)
        counting = self._judges.keys() & learnt.keys() - left_out.keys()
        reply = PublicReply(
            request,
            marks,
            [one.loss for one in learnt.values()],
            [one.distance for one in learnt.values()],
            rows if request.wants_embeddings else None,
            {name: [one.get(name, math.nan) for one in judged.values()] for name in names},
            left_out,
            counts=added(self._judges[c].counts for c in counting) if request.counting else None,
        )
        self.outputs.measured(
            request.server_round,
            request.clients,
            loss=reply.loss,
            accuracy=[[one.get(role, math.nan) for role in ROLES] for one in judged.values()],
            nodes=[self.members[client].nodes.size for client in request.clients],
        )
        return reply

    def _made(self, tensors: Tensors | None) -> tuple[LearntState, Tensors]:
        own, shape = dict(tensors or {}), (len(self.members) if self.turns else 0, self.dimension)
        none = torch.full((*shape, self.dimension), math.nan, dtype=torch.float64)
        turns = own.pop(TURNS, none)
        models = self._make(None if tensors is None else own)
        return LearntState(models, turns), models.tensors | ({TURNS: turns} if self.turns else {})


# In a secure sum ----------------------------------------------------------------------------------


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
    **where
        ``models``, ``checkpoint_dir`` and ``outputs`` as of ``PublicNodeClient``; checkpoints have
        the rotations too, and never keys.
    """

    turns = True

    def __init__(
        self,
        context: Context,
        members: Sequence[EmbeddingClient],
        *,
        trust: TrustSettings | None = None,
        least_holders: int = LEAST_HOLDERS,
        **where: Any,
    ) -> None:
        super().__init__(context, members, **where)
        MaskingClient.__init__(self, context, list(self.members), trust)
        self._least = least_holders

    def enrolment(self) -> EmbeddingEnrolment:
        here = super().enrolment()
        if self.trust is not None:
            signed = self.trust.identity.sign(*claim_parts(self.context.run_id, self.public))
            here.signature = np.frombuffer(signed, np.uint8)
        return here

    def get_properties(self, config: Config) -> Config:
        """Record the run; refuse a second run, and a checkpoint from before its last sum."""
        if self.trust is not None:
            run, is_new = str(config.get(RUN_TOKEN, "")), not self._run()
            self._check_run(run, is_new and not config.get(CHECKPOINT))
            last = replace(self.trust.journal, run=run.encode()).last(ROUNDS)
            resume = codec.Resume.from_config(config)
            if self._state.is_due(resume) and resume.server_round < last:
                raise RefusedError(
                    f"this SuperNode is in the sum of round {last}: no way back to the checkpoint "
                    f"of round {resume.server_round}, as two sums of a round can be compared"
                )
            self.context.state[RUN] = ConfigRecord({RUN: run})
        return super().get_properties(config)

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Rotate the mean back, train, embed, measure, rotate and mask (steps 2 to 4)."""
        request = self.asked(parameters, config)
        order = SumOrder.from_config(config, n=sum(request.sizes))
        self.keys()  # before anything is trained: without keys there is no round
        layout, ring = self._layout(request, order, config), Ring.from_config(config)
        with self._state.opened(follows=request.follows) as held:
            kept = dict(zip(self.members, held.turns.numpy(), strict=True))
            targets = [
                self._target(held, client, kept[client], mean) if order.is_target else None
                for client, mean in zip(request.clients, request.means, strict=True)
            ]
            reply = self.trained(held, request, targets)
            rotations, vectors = rotate(request, order, reply, self._rows_in(request, config))
            figures = {} if self.trust is None else hide_figures(reply, ring.limit)
            counts, reply.counts = reply.counts, None
            # Counts are in the sum with the first client's rows; a node is one step of the ring
            step, first, none = 2.0**-ring.fraction_bits, min(vectors, default=-1), np.zeros(0)
            flat = none if counts is None else counts.flat().numpy() * step
            vectors = {
                c: np.concatenate([vector, figures.get(c, none), flat * (c == first)])
                for c, vector in vectors.items()
            }
            # The same embeddings with another rotation are the same state.
            state = [one for one in reply.embeddings if one is not None]
            reply.rows = None  # only their sum leaves
            masked, entries = self.masked(self.received(config), vectors, MEANS, layout, state)
            for client, rotation in rotations.items():
                kept[client][:] = rotation
        if self.trust is not None and masked.left_out:
            # A missing client may leave others alone in the sum, and means may push a client out.
            raise RefusedError("a client here cannot be in the sum: its SuperNode sends nothing")
        _, weight, metrics = self.saved(reply).to_numpy()
        return [masked.total], weight, metrics | entries

    def _target(
        self, held: LearntState, client: int, rotation: DoubleArray, mean: FloatArray | None
    ) -> FloatArray | None:
        if mean is None or np.isnan(rotation).any():
            return None
        rows = self.members[client].rows
        return rotated_back(mean, rotation, lambda: held.models.outputs([client])[client][0][rows])

    def _layout(self, request: PublicRequest, order: SumOrder, config: Config) -> bytes:
        """Return the meaning of a vector's numbers; an untrusting SuperNode checks it first."""
        if self.trust is None:
            return order.meaning(*NOT_TOLD, request)
        claims, epoch = Claims.from_config(config), self.keys().epoch
        if epoch is None:
            raise StateLostError("no epoch has begun under this version of the registry")
        run, parties = self.context.run_id, epoch.parties.tolist()
        nodes = claims.agreed(self.trust, run, parties, self.public, self._least)
        slots_of = split_rows(order.slots, request.sizes)
        for ids, slots, mean in zip(request.nodes, slots_of, request.means, strict=True):
            if not np.array_equal(slots, find_slots(ids, nodes)):
                raise RefusedError("the server orders public nodes otherwise than their holders")
            claims.check_mean(mean, slots)
        if self._rows_in(request, config) != nodes.size * request.dimension:
            raise RefusedError("the sum has another length than the nodes that are in it")
        self._check_run(request.run, not request.saves)
        # Of the method's run, which may go on in another run of Flower's
        journal = replace(self.trust.journal, run=self._run().encode())
        journal.contribute(request.server_round, ROUNDS)
        return order.meaning(nodes, claims.means, request)

    def _rows_in(self, request: PublicRequest, config: Config) -> int:
        """Return how many numbers of a vector are rows; measurements and counts follow them."""
        classes = next((one.num_classes for one in self._judges.values()), 0)
        others = vector_parts(0, self.trust is not None, classes, request.counting)
        return int(config["mask-length"]) - sum(others)

    def _check_run(self, run: str, may_differ: bool) -> None:
        if not may_differ and run != self._run():
            raise RefusedError("this SuperNode takes part in another run")

    def _run(self) -> str:
        record = self.context.state.config_records.get(RUN, ConfigRecord())
        return str(record.get(RUN, ""))


def vector_parts(
    rows: int, hides_figures: bool, classes: int, counting: str
) -> tuple[int, int, int]:
    """Return how many numbers each part of a vector has: rows, measurements, counts."""
    # Of measurements, which are in it where the server is not trusted, each has a 1 if it exists
    return rows, 2 * len(MEASURED) * hides_figures, counts_size(classes, counting)


def rotate(
    request: PublicRequest, order: SumOrder, reply: PublicReply, length: int
) -> tuple[dict[int, DoubleArray], dict[int, DoubleArray]]:
    """Rotate each client's rows nearest to the common mean, or to the first points.

    Returns the rotations ``W_i``, and the clients' parts of the sum ``[length]``: the rotated rows
    at their slots, and zeros. The reply gets the distances to the common mean.
    """
    count, dimension = length // request.dimension, request.dimension
    start, near = first_points(order.seed, count, dimension), dict[int, Mapping[int, float]]()
    rotations, vectors = dict[int, DoubleArray](), dict[int, DoubleArray]()
    slots_of = split_rows(order.slots, request.sizes)
    of_clients = request.clients, reply.embeddings, request.means, slots_of
    for client, x, mean, slots in zip(*of_clients, strict=True):
        here = slots != ABSENT
        chosen, rows = slots[here], np.zeros((count, dimension))
        is_inside = ((chosen >= 0) & (chosen < count)).all()
        if length % dimension or np.unique(chosen).size != chosen.size or not is_inside:
            given = f"{brief(chosen.tolist())} of {length} numbers in rows of {dimension}"
            raise ValueError(f"slots: {given}; allowed are different ones from 0 to {count - 1}")
        if x is None:
            continue
        local = x[here].astype(np.float64)
        points = start[chosen] if mean is None else mean[here].astype(np.float64)
        rotations[client], rows[chosen] = rotated(local, points)
        vectors[client] = rows.ravel()
        if mean is not None and chosen.size:
            near[client] = alignment_precision(local, points, rotations[client])
    for name, k in PRECISIONS.items() if near else ():
        reply.judged[name] = [near.get(c, {}).get(k, math.nan) for c in request.clients]
    return rotations, vectors


def hide_figures(reply: PublicReply, limit: float) -> dict[int, DoubleArray]:
    """Move measurements from a reply into vectors: the server learns no single client's."""
    # Some of them depend on the server's means.
    nothing = [math.nan] * len(reply.loss)
    said = {**reply.judged, "loss": reply.loss, "disagreement": reply.disagreement}
    values = np.array([said.get(name, nothing) for name in MEASURED]).T
    fits = np.abs(values) <= limit  # not if it is NaN
    reply.loss, reply.disagreement, reply.judged = nothing, nothing, {}
    vectors = np.concatenate([np.where(fits, values, 0), fits], 1)
    return dict(zip(reply.request.clients, vectors, strict=True))
