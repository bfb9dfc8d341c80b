"""The PPFL-GNN clients of one SuperNode, kept from message to message."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray
from torch.nn.functional import cosine_similarity

from flower_graph.client.state import CohortState, Tensors, forms_of
from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.flower_compat import NumPyClient
from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import Embeddings, Predictions, SavedModels, Snapshot
from flower_graph.rng import derive_seed
from flower_graph.secure.client import MaskingClient
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.ring import Ring
from flower_graph.strategies.ppfl import messages
from flower_graph.strategies.ppfl.config import PRECISIONS
from flower_graph.strategies.ppfl.evaluation import GraphJudge
from flower_graph.strategies.ppfl.messages import (
    MEASURED,
    EmbeddingEnrolment,
    FloatArray,
    IntArray,
    PublicReply,
    PublicRequest,
    SumOrder,
)
from flower_graph.strategies.ppfl.modules import Asked, GATCohort
from flower_graph.wire.arrays import Answer, Config, Parameters
from flower_graph.wire.codec import Resume
from flower_graph.wire.counts import added, counts_size
from flower_graph.wire.keys import CHECKPOINT, MAX_NUMBER, ROLES, RUN_TOKEN

Floats = NDArray[np.float64]
# Evaluates the embeddings of all of a client's nodes, given the round and whether it is the last
Judge = Callable[[FloatArray, int, bool], Mapping[str, float]]
RUN = "public-run"  # in Context.state: the run of a SuperNode with a key of its own
ROUNDS = b"public-rounds"  # in its journal


class EmbeddingModel(Protocol):
    """Anything that embeds the nodes of one client and can be pulled towards targets."""

    # A message may be answered by another process than the one before. So a model that keeps
    # anything from round to round also has PyTorch's ``state_dict`` and ``load_state_dict``, with
    # the same names, shapes and types from its making on. It draws random numbers from nothing but
    # a seed, its client and the round.

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        """Train for one round."""
        # rows [p], targets [p, d]

    def embed(self) -> FloatArray:
        """Return the embeddings of all nodes of the client, ``[n, d]``."""


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
        """Ids of the public nodes, int64 ``[p]``."""
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
        self._models = {member.number: member.build() for member in members}
        if tensors is not None:
            for number, model in self._models.items():
                if load := getattr(model, "load_state_dict", None):
                    own = {n: v.clone() for n, v in tensors.items() if n.startswith(f"{number}.")}
                    load({name.partition(".")[2]: value for name, value in own.items()})
        self.tensors = self._copied() if tensors is None else tensors

    def train(self, asked: Asked, server_round: int) -> dict[int, float]:
        each = asked.items()
        losses = {c: float(self._models[c].learn(*given, server_round)) for c, given in each}
        result = self._copied()
        was, now = forms_of(self.tensors), forms_of(result)
        if was != now:
            raise ValueError(
                f"state_dict: was {was!s:.200}, is {now!s:.200}; names, shapes and types must stay"
            )
        for name, value in result.items():
            self.tensors[name].copy_(value)
        return losses

    def outputs(self, clients: Sequence[int]) -> dict[int, tuple[FloatArray, None]]:
        return {one: (np.asarray(self._models[one].embed(), np.float32), None) for one in clients}

    def saved(self) -> list[SavedModels]:
        return []

    def _copied(self) -> Tensors:
        return {
            f"{number}.{name}": value.detach().clone()
            for number, model in self._models.items()
            for name, value in getattr(model, "state_dict", dict)().items()
        }


Models = SingleModels | GATCohort


class Held(NamedTuple):
    """What a SuperNode keeps from message to message."""

    models: Models
    turns: Tensors  # ``W_i`` of each client in the secure form, by key; NaN before there is one


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
        self.members = dict(zip(numbers, members, strict=True))
        self.public = {number: member.public for number, member in self.members.items()}
        self.outputs = outputs or ClientOutputs(context)
        self._make = models or partial(SingleModels, members)
        places = "public-node-client", numbers, checkpoint_dir
        self._state = CohortState[Held](context, *places, self._made)

    def get_properties(self, config: Config) -> Config:
        if config.get(CHECKPOINT, False):
            return {**self._state.save_asked(config)}
        self._state.restore(Resume.from_config(config))
        return self.enrolment().to_config()

    def enrolment(self) -> EmbeddingEnrolment:
        dimension, handled = next(iter(self.members.values())).dimension, self._state.processed()
        return EmbeddingEnrolment(list(self.public), [*self.public.values()], dimension, handled)

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        request = PublicRequest.from_numpy(parameters, config, public=self.public)
        with self._state.opened(follows=request.follows) as held:
            reply = self.trained(held, request, request.targets)
        return self.saved(reply).to_numpy()

    def saved(self, reply: PublicReply) -> PublicReply:
        """Write the checkpoint that a request asks for; a reply says if that failed."""
        if reply.request.saves:
            reply.not_saved = self._state.save(reply.request.server_round, reply.request.run)
        return reply

    def snapshot(self) -> Snapshot:
        models, placed, predictions = self._state.look().models, [], []
        for number, (embeddings, logits) in models.outputs([*self.members]).items():
            member = self.members[number]
            judge, nodes = member.judge, member.nodes
            if isinstance(judge, GraphJudge):
                nodes = judge.named
                if np.isfinite(embeddings).all():
                    predictions.append(judge.predict(embeddings, logits))
            client, public = np.full(nodes.size, number), np.isin(member.nodes, member.public)
            placed.append(Embeddings(client, nodes, member.nodes, public, embeddings))
        joined = Predictions.join(predictions) if predictions else None
        return Snapshot(joined, models.saved(), Embeddings.join(placed))

    def trained(
        self, held: Held, request: PublicRequest, targets: Sequence[FloatArray | None]
    ) -> PublicReply:
        """Train towards the means of public nodes; embed, and measure (steps 2 and 3)."""
        members = [self.members[client] for client in request.clients]
        given = {m.number: (m.rows, means) for m, means in zip(members, targets, strict=True)}
        for member, means in zip(members, targets, strict=True):
            shape = member.rows.size, member.dimension
            if means is not None and (means.shape != shape or not np.isfinite(means).all()):
                why = f"means {means.shape}: finite ones of {shape} are allowed"
                raise ValueError(f"client {member.number}: {why}")
        losses = held.models.train(given, request.server_round)
        outputs = held.models.outputs(request.clients)
        reply, judged, counts = PublicReply(request, [], [], []), list[Mapping[str, float]](), []
        for member, means in zip(members, targets, strict=True):
            rows, judge = outputs[member.number][0], member.judge
            if rows.shape != (shape := (member.nodes.size, member.dimension)):
                why = f"its model embeds as {rows.shape}, expected {shape}"
                raise ValueError(f"client {member.number}: {why}")
            shared, is_usable = rows[member.rows], np.isfinite(rows).all()
            is_usable &= np.abs(shared).max() <= MAX_NUMBER
            reply.loss.append(losses[member.number])
            reply.disagreement.append(disagreement(shared, means))
            reply.embeddings.append(shared if is_usable else None)
            if not is_usable:
                reply.left_out[member.number], judge = messages.UNUSABLE, None
            when = request.server_round, request.is_last
            judged.append({} if judge is None else judge(rows, *when))
            counts += [judge.counts] if isinstance(judge, GraphJudge) else []
        names = dict.fromkeys(name for one in judged for name in one)
        reply.judged = {name: [one.get(name, math.nan) for one in judged] for name in names}
        reply.counts = added(counts) if request.counting else None
        self.outputs.measured(
            request.server_round,
            request.clients,
            loss=reply.loss,
            accuracy=[[one.get(role, math.nan) for role in ROLES] for one in judged],
            nodes=[member.nodes.size for member in members],
        )
        return reply

    def _made(self, tensors: Tensors | None) -> tuple[Held, Tensors]:
        own, turns = dict(tensors or {}), Tensors()
        for number, member in self.members.items() if self.turns else ():
            none = torch.full((member.dimension,) * 2, math.nan, dtype=torch.float64)
            turns[turn_of(number)] = own.pop(turn_of(number), none)
        models = self._make(None if tensors is None else own)
        return Held(models, turns), models.tensors | turns


def turn_of(client: int) -> str:
    """Return the key of a client's rotation among what is kept."""
    return f"turn-{client}"


