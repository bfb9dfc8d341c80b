"""FedGLS and its baselines, one client at a time, with dense matrices and PyG: slow and plain.

Nothing of the engine is used but its settings and what it starts from: graphs are ``[n, n]``
matrices, each model is a module of its own with PyTorch's Adam, losses are written out term by
term, the server's means are loops over clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from learner_helpers import slow_similarity
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv
from torch_geometric.utils import dense_to_sparse

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.rng import generator
from flower_graph.strategies.fedgls.config import FEDGLS as FEDGLS
from flower_graph.strategies.fedgls.config import METHODS as METHODS
from flower_graph.strategies.fedgls.networks import (
    LearnerSettings,
    StructureSettings,
    initial_models,
)


class PlainNet(nn.Module):
    """A model that takes over the engine's weights: its slots are the first layer and the rest."""

    start: ModelWeights  # the model that was taken over last

    def slots(self) -> list[nn.Parameter]:
        raise NotImplementedError

    def load(self, model: ModelWeights) -> None:
        """Take over a model; the optimiser stays."""
        self.start = model
        with torch.no_grad():
            for slot, value in zip(self.slots(), self.start_slots(), strict=True):
                slot.copy_(value)

    def start_slots(self) -> list[Tensor]:
        shapes = [slot.t().shape for slot in self.slots()[1:]]
        parts = self.start.rest.split([shape.numel() for shape in shapes])
        rest = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return [value.t() for value in (self.start.first, *rest)]

    def model(self, x: Tensor) -> ModelWeights:
        """The weights; a row whose feature is nowhere in ``x`` as it came."""
        first, *rest = (slot.detach().t().clone() for slot in self.slots())
        has = (x != 0).any(0)[:, None]
        flat = torch.cat([part.reshape(-1) for part in rest])
        return ModelWeights(torch.where(has, first, self.start.first), flat)


@dataclass
class Drops:
    """What dropout leaves of one model in each step of a round: ``[E, n, f]`` and ``[E, n, h]``."""

    inputs: Tensor
    hidden: Tensor


NoDrops = Drops(torch.ones(1, 1, 1), torch.ones(1, 1, 1))
MakeDrops = Callable[[int, int, int], Drops]  # of client, number of the model, round


class Net(PlainNet):
    """Two layers, of a GCN or, without a graph, of an MLP, and its own Adam."""

    def __init__(self, start: ModelWeights, settings: StructureSettings, *, is_gnn: bool) -> None:
        super().__init__()
        f, h, k = settings.num_features, settings.hidden, settings.num_classes
        pairs = ((f, h), (h, k))
        layers = [GCNConv(*pair) if is_gnn else nn.Linear(*pair) for pair in pairs]
        self.layers, self.is_gnn, self.settings = nn.ModuleList(layers), is_gnn, settings
        self.load(start)
        self.new_optimiser()

    def new_optimiser(self) -> None:
        rates = {"lr": self.settings.learning_rate, "weight_decay": self.settings.weight_decay}
        self.optimiser = torch.optim.Adam(self.parameters(), **rates)

    def slots(self) -> list[nn.Parameter]:
        """Weight and bias of the first layer, then of the second."""
        linear = [layer.lin if self.is_gnn else layer for layer in self.layers]
        pairs = zip(linear, self.layers, strict=True)
        return [slot for one, layer in pairs for slot in (one.weight, layer.bias)]

    def forward(self, x: Tensor, adjacency: Tensor | None, dropped: Tensor | float = 1.0):
        """Hidden numbers, before dropout, and logits."""
        one, two = self.layers
        around = (*dense_to_sparse(adjacency),) if adjacency is not None else ()
        hidden = one(x, *around).relu()
        return hidden, two(hidden * dropped, *around)


