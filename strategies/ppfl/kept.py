"""Outputs of PPFL-GNN's clients: embeddings, predictions and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.outputs.files import Embeddings, Predictions, SavedModels, Snapshot
from flower_graph.strategies.ppfl.evaluation import Folds, GraphJudge, Judgement
from flower_graph.wire.arrays import decode_array

JUDGED = "public-node-judged"  # in Context.state: the last predictions of evaluations


class Member(Protocol):
    """The attributes of an ``EmbeddingClient`` that are read here."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def nodes(self) -> NDArray[np.int64]:
        """Ids of its nodes, ``[n]``."""

    @property
    def rows(self) -> NDArray[np.int64]:
        """Which are public."""

    @property
    def judge(self) -> object:
        """Evaluates its embeddings, if anything does."""


class Embeds(Protocol):
    """The method that every model of a client has."""

    def embed(self) -> NDArray[np.floating]:
        """Return the embeddings of all nodes of the client, ``[n, d]``."""


@runtime_checkable
class Classifies(Protocol):
    """Methods of a model that classifies nodes itself and can be saved."""

    def logits(self) -> Tensor:
        """Return the logits of all nodes, ``[n, k]``."""

    def saved(self) -> SavedModels:
        """Return the weights under a plain module's names."""


def remember(context: Context, judged: Mapping[int, Mapping[str, float]]) -> None:
    """Keep the predictions of evaluations for later requests, perhaps in another process."""
    folds = {str(c): Array(np.stack(one.said)) for c, one in judged.items()
            if isinstance(one, Judgement) and one}  # fmt: skip
    if folds:
        kept = context.state.array_records.get(JUDGED, ArrayRecord())
        context.state[JUDGED] = ArrayRecord({**kept, **folds})


def recall(context: Context) -> dict[int, Folds]:
    """Return the kept predictions by client."""
    record = context.state.array_records.get(JUDGED, ArrayRecord())
    return {int(name): Folds(*decode_array(name, array)) for name, array in record.items()}


def forget(context: Context) -> None:
    """Drop the kept predictions."""
    context.state.pop(JUDGED, None)


def snapshot_of(
    members: Sequence[Member], models: Mapping[int, Embeds], said: Mapping[int, Folds]
) -> Snapshot:
    """Return the clients' models and predictions, by evaluations or by the model itself."""
    placed, predictions, saved = [], [], []
    for member in members:
        model = models[member.number]
        embeddings = np.asarray(model.embed(), np.float32)
        placed.append(_placed(member, embeddings))
        if isinstance(member.judge, GraphJudge):
            folds = said.get(member.number) or member.judge.again(embeddings)
            predictions.append(_predictions(member.number, member.judge, model, folds))
        if isinstance(model, Classifies):
            saved.append(model.saved())
    return Snapshot(
        Predictions.join(predictions) if predictions else None,
        SavedModels.join(saved),
        Embeddings.join(placed),
    )


def _placed(member: Member, embeddings: NDArray[np.float32]) -> Embeddings:
    public = np.zeros(member.nodes.size, bool)
    public[member.rows] = True
    named = member.judge.named if isinstance(member.judge, GraphJudge) else member.nodes
    client = np.full(member.nodes.size, member.number)
    return Embeddings(client, named, member.nodes, public, embeddings)


def _predictions(client: int, judge: GraphJudge, model: object, said: Folds) -> Predictions:
    n = len(judge.labels)
    predictions = Predictions(
        np.full(n, client),
        judge.named,
        said.predicted.copy(),
        np.full(n, np.nan, np.float32),  # an SVC has no probability
        judge.roles,
        np.maximum(judge.labels, -1),
        judge.classes,
        said.fold,
    )
    if isinstance(model, Classifies):
        itself = said.predicted < 0
        share = model.logits().cpu().softmax(1).numpy()
        predictions.predicted[itself] = share.argmax(1)[itself]
        predictions.probability[itself] = share.max(1)[itself]
    return predictions.rows(predictions.predicted >= 0)