def disagreement(embeddings: FloatArray, targets: FloatArray | None) -> float:
    """Return the mean of 1 - cos between rows ``[p, d]`` and their targets (equation 8)."""
    if targets is None:
        return math.nan
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (embeddings, targets))
    return float(1.0 - cosine_similarity(a, b).mean())


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
            signed = self.trust.identity.sign(
                *messages.claim_parts(self.context.run_id, self.public)
            )
            here.signature = np.frombuffer(signed, np.uint8)
        return here

    def get_properties(self, config: Config) -> Config:
        """Record the run; refuse a second run, and a checkpoint from before its last sum."""
        if self.trust is not None:
            run, is_new = str(config.get(RUN_TOKEN, "")), not self._run()
            self._check_run(run, is_new and not config.get(CHECKPOINT))
            last = Journal(self.trust.journal).last(ROUNDS, run.encode()) or 0
            resume = Resume.from_config(config)
            if self._state.is_due(resume) and resume.server_round < last:
                raise RefusedError(
                    f"this SuperNode is in the sum of round {last}: no way back to the checkpoint "
                    f"of round {resume.server_round}, as two sums of a round can be compared"
                )
            self.context.state[RUN] = ConfigRecord({RUN: run})
        return super().get_properties(config)

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Rotate the mean back, train, embed, measure, rotate and mask (steps 2 to 4)."""
        request = PublicRequest.from_numpy(parameters, config, public=self.public)
        order = SumOrder.from_config(config, sizes=[ids.size for ids in request.nodes])
        self.keys()  # before anything is trained: without keys there is no round
        layout, ring = self._layout(request, order, config), Ring.from_config(config)
        with self._state.opened(follows=request.follows) as held:
            means = zip(request.clients, request.targets, strict=True)
            targets = [self._own_space(held, *one) if order.is_target else None for one in means]
            reply = self.trained(held, request, targets)
            counts, reply.counts = reply.counts, None
            # Counts are in the sum with the first client's rows; a node is one step of the ring
            step = 2.0**-ring.fraction_bits
            flat = np.zeros(0) if counts is None else counts.flat().numpy() * step
            hidden = 0 if self.trust is None else 2 * len(MEASURED)
            rows = int(config["mask-length"]) - flat.size - hidden
            turns, vectors = rotate(request, order, reply, rows)
            figures = hide_figures(reply, ring.limit) if hidden else {}
            first, none = min(vectors, default=-1), np.zeros(0)
            vectors = {
                c: np.concatenate([vector, figures.get(c, none), flat * (c == first)])
                for c, vector in vectors.items()
            }
            # The same embeddings with another rotation are the same state.
            state = [one for one in reply.embeddings if one is not None]
            masked, entries = self.masked(config, vectors, messages.MEANS, layout, state)
            for client, turn in turns.items():
                held.turns[turn_of(client)].copy_(torch.from_numpy(turn))
        if self.trust is not None and masked.left_out:
            # A missing client may leave others alone in the sum, and means may push a client out.
            raise RefusedError("a client here cannot be in the sum: its SuperNode sends nothing")
        self.saved(reply).request = replace(request, wants_embeddings=False)
        _, weight, metrics = reply.to_numpy()
        return [masked.total], weight, metrics | entries

    def _layout(self, request: PublicRequest, order: SumOrder, config: Config) -> bytes:
        """Return the meaning of a vector's numbers; an untrusting SuperNode checks it first."""
        if self.trust is None:
            return order.meaning(*messages.NOT_TOLD, request)
        claims, epoch = messages.Claims.from_config(config), self.keys().epoch
        if epoch is None:
            raise StateLostError("no epoch has begun under this version of the registry")
        run, parties = self.context.run_id, epoch.parties.tolist()
        nodes = claims.agreed(self.trust, run, parties, self.public, self._least)
        for ids, slots, mean in zip(request.nodes, order.slots, request.targets, strict=True):
            if not np.array_equal(slots, messages.find_slots(ids, nodes)):
                raise RefusedError("the server orders public nodes otherwise than their holders")
            claims.check_mean(mean, slots)
        judges = [member.judge for member in self.members.values()]
        classes = next((one.num_classes for one in judges if isinstance(one, GraphJudge)), 0)
        size = counts_size(classes, request.counting)
        if config["mask-length"] != nodes.size * request.dimension + 2 * len(MEASURED) + size:
            raise RefusedError("the sum has another length than the nodes that are in it")
        self._check_run(request.run, not request.saves)
        Journal(self.trust.journal).contribute(request.server_round, ROUNDS, self._run().encode())
        return order.meaning(nodes, claims.means, request)

    def _check_run(self, run: str, may_differ: bool) -> None:
        if not may_differ and run != self._run():
            raise RefusedError("this SuperNode takes part in another run")

    def _run(self) -> str:
        record = self.context.state.config_records.get(RUN, ConfigRecord())
        return str(record.get(RUN, ""))

    def _own_space(self, held: Held, client: int, mean: FloatArray | None) -> FloatArray | None:
        """Rotate the common mean into a client's space; rows without a mean stay its own."""
        turn = held.turns[turn_of(client)].numpy()
        if mean is None or np.isnan(turn).any():
            return None
        target: FloatArray = (mean @ turn.T).astype(np.float32)
        if (missing := ~mean.any(1)).any():
            local = held.models.outputs([client])[client][0][self.members[client].rows]
            target[missing] = local[missing]
        return target


