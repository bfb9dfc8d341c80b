"""FedGLS and its baselines from a config: builds the server's and the clients' half."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.client import NumPyClient

from flower_graph.apps.common import cached_data, saved_at, share
from flower_graph.config import DataConfig, FedGLSConfig
from flower_graph.config_fedgls import FEDGLS, GraphConfig, PartitionConfig
from flower_graph.data.client_folder import load_folder
from flower_graph.data.client_graphs import ClientGraph, check_neighbours, partition_graph
from flower_graph.data.names import folder_path
from flower_graph.errors import ConfigError
from flower_graph.graph_learners import LearnerSettings
from flower_graph.strategies import fedproto, structure_fedavg
from flower_graph.structure_networks import KNN, LEARNED, NONE, OWN, TRUE, StructureSettings

LOG = logging.getLogger(__name__)
ACTIONS = ()
# Which graphs the clients of each method work on
GRAPHS = {
    FEDGLS: LEARNED,
    "fed-mlp": NONE,
    "fed-gnn-mlp": OWN,
    "fedproto": OWN,
    "local-gnn-knn": KNN,
    "fed-gnn-knn": KNN,
    "fed-gnn": TRUE,
}


def build_strategy(config: FedGLSConfig, out: Path | None) -> structure_fedavg.StructureFedAvg:
    """Build the server's half of the method that ``strategy.name`` names.

    Parameters
    ----------
    config : FedGLSConfig
        The run.
    out : Path, optional
        Output folder; not used, since the method saves no checkpoints.
    """
    how, settings = config.strategy, structure_settings(config)
    sampling: dict[str, Any] = {"participation": how.participation, "min_nodes": how.min_nodes}
    match how.name:
        case "fed-gnn-mlp":
            return structure_fedavg.SharewiseFedAvg(settings, **sampling)
        case "local-gnn-knn":
            return structure_fedavg.LocalTraining(settings, **sampling)
        case "fedproto":
            return fedproto.FedProto(settings, **sampling)
    return structure_fedavg.StructureFedAvg(settings, **sampling)


def build_client(config: FedGLSConfig, context: Context, out: Path | None) -> NumPyClient:
    """Build the client of one SuperNode: its share of the communities, dealt by its partition.

    Parameters
    ----------
    config : FedGLSConfig
        The run.
    context : Context
        The ClientApp's; ``partition-id`` and ``num-partitions`` say which clients are here.
    out : Path, optional
        Output folder; not used.
    """
    everyone = cached_clients(config)
    graphs, settings = everyone[share(context, len(everyone))], structure_settings(config)
    match config.strategy.name:
        case "local-gnn-knn":
            kind: type[structure_fedavg.StructureClient] = structure_fedavg.LocalClient
        case "fedproto":
            kind = fedproto.PrototypeClient
        case _:
            kind = structure_fedavg.StructureClient
    return kind(context, graphs, settings, device=config.device)


def num_clients(config: FedGLSConfig) -> int:
    """Count the clients."""
    return len(cached_clients(config))


def final_figures(config: FedGLSConfig, strategy: Any) -> dict[str, Any]:
    """Give the whole payload and the graphless clients."""
    graphless = [graph.client for graph in cached_clients(config) if graph.is_graphless]
    return {"bytes": strategy.payload, "graphless": graphless}


def cached_clients(config: FedGLSConfig) -> list[ClientGraph]:
    """Make the run's clients once a process, and check that the method can work with them."""
    settings = json.dumps([asdict(config.data), asdict(config.partition), asdict(config.graph)])
    return _cached_clients(settings, config.strategy.name, config.seed, saved_at(config.data.name))


@lru_cache(maxsize=2)
def _cached_clients(settings: str, name: str, seed: int, saved: int) -> list[ClientGraph]:
    """Make them; `saved`, the time of the graph's file, is there to read a new file anew."""
    data, partition, graph = json.loads(settings)
    config = FedGLSConfig(
        seed=seed,
        data=DataConfig(**data),
        partition=PartitionConfig(**partition),
        graph=GraphConfig(**graph),
    )
    graphs = load_clients(config)
    _check(graphs, config, name)
    return graphs


def load_clients(config: FedGLSConfig) -> list[ClientGraph]:
    """Cut the clients out of the config's graph, or read them from its folder."""
    folder = folder_path(config.data.name)
    if folder is not None:
        seed = config.seed if config.partition.seed is None else config.partition.seed
        return load_folder(
            folder,
            config.partition.ratios,
            seed,
            presence=config.data.presence,
            normalize=config.data.normalize,
        )
    ratio = config.graph.graphless_ratio
    return partition_graph(cached_data(config), config.partition, ratio, config.seed)


def _check(graphs: list[ClientGraph], config: FedGLSConfig, name: str) -> None:
    graphless = [graph.client for graph in graphs if graph.is_graphless]
    if name == FEDGLS and not graphless:
        key, value = "graph.graphless_ratio", f"{config.graph.graphless_ratio:g}"
        if folder_path(config.data.name) is not None:
            key, value = "data.name", repr(config.data.name)
        raise ConfigError(
            f"{key}: {value} leaves none of {len(graphs)} clients without edges, and "
            f"strategy.name={FEDGLS} has no graph to learn; set strategy.name=fed-gnn"
        )
    if name == FEDGLS and len(graphless) == len(graphs):
        LOG.warning(
            "all %d clients are graphless: nobody has structure to learn from, so the graphs stay "
            "those of nearest neighbours, as with strategy.name=fed-gnn-knn",
            len(graphs),
        )
    unknown = [g.client for g in graphs if g.is_graphless and g.hidden_edges is None]
    if GRAPHS[name] == TRUE and unknown:
        raise ConfigError(
            f"strategy.name: {name} works on every client's true edges, and nobody has those of "
            f"client {unknown[0]}; set strategy.name=fed-gnn-knn"
        )
    if GRAPHS[name] in (LEARNED, KNN):
        check_neighbours(graphs, config.graph.neighbours)


def structure_settings(config: FedGLSConfig) -> StructureSettings:
    """Collect what server and clients must agree on."""
    graphs, how = cached_clients(config), config.strategy
    kind = GRAPHS[how.name]
    if kind == LEARNED and all(graph.is_graphless for graph in graphs):
        kind = KNN
    learner = config.graph
    return StructureSettings(
        num_features=int(graphs[0].x.shape[1]),
        num_classes=_num_classes(config, graphs),
        graphs=kind,
        hidden=config.model.hidden,
        dropout=config.model.dropout,
        input_dropout=config.model.input_dropout,
        learning_rate=how.learning_rate,
        weight_decay=how.weight_decay,
        local_epochs=how.local_epochs,
        keep_optimiser=how.optimiser == "keep",
        seed=config.seed,
        learner=LearnerSettings(
            encoder=learner.encoder,
            layers=learner.layers,
            width=learner.width,
            similarity=learner.similarity,
            neighbours=learner.neighbours,
            learning_rate=learner.learning_rate,
        ),
        tau=learner.tau,
        prototype_weight=how.prototype_weight,
    )


def _num_classes(config: FedGLSConfig, graphs: list[ClientGraph]) -> int:
    if folder_path(config.data.name) is not None:
        return 1 + max(int(graph.y.max()) for graph in graphs)
    return int(cached_data(config).num_classes)
