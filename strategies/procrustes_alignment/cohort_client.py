"""The PPFL-GNN clients of one SuperNode, kept from message to message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flower_graph.client.cohort_state import CohortState, Makers
from flower_graph.client.state import Tensors
from flower_graph.messages.fields import Resume
from flower_graph.storage.files import atomic
from flower_graph.strategies.procrustes_alignment.embedding_models import (
    EmbeddingClient,
    EmbeddingModel,
    FloatArray,
    KeepsState,
)
from flower_graph.strategies.procrustes_alignment.messages import (
    EmbeddingEnrolment,
    PublicReply,
    PublicRequest,
)

if TYPE_CHECKING:
    from flwr.app import Context

Models = dict[int, EmbeddingModel]
MODELS = "model."  # before the names of the models' tensors in a checkpoint


class _Answer(NamedTuple):
    """What one client did in one round."""

    loss: float
    embeddings: FloatArray  # [n, d] of all its nodes
    disagreement: float
    judged: Mapping[str, float]


class ModelState(CohortState[Models]):
    """The state of models that hand out copies of what they keep, by PyTorch's ``state_dict``."""

    def _collect(self, live: Models, tensors: Tensors) -> None:
        result = _tensors(live)
        _check_form(result, tensors)
        for name, value in result.items():
            tensors[name].copy_(value)


class EmbeddingCohortClient:
    """Keeps the models of one SuperNode's clients behind the ClientApp's context."""

    def __init__(
        self,
        context: Context,
        members: Sequence[EmbeddingClient],
        save_to: Path | None = None,
        checkpoint_dir: Path | None = None,
    ) -> None:
        if not members:
            raise ValueError("members: none is given; a SuperNode hosts at least one client")
        self.members = {member.number: member for member in members}
        if len(self.members) != len(members):
            numbers = [member.number for member in members]
            raise ValueError(f"members: client numbers {numbers!s:.60} are not all different")
        self._save_to = save_to
        self._state = ModelState(
            context, "public-node-client", list(self.members), checkpoint_dir, prefix=MODELS
        )
        self._makers = Makers(lambda: _copied(self._models()), self._build)

    @property
    def public(self) -> dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        """Ids of the public nodes of each client."""
        return {number: member.public for number, member in self.members.items()}

    def hello(self) -> EmbeddingEnrolment:
        """Say who is here, and how many messages they have behind them."""
        members = self.members.values()
        return EmbeddingEnrolment(
            list(self.members),
            [member.public for member in members],
            [member.dimension for member in members],
            self._state.processed(self._makers),
        )

    def save(self, server_round: int, run: str, more: Tensors | None = None) -> str:
        """Write a round's checkpoint; return why it cannot be done, or nothing."""
        return self._state.save(server_round, run, self._makers, more)

    def restore(self, resume: Resume) -> Tensors | None:
        """Go on from the checkpoint that the server names."""
        return self._state.restore(resume, self._makers)

    def round(self, request: PublicRequest) -> PublicReply:
        """Have every client that is asked take its targets, train, embed and measure."""
        with self.opened(follows=request.follows) as models:
            answers = [
                self._answer(models[client], self.members[client], targets, request)
                for client, targets in zip(request.clients, request.targets, strict=True)
            ]
        if request.is_last and self._save_to is not None:
            for client, answer in zip(request.clients, answers, strict=True):
                save_embeddings(self._save_to, self.members[client], answer.embeddings)
        return self._reply(request, answers)

    def opened(self, *, follows: bool = False) -> AbstractContextManager[Models]:
        """Work with the models; what changed counts when the block ends well."""
        return self._state.opened(self._makers, follows=follows)

    def _models(self) -> Models:
        return {number: member.build() for number, member in self.members.items()}

    def _build(self, tensors: Tensors) -> tuple[Models, Tensors]:
        models = self._models()
        _restore(models, tensors)
        return models, tensors

    def _answer(
        self,
        model: EmbeddingModel,
        member: EmbeddingClient,
        targets: FloatArray | None,
        request: PublicRequest,
    ) -> _Answer:
        loss = float(model.learn(member.rows, targets, request.server_round))
        embeddings = np.asarray(model.embed(), np.float32)
        shape = (member.nodes.size, member.dimension)
        if embeddings.shape != shape:
            raise ValueError(
                f"client {member.number}: its model embeds as {embeddings.shape}, expected {shape}"
            )
        good = bool(np.isfinite(embeddings).all())
        judge = member.judge if good else None
        at = (request.server_round, request.is_last)
        judged = {} if judge is None else judge(embeddings, *at)
        pull = math.nan if targets is None else disagreement(embeddings[member.rows], targets)
        return _Answer(loss, embeddings, pull, judged)

    def _reply(self, request: PublicRequest, answers: Sequence[_Answer]) -> PublicReply:
        embeddings: list[FloatArray | None] = []
        left_out = []
        for client, answer in zip(request.clients, answers, strict=True):
            rows = answer.embeddings[self.members[client].rows]
            good = bool(np.isfinite(answer.embeddings).all())
            embeddings.append(rows if good else None)
            if not good:
                left_out.append(f"client {client}: its embeddings are not finite")
        names = dict.fromkeys(name for answer in answers for name in answer.judged)
        return PublicReply(
            embeddings,
            [answer.loss for answer in answers],
            [answer.disagreement for answer in answers],
            {name: [answer.judged.get(name, math.nan) for answer in answers] for name in names},
            left_out,
        )


def disagreement(embeddings: FloatArray, targets: FloatArray) -> float:
    """Return the mean of 1 - cos between rows ``[p, d]`` and their targets (equation 8)."""
    a, b = embeddings.astype(np.float64), targets.astype(np.float64)
    length = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.where(length > 0, (a * b).sum(1) / length, 0.0)
    return float(1.0 - cosine.mean())


def save_embeddings(folder: Path, member: EmbeddingClient, embeddings: FloatArray) -> Path:
    """Write a client's embeddings with the ids of its nodes."""
    # embeddings [n, d]
    folder.mkdir(parents=True, exist_ok=True)
    public = np.zeros(member.nodes.size, bool)
    public[member.rows] = True
    file = folder / f"client-{member.number}.npz"
    with atomic(file) as temporary, temporary.open("wb") as stream:
        np.savez(stream, nodes=member.nodes, public=public, embeddings=embeddings)
    return file


def _tensors(models: Models) -> Tensors:
    """Collect what the models keep, under names that tell whose it is."""
    return {
        f"{number}.{name}": value
        for number, model in models.items()
        if isinstance(model, KeepsState)
        for name, value in model.state_dict().items()
    }


def _copied(models: Models) -> Tensors:
    return {name: value.detach().clone() for name, value in _tensors(models).items()}


def _restore(models: Models, tensors: Tensors) -> None:
    """Give every model its part back."""
    for number, model in models.items():
        if isinstance(model, KeepsState):
            start = f"{number}."
            local = {
                name.removeprefix(start): value.clone()
                for name, value in tensors.items()
                if name.startswith(start)
            }
            model.load_state_dict(local)


def _check_form(tensors: Tensors, kept: Tensors) -> None:
    """Refuse a state that does not fit where the last one lies; names the tensor."""
    for name in {**tensors, **kept}:
        forms = [
            None if name not in result else (tuple(result[name].shape), result[name].dtype)
            for result in (kept, tensors)
        ]
        if forms[0] != forms[1]:
            raise ValueError(
                f"state {name}: was {forms[0]}, is {forms[1]}; names, shapes and types of what a "
                "model keeps must stay as they were at first"
            )
