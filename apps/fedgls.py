"""FedGLS and its baselines from a config: builds the server's and the clients' half."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context
from flwr.client import NumPyClient

from flower_graph.apps.common import CHECKPOINTS, cached_data, checkpoint_settings, saved_at
from flower_graph.apps.data_folders import client_folder, graphs_of, share
from flower_graph.central_privacy import central_noise
from flower_graph.config import DataConfig, FedGLSConfig
from flower_graph.config_fedgls import FEDGLS, GraphConfig, PartitionConfig
from flower_graph.data.client_folder import load_folder
from flower_graph.data.client_graphs import ClientGraph, check_neighbours, partition_graph
from flower_graph.data.names import folder_path
from flower_graph.data.run_data import GRAPHLESS, NUM_GRAPHLESS, NUM_NODES
from flower_graph.data.run_folder import RunFolder
from flower_graph.errors import ConfigError
from flower_graph.graph_learners import LearnerSettings
from flower_graph.local_privacy import require_one_client
from flower_graph.robust import make_robust
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


class Census(NamedTuple):
    """What server and clients must know of the whole run's data."""

    clients: int
    graphless: int
    features: int
    classes: int


def build_strategy(
    config: FedGLSConfig, out: Path | None, folder: RunFolder | None = None
) -> structure_fedavg.StructureFedAvg:
    """Build the server's half of the method that ``strategy.name`` names.

    Parameters
    ----------
    config : FedGLSConfig
        The run.
    out : Path, optional
        Output folder; checkpoints go below it.
    folder : RunFolder, optional
        The server's data, which are counts alone.
    """
    how, settings = config.strategy, structure_settings(config, folder)
    own: dict[str, Any] = {"participation": how.participation, "min_nodes": how.min_nodes}
    own |= checkpoint_settings(config, out) | {"num_nodes": _num_nodes(config, folder)}
    match how.name:
        case "fed-gnn-mlp":
            return structure_fedavg.SharewiseFedAvg(settings, **own)
        case "local-gnn-knn":
            return structure_fedavg.LocalTraining(settings, **own)
        case "fedproto":
            return fedproto.FedProto(settings, **own)
    strategy = make_robust(structure_fedavg.StructureFedAvg, how.average, settings, **own)
    strategy.central_noise = central_noise(config.privacy, config.rounds)
    return strategy


def build_client(config: FedGLSConfig, context: Context, out: Path | None) -> NumPyClient:
    """Build the client of one SuperNode: its share of the communities, dealt by its partition.

    Parameters
    ----------
    config : FedGLSConfig
        The run.
    context : Context
        The ClientApp's; ``data-folder``, or ``partition-id`` and ``num-partitions``, say which
        clients are here.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    graphs, folder = hosted_clients(config, context)
    require_one_client(config.privacy, [graph.client for graph in graphs])
    settings = structure_settings(config, folder)
    match config.strategy.name:
        case "local-gnn-knn":
            kind: type[structure_fedavg.StructureClient] = structure_fedavg.LocalClient
        case "fedproto":
            kind = fedproto.PrototypeClient
        case _:
            kind = structure_fedavg.StructureClient
    saved = None if out is None else out / CHECKPOINTS
    return kind(context, graphs, settings, device=config.device, checkpoint_dir=saved)


def hosted_clients(
    config: FedGLSConfig, context: Context
) -> tuple[list[ClientGraph], RunFolder | None]:
    """Give the clients of one SuperNode, and the folder that they come from if they do."""
    folder = client_folder(config, context)
    if folder is None:
        everyone = cached_clients(config)
        return everyone[share(context, len(everyone))], None
    here = graphs_of(folder, ClientGraph)
    _check_each(here, config, config.strategy.name)
    return here, folder


def num_clients(config: FedGLSConfig, folder: RunFolder | None = None) -> int:
    """Count the clients."""
    return len(cached_clients(config)) if folder is None else folder.manifest.num_clients


def final_figures(
    config: FedGLSConfig, strategy: Any, folder: RunFolder | None = None
) -> dict[str, Any]:
    """Give the whole payload and the graphless clients."""
    if folder is None:
        graphless = [graph.client for graph in cached_clients(config) if graph.is_graphless]
    else:
        graphless = folder.detail(GRAPHLESS, list)
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
    _check_mix(len(graphs), sum(graph.is_graphless for graph in graphs), config, name)
    _check_each(graphs, config, name)
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


def _check_mix(clients: int, graphless: int, config: FedGLSConfig, name: str) -> None:
    """Refuse FedGLS without a graphless client; warn if all are."""
    if name == FEDGLS and not graphless:
        key, value = "graph.graphless_ratio", f"{config.graph.graphless_ratio:g}"
        if folder_path(config.data.name) is not None:
            key, value = "data.name", repr(config.data.name)
        raise ConfigError(
            f"{key}: {value} leaves none of {clients} clients without edges, and "
            f"strategy.name={FEDGLS} has no graph to learn; set strategy.name=fed-gnn"
        )
    if name == FEDGLS and graphless == clients:
        LOG.warning(
            "all %d clients are graphless: nobody has structure to learn from, so the graphs stay "
            "those of nearest neighbours, as with strategy.name=fed-gnn-knn",
            clients,
        )


def _check_each(graphs: list[ClientGraph], config: FedGLSConfig, name: str) -> None:
    """Check that the method can work with each of some clients."""
    unknown = [g.client for g in graphs if g.is_graphless and g.hidden_edges is None]
    if GRAPHS[name] == TRUE and unknown:
        raise ConfigError(
            f"strategy.name: {name} works on every client's true edges, and nobody has those of "
            f"client {unknown[0]}; set strategy.name=fed-gnn-knn, or make data folders with "
            "`flower-graph partition --true-edges`"
        )
    if GRAPHS[name] in (LEARNED, KNN):
        check_neighbours(graphs, config.graph.neighbours)


def structure_settings(config: FedGLSConfig, folder: RunFolder | None = None) -> StructureSettings:
    """Collect what server and clients must agree on."""
    census, how = _census(config, folder), config.strategy
    kind = GRAPHS[how.name]
    if kind == LEARNED and census.graphless == census.clients:
        kind = KNN
    learner = config.graph
    return StructureSettings(
        num_features=census.features,
        num_classes=census.classes,
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


def _census(config: FedGLSConfig, folder: RunFolder | None) -> Census:
    """Count what the whole run has, by its folder if there is one."""
    if folder is None:
        graphs = cached_clients(config)
        graphless = sum(graph.is_graphless for graph in graphs)
        features = int(graphs[0].x.shape[1])
        return Census(len(graphs), graphless, features, _num_classes(config, graphs))
    there = folder.manifest
    graphless = folder.detail(NUM_GRAPHLESS, int)
    _check_mix(there.num_clients, graphless, config, config.strategy.name)
    return Census(there.num_clients, graphless, there.features, there.classes)


def _num_nodes(config: FedGLSConfig, folder: RunFolder | None) -> int:
    """Count the nodes of all clients."""
    if folder is not None:
        return folder.detail(NUM_NODES, int)
    return sum(int(graph.x.shape[0]) for graph in cached_clients(config))


def _num_classes(config: FedGLSConfig, graphs: list[ClientGraph]) -> int:
    if folder_path(config.data.name) is not None:
        return 1 + max(int(graph.y.max()) for graph in graphs)
    return int(cached_data(config).num_classes)
