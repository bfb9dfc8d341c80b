"""The audit of FedGLS: what each client's model shows of its features, classes, training nodes."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from flower_graph.audit import attacks, suite
from flower_graph.strategies.fedgls.config import AVERAGING, FedGLSConfig
from flower_graph.wire import keys

MODELS = "models"  # the GNN's, if a client has two models
NAMES = ("gnn-first", "gnn-rest")  # of the arrays: the first layer [f, h], the other parameters


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

    def view(self, message: attacks.Exchange) -> Iterator[tuple[str, int, suite.Update]]:
        if message.kind == "train" and keys.ARRAYS in message.reply.array_records:
            sent, returned = (
                layers(*(attacks.array_of(content, keys.ARRAYS, name) for name in NAMES))
                for content in (message.request, message.reply)
            )
            yield MODELS, message.place, suite.Update(sent, returned)

    def findings(
        self, config: FedGLSConfig, seen: attacks.Seen, method: Any
    ) -> list[attacks.Finding]:
        graphs = method.graphs(config)
        updates = seen.of(MODELS, len(graphs))
        x = [graph.x.to_dense().numpy() for graph in graphs]
        y = [graph.y.numpy() for graph in graphs]
        train = [graph.train_mask.numpy() for graph in graphs]
        trained = [local[mask] for local, mask in zip(y, train, strict=True)]
        classes = "which classes a client trains on more than others do"
        members = "whether a node whose features and class are known was trained on"
        return [
            suite.features_from_updates("which features a client's nodes have", updates, x),
            suite.classes_from_updates(classes, updates, trained),
            suite.members_by_loss(members, updates, x, y, train),
        ]


def layers(first: attacks.Floats, rest: attacks.Floats) -> suite.Layers:
    """Split the parameters of a GCN into its two layers."""
    width = first.shape[1]
    classes = (rest.size - width) // (width + 1)
    bias, weight, last = np.split(rest, [width, width * (classes + 1)])
    return [(first, bias), (weight.reshape(width, classes), last)]
