"""FedGLS and its averaging baselines, one client at a time, with PyTorch and PyG: slow and plain.

Fu et al., "Federated Graph Learning with Graphless Clients", TMLR 2024. A client's data are any
object with ``client``, ``x``, ``y``, ``edge_index`` (None: graphless), ``hidden_edges`` and
``train_mask``; settings have the sections ``graph``, ``model``, ``strategy``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import dense_to_sparse, to_dense_adj


class Weights(NamedTuple):
    first: Tensor  # [f, h]
    rest: Tensor  # [D] flat


class Drops(NamedTuple):
    """What dropout leaves of one model in each step of a round: ``[E, n, f]`` and ``[E, n, h]``."""

    inputs: Tensor = torch.ones(1, 1, 1)
    hidden: Tensor = torch.ones(1, 1, 1)


class Net(nn.Module):
    """Two layers, of a GCN or, without a graph, of an MLP, and its own Adam."""

    def __init__(self, start: Any, settings: Any) -> None:
        super().__init__()
        h, k = settings.model.hidden, settings.num_classes
        shapes = [(settings.num_features, h), (h,), (h, k), (k,)]
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self.how = settings.strategy
        self.load(start)
        self.new_optimiser()

    def new_optimiser(self) -> None:
        rate, decay = self.how.learning_rate, self.how.weight_decay
        self.optimiser = torch.optim.Adam(self.parameters(), lr=rate, weight_decay=decay)

    def load(self, model: Any) -> None:
        self.start = model
        flat = model.rest.split([part.numel() for part in self.parts[1:]])
        with torch.no_grad():
            for part, value in zip(self.parts, (model.first, *flat), strict=True):
                part.copy_(value.view(part.shape))

    def model(self, x: Tensor) -> Weights:
        """The weights; a row whose feature is nowhere in ``x`` as it came."""
        first, *rest = (part.detach().clone() for part in self.parts)
        first = torch.where((x != 0).any(0)[:, None], first, self.start.first)
        return Weights(first, torch.cat([part.flatten() for part in rest]))

    def forward(self, x: Tensor, adjacency: Tensor | None, dropped: Tensor | float = 1.0) -> Tensor:
        first, bias, second, last = self.parts
        around = torch.eye(len(x)) if adjacency is None else normalised(adjacency)
        hidden = (around @ (x @ first) + bias).relu() * dropped
        return around @ hidden @ second + last


def normalised(adjacency: Tensor) -> Tensor:
    edges, weight = gcn_norm(*dense_to_sparse(adjacency), num_nodes=len(adjacency))
    return to_dense_adj(edges, edge_attr=weight, max_num_nodes=len(adjacency))[0]


def similarity_of(e: Tensor, kind: str) -> Tensor:
    """Compare all nodes, ``[n, n]`` (equation 13)."""
    if kind == "cosine":
        return F.cosine_similarity(e[:, None], e[None], dim=2, eps=1e-30)
    if kind == "inner":
        return (e[:, None] * e[None]).sum(2)
    square = (e[:, None] - e[None]).square().sum(2)
    return 1 / (1 + square.where(square > 0, 1).sqrt() * (square > 0))


class Learner(nn.Module):
    """φ, and equations 13 to 18: ``layers`` are vectors (attentive) or matrices (an MLP)."""

    def __init__(self, layers: Sequence[Tensor], how: Any) -> None:
        super().__init__()
        self.how, self.parts = how, nn.ParameterList([layer.clone() for layer in layers])
        if self.parts:
            self.optimiser = torch.optim.Adam(self.parameters(), lr=how.learning_rate)

    def graph(self, e: Tensor) -> Tensor:
        """``(σ(S) + σ(S)^T) / 2`` of each node's k most similar others; PyG normalises it."""
        for part in self.parts:
            e = (e * part if part.dim() == 1 else e @ part).relu()
        similarity = similarity_of(e, self.how.similarity)
        others = similarity.detach().clone().fill_diagonal_(-torch.inf)
        kept = torch.zeros_like(others).scatter_(1, others.topk(self.how.neighbours).indices, 1.0)
        chosen = (similarity * kept).relu()
        return (chosen + chosen.T) / 2


def contrast(h: Tensor, z: Tensor, tau: float) -> Tensor:
    """Equation 8 with all its terms."""
    likeness = (F.cosine_similarity(h[:, None], other[None], dim=2) for other in (z, h))
    between, among = ((one / tau).exp() for one in likeness)
    total = between.sum(1) + among.sum(1) - among.diagonal()
    return -(between.diagonal() / total).log().mean()


