"""The PPFL-GNN clients of one SuperNode, kept from message to message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.state import CohortState, Makers, Tensors, forms_of
from flower_graph.flower_compat import NumPyClient
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import Embeddings, Predictions, SavedModels, Snapshot
from flower_graph.storage.files import private_folder
from flower_graph.storage.writing import replaced, saying
from flower_graph.strategies.ppfl.evaluation import GraphJudge, count_judged
from flower_graph.strategies.ppfl.messages import (
    NOT_FINITE,
    EmbeddingEnrolment,
    FloatArray,
    IntArray,
    PublicReply,
    PublicRequest,
)
from flower_graph.wire.arrays import Answer, Config, Parameters
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import CHECKPOINT, NOT_SAVED, ROLES, RUN_TOKEN, SERVER_ROUND

# Evaluates the embeddings of all of a client's nodes, given the round and whether it is the last
Judge = Callable[[FloatArray, int, bool], Mapping[str, float]]


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


@runtime_checkable
class Classifies(Protocol):
    """Methods of a model that classifies nodes itself and can be saved."""

    def logits(self) -> Tensor:
        """Return the logits of all nodes, ``[n, k]``."""

    def saved(self) -> SavedModels:
        """Return the weights under a plain module's names."""


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
        who, n = f"client {self.number}", self.nodes.size
        for name, values in (("nodes", self.nodes), ("rows", self.rows)):
            if values.ndim != 1 or values.size == 0 or np.unique(values).size != values.size:
                why = "one or more different numbers are allowed"
                raise ValueError(f"{who}: {name} of shape {values.shape}: {why}")
        least, most = int(self.rows.min()), int(self.rows.max())
        if least < 0 or most >= n or self.dimension < 1:
            given = f"rows {least} to {most}, dimension {self.dimension}"
            raise ValueError(f"{who}: {given}; allowed are rows 0 to {n - 1}, dimension 1 or more")

    @property
    def public(self) -> IntArray:
        """Ids of the public nodes, int64 ``[p]``."""
        return self.nodes[self.rows]

    @property
    def is_public(self) -> NDArray[np.bool_]:
        """Whether each node is public, ``[n]``."""
        return np.isin(np.arange(self.nodes.size), self.rows)


def public_rows(nodes: IntArray, public: IntArray) -> IntArray:
    """Return the indices in ``nodes`` of public ids ``[p]``; ``ValueError`` for an unknown id."""
    if (strangers := public[~np.isin(public, nodes)]).size:
        raise ValueError(f"public: {strangers[:5].tolist()} are none of the {nodes.size} nodes")
    order = np.argsort(nodes, kind="stable")
    return order[np.searchsorted(nodes, public, sorter=order)]


Models = dict[int, EmbeddingModel]


class ModelState(CohortState[Models]):
    """The state of models whose ``state_dict`` returns copies."""

    def _collect(self, live: Models, tensors: Tensors) -> None:
        result = _tensors(live)
        was, now = forms_of(tensors), forms_of(result)
        if was != now:
            raise ValueError(
                f"state_dict: was {was!s:.200}, is {now!s:.200}; names, shapes and types must stay"
            )
        for name, value in result.items():
            tensors[name].copy_(value)


def _tensors(models: Models) -> Tensors:
    return {
        f"{number}.{name}": value
        for number, model in models.items()
        for name, value in getattr(model, "state_dict", dict)().items()
    }


