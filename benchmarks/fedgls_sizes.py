"""How FedGLS grows: the graph learner with a client's nodes, a round with the number of clients."""

from __future__ import annotations

import logging
import time
from typing import Any

import psutil
import torch
from flwr.app import Context
from torch import Tensor

from benchmarks.ego import timed
from benchmarks.measure import peak_bytes, say, summary
from flower_graph.client.adaptor import make_client_app
from flower_graph.data.partition.client_graphs import ClientGraph, split_nodes
from flower_graph.data.sources.generators import csbm_sparse
from flower_graph.engine.graph_batch import pack_graphs
from flower_graph.engine.machine import peak_memory
from flower_graph.ops.contrast import nt_xent
from flower_graph.ops.graph import csr_tensor
from flower_graph.ops.graph_learner import Pattern, weighted_propagate
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.structure_fedavg.networks import (
    LEARNED,
    TRUE,
    GraphLearners,
    LearnerSettings,
    StructureSettings,
    network_of,
)
from flower_graph.strategies.structure_fedavg.strategy import StructureClient, StructureFedAvg

CLASSES, FEATURES, ACTIVE, DEGREE, RATIOS = 7, 500, 32, 10.0, [0.6, 0.2, 0.2]
NODES = 100  # of each client, where their number grows
ROUNDS, WARM_UP = 8, 2
GRAPHS = {"fed-gnn": TRUE, "structure-fedavg": LEARNED}


def generated(client: int, nodes: int, *, graphless: bool) -> ClientGraph:
    """Generate a client with sparse features."""
    whole = csbm_sparse(
        nodes, CLASSES, degree=DEGREE, features=FEATURES, active=ACTIVE, seed=client
    )
    x = csr_tensor(whole.indptr.int(), whole.indices, whole.values, (nodes, FEATURES))
    edges = (None, whole.edge_index) if graphless else (whole.edge_index, None)
    nobody = torch.zeros(nodes, dtype=torch.bool)
    graph = ClientGraph(client, torch.arange(nodes), x, whole.y, *edges, nobody, nobody, nobody)
    return split_nodes(graph, RATIOS, 0)


def measure_learner(nodes: int) -> dict[str, Any]:
    """Time what the graph learner of one client does in a round, apart from the round."""
    say(f"fedgls: graph learner, {nodes:,} nodes")
    batch = pack_graphs([network_of(generated(0, nodes, graphless=True), LEARNED)])
    learners = GraphLearners(batch, slice(0, 1), LearnerSettings())
    before = psutil.Process().memory_info().rss
    learners.edges()  # what the round before has left behind
    chance = torch.Generator().manual_seed(0)
    x, slope = torch.randn(2, nodes, 16, generator=chance).unbind()

    def loss(pattern: Pattern, weight: Tensor) -> Tensor:
        return (weighted_propagate(pattern, weight, x) * slope).sum()

    def round_() -> None:
        learners.step(loss)
        edges.append(learners.edges()[1].numel())

    edges: list[int] = []
    seconds = timed(round_)
    peak = peak_memory()
    return {
        "nodes": nodes,
        "entries": edges[-1],
        "seconds": seconds,
        "contrast-seconds": _contrast_seconds(nodes, chance),
        "bytes": peak - before,
        "square-bytes": 4 * nodes**2,
    }


def _contrast_seconds(nodes: int, chance: torch.Generator) -> float:
    """Time the loss that a round's step has, with its gradient."""
    h, z = torch.randn(2, nodes, CLASSES, generator=chance).unbind()
    h.requires_grad_()

    def work() -> None:
        nt_xent(h, z, torch.arange(nodes), [0, nodes], [0, nodes], 0.2).sum().backward()

    return timed(work)


def measure_clients(method: str, clients: int) -> dict[str, Any]:
    """Time whole rounds over small clients, half of them without edges."""
    say(f"fedgls: {method}, {clients} clients")
    graphs = [generated(client, NODES, graphless=client % 2 == 1) for client in range(clients)]
    settings = StructureSettings(FEATURES, CLASSES, graphs=GRAPHS[method])

    def client_fn(context: Context) -> StructureClient:
        return StructureClient(context, graphs, settings)

    seconds: list[float] = []
    ended = time.perf_counter()

    def on_round(report: RoundReport) -> None:
        nonlocal ended
        seconds.append(time.perf_counter() - ended)
        ended = time.perf_counter()

    logging.getLogger("flwr").setLevel(logging.WARNING)  # as in `flower-graph run`
    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=1)
    StructureFedAvg(settings).start(grid, num_rounds=ROUNDS, on_round=on_round)
    nodes = clients * NODES
    return {
        "clients": clients,
        "nodes": nodes,
        "round": summary(seconds[WARM_UP:]),
        "peak-bytes": peak_bytes(),
    }