def step(module: Any, loss: Tensor) -> None:
    module.optimiser.zero_grad()
    loss.backward()
    module.optimiser.step()


class Client:
    """One client; ``starts`` are θ and ω, ``phi`` the first layers of a graph learner."""

    def __init__(self, graph: Any, settings: Any, starts: Any, phi: Sequence[Tensor]) -> None:
        self.graph, self.settings, method = graph, settings, settings.strategy.name
        self.x, n = graph.x.to_dense(), graph.y.numel()
        graphless, self.learner = graph.edge_index is None, None
        alone = graphless and method == "fed-gnn-mlp"
        edges = graph.hidden_edges if graphless else graph.edge_index
        self.adjacency = None
        if graphless and method == "structure-fedavg":
            self.learner = Learner(phi, settings.graph)
            self.adjacency = self.learner.graph(self.x).detach()
        elif graphless and method == "fed-gnn-knn":
            self.adjacency = self.neighbours(starts[0])
        elif not alone and method != "fed-mlp":
            self.adjacency = to_dense_adj(edges, max_num_nodes=n)[0]
        self.kind = int(alone)  # which model its first net is: theta is number 0, omega 1
        numbers = (0, 1) if method == "structure-fedavg" else (self.kind,)
        self.nets = [Net(starts[number], settings) for number in numbers]
        self.contrast = torch.nan

    def begin(self, models: Sequence[Any]) -> None:
        for number, net in enumerate(self.nets, start=self.kind):
            net.load(models[number])
        if self.settings.graph.knn_on == "encoder" and self.graph.edge_index is None:
            self.adjacency = self.neighbours(models[0])

    def neighbours(self, model: Any) -> Tensor:
        rows, h = self.x, self.settings.model.hidden
        if self.settings.graph.knn_on == "encoder":
            rows = (rows @ model.first + model.rest[:h]).relu()
        return (Learner((), self.settings.graph).graph(rows) > 0).float()

    def models(self) -> dict[int, Weights]:
        return {n: net.model(self.x) for n, net in enumerate(self.nets, start=self.kind)}

    def learn(self) -> None:
        gnn, encoder = self.nets
        h, z = gnn(self.x, self.learner.graph(self.x)), encoder(self.x, None).detach()
        step(self.learner, loss := contrast(h, z, self.settings.graph.tau))
        self.contrast, self.adjacency = loss.item(), self.learner.graph(self.x).detach()

    def train(self, drops: Sequence[Drops] = (Drops(), Drops())) -> None:
        """One round: φ on equation 8, then θ on 10 and ω on 11; ``drops`` of each net."""
        if self.settings.strategy.optimiser == "reset":
            for net in self.nets:
                net.new_optimiser()
        if self.learner is not None:
            self.learn()
        mask, y = self.graph.train_mask, self.graph.y
        for epoch in range(self.settings.strategy.local_epochs):
            at = [min(epoch, len(drop.hidden) - 1) for drop in drops]
            x = [self.x * drop.inputs[e] for drop, e in zip(drops, at, strict=True)]
            logits = self.nets[0](x[0], self.adjacency, drops[0].hidden[at[0]])
            losses = [F.cross_entropy(logits[mask], y[mask])]
            if len(self.nets) == 2:
                student = self.nets[1](x[1], None, drops[1].hidden[at[1]]).softmax(1)
                p = logits.detach().softmax(1)
                losses.append((p * (p / student).log()).sum(1).mean())
            for net, loss in zip(self.nets, losses, strict=True):
                step(net, loss)


class Federation:
    """All clients and the server; ``models`` are the server's."""

    def __init__(self, graphs: Any, settings: Any, starts: Any, phi: Sequence[Tensor]) -> None:
        self.clients = [Client(graph, settings, starts, phi) for graph in graphs]
        self.models, self.phi = list(starts), phi

    def train(self, drops: Callable[[Client, int], Drops] = lambda *_: Drops()) -> None:
        for client in self.clients:
            client.train([drops(client, number) for number in range(len(client.nets))])

    def average(self, left_out: Sequence[int] = ()) -> None:
        """Weight by nodes (equation 12); a model that nobody has stays. Then all have the means."""
        chosen = [client for client in self.clients if client.graph.client not in left_out]
        for number in range(len(self.models)):
            held = [(len(c.x), c.models()[number]) for c in chosen if number in c.models()]
            total = sum(nodes for nodes, _ in held)
            if held:
                first, rest = (sum(n / total * m[at] for n, m in held) for at in (0, 1))
                self.models[number] = Weights(first, rest)
        for client in self.clients:
            client.begin(self.models)
