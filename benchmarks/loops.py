"""Loops over clients as users of PyG write them, to compare with measured rounds.

``python -m benchmarks.loops central|fedavg|fedscem CONFIG ROUNDS [key=value …]`` prints the seconds
of every round. The loops use what makes them faster: ``GCNConv(cached=True)`` normalises a graph
once, and a client keeps its optimiser. There are no messages, no masks and no checks in a loop.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
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


class Ego(nn.Module):
    """A client of FedSCem."""

    def __init__(self, ego: Any, classes: int, config: Any) -> None:
        super().__init__()
        self.how, h = config.strategy, config.model.hidden
        self.x = ego.x.to_dense() if ego.x.layout == torch.sparse_csr else ego.x
        self.y, self.edge_index = ego.y, ego.edge_index
        self.masks = ego.train_mask, ego.val_mask, ego.test_mask
        self.first = GCNConv(self.x.shape[1], h, cached=True)
        self.second = GCNConv(h, h, cached=True)
        self.classifier, self.head = nn.Linear(h, classes), nn.Linear(h, config.model.projection)
        self.optimizer = torch.optim.Adam(
            self.parameters(), lr=self.how.learning_rate, weight_decay=self.how.weight_decay
        )

    def embed(self) -> Tensor:
        return F.relu(self.second(F.relu(self.first(self.x, self.edge_index)), self.edge_index))

    def classification(self, h: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(h)[self.masks[0]], self.y[self.masks[0]])

    def contrast(self, h: Tensor, rows: Tensor, mean: Tensor) -> Tensor:
        if not rows.numel():
            return h.new_zeros(())
        z, means = F.normalize(self.head(h)), F.normalize(self.head(mean))
        logits = z[rows] @ torch.cat([z, means]).T / self.how.tau
        number = torch.arange(rows.numel())
        itself = torch.zeros_like(logits, dtype=torch.bool)
        itself[number, rows] = True
        return F.cross_entropy(logits.masked_fill(itself, -torch.inf), number + h.shape[0])

    def step(self, loss: Callable[[Tensor], Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.embed()).backward()
        self.optimizer.step()

    def measure(self) -> list[float]:
        right = (self.classifier(self.embed()).argmax(1) == self.y).float()
        return [right[mask].mean().item() for mask in self.masks]


def fedscem(config: Any) -> Callable[[], object]:
    """Train each client, average the embeddings of common nodes, and fuse."""
    egos: Sequence[Any] = method_of(config).graphs(config)
    classes = 1 + max(int(ego.y.max()) for ego in egos)
    clients = [Ego(ego, classes, config) for ego in egos]
    nodes = torch.cat([ego.nodes for ego in egos])
    _, slot, count = torch.unique(nodes, return_inverse=True, return_counts=True)
    starts = [0, *torch.tensor([ego.nodes.numel() for ego in egos]).cumsum(0).tolist()]

    def work() -> None:
        for client in clients:
            client.step(client.classification)
        with torch.no_grad():
            h = torch.cat([client.embed() for client in clients])
        mean = h.new_zeros(count.numel(), h.shape[1]).index_add_(0, slot, h) / count[:, None]
        for client, start, end in zip(clients, starts, starts[1:], strict=False):
            own = slot[start:end]
            rows = (count[own] > 1).nonzero().flatten()
            client.step(
                lambda h, client=client, rows=rows, own=own: (
                    client.classification(h)
                    + client.how.mu * client.contrast(h, rows, mean[own[rows]])
                )
            )
        with torch.no_grad():
            for client in clients:
                client.measure()

    return work


LOOPS: dict[str, Callable[[Any], Callable[[], object]]] = {
    "central": central,
    "fedavg": fedavg,
    "fedscem": fedscem,
}


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
