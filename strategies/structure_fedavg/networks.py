"""What a weight-sharing client's networks are: settings, shapes, first weights, graphs.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from flower_graph.engine.graph_batch import ROLES
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.rng import generator
from flower_graph.strategies.structure_fedavg.graph_learners import LearnerSettings

if TYPE_CHECKING:
    from flower_graph.data.partition.client_graphs import ClientGraph

# On which graph a graphless client's network works, and, for NONE, everybody's
LEARNED, KNN, TRUE, OWN, NONE = "learned", "knn", "true", "own", "none"
GNN, ENCODER = 0, 1  # the models: theta and omega


class StructureSettings(NamedTuple):
    """What server and clients must agree on.

    Attributes
    ----------
    num_features, num_classes : int
        Widths of the features and of the output, ``f`` and ``k``.
    graphs : str
        What a graphless client works on: ``learned`` (FedGLS), ``knn``, its ``true`` graph, or
        its ``own``, that is none, with the second model for those; ``none`` takes the edges of
        all clients away.
    hidden : int
        Numbers in the hidden layer, ``h``.
    dropout, input_dropout : float
        Dropout on the hidden layer and on the features.
    learning_rate, weight_decay : float
        Adam's, as in ``torch.optim.Adam``, of theta and omega.
    local_epochs : int
        Steps of a round, ``E``.
    keep_optimiser : bool
        Whether a client's Adam lasts from round to round.
    seed : int
        The run's seed.
    learner : LearnerSettings
        The graph learner, and ``k`` of the kNN graphs.
    tau : float
        Temperature of the contrastive loss (equation 8).
    prototype_weight : float
        Weight of FedProto's distance to the prototypes.
    """

    num_features: int
    num_classes: int
    graphs: str = LEARNED
    hidden: int = 16
    dropout: float = 0.5
    input_dropout: float = 0.0
    learning_rate: float = 0.01
    weight_decay: float = 5e-4
    local_epochs: int = 5
    keep_optimiser: bool = True
    seed: int = 0
    learner: LearnerSettings = LearnerSettings()
    tau: float = 0.2
    prototype_weight: float = 1.0

    @property
    def num_models(self) -> int:
        """Count the models that the server averages: theta alone, or omega too."""
        return 2 if self.graphs in (LEARNED, OWN) else 1


@dataclass(frozen=True)
class Network:
    """One network of a client and the graph that it works on; what ``pack_graphs`` reads."""

    client: int
    x: Tensor
    y: Tensor
    edge_index: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor


def rest_shapes(settings: StructureSettings) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a network's parameters but the first matrix, in order."""
    h, k = settings.hidden, settings.num_classes
    return {"bias-1": (h,), "weight-2": (h, k), "bias-2": (k,)}


def initial_models(settings: StructureSettings) -> list[ModelWeights]:
    """Draw theta and, if there is one, omega, as PyG's GCN does."""
    models = []
    for name in ("gnn", "encoder")[: settings.num_models]:
        rng = generator(settings.seed, "structure", name)
        first = torch.empty(settings.num_features, settings.hidden)
        second = torch.empty(settings.hidden, settings.num_classes)
        for matrix in (first, second):
            nn.init.xavier_uniform_(matrix, generator=rng)
        biases = torch.zeros(settings.hidden), torch.zeros(settings.num_classes)
        models.append(ModelWeights(first, torch.cat([biases[0], second.reshape(-1), biases[1]])))
    return models


def network_of(graph: ClientGraph, graphs: str) -> Network:
    """Put a client on the graph that a network of its works on."""
    edges = graph.edge_index
    if graph.is_graphless and graphs == TRUE:
        if graph.hidden_edges is None:
            raise ValueError(f"client {graph.client}: has no edges, and its true ones are wanted")
        edges = graph.hidden_edges
    if edges is None or graphs == NONE:
        edges = torch.zeros(2, 0, dtype=torch.long)
    masks = (getattr(graph, f"{role}_mask") for role in ROLES)
    return Network(graph.client, graph.x, graph.y, edges, *masks)
