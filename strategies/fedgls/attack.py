"""Attacks on FedGLS: find a client's features, classes and training nodes from its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from flower_graph.audit import attacks
from flower_graph.data.graph import ClientGraph
from flower_graph.strategies.fedgls.config import AVERAGING, FedGLSConfig
from flower_graph.wire import keys

NAMES = ("gnn-first", "gnn-rest")  # of its arrays


class Models(NamedTuple):
    """A client's model of each round, as sent and as returned (the GNN, if there are two)."""

    first: attacks.Floats  # [T, 2, f, h] the first layer
    rest: attacks.Floats  # [T, 2, p] the other parameters

    @classmethod
    def of(cls, exchanges: Sequence[attacks.Exchange], node: int) -> Models:
        every = (one for one in attacks.of_kind(exchanges, "train") if one.node == node)
        sent = [
            [
                [attacks.array_of(one, keys.ARRAYS, name) for one in (each.request, each.reply)]
                for name in NAMES
            ]
            for each in every
            if keys.ARRAYS in each.reply.array_records
        ]
        if not sent:
            raise ValueError(f"no model of node {node} was recorded; one round is needed")
        return cls(*map(np.array, zip(*sent, strict=True)))


def attack(
    models: Sequence[Models], graphs: Sequence[ClientGraph], classes: int
) -> list[attacks.Finding]:
    """Guess the properties of the clients' data."""
    # How far each feature's row of the first layer moved, over all rounds, [c, f]; and how far the
    # last layer's bias moved towards each class, [c, k]
    steps = [[np.diff(part.astype(float), axis=1)[:, 0] for part in one] for one in models]
    moved = [np.linalg.norm(first, axis=2).sum(0) for first, _ in steps]
    pulls = np.stack([rest[:, -classes:].sum(0) for _, rest in steps])
    x = [graph.x.to_dense().numpy() for graph in graphs]
    labels = [graph.y.numpy() for graph in graphs]
    train = [graph.train_mask.numpy() for graph in graphs]
    known = [y[mask & (y >= 0)] for y, mask in zip(labels, train, strict=True)]
    counts = np.stack([np.bincount(y, minlength=classes) for y in known])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    scores = map(_confidence, models, x, labels)
    trained = [mask[y >= 0] for y, mask in zip(labels, train, strict=True)]
    return [
        attacks.ranking(
            "which features a client's nodes have", moved, [(one != 0).any(0) for one in x]
        ),
        # Both relative to the other clients, since what all have in common tells nothing about one.
        attacks.ranking(
            "which classes a client trains on more than others do",
            pulls - pulls.mean(0),
            shares > shares.mean(0),
        ),
        attacks.ranking(
            "whether a node whose features and class are known was trained on",
            np.concatenate([*scores]),
            np.concatenate(trained),
        ),
    ]


def _confidence(models: Models, x: attacks.Floats, y: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return minus the loss of each labelled node in the client's own model, without edges."""
    # The attacker has no edges, so it runs the two layers as an MLP.
    first, rest = (part[-1, 1].astype(float) for part in models)
    width = first.shape[1]
    classes = (rest.size - width) // (width + 1)
    bias, weight, last = np.split(rest, [width, width * (classes + 1)])
    logits = np.maximum(x @ first + bias, 0) @ weight.reshape(width, classes) + last
    labelled = np.flatnonzero(y >= 0)
    result: NDArray[np.float64] = log_softmax(logits, 1)[labelled, y[labelled]]
    return result


class ModelAudit(attacks.Audit[FedGLSConfig]):
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

    def attack(
        self, config: FedGLSConfig, grid: attacks.RecordingGrid, method: Any
    ) -> list[attacks.Finding]:
        models = [Models.of(grid.exchanges, node) for node in grid.get_node_ids()]
        return attack(models, method.graphs(config), method.whole(config).classes)
