"""FedGLS and its baselines as a method: server, clients, and figures for commands."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor

from flower_graph.client.learner import SharedModule
from flower_graph.config.common import checkpoint_settings
from flower_graph.data.description import NewGraph
from flower_graph.data.folders.client_folder import clients_path, is_one_graph
from flower_graph.data.folders.party import RunData, RunFolder, graph_data
from flower_graph.data.graph import ClientGraph
from flower_graph.data.sources.datasets import cached_clients
from flower_graph.errors import ConfigError, OutputError
from flower_graph.flower_compat import NumPyClient
from flower_graph.method.base import FinishedRun, GraphMethod, Partition
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.outputs.build import build_module
from flower_graph.outputs.client import client_folders
from flower_graph.privacy.noise import central_noise
from flower_graph.server.averaging import ReportedFedAvg, make_robust
from flower_graph.strategies import fed_proto
from flower_graph.strategies.fed_proto import FedProtoClient
from flower_graph.strategies.fedgls.config import (
    APP,
    FED_KNN,
    FEDGLS,
    FEDPROTO,
    LOCAL,
    FedGLSConfig,
    StructureSettings,
)
from flower_graph.strategies.fedgls.modules import StructureModel, draw_learner, predict
from flower_graph.strategies.fedgls.strategy import StructureClient, StructureFedAvg, check_edges

LOG = logging.getLogger(__name__)
GRAPHLESS, NUM_GRAPHLESS = "graphless", "graphless-clients"  # details of data folders
NUM_NODES = "nodes"  # another detail, of the server's folder alone
TRUE_GRAPHS = "fed-gnn"  # trains on edges which graphless clients do not have
NEWCOMERS_STEPS = 1  # of φ, as in a round: more do worse (docs/results/newcomers)

# Table 4 (Fu et al., TMLR 2024, appendix D) by data set: clients, features, mean nodes, mean edges
# and classes. The edges are close to ours if each counts in both directions.
TABLE_4_FIGURES = (
    "clients",
    "features",
    "nodes-per-client",
    "directed-edges-per-client",
    "classes",
)
TABLE_4 = {
    "cora": (8, 1433, 192, 695, 7),
    "citeseer": (8, 3703, 149, 535, 6),
    "pubmed": (16, 500, 1079, 4367, 3),
    "flickr": (20, 500, 4441, 28663, 7),
    "ogbn-arxiv": (16, 128, 8948, 50397, 40),
}


class FedGLS(GraphMethod[FedGLSConfig, ReportedFedAvg]):
    """Every client is a community of the graph; some have no edges."""

    name = APP
    schema = FedGLSConfig
    client, clients = "community", "communities"
    has_true_edges = True
    heterophily = (
        "FedGLS's GCN smooths over edges: at homophily 0.1 it gained over training alone, to 0.52 "
        "where logistic regression on good features has 0.84 (`flower-graph docs results/heat-map`)"
    )
    tables = ("fedgls",)
    attacks = "flower_graph.strategies.fedgls.attack:ModelAudit"
    needs_variety = True

    def build_strategy(
        self, config: FedGLSConfig, out: Path | None, folder: RunFolder | None = None
    ) -> ReportedFedAvg:
        how, whole = config.strategy, self.whole(config, folder)
        settings = structure_settings(config, whole)
        local = checkpoint_settings(config, out)
        if how.name == FEDPROTO:
            shared, classes = _prototypes(config, settings), settings.num_classes
            return ModuleFedAvg(shared, how, classes=classes, **local)
        nodes = whole.detail(NUM_NODES, int)
        strategy = make_robust(StructureFedAvg, how, settings, num_nodes=nodes, **local)
        strategy.central_noise = central_noise(config.privacy, config.rounds)
        return strategy

    def build_client(self, config: FedGLSConfig, context: Context, out: Path | None) -> NumPyClient:
        graphs, whole = self.hosted(config, context)
        settings = structure_settings(config, whole)
        local = client_folders(context, out, whole.class_names)
        local["device"] = config.device
        if config.strategy.name == FEDPROTO:
            shared = _prototypes(config, settings)
            return FedProtoClient(context, graphs, shared, config.strategy, **local)
        return StructureClient(context, graphs, settings, **local)

    def graphs(self, config: FedGLSConfig) -> list[ClientGraph]:
        return cached_clients(self._checked, config, config.strategy.name)

    def _checked(self, config: FedGLSConfig) -> list[ClientGraph]:
        graphs = cached_clients(self.load_graphs, config)
        _check_mix(len(graphs), sum(graph.is_graphless for graph in graphs), config)
        check_edges(graphs, config.strategy.name, config.graph.neighbours)
        return graphs

    def graphless_ratio(self, config: FedGLSConfig) -> float:
        return config.graph.graphless_ratio

    def partition(self, config: FedGLSConfig, *, true_edges: bool = False) -> Partition:
        note = f"; {TRUE_GRAPHS} needs --true-edges where clients are graphless"
        if config.strategy.name != TRUE_GRAPHS or true_edges:
            note = ""
        data = self.run_data(config, true_edges=true_edges)
        return super().partition(config)._replace(data=data, note=note, paper=paper_sizes(config))

    def run_data(self, config: FedGLSConfig, *, true_edges: bool = True) -> RunData:
        """Give each client its graph, and the server the counts and the graphless clients."""
        # A graphless client's true edges are in its folder only with `true_edges`; only the server
        # learns which clients are graphless.
        graphs = self.data(config)
        bare = (replace(graph, hidden_edges=None) for graph in graphs)
        held = graphs if true_edges else graphs.replaced(bare)
        graphless = [graph.client for graph in graphs if graph.is_graphless]
        count = {NUM_GRAPHLESS: len(graphless)}
        nodes = sum(len(graph.y) for graph in graphs)
        return graph_data(held, {GRAPHLESS: graphless, NUM_NODES: nodes, **count}, count)

    def final_figures(
        self, config: FedGLSConfig, strategy: ReportedFedAvg, folder: RunFolder | None = None
    ) -> dict[str, object]:
        graphless = self.whole(config, folder).detail(GRAPHLESS, list)
        return super().final_figures(config, strategy) | {"graphless": graphless}

    def predict(
        self, config: FedGLSConfig, run: FinishedRun, graph: NewGraph, client: int | None
    ) -> Tensor:
        """Predict by one client's model, or by the mean of all; a graphless client makes edges."""
        # If there is only one client's model, as on its own machine, it is used.
        is_ones, name = client is not None or len(run.clients) == 1, config.strategy.name
        if not is_ones and name in (FEDPROTO, LOCAL):
            why = "clients have no common model; say whose to use (client=, --client)"
            raise OutputError(f"strategy.name={name}: {why}")
        if name == FEDPROTO:
            edges = torch.zeros(2, 0).long() if graph.edge_index is None else graph.edge_index
            return super().predict(config, run, replace(graph, edge_index=edges), client)
        model = build_module(*run.saved(client)) if is_ones else build_module(run.all_saved()[0])
        assert isinstance(model, StructureModel)
        if not is_ones:
            draw_learner(model, config.graph, 0)
        return predict(model, graph, 0 if is_ones else NEWCOMERS_STEPS).softmax(1)