class PublicNodeClient(NumPyClient):
    """The clients of one SuperNode: usually one, in a simulation any number.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps the models' state.
    members : sequence of EmbeddingClient
        The clients.
    save_to : Path, optional
        Folder for the embeddings after the last iteration, a file for each client.
    checkpoint_dir : Path, optional
        Where to save the models when the server asks for a checkpoint.
    output_dir : Path, optional
        Where outputs are saved, if the SuperNode has no folder of its own.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[EmbeddingClient],
        *,
        save_to: Path | None = None,
        checkpoint_dir: Path | None = None,
        output_dir: Path | None = None,
    ) -> None:
        if not members:
            raise ValueError("members: none is given; a SuperNode hosts at least one client")
        self.members = {member.number: member for member in members}
        if len(self.members) != len(members):
            numbers = [member.number for member in members]
            raise ValueError(f"members: client numbers {numbers!s:.60} are not all different")
        self._save_to = save_to
        self.outputs = ClientOutputs(context, output_dir)
        name, numbers = "public-node-client", list(self.members)
        self._state = ModelState(context, name, numbers, checkpoint_dir)
        self._makers = Makers(self._first, self._build)

    def get_properties(self, config: Config) -> Config:
        if config.get(CHECKPOINT, False):
            why = self.save(int(config[SERVER_ROUND]), str(config[RUN_TOKEN]))
            return {NOT_SAVED: why} if why else {}
        self.resume(Resume.from_config(config))
        return self.enrolment().to_config()

    def enrolment(self) -> EmbeddingEnrolment:
        dimensions = [member.dimension for member in self.members.values()]
        handled = self._state.processed(self._makers)
        return EmbeddingEnrolment(list(self.members), [*self.public.values()], dimensions, handled)

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        request = PublicRequest.from_numpy(parameters, config, public=self.public)
        reply = self.round(request)
        if request.saves:
            reply.not_saved = self.save(request.server_round, request.run)
        return reply.to_numpy()

    @property
    def public(self) -> dict[int, IntArray]:
        return {number: member.public for number, member in self.members.items()}

    def save(self, server_round: int, run: str) -> str:
        """Write a round's checkpoint; return why it failed, or an empty string."""
        return self._state.save(server_round, run, self._makers, self.beside())

    def beside(self) -> Tensors:
        return {}

    def resume(self, resume: Resume) -> Tensors | None:
        return self._state.restore(resume, self._makers)

    def snapshot(self) -> Snapshot:
        models = self._state.look(self._makers)
        placed, predictions, saved = [], [], []
        for number, member in self.members.items():
            model, judge, named = models[number], member.judge, member.nodes
            embeddings = np.asarray(model.embed(), np.float32)
            logits = model.logits() if isinstance(model, Classifies) else None
            if isinstance(judge, GraphJudge):
                named = judge.named
                if np.isfinite(embeddings).all():
                    predictions.append(judge.predict(embeddings, logits))
            if isinstance(model, Classifies):
                saved.append(model.saved())
            client = np.full(member.nodes.size, number)
            placed.append(Embeddings(client, named, member.nodes, member.is_public, embeddings))
        return Snapshot(
            Predictions.join(predictions) if predictions else None,
            SavedModels.join(saved),
            Embeddings.join(placed),
        )

    def round(self, request: PublicRequest) -> PublicReply:
        reply, embedded = PublicReply(request, [], [], []), dict[int, FloatArray]()
        judged: list[Mapping[str, float]] = []
        with self._state.opened(self._makers, follows=request.follows) as models:
            for client, targets in zip(request.clients, request.targets, strict=True):
                member = self.members[client]
                loss, rows = _learn(member, models[client], targets, request.server_round)
                embedded[client], shared, judge = rows, rows[member.rows], member.judge
                pull = math.nan if targets is None else disagreement(shared, targets)
                reply.loss.append(loss)
                reply.disagreement.append(pull)
                is_finite = bool(np.isfinite(rows).all())
                reply.embeddings.append(shared if is_finite else None)
                if not is_finite:
                    reply.left_out[client], judge = NOT_FINITE, None
                when = request.server_round, request.is_last
                judged.append({} if judge is None else judge(rows, *when))
        if request.is_last and self._save_to is not None:
            private_folder(self._save_to)
            for client, rows in embedded.items():
                member, file = self.members[client], self._save_to / f"client-{client}.npz"
                nodes, public = member.nodes, member.is_public
                with saying(file), replaced(file) as stream:
                    np.savez(stream, nodes=nodes, public=public, embeddings=rows)
        self.outputs.measured(
            request.server_round,
            [*embedded],
            loss=reply.loss,
            accuracy=[[one.get(role, math.nan) for role in ROLES] for one in judged],
            nodes=[len(rows) for rows in embedded.values()],
        )
        names = dict.fromkeys(name for one in judged for name in one)
        reply.judged = {name: [one.get(name, math.nan) for one in judged] for name in names}
        reply.counts = count_judged(judged) if request.counting else None
        return reply

    def _first(self) -> Tensors:
        return {name: value.detach().clone() for name, value in _tensors(self._models()).items()}

    def _build(self, tensors: Tensors) -> tuple[Models, Tensors]:
        models = self._models()
        for number, model in models.items():
            if load := getattr(model, "load_state_dict", None):
                own = {n: v.clone() for n, v in tensors.items() if n.startswith(f"{number}.")}
                load({name.partition(".")[2]: value for name, value in own.items()})
        return models, tensors

    def _models(self) -> Models:
        return {number: member.build() for number, member in self.members.items()}


def _learn(
    member: EmbeddingClient, model: EmbeddingModel, targets: FloatArray | None, server_round: int
) -> tuple[float, FloatArray]:
    """Train a client's model for a round; return its loss and its embeddings ``[n, d]``."""
    who, shape = f"client {member.number}", (member.rows.size, member.dimension)
    if targets is not None and (targets.shape != shape or not np.isfinite(targets).all()):
        raise ValueError(f"{who}: means {targets.shape}: finite ones of {shape} are allowed")
    loss = float(model.learn(member.rows, targets, server_round))
    embeddings, shape = np.asarray(model.embed(), np.float32), (member.nodes.size, shape[1])
    if embeddings.shape != shape:
        raise ValueError(f"{who}: its model embeds as {embeddings.shape}, expected {shape}")
    return loss, embeddings


def disagreement(embeddings: FloatArray, targets: FloatArray) -> float:
    """Return the mean of 1 - cos between rows ``[p, d]`` and their targets (equation 8)."""
    a, b = embeddings.astype(np.float64), targets.astype(np.float64)
    length = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.where(length > 0, (a * b).sum(1) / length, 0.0)
    return float(1.0 - cosine.mean())