class Learner(nn.Module):
    """φ, and equations 13 to 18 on dense matrices."""

    def __init__(self, settings: LearnerSettings, features: int, seed: int) -> None:
        super().__init__()
        self.settings = settings
        parts = [torch.ones(features) for _ in range(settings.layers)]
        if settings.encoder == "mlp":
            chance, width = generator(seed, "graph-learner"), settings.width
            sizes = [features, *[width] * settings.layers]
            parts = [torch.empty(a, b) for a, b in pairwise(sizes)]
            for part in parts:
                nn.init.xavier_uniform_(part, generator=chance)
        self.parts = nn.ParameterList(parts)
        if parts:
            self.optimiser = torch.optim.Adam(self.parameters(), lr=settings.learning_rate)

    def graph(self, x: Tensor) -> Tensor:
        """``(σ(S) + σ(S)^T) / 2`` of each node's k most similar others; PyG normalises it."""
        e = x
        for part in self.parts:
            e = (e * part if part.dim() == 1 else e @ part).relu()
        similarity = slow_similarity(e, self.settings.similarity)
        others = similarity.detach().clone().fill_diagonal_(-torch.inf)
        kept = torch.zeros_like(others)
        kept.scatter_(1, others.topk(self.settings.neighbours).indices, 1.0)
        chosen = (similarity * kept).relu()
        return (chosen + chosen.T) / 2


def contrast(h: Tensor, z: Tensor, tau: float) -> Tensor:
    """Equation 8 with all its terms."""

    def terms(others: Tensor) -> Tensor:
        return (F.cosine_similarity(h[:, None], others[None], dim=2) / tau).exp()

    between, among = terms(z), terms(h)
    total = between.sum(1) + among.sum(1) - among.diagonal()
    return -(between.diagonal() / total).log().mean()


def dense(edges: Tensor, n: int) -> Tensor:
    """0/1 matrix."""
    matrix = torch.zeros(n, n)
    matrix[edges[0], edges[1]] = 1.0
    return matrix


class PlainClient:
    """One client of one method."""

    def __init__(self, graph: ClientGraph, method: str, settings: StructureSettings) -> None:
        self.graph, self.method, self.settings = graph, method, settings
        self.x, n = graph.x.to_dense(), graph.y.numel()
        self.learner: Learner | None = None
        start, no_graph = initial_models(settings), method == "fed-mlp"
        alone = graph.is_graphless and method in ("fed-gnn-mlp", "fedproto")
        edges = graph.hidden_edges if graph.is_graphless else graph.edge_index
        self.adjacency = None if no_graph or alone else dense(edges, n)
        if graph.is_graphless and method == FEDGLS:
            self.learner = Learner(settings.learner, settings.num_features, settings.seed)
            self.adjacency = self.learner.graph(self.x).detach()
        if graph.is_graphless and method.endswith("-knn"):
            plain = settings.learner._replace(encoder="attentive", layers=0)
            near = Learner(plain, settings.num_features, 0).graph(self.x)
            self.adjacency = (near > 0).float()
        self.kind = 1 if alone else 0
        self.nets = [Net(start[self.kind], settings, is_gnn=self.adjacency is not None)]
        if method == FEDGLS:
            self.nets.append(Net(start[1], settings, is_gnn=False))
        self.contrast = self.distillation = torch.nan

    @property
    def nodes(self) -> int:
        return self.graph.y.numel()

    def load(self, models: Sequence[ModelWeights]) -> None:
        for number, net in enumerate(self.nets, start=self.kind):
            net.load(models[number])

    def models(self) -> dict[int, ModelWeights]:
        """Theta is number 0, omega 1."""
        return {n: net.model(self.x) for n, net in enumerate(self.nets, start=self.kind)}

    def train(self, drops: Sequence[Drops], prototypes: Mapping[int, Tensor]) -> None:
        """One round; ``drops`` has an entry for each of the nets."""
        if not self.settings.keep_optimiser:
            for net in self.nets:
                net.new_optimiser()
        if self.learner is not None:
            self._learn_structure(self.learner)
        for epoch in range(self.settings.local_epochs):
            self._step(epoch, drops, prototypes)

    def _learn_structure(self, learner: Learner) -> None:
        gnn, encoder = self.nets
        h, z = gnn(self.x, learner.graph(self.x))[1], encoder(self.x, None)[1].detach()
        loss = contrast(h, z, self.settings.tau)
        learner.optimiser.zero_grad()
        loss.backward()
        learner.optimiser.step()
        self.contrast, self.adjacency = loss.item(), learner.graph(self.x).detach()

    def _step(self, epoch: int, drops: Sequence[Drops], prototypes: Mapping[int, Tensor]) -> None:
        at = [min(epoch, drop.hidden.shape[0] - 1) for drop in drops]
        x = [self.x * drop.inputs[e] for drop, e in zip(drops, at, strict=True)]
        mask, y = self.graph.train_mask, self.graph.y
        hidden, logits = self.nets[0](x[0], self.adjacency, drops[0].hidden[at[0]])
        losses = [F.cross_entropy(logits[mask], y[mask])]
        apart = [
            (hidden[node] - prototypes[int(y[node])]).square().mean()
            for node in mask.nonzero().flatten()
            if int(y[node]) in prototypes
        ]
        losses[0] = losses[0] + self.settings.prototype_weight * sum(apart) / int(mask.sum())
        if len(self.nets) == 2:
            _, student = self.nets[1](x[1], None, drops[1].hidden[at[1]])
            p, q = logits.detach().softmax(1), student.softmax(1)
            losses.append((p * (p / q).log()).sum(1).mean())
            self.distillation = losses[1].item()
        for net, loss in zip(self.nets, losses, strict=True):
            net.optimiser.zero_grad()
            loss.backward()
            net.optimiser.step()

    @torch.no_grad()
    def judge(self) -> tuple[list[float], float]:
        """Accuracy on training, validation and test nodes, and cross-entropy."""
        _, logits = self.nets[0](self.x, self.adjacency)
        graph, right = self.graph, logits.argmax(1) == self.graph.y
        masks = (graph.train_mask, graph.val_mask, graph.test_mask)
        found = [right[mask].float().mean().item() for mask in masks]
        train = graph.train_mask
        return found, F.cross_entropy(logits[train], graph.y[train]).item()

    @torch.no_grad()
    def training_vectors(self) -> list[tuple[int, Tensor]]:
        """Class and hidden numbers of each training node."""
        hidden, _ = self.nets[0](self.x, self.adjacency)
        nodes = self.graph.train_mask.nonzero().flatten()
        return [(int(self.graph.y[node]), hidden[node]) for node in nodes]


