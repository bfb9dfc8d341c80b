"""FedAvg over clients with a graph each, one after the other, as users of PyG write it.

The loop keeps what makes it quicker: ``GCNConv(cached=True)`` normalises a graph once, and a client
keeps its optimiser. ``state_dict`` goes out, is trained, and comes back to be averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.strategies.structure_fedavg.networks import StructureSettings, initial_models

State = dict[str, Tensor]
# Names of PyG's parameters in the order of ``ModelWeights.rest``
REST = ("first.bias", "second.lin.weight", "second.bias")


class PlainClient(nn.Module):
    """A client with a GCN of two layers and an Adam of its own."""

    def __init__(self, graph: ClientGraph, settings: StructureSettings, *, sparse: bool) -> None:
        super().__init__()
        assert graph.edge_index is not None
        dense = graph.x.to_dense() if graph.x.layout == torch.sparse_csr else graph.x
        self.x = dense.to_sparse_csr() if sparse else dense
        self.y, self.edge_index, self.epochs = graph.y, graph.edge_index, settings.local_epochs
        self.masks = graph.train_mask, graph.val_mask, graph.test_mask
        self.first = GCNConv(settings.num_features, settings.hidden, cached=True)
        self.second = GCNConv(settings.hidden, settings.num_classes, cached=True)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=settings.learning_rate)

    def forward(self) -> Tensor:
        """Return logits ``[n, k]``."""
        hidden = F.relu(self.first(self.x, self.edge_index))
        return self.second(hidden, self.edge_index)  # type: ignore[no-any-return]

    def fit(self, state: State) -> State:
        """Train from the server's weights; return the client's own."""
        self.load_state_dict(state)
        train = self.masks[0]
        for _ in range(self.epochs):
            self.optimizer.zero_grad()
            F.cross_entropy(self()[train], self.y[train]).backward()
            self.optimizer.step()
        return self.state_dict()

    @torch.no_grad()
    def evaluate(self, state: State) -> list[float]:
        """Return the loss, and the accuracy on the nodes for training, validation and test."""
        self.load_state_dict(state)
        logits, train = self(), self.masks[0]
        loss = F.cross_entropy(logits[train], self.y[train]).item()
        right = (logits.argmax(1) == self.y).float()
        return [loss, *(right[mask].mean().item() for mask in self.masks)]


class PlainLoop:
    """The server and its clients."""

    def __init__(
        self, graphs: Sequence[ClientGraph], settings: StructureSettings, *, sparse: bool
    ) -> None:
        self.settings = settings
        self.clients = [PlainClient(graph, settings, sparse=sparse) for graph in graphs]
        nodes = torch.tensor([graph.y.numel() for graph in graphs])
        self.shares: list[float] = (nodes / nodes.sum()).tolist()
        self.state = self._from_model(initial_models(settings)[0])

    def round(self) -> list[list[float]]:
        """Train every client, average by nodes, and measure the mean at every client."""
        states = [client.fit(self.state) for client in self.clients]
        self.state = {
            name: torch.stack(
                [share * state[name] for share, state in zip(self.shares, states, strict=True)]
            ).sum(0)
            for name in self.state
        }
        return [client.evaluate(self.state) for client in self.clients]

    def model(self) -> ModelWeights:
        """Return the shared weights as the engine has them."""
        rest = [self.state[name] for name in REST]
        rest[1] = rest[1].T  # PyG's matrices are the other way round
        return ModelWeights(
            self.state["first.lin.weight"].T, torch.cat([p.flatten() for p in rest])
        )

    def _from_model(self, model: ModelWeights) -> State:
        h, k = self.settings.hidden, self.settings.num_classes
        bias, weight, last = model.rest.split([h, h * k, k])
        rest = dict(zip(REST, (bias, weight.view(h, k).T, last), strict=True))
        return {"first.lin.weight": model.first.T, **rest}
