"""Rounds of FedGLS's engine and of PPFL-GNN's GAT on one device, for ``benchmarks.gpu``.

Needs PyTorch alone, as that does. Dropout is off.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flower_graph.data.partition.client_graphs import ClientGraph, split_nodes
from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.data.sources.generators import csbm
from flower_graph.strategies.procrustes_alignment.gat import PublicGAT, PublicGATSettings
from flower_graph.strategies.structure_fedavg.cohort import StructureCohort
from flower_graph.strategies.structure_fedavg.networks import StructureSettings, initial_models

CLASSES, FEATURES, ACTIVE, DEGREE, RATIOS = 7, 500, 20, 5.0, [0.6, 0.2, 0.2]
T = TypeVar("T")


class Communities:
    """FedGLS: every second client has no edges, and learns a graph."""

    def __init__(self, clients: int, nodes: int, device: torch.device) -> None:
        self._settings = StructureSettings(FEATURES, CLASSES, dropout=0.0)
        graphs = [_community(client, nodes) for client in range(clients)]
        self._cohort = StructureCohort(graphs, self._settings, device=device)
        self._models = [_to(model, device) for model in initial_models(self._settings)]

    def round(self, number: int) -> float:
        """Train all clients, average, and evaluate the mean; return its loss."""
        self._cohort.start_from(self._models)
        trained = self._cohort.train(number)
        self._models, _, _ = self._cohort.mean_models(trained.diverged)
        self._cohort.start_from(self._models)
        return self._cohort.evaluate().loss.nanmean().item()

    def sent(self) -> Tensor:
        """Return what travels in a round: the mean models."""
        parts = (part for model in self._models for part in (model.first, model.rest))
        return torch.cat([part.flatten() for part in parts])


class Attention:
    """PPFL-GNN with a GAT: a model for each client, pulled towards embeddings of public nodes."""

    def __init__(self, clients: int, nodes: int, device: torch.device) -> None:
        settings = PublicGATSettings(classes=CLASSES, dropout=0.0)
        self._models = [
            PublicGAT(_to(_overlapping(client, nodes), device), settings)
            for client in range(clients)
        ]
        self._device, self._public = device, torch.arange(nodes // 2).numpy()

    def round(self, number: int) -> float:
        """Train each client towards what it had; return the mean loss."""
        # The server's alignment, which lies between, is measured by itself.
        losses = [
            model.learn(self._public, model.embed()[self._public], number) for model in self._models
        ]
        return sum(losses) / len(losses)

    def sent(self) -> Tensor:
        """Return what travels in a round: embeddings of public nodes."""
        rows = [torch.from_numpy(model.embed()[self._public]) for model in self._models]
        return torch.cat(rows).to(self._device)


def _community(client: int, nodes: int) -> ClientGraph:
    whole = _generated(client, nodes)
    is_graphless = client % 2 == 1
    edges = (None, whole.edge_index) if is_graphless else (whole.edge_index, None)
    nobody = torch.zeros(nodes, dtype=torch.bool)
    graph = ClientGraph(
        client, torch.arange(nodes), whole.x, whole.y, *edges, nobody, nobody, nobody
    )
    return split_nodes(graph, RATIOS, 0)


def _overlapping(client: int, nodes: int) -> OverlappingGraph:
    whole, place = _generated(client, nodes), torch.arange(nodes)
    masks = (place % 5 < 3, place % 5 == 3, place % 5 == 4)
    public = place < nodes // 2
    return OverlappingGraph(
        client, place, public, whole.x, whole.y, whole.y, whole.edge_index, *masks
    )


def _generated(seed: int, nodes: int) -> Any:
    return csbm(nodes, CLASSES, degree=DEGREE, features=FEATURES, active=ACTIVE, seed=seed)


def _to(thing: T, device: torch.device) -> T:
    """Copy a graph or a model with its tensors to a device."""
    parts = {field.name: getattr(thing, field.name) for field in fields(thing)}  # type: ignore[arg-type]
    moved = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(thing, **moved)  # type: ignore[type-var]