def first_points(seed: int, nodes: int, dimension: int) -> Floats:
    """Draw the points ``[u, d]`` to which clients rotate before there is a mean."""
    # Any fixed points do: clients with similar embeddings get similar rotated embeddings.
    rng = np.random.default_rng(derive_seed(seed, "secure-consensus"))
    return rng.standard_normal((nodes, dimension))


def rotate(
    request: PublicRequest, order: SumOrder, reply: PublicReply, length: int
) -> tuple[dict[int, Floats], dict[int, Floats]]:
    """Rotate each client's rows nearest to the common mean, or to the first points.

    Returns the rotations ``W_i``, and the clients' parts of the sum ``[length]``: the rotated rows
    at their slots, and zeros. The reply gets the distances to the common mean.
    """
    count, dimension = length // request.dimension, request.dimension
    start, near = first_points(order.seed, count, dimension), dict[int, Mapping[int, float]]()
    turns, vectors = dict[int, Floats](), dict[int, Floats]()
    of_clients = request.clients, reply.embeddings, request.targets, order.slots
    for client, x, mean, slots in zip(*of_clients, strict=True):
        here = slots != messages.ABSENT
        chosen, turn, rows = slots[here], np.eye(dimension), np.zeros((count, dimension))
        is_inside = ((chosen >= 0) & (chosen < count)).all()
        if length % dimension or np.unique(chosen).size != chosen.size or not is_inside:
            given = f"{brief(chosen.tolist())} of {length} numbers in rows of {dimension}"
            raise ValueError(f"slots: {given}; allowed are different ones from 0 to {count - 1}")
        if x is None:
            continue
        if here.any():
            local = x[here].astype(np.float64)
            points = start[chosen] if mean is None else mean[here].astype(np.float64)
            turn = orthogonal_procrustes(local, points)
            rows[chosen] = local @ turn
            if mean is not None:
                near[client] = alignment_precision(local, points, turn)
        turns[client], vectors[client] = turn, rows.ravel()
    for name, k in PRECISIONS.items() if near else ():
        reply.judged[name] = [near.get(c, {}).get(k, math.nan) for c in request.clients]
    return turns, vectors


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
