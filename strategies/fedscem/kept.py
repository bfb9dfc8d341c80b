"""Outputs of ego-networks: predictions, and models under PyTorch's names.

This file needs neither Flower nor Ray, and PyTorch Geometric only where a model is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_graph.data.new_graph import NewGraph
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.outputs.files import Predictions, SavedModels, SparseRows
from flower_graph.outputs.form import predictions_from
from flower_graph.strategies.fedscem.cohort import ChosenEgos, EgoCohort, EgoSettings, split_rest

MODULE = "flower_graph.strategies.fedscem.modules.EgoGCN"
FIRST = "conv1.lin.weight"
# names of the engine's parameters, whose matrices PyTorch stores transposed
NAMES = {
    "bias-1": "conv1.bias",
    "weight-2": "conv2.lin.weight",
    "bias-2": "conv2.bias",
    "classifier": "classifier.weight",
    "classifier-bias": "classifier.bias",
    "projection": "projection.weight",
    "projection-bias": "projection.bias",
}


def predictions_of(
    egos: Sequence[EgoNetwork], chosen: ChosenEgos, classes: Sequence[str] | None
) -> Predictions:
    """Return the clients' predictions for all their nodes, from their weights."""
    of_client = {ego.client: ego for ego in egos}
    egos = [of_client[client] for client in chosen.batch.clients]
    nodes = [node for ego in egos for node in ego.called or ego.identities]
    return predictions_from(egos, chosen.classify(chosen.embed()), classes, nodes)


def own_models(chosen: ChosenEgos) -> SavedModels:
    """Return the clients' models; only the rows of a client's features are its own."""
    batch, (first, rest) = chosen.batch, chosen.weights()
    rows = SparseRows(FIRST, first, batch.feature, torch.tensor(batch.row_ptr), transposed=True)
    begun = {FIRST: chosen.begun().first.T}
    own = _named(rest, chosen.settings)
    return SavedModels(MODULE, _arguments(chosen.settings), list(batch.clients), begun, own, rows)


def common_model(model: ModelWeights, settings: EgoSettings, clients: Sequence[int]) -> SavedModels:
    """Return the model that the clients share; client -1 is the server."""
    rest = {name: part[0] for name, part in _named(model.rest[None], settings).items()}
    return SavedModels(
        MODULE, _arguments(settings), list(clients), {FIRST: model.first.T} | rest, {}
    )


def train_alone(graph: NewGraph, settings: EgoSettings, trains: Tensor, rounds: int) -> Tensor:
    """Train a newcomer on nodes ``[n]`` of its own; return probabilities ``[n, k]`` of all."""
    assert graph.edge_index is not None
    nodes, nobody = torch.arange(graph.y.numel()), torch.zeros_like(trains)
    ego = EgoNetwork(0, 0, nodes, graph.edge_index, graph.x, graph.y, trains, nobody, nobody)
    chosen = EgoCohort([ego], settings).choose([0])
    for number in range(rounds):
        chosen.train(number)
    return chosen.classify(chosen.embed()).softmax(1)


def _named(rest: Tensor, settings: EgoSettings) -> dict[str, Tensor]:
    parts = split_rest(rest, settings)
    return {NAMES[name]: part.mT if part.dim() == 3 else part for name, part in parts.items()}


def _arguments(settings: EgoSettings) -> dict[str, int]:
    return {
        "features": settings.num_features,
        "hidden": settings.hidden,
        "classes": settings.num_classes,
        "projection": settings.projection,
    }
