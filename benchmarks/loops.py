"""Loops over clients as users of PyG write them, to compare with measured rounds.

``python -m benchmarks.loops central|fedavg CONFIG ROUNDS [key=value …]`` prints the seconds
of every round. The loops use what makes them faster: ``GCNConv(cached=True)`` normalises a graph
once, and a client keeps its optimiser. There are no messages and no checks in a loop.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

from flower_graph.data.sources.datasets import cached_data
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of

State = dict[str, Tensor]


class GCN(nn.Module):
    """The ordinary two-layer GCN of PyG, with an Adam of its own."""

    def __init__(self, data: Any, classes: int, how: Any, hidden: int, dropout: float) -> None:
        super().__init__()
        self.x = data.x.to_dense() if data.x.layout == torch.sparse_csr else data.x
        self.y, self.edge_index, self.dropout = data.y, data.edge_index, dropout
        self.masks = data.train_mask, data.val_mask, data.test_mask
        self.first = GCNConv(self.x.shape[1], hidden, cached=True)
        self.second = GCNConv(hidden, classes, cached=True)
        self.optimizer = torch.optim.Adam(
            self.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay
        )

    def forward(self) -> Tensor:
        x = F.dropout(self.x, self.dropout, self.training)
        h = F.relu(self.first(x, self.edge_index))
        h = F.dropout(h, self.dropout, self.training)
        return self.second(h, self.edge_index)  # type: ignore[no-any-return]

    def fit(self, epochs: int) -> None:
        self.train()
        train = self.masks[0]
        for _ in range(epochs):
            self.optimizer.zero_grad()
            F.cross_entropy(self()[train], self.y[train]).backward()
            self.optimizer.step()

    @torch.no_grad()
    def measure(self) -> list[float]:
        self.eval()
        right = (self().argmax(1) == self.y).float()
        return [right[mask].mean().item() for mask in self.masks]


def central(config: Any) -> Callable[[], object]:
    """Train the graph in one place, an epoch a round (beside nFedGNN, which also evaluates)."""
    data = cached_data(config)
    model = GCN(
        data, int(data.num_classes), config.strategy, config.model.hidden, config.model.dropout
    )
    return lambda: model.fit(1)


def fedavg(config: Any) -> Callable[[], object]:
    """Train each client, average by training nodes, and measure the mean at every client."""
    graphs = method_of(config).graphs(config)
    classes = 1 + max(int(graph.y.max()) for graph in graphs)
    hidden, dropout = config.model.hidden, config.model.dropout
    clients = [GCN(graph, classes, config.strategy, hidden, dropout) for graph in graphs]
    weights = torch.tensor([float(client.masks[0].sum()) for client in clients])
    shares: list[float] = (weights / weights.sum()).tolist()
    state: State = {name: value.clone() for name, value in clients[0].state_dict().items()}

    def work() -> None:
        nonlocal state
        states = []
        for client in clients:
            client.load_state_dict(state)
            client.fit(config.strategy.local_epochs)
            states.append({name: value.clone() for name, value in client.state_dict().items()})
        pairs = list(zip(shares, states, strict=True))
        state = {name: sum(share * one[name] for share, one in pairs) for name in state}  # type: ignore[misc]
        for client in clients:
            client.load_state_dict(state)
            client.measure()

    return work


LOOPS: dict[str, Callable[[Any], Callable[[], object]]] = {"central": central, "fedavg": fedavg}


def main() -> None:
    """Print the seconds of every round as JSON."""
    kind, name, rounds, *settings = sys.argv[1:]
    work, seconds = LOOPS[kind](load_config(name, [*settings, "device=cpu"])), []
    for _ in range(int(rounds)):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
