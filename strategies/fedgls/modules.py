"""The saved model of a client of FedGLS or of one of its baselines, with the engine's tensors.

It needs PyTorch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.config.rules import Rule, choice
from flower_graph.engine.graph_batch import pack_graphs
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.ops.graph import Adjacency, gcn_adjacency, propagate
from flower_graph.outputs.build import COUNT, FLAG, LAYERS, SHARE, WIDTH, built_with, mapping
from flower_graph.strategies.fedgls.networks import (
    KNN,
    LEARNED,
    NONE,
    OWN,
    TRUE,
    GraphLearners,
    LearnerSettings,
    StructureSettings,
    learner_sizes,
    network_of,
    new_client,
    split_rest,
)

__all__ = ["StructureModel"]

# Allowed settings of a graph learner
LEARNER: dict[str, Rule] = {
    "encoder": choice("attentive", "mlp"),
    "layers": LAYERS,
    "width": WIDTH,
    "similarity": choice("cosine", "euclidean", "inner"),
    "neighbours": COUNT,
}


@built_with(
    features=WIDTH,
    hidden=WIDTH,
    classes=WIDTH,
    dropout=SHARE,
    graphs=choice(LEARNED, KNN, TRUE, OWN, NONE),
    knn_on=choice("features", "encoder"),
    encoder=FLAG,
    learner=mapping(LEARNER),
)
class StructureModel(nn.Module):
    """A client's network; for FedGLS also its feature encoder and its graph learner.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, hidden layer and output.
    dropout : float
        Dropout on the hidden layer; in training mode alone.
    graphs : str
        The network's graph: ``true`` is the graph that ``forward`` gets, ``none`` and ``own`` have
        no edges, ``learned`` and ``knn`` are made from the features.
    knn_on : str
        As of ``StructureSettings``.
    encoder : bool
        Whether there is a feature encoder; ``forward`` does not use it.
    learner : dict, optional
        Arguments of ``LearnerSettings``, for the graphs ``learned`` and ``knn``.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        dropout: float = 0.5,
        graphs: str = TRUE,
        knn_on: str = "features",
        *,
        encoder: bool = False,
        learner: dict[str, Any] | None = None,  # arguments of ``LearnerSettings``
    ) -> None:
        super().__init__()
        how = LearnerSettings(**(learner or {}))
        self.settings = StructureSettings(
            features, classes, graphs, hidden, dropout, learner=how, knn_on=knn_on
        )
        sizes = hidden, hidden + hidden * classes + classes
        self.network = _weights(features, *sizes)
        self.encoder = _weights(features, *sizes) if encoder else None
        self.learner = _weights(features, *learner_sizes(how)) if graphs == LEARNED else None

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and, if ``graphs`` is ``true``, edges.

        ``edge_index`` ``[2, e]`` has both directions of each edge.
        """
        first, rest = self.network["first"], self.network["rest"]
        bias, weight, last = (part[0] for part in split_rest(rest[None], self.settings))
        graph, lifted = self._graph(x, edge_index), x @ first
        hidden = functional.relu(propagate(graph, lifted) + bias)
        hidden = functional.dropout(hidden, self.settings.dropout, self.training)
        return propagate(graph, hidden) @ weight + last

    @torch.no_grad()
    def _graph(self, x: Tensor, edge_index: Tensor | None) -> Adjacency:
        if self.settings.graphs not in (LEARNED, KNN):
            if self.settings.graphs != TRUE:
                edge_index = torch.zeros((2, 0), dtype=torch.int64)
            elif edge_index is None:
                raise ValueError("edge_index: this client's network needs edges")
            return gcn_adjacency(edge_index, len(x))
        batch = pack_graphs([network_of(new_client(x), NONE)])
        learners = GraphLearners(batch, self.settings.graph_learner)
        if self.learner is not None:
            learners.start_from(ModelWeights(**self.learner))
        if self.settings.compares_hidden:
            bias = split_rest(self.network["rest"][None], self.settings)[0]
            learners.compare(functional.relu(x @ self.network["first"] + bias))
        return learners.adjacency()


def _weights(features: int, columns: int, rest: int) -> nn.ParameterDict:
    return nn.ParameterDict({"first": torch.zeros(features, columns), "rest": torch.zeros(rest)})
