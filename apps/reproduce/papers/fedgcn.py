"""FedGCN beside FedAvg without the edges between clients, and beside training in one place."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flower_graph.apps.reproduce import table as t
from flower_graph.data.baselines import graph_baselines
from flower_graph.data.graph import ClientGraph, joined_masks
from flower_graph.data.sources.datasets import cached_data
from flower_graph.method.registry import method_of
from flower_graph.models import GCN
from flower_graph.ops.adam import Adam
from flower_graph.records.rounds import Epoch, train_epochs
from flower_graph.rng import seeded
from flower_graph.strategies.fedgcn import FedGCNConfig

LOCAL, NO_HOPS, ONE, TWO = "local training", "FedAvg", "FedGCN, 1 hop", "FedGCN, 2 hops"
FEW, CENTRAL = "FedGCN, 2 hops of 3 clients", "in one place"
METHODS: dict[str, dict[str, Any]] = {
    LOCAL: {"config": "local/{data}"},
    NO_HOPS: {"settings": ["strategy.hops=0"]},
    ONE: {"settings": ["strategy.hops=1"]},
    TWO: {"settings": ["strategy.hops=2"]},
    FEW: {"settings": ["strategy.hops=2", "strategy.least_holders=3"]},
    CENTRAL: {
        "trained": "flower_graph.apps.reproduce.papers.fedgcn:train_in_one_place",
        "figures": t.PLAIN,
    },
    **t.BASELINES,
    "label propagation in one place": {
        "trained": "flower_graph.apps.reproduce.papers.fedgcn:propagate_in_one_place",
        "figures": [t.TEST],
        "tries": [()],
    },
}
LOUVAIN, RANDOM = ["partition.method=louvain"], ["partition.method=random"]
LINE = t.Line(
    table="",
    config="fedgcn/{data}",
    settings=[
        *("device=cpu", "data.features=presence", "partition.ratios=[0.2,0.4,0.4]"),
        *("partition.clients=10", "model.hidden=16", "model.dropout=0.5", "patience=20"),
        *("strategy.local_epochs=3", "strategy.learning_rate=0.01"),
    ],
    seeds=(0, 1, 2, 3),
    rounds=150,
    figures=[*t.PLAIN, *t.SPENT],
    tries=[[f"strategy.weight_decay={decay}"] for decay in ("0", "5e-4", "5e-3")],
    choosers=(10,),
    tried_on=LOUVAIN,
)


def lines(table: str, cut: list[str]) -> list[t.Line]:
    """Make a table."""
    gains = [
        t.gain(NO_HOPS, ONE, TWO, FEW),
        t.gain(CENTRAL, TWO),
        t.gain(LOCAL, NO_HOPS, ONE, TWO),
        t.gain(t.REGRESSION, LOCAL, NO_HOPS, TWO, name="gain-over-regression"),
    ]
    data = ["Cora", "CiteSeer", "PubMed"]
    return replace(LINE, table=table).grid(data, METHODS, gains, last=cut)


PAPER = t.Paper(
    title="FedGCN beside FedAvg without edges between clients",
    tables={
        "louvain": lines("Louvain communities", LOUVAIN),
        "random": lines("Random clients", RANDOM),
    },
)


def train_in_one_place(config: FedGCNConfig) -> list[Epoch]:
    """Train the clients' GCN on the whole graph, on all clients' training nodes together.

    An epoch has as many steps as a round has; accuracies are means over the clients.
    """
    whole, how = cached_data(config), config.strategy
    method: Any = method_of(config)
    graphs = method.graphs(config)
    nodes = torch.cat([graph.nodes for graph in graphs])
    train = nodes[joined_masks(graphs)["train"]]
    with seeded(torch.device("cpu"), config.seed, "module"):
        model = GCN(whole.x.shape[1], config.model.hidden, whole.num_classes, config.model.dropout)
    adam = Adam(model.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay)
    x = whole.x.to_dense()

    def epoch(number: int) -> Epoch:
        model.train()
        for step in range(how.local_epochs):
            with seeded(torch.device("cpu"), config.seed, "one-place", number - 1, step):
                loss = functional.cross_entropy(model(x, whole.edge_index)[train], whole.y[train])
            adam.zero_grad()
            loss.backward()
            adam.step()
        model.eval()
        with torch.no_grad():
            right = model(x, whole.edge_index).argmax(1) == whole.y
        return Epoch(loss.item(), *mean_over_clients(right, graphs))

    return train_epochs(config.rounds, config.patience, epoch)


def propagate_in_one_place(config: FedGCNConfig) -> list[Epoch]:
    """Spread all clients' training labels over the whole graph; accuracies are of all nodes."""
    method: Any = method_of(config)
    found = graph_baselines(method.data(config).as_graph())["label-propagation"]
    return [Epoch(math.nan, found["val"], found["test"])]


def mean_over_clients(right: Tensor, graphs: Sequence[ClientGraph]) -> tuple[float, float]:
    """Return the clients' mean accuracy over their validation and their test nodes."""
    # right [n] of the whole graph
    own = [(right[graph.nodes].double(), graph) for graph in graphs]
    val = [hits[graph.val_mask].mean() for hits, graph in own if graph.val_mask.any()]
    test = [hits[graph.test_mask].mean() for hits, graph in own if graph.test_mask.any()]
    return float(torch.stack(val).mean()), float(torch.stack(test).mean())
