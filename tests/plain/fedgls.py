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
from torch_geometric.nn import GCNConv
from torch_geometric.utils import dense_to_sparse, to_dense_adj


class Weights(NamedTuple):
    first: Tensor  # [f, h] of the first layer
    rest: Tensor  # [D] all others, flat


class Drops(NamedTuple):
    """What dropout leaves of one model in each step of a round: ``[E, n, f]`` and ``[E, n, h]``."""

    inputs: Tensor = torch.ones(1, 1, 1)
    hidden: Tensor = torch.ones(1, 1, 1)


class Net(nn.Module):
    """Two layers, of a GCN or, without a graph, of an MLP, and its own Adam."""

    def __init__(self, start: Any, settings: Any, *, is_gnn: bool) -> None:
        super().__init__()
        f, h, k = settings.num_features, settings.model.hidden, settings.num_classes
        layers = [GCNConv(*p) if is_gnn else nn.Linear(*p) for p in ((f, h), (h, k))]
        self.layers, self.is_gnn, self.how = nn.ModuleList(layers), is_gnn, settings.strategy
        self.load(start)
        self.new_optimiser()

    def new_optimiser(self) -> None:
        rates = {"lr": self.how.learning_rate, "weight_decay": self.how.weight_decay}
        self.optimiser = torch.optim.Adam(self.parameters(), **rates)

    def slots(self) -> list[nn.Parameter]:
        """Weight and bias of the first layer, then of the second."""
        linear = [layer.lin if self.is_gnn else layer for layer in self.layers]
        pairs = zip(linear, self.layers, strict=True)
        return [slot for one, layer in pairs for slot in (one.weight, layer.bias)]

    def load(self, model: Any) -> None:
        """Take over weights; the optimiser stays."""
        self.start = model
        shapes = [slot.t().shape for slot in self.slots()[1:]]
        parts = model.rest.split([shape.numel() for shape in shapes])
        rest = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        with torch.no_grad():
            for slot, value in zip(self.slots(), (model.first, *rest), strict=True):
                slot.copy_(value.t())

    def model(self, x: Tensor) -> Weights:
        """The weights; a row whose feature is nowhere in ``x`` as it came."""
        first, *rest = (slot.detach().t().clone() for slot in self.slots())
        has = (x != 0).any(0)[:, None]
        flat = torch.cat([part.reshape(-1) for part in rest])
        return Weights(torch.where(has, first, self.start.first), flat)

    def forward(self, x: Tensor, adjacency: Tensor | None, dropped: Tensor | float = 1.0) -> Tensor:
        one, two = self.layers
        around = () if adjacency is None else dense_to_sparse(adjacency)
        return two(one(x, *around).relu() * dropped, *around)


def similarity_of(e: Tensor, kind: str) -> Tensor:
    """Compare all nodes, ``[n, n]`` (equation 13)."""
    if kind == "cosine":
        return F.cosine_similarity(e[:, None], e[None], dim=2, eps=1e-30)
    if kind == "inner":
        return (e[:, None] * e[None]).sum(2)
    square = (e[:, None] - e[None]).square().sum(2)
    none = square == 0
    return 1 / (1 + square.masked_fill(none, 1).sqrt().masked_fill(none, 0))


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
        kept = torch.zeros_like(others)
        kept.scatter_(1, others.topk(self.how.neighbours).indices, 1.0)
        chosen = (similarity * kept).relu()
        return (chosen + chosen.T) / 2


def contrast(h: Tensor, z: Tensor, tau: float) -> Tensor:
    """Equation 8 with all its terms."""

    def terms(others: Tensor) -> Tensor:
        return (F.cosine_similarity(h[:, None], others[None], dim=2) / tau).exp()

    between, among = terms(z), terms(h)
    total = between.sum(1) + among.sum(1) - among.diagonal()
    return -(between.diagonal() / total).log().mean()


def step(module: Any, loss: Tensor) -> None:
    module.optimiser.zero_grad()
    loss.backward()
    module.optimiser.step()


class Client:
    """One client; ``starts`` are θ and ω, ``phi`` the first layers of a graph learner."""

    def __init__(
        self, graph: Any, settings: Any, starts: Sequence[Any], phi: Sequence[Tensor] = ()
    ) -> None:
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
            self.adjacency = (Learner((), settings.graph).graph(self.x) > 0).float()
        elif not alone and method != "fed-mlp":
            self.adjacency = to_dense_adj(edges, max_num_nodes=n)[0]
        self.kind = 1 if alone else 0
        self.nets = [Net(starts[self.kind], settings, is_gnn=self.adjacency is not None)]
        if method == "structure-fedavg":
            self.nets.append(Net(starts[1], settings, is_gnn=False))
        self.contrast = self.distillation = torch.nan

    def models(self) -> dict[int, Weights]:
        """Theta is number 0, omega 1."""
        return {n: net.model(self.x) for n, net in enumerate(self.nets, start=self.kind)}

    def train(self, drops: Sequence[Drops] = (Drops(), Drops())) -> None:
        """One round: φ on equation 8, then θ on 10 and ω on 11; ``drops`` of each net."""
        if self.settings.strategy.optimiser == "reset":
            for net in self.nets:
                net.new_optimiser()
        if self.learner is not None:
            gnn, encoder = self.nets
            h, z = gnn(self.x, self.learner.graph(self.x)), encoder(self.x, None).detach()
            loss = contrast(h, z, self.settings.graph.tau)
            step(self.learner, loss)
            self.contrast, self.adjacency = loss.item(), self.learner.graph(self.x).detach()
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
                self.distillation = losses[1].item()
            for net, loss in zip(self.nets, losses, strict=True):
                step(net, loss)

    @torch.no_grad()
    def logits(self) -> Tensor:
        return self.nets[0](self.x, self.adjacency)


class Federation:
    """All clients and the server; ``models`` are the server's."""

    def __init__(
        self, graphs: Sequence[Any], settings: Any, starts: Sequence[Any], phi: Sequence[Tensor]
    ) -> None:
        self.clients = [Client(graph, settings, starts, phi) for graph in graphs]
        self.models = list(starts)

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
            for number, net in enumerate(client.nets, start=client.kind):
                net.load(self.models[number])
