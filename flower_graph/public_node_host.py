"""The PPFL-GNN clients of one SuperNode, kept from message to message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flower_graph.checkpoint import ClientCheckpoints
from flower_graph.errors import CheckpointError
from flower_graph.files import atomic
from flower_graph.public_nodes import EmbeddingModel, FloatArray, KeepsState, Member
from flower_graph.records.public_nodes import PublicHello, PublicReply, PublicRequest
from flower_graph.records.resume import Resume
from flower_graph.state import StateStore, Tensors

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


class PublicNodeHost:
    """Keeps the models of one SuperNode's clients behind the ClientApp's context.

    Parameters
    ----------
    context : Context
        The ClientApp's context.
    members : sequence of Member
        The clients.
    save_to : Path, optional
        Folder for the embeddings after the last round, a file ``client-<number>.npz`` each.
    checkpoint_dir : Path, optional
        Where to save the models when the server asks for a checkpoint.

    Raises
    ------
    ValueError
        If there is no client, or two have one number.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[Member],
        save_to: Path | None = None,
        checkpoint_dir: Path | None = None,
    ) -> None:
        if not members:
            raise ValueError("members: none is given; a SuperNode hosts at least one client")
        self.members = {member.number: member for member in members}
        if len(self.members) != len(members):
            numbers = [member.number for member in members]
            raise ValueError(f"members: client numbers {numbers!s:.60} are not all different")
        self._store, self._save_to = StateStore(context, "public-node-client"), save_to
        self._checkpoints = ClientCheckpoints(context, checkpoint_dir)

    @property
    def public(self) -> dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        """Ids of the public nodes of each client."""
        return {number: member.public for number, member in self.members.items()}

    def hello(self) -> PublicHello:
        """Say who is here, and how many messages they have behind them."""
        members = self.members.values()
        return PublicHello(
            list(self.members),
            [member.public for member in members],
            [member.dimension for member in members],
            self._store.handled(self._open),
        )

    def save(self, server_round: int, run: str, more: Tensors | None = None) -> str:
        """Write a round's checkpoint; return why it cannot be done, or nothing.

        Parameters
        ----------
        server_round : int
            The round.
        run : str
            Token of the run.
        more : dict of Tensor, optional
            What else ``restore`` is to give back.
        """
        if not self._store.version:  # not asked so far
            with self.opened():
                pass
        _, kept = self._open()
        own = {f"{MODELS}{name}": value for name, value in kept.items()}
        numbers = {"clients": torch.tensor(list(self.members))}
        return self._checkpoints.save(server_round, own | numbers | (more or {}), run)

    def restore(self, resume: Resume) -> Tensors | None:
        """Go on from the checkpoint that the server names.

        Returns
        -------
        dict or None
            What ``save`` was given besides; None where no checkpoint is named that is not loaded
            already.

        Raises
        ------
        CheckpointError
            If it is missing, damaged, or of other clients or another run.
        """
        if not self._store.is_due(resume):
            return None
        tensors = self._checkpoints.load(resume.server_round, resume.run)
        if tensors.pop("clients").tolist() != list(self.members):
            raise CheckpointError(
                f"round {resume.server_round}: other clients; resume with as many SuperNodes as "
                "before"
            )
        own = {k: v for k, v in tensors.items() if k.startswith(MODELS)}
        kept = self._store.create({k.removeprefix(MODELS): v for k, v in own.items()})
        self._store.commit(self._build(kept), kept)
        self._store.note(resume)
        return {k: v for k, v in tensors.items() if k not in own}

    def round(self, request: PublicRequest) -> PublicReply:
        """Have every client that is asked take its targets, train, embed and measure."""
        if request.follows:
            self._store.expect()
        with self.opened() as models:
            answers = [
                self._answer(models[client], self.members[client], targets, request)
                for client, targets in zip(request.clients, request.targets, strict=True)
            ]
        if request.is_last and self._save_to is not None:
            for client, answer in zip(request.clients, answers, strict=True):
                save_embeddings(self._save_to, self.members[client], answer.embeddings)
        return self._reply(request, answers)

    @contextmanager
    def opened(self) -> Iterator[Models]:
        """Work with the models; what changed counts when the block ends well."""
        models, kept = self._open()
        try:
            yield models
            tensors = _tensors(models)
            _check_form(tensors, kept)
        except BaseException:
            # Models that stopped half way go back to where they were.
            _restore(models, kept)
            raise
        self._store.begin()
        for name, value in tensors.items():
            kept[name].copy_(value)
        self._store.commit((models, kept), kept)

    def _open(self) -> tuple[Models, Tensors]:
        if self._store.version:
            found: tuple[Models, Tensors] = self._store.load(self._build)
            return found
        models = {number: member.build() for number, member in self.members.items()}
        start = {name: value.detach().clone() for name, value in _tensors(models).items()}
        return models, self._store.create(start)

    def _build(self, tensors: Tensors) -> tuple[Models, Tensors]:
        models = {number: member.build() for number, member in self.members.items()}
        _restore(models, tensors)
        return models, tensors

    def _answer(
        self,
        model: EmbeddingModel,
        member: Member,
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


def save_embeddings(folder: Path, member: Member, embeddings: FloatArray) -> Path:
    """Write a client's embeddings with the ids of its nodes.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    member : Member
        The client.
    embeddings : ndarray
        ``[n, d]``.

    Returns
    -------
    Path
        The file: ``nodes`` int64 ``[n]``, ``public`` bool ``[n]``, ``embeddings`` float32
        ``[n, d]``; ``numpy.load`` reads it.
    """
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


def _restore(models: Models, tensors: Tensors) -> None:
    """Give every model its part back."""
    for number, model in models.items():
        if isinstance(model, KeepsState):
            start = f"{number}."
            own = {
                name.removeprefix(start): value.clone()
                for name, value in tensors.items()
                if name.startswith(start)
            }
            model.load_state_dict(own)


def _check_form(tensors: Tensors, kept: Tensors) -> None:
    """Refuse a state that does not fit where the last one lies; names the tensor."""
    for name in {**tensors, **kept}:
        forms = [
            None if name not in found else (tuple(found[name].shape), found[name].dtype)
            for found in (kept, tensors)
        ]
        if forms[0] != forms[1]:
            raise ValueError(
                f"state {name}: was {forms[0]}, is {forms[1]}; names, shapes and types of what a "
                "model keeps must stay as they were at first"
            )
