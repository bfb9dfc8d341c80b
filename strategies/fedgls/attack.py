"""Attacks on FedGLS: find a client's features, classes and training nodes from its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from flower_graph.audit.attacks import (
    Audit,
    Exchange,
    RecordingGrid,
    array_of,
    of_kind,
)
from flower_graph.audit.scores import Finding, Floats, ranking
from flower_graph.strategies.fedgls.config import AVERAGING, FedGLSConfig
from flower_graph.wire import keys


class Truth(NamedTuple):
    """A client's data, to score the attacks."""

    x: Floats  # [n, f] features of its nodes
    y: NDArray[np.int64]  # [n] classes; below 0 without one
    train: NDArray[np.bool_]  # [n] bool: which nodes train


class Sent(NamedTuple):
    """A client's model as sent and as returned in one round."""

    first: tuple[Floats, Floats]  # First layer [f, h] and the other parameters, before and after
    rest: tuple[Floats, Floats]


def read(exchanges: Sequence[Exchange], nodes: Sequence[int]) -> dict[int, list[Sent]]:
    """Return each client's models of all rounds (the GNN, if there are two models)."""
    result: dict[int, list[Sent]] = {node: [] for node in nodes}
    for one in of_kind(exchanges, "train"):
        if keys.ARRAYS in one.reply.array_records:
            first, rest = (
                (array_of(one.request, keys.ARRAYS, key), array_of(one.reply, keys.ARRAYS, key))
                for key in ("gnn-first", "gnn-rest")
            )
            result[one.node].append(Sent(first, rest))
    if silent := [index for index, node in enumerate(nodes) if not result[node]]:
        raise ValueError(f"no model of client {silent[0]} was recorded; one round is needed")
    return dict(enumerate(result.values()))


def attack(
    sent: Mapping[int, Sequence[Sent]], truth: Mapping[int, Truth], classes: int
) -> list[Finding]:
    """Guess the properties of the clients' data."""
    order = sorted(sent)
    # How far each feature's row of the first layer moved, over all rounds, [c, f]; and how far the
    # last layer's bias moved towards each class, [c, k]
    moved = np.stack([np.linalg.norm(_steps(sent[c], "first"), axis=2).sum(0) for c in order])
    pulls = np.stack([_steps(sent[c], "rest")[:, -classes:].sum(0) for c in order])
    present = np.stack([(truth[client].x != 0).any(0) for client in order])
    train = [truth[client].y[truth[client].train & (truth[client].y >= 0)] for client in order]
    counts = np.stack([np.bincount(y, minlength=classes) for y in train])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    scores = [_confidence(sent[client][-1], truth[client], classes) for client in order]
    trained = [truth[client].train[truth[client].y >= 0] for client in order]
    return [
        ranking("which features a client's nodes have", moved, present),
        # Both relative to the other clients, since what all have in common tells nothing about one.
        ranking(
            "which classes a client trains on more than others do",
            pulls - pulls.mean(0),
            shares > shares.mean(0),
        ),
        ranking(
            "whether a node whose features and class are known was trained on",
            np.concatenate(scores),
            np.concatenate(trained),
        ),
    ]


def _steps(sent: Sequence[Sent], part: str) -> NDArray[np.float64]:
    """Return by how much a part of the model changed in each round."""
    before, after = np.array([getattr(one, part) for one in sent], float).swapaxes(0, 1)
    return after - before  # type: ignore[no-any-return]


def _confidence(sent: Sent, truth: Truth, classes: int) -> NDArray[np.float64]:
    """Return minus the loss of each labelled node in the client's own model, without edges."""
    # The attacker has no edges, so it runs the two layers as an MLP.
    first, rest = sent.first[1].astype(float), sent.rest[1].astype(float)
    width = first.shape[1]
    bias, weight = rest[:width], rest[width:-classes].reshape(width, classes)
    logits = np.maximum(truth.x @ first + bias, 0) @ weight + rest[-classes:]
    labelled = np.flatnonzero(truth.y >= 0)
    result: NDArray[np.float64] = log_softmax(logits, 1)[labelled, truth.y[labelled]]
    return result


class ModelAudit(Audit[FedGLSConfig]):
    """The attacks on a run of FedGLS."""

    rounds = 30
    notes = (
        "Features: how far a row of the first layer moved. Classes: how far the last layer's bias "
        "moved, less the mean over clients. For the last attack the attacker has the features and "
        "classes of nodes and asks which were trained on; it has no edges.",
        "Robust averaging (`strategy.robust`) changes what the server does with the models, not "
        "what it is sent: these figures stay. FedGLS has no secure sum.",
    )
    audited = AVERAGING  # the others send something else than one client's weights

    def attack(self, config: FedGLSConfig, grid: RecordingGrid, method: Any) -> list[Finding]:
        truth = {
            number: Truth(one.x.to_dense().numpy(), one.y.numpy(), one.train_mask.numpy())
            for number, one in enumerate(method.graphs(config))
        }
        sent = read(grid.exchanges, list(grid.get_node_ids()))
        return attack(sent, truth, method.num_classes(config))