METHOD = FedGLS()


def paper_sizes(config: FedGLSConfig) -> dict[str, int]:
    """Return Table 4's row, if the config asks for its partition."""
    row = TABLE_4.get(config.data.name.lower().removeprefix("planetoid/"), ())
    is_asked = (config.partition.method, config.partition.clients) == ("louvain", *row[:1])
    return dict(zip(TABLE_4_FIGURES, row, strict=True)) if is_asked else {}


def _check_mix(clients: int, graphless: int, config: FedGLSConfig) -> None:
    """Refuse FedGLS without a graphless client; warn if all are graphless."""
    name = config.strategy.name
    if name == FEDGLS and not graphless:
        key, value = "graph.graphless_ratio", f"{config.graph.graphless_ratio:g}"
        path = clients_path(config.data)
        if path is not None and not is_one_graph(path):
            key, value = "data.name", repr(config.data.name)
        why = f"strategy.name={FEDGLS} has no graph to learn; set strategy.name=fed-gnn"
        raise ConfigError(f"{key}: {value} leaves none of {clients} clients without edges: {why}")
    if name == FEDGLS and graphless == clients:
        as_knn = "graphs stay those of nearest neighbours, as with strategy.name=fed-gnn-knn"
        LOG.warning("all %d clients are graphless: %s", clients, as_knn)


def structure_settings(config: FedGLSConfig, whole: RunFolder) -> StructureSettings:
    """Return the settings that server and clients must share."""
    strategy, graphless = config.strategy, whole.detail(NUM_GRAPHLESS, int)
    if whole.path.name:  # a folder; in a simulation all graphs were checked
        _check_mix(whole.num_clients, graphless, config)
    if strategy.name == FEDGLS and graphless == whole.num_clients:
        strategy = replace(strategy, name=FED_KNN)
    sizes = whole.features, whole.classes
    return StructureSettings(*sizes, config.graph, config.model, strategy, config.seed)


# Any: a schema like FedProto's
def _prototypes(config: Any, settings: StructureSettings) -> SharedModule:
    """Return FedProto's module: a GCN is an MLP where there are no edges."""
    how = fed_proto.METHOD
    make = how.module(config, settings.num_features, settings.num_classes)
    return SharedModule(make, settings.seed, how.local(config))