class PlainFederation:
    """All clients and the server of one method.

    ``drops`` says what dropout leaves; without it, all. ``clients`` can be looked at after each
    round, ``models`` are the server's, ``prototypes`` FedProto's by class.
    """

    def __init__(
        self,
        graphs: Sequence[ClientGraph],
        method: str,
        settings: StructureSettings,
        drops: MakeDrops | None = None,
    ) -> None:
        self.clients = [PlainClient(graph, method, settings) for graph in graphs]
        self.shares_models = method not in ("fedproto", "local-gnn-knn")
        self.method, self.drops = method, drops or (lambda *_: NoDrops)
        self.models = initial_models(settings)
        self.prototypes: dict[int, Tensor] = {}

    def train(self, number: int, absent: Sequence[int] = ()) -> None:
        """Every client's part of a round, but for those who are not there."""
        for client in self.clients:
            if client.graph.client in absent:
                continue
            if self.shares_models:
                client.load(self.models)
            own = [self.drops(client.graph.client, n, number) for n in range(len(client.nets))]
            client.train(own, self.prototypes)

    def average(self, left_out: Sequence[int] = ()) -> None:
        """The server's part, without some; then every client has the new models."""
        chosen = [client for client in self.clients if client.graph.client not in left_out]
        if self.shares_models:
            for number in range(len(self.models)):
                held = [(c.nodes, c.models().get(number)) for c in chosen]
                self.models[number] = _mean(held, self.models[number])
            for client in self.clients:
                client.load(self.models)
        if self.method == "fedproto":
            found = [pair for client in chosen for pair in client.training_vectors()]
            for label in {label for label, _ in found}:
                own = [vector for other, vector in found if other == label]
                self.prototypes[label] = torch.stack(own).mean(0)

    def round(self, number: int, absent: Sequence[int] = ()) -> None:
        """Both; some may not be there for all of it."""
        self.train(number, absent)
        self.average(absent)


def _mean(held: Sequence[tuple[int, ModelWeights | None]], last: ModelWeights) -> ModelWeights:
    """Weighted by nodes (equation 12); the last one if nobody has such a model."""
    there = [(nodes, model) for nodes, model in held if model is not None]
    total = sum(nodes for nodes, _ in there)
    if not there:
        return last
    first = torch.stack([nodes / total * model.first for nodes, model in there]).sum(0)
    return ModelWeights(first, sum(nodes / total * model.rest for nodes, model in there))
