"""FedGLS's model of one client, or of several at once: GNN, feature encoder and graph learner.

A two-layer MLP is a two-layer GCN on a graph without edges. So FedGLS's GNN (theta), its feature
encoder (omega) and the models of its baselines are *networks* of one form: ``<name>-first``
``[f, h]``, and ``<name>-rest``, the first bias, the second layer and its bias, flat. A graph
learner (phi) turns features into a graph by ``flower_graph.ops.graph_learner``. As a group
(``flower_graph.engine.grouped``) each parameter is a stack with a client's part a row.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flower_graph.config.rules import Rule, choice
from flower_graph.data.new_graph import NewGraph
from flower_graph.engine.graph_batch import check_classes, turn_of, with_dropout
from flower_graph.errors import DataError, OutputError
from flower_graph.ops.adam import Adam
from flower_graph.ops.contrast import nt_xent
from flower_graph.ops.graph import Adjacency, block_diagonal, csr, gcn_adjacency, propagate
from flower_graph.ops.graph_learner import (
    Pattern,
    attentive_encode,
    distinct_edges,
    entries_of,
    learned_adjacency,
    mlp_encode,
    symmetric_pattern,
    to_adjacency,
    weighted_propagate,
)
from flower_graph.ops.grouped import group_sizes, grouped_add, grouped_linear
from flower_graph.ops.similarity import Rows, SparseRows, comparable, kept_similarity, nearest
from flower_graph.outputs.build import COUNT, LAYERS, WIDTH, built_with, mapping
from flower_graph.rng import generator
from flower_graph.strategies.fedgls.config import (
    ENCODER,
    ENCODERS,
    FEDGLS,
    GRAPHS,
    KNN,
    KNN_ON,
    LEARNED,
    METHODS,
    NONE,
    OWN,
    SIMILARITIES,
    TRUE,
    GraphSection,
    StructureSettings,
)

__all__ = ["StructureModel"]

GNN, MLP, LEARNER = "gnn", "encoder", "learner"  # the parts of a model
# Settings of the section `graph` that determine a saved model, and what is allowed
SAVED: dict[str, Rule] = {
    "encoder": choice(*ENCODERS),
    "layers": LAYERS,
    "width": WIDTH,
    "similarity": choice(*SIMILARITIES),
    "neighbours": COUNT,
    "knn_on": choice(*KNN_ON),
}


class Clients(NamedTuple):
    """The graphs of one client or of several."""

    ptr: list[int]  # c + 1 bounds of the clients' nodes
    x: Adjacency  # [n, c f] features, those of each client in columns of their own
    turn: Tensor  # [z] the place in x of each entry of its transpose
    # The same, as wide as the client with the most columns needs; and the number of each entry's
    # column among those that its client has
    rows: SparseRows
    column: Tensor  # [z]
    graphs: list[Adjacency | None]  # normalised, of each client; None: it is made of features
    made: Tensor  # [g] the places of the clients whose graph is made

    @classmethod
    def of(cls, x: Tensor, edges: Sequence[Tensor | None], sizes: Sequence[int]) -> Clients:
        """Join clients' graphs: features ``[n, f]``, and each client's own edges ``[2, e]``."""
        (n, f), ptr = x.shape, list(accumulate(sizes, initial=0))
        owner = torch.arange(len(sizes), device=x.device)
        owner = owner.repeat_interleave(torch.tensor(sizes, device=x.device))
        row, feature = x.nonzero(as_tuple=True)
        column, value, width = feature + f * owner[row], x[row, feature], f * len(sizes)
        joined = Adjacency(csr(row, column, value, n, width), csr(column, row, value, width, n))
        graphs = [
            None if own is None else gcn_adjacency(own, size)
            for own, size in zip(edges, sizes, strict=True)
        ]
        made = torch.tensor([place for place, own in enumerate(edges) if own is None])
        # Nodes of two clients are never compared, so their columns may share numbers
        active, place = torch.unique(column, return_inverse=True)
        bounds = f * torch.arange(len(sizes) + 1, device=x.device)
        starts = torch.searchsorted(active, bounds)
        rows = SparseRows(row, column, value, (n, int(starts.diff().max())))
        made = made.long().to(x.device)
        return cls(ptr, joined, turn_of(joined), rows, place - starts[owner[row]], graphs, made)

    @property
    def sizes(self) -> list[int]:
        return group_sizes(self.ptr)


class Learned(NamedTuple):
    """The graphs that given weights make, with their gradient."""

    weights: tuple[int, ...]  # what tells these weights from others
    pattern: Pattern  # the entries of all clients' graphs
    similarities: Tensor  # [n, k] kept similarities
    entries: Tensor  # [2nk + n] the normalised entries


class Drops(NamedTuple):
    """Factors of one step's dropout: 0 or 1 / (1 - p); None: no dropout."""

    inputs: Tensor | None = None  # [z] for each entry of the features, node by node
    hidden: Tensor | None = None  # [n, h] for each number in the hidden layer


NOTHING = Drops()


@built_with(
    features=WIDTH, hidden=WIDTH, classes=WIDTH, name=choice(*METHODS), graph=mapping(SAVED)
)
class StructureModel(nn.ParameterDict):
    """A client's network; for FedGLS also its feature encoder and its graph learner.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, hidden layer and output.
    name : str
        FedGLS or the baseline, as in ``strategy.name``.
    graph : dict, optional
        Settings of the section ``graph``.
    """

    __call__ = nn.Module.__call__  # which ``nn.ParameterDict`` refuses

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        name: str = FEDGLS,
        graph: dict[str, Any] | None = None,  # of different types
    ) -> None:
        check_classes(classes)
        how = GraphSection(**(graph or {}))
        rest, deeper = hidden + hidden * classes + classes, (how.layers - 1) * how.width**2
        shapes = {f"{GNN}-first": (features, hidden), f"{GNN}-rest": (rest,)}
        self.kind: str = GRAPHS[name]
        if self.kind in (LEARNED, OWN):
            shapes |= {f"{MLP}-first": (features, hidden), f"{MLP}-rest": (rest,)}
        if self.kind == LEARNED:
            is_mlp = how.encoder == "mlp"
            shapes[f"{LEARNER}-first"] = features, how.width if is_mlp else how.layers
            shapes |= {f"{LEARNER}-rest": (deeper,)} if is_mlp else {}
        super().__init__({part: torch.zeros(shape) for part, shape in shapes.items()})
        if self.kind == OWN:
            for part in (GNN, MLP):
                self[f"{part}-share"] = nn.Parameter(torch.ones(1), requires_grad=False)
        self.how, self.split = how, [hidden, hidden * classes, classes]
        self.arguments = {"features": features, "hidden": hidden, "classes": classes, "name": name}
        self.arguments["graph"] = {key: asdict(how)[key] for key in SAVED}
        self.data: Clients | None = None  # of whom this is the model, or the models
        self.has_edges: Tensor | None = None  # [c]
        self.received: object = None  # what the server sent last, and how often it has sent
        self.sent = 0
        self.drops: list[tuple[Drops, Drops]] = []  # of a round's further steps
        self._lone: Clients | None = None  # the clients whose graphs are made
        self._learned: Learned | None = None
        self._graph: tuple[object, Adjacency] | None = None

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and, where there are any, edges.

        ``edge_index`` ``[2, e]`` has both directions of each edge; without it, the model makes a
        graph of the features.
        """
        if edge_index is None and self.kind == TRUE:
            raise ValueError("edge_index: this client's network needs edges")
        self.hold(x, [edge_index], [len(x)])
        with torch.no_grad():
            return self.logits()

    def hold(self, x: Tensor, edges: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        """Work from now on with these clients' features ``[n, f]`` and edges, None of graphless."""
        self.has_edges = torch.tensor([own is not None for own in edges], device=x.device)
        none = torch.zeros(2, 0, dtype=torch.int64, device=x.device)
        if self.kind in (LEARNED, KNN):
            used = list(edges)
        else:
            used = [none if own is None or self.kind == NONE else own for own in edges]
        self.data, self._learned, self._graph = Clients.of(x, used, sizes), None, None
        lone, parts = self.data.made.tolist(), x.split(list(sizes))
        self._lone = None
        if lone:
            own = torch.cat([parts[place] for place in lone])
            self._lone = Clients.of(own, [None] * len(lone), [sizes[place] for place in lone])

    # Networks

    def stack(self, name: str) -> Tensor:
        """Return the clients' values of a parameter, ``[c, ...]``."""
        assert self.data is not None
        value: Tensor = self[name]
        return value if len(self.data.graphs) > 1 else value[None]

    def network(self, part: str) -> tuple[Tensor, Tensor]:
        return self.stack(f"{part}-first"), self.stack(f"{part}-rest")

    def own(self) -> tuple[Tensor, Tensor]:
        """Return the networks that classify: of Fed-GNNMLP, those that each client has."""
        if self.kind != OWN:
            return self.network(GNN)
        assert self.has_edges is not None
        (one, rest), (other, last) = self.network(GNN), self.network(MLP)
        has = self.has_edges[:, None]
        return torch.where(has[..., None], one, other), torch.where(has, rest, last)

    def lay(self, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split rows ``[c, D]`` into the first bias, the second layer's matrix and its bias."""
        bias, weight, last = rest.split(self.split, dim=1)
        return bias, weight.unflatten(1, (self.split[0], self.split[2])), last

    def logits(self, part: str = "", drops: Drops = NOTHING) -> Tensor:
        """Return the logits of all nodes ``[n, k]``: ``H``, or of ``part`` without a graph."""
        assert self.data is not None
        data, (first, rest) = self.data, self.network(part) if part else self.own()
        return self._logits(data, None if part else self.graph(), first, rest, drops)

    def _logits(
        self,
        data: Clients,
        graph: Adjacency | None,
        first: Tensor,
        rest: Tensor,
        drops: Drops = NOTHING,
    ) -> Tensor:
        x, (bias, weight, last) = data.x, self.lay(rest)
        if drops.inputs is not None:
            x = with_dropout(x, data.turn, drops.inputs)
        hidden = propagate(x, first.flatten(0, 1))
        hidden = hidden if graph is None else propagate(graph, hidden)
        hidden = F.relu_(grouped_add(hidden, bias, data.ptr))
        hidden = hidden if drops.hidden is None else hidden * drops.hidden
        # Multiplying by the weights after the neighbours' sum gives the same, and includes the bias
        hidden = hidden if graph is None else propagate(graph, hidden)
        return grouped_linear(hidden, weight, last, data.ptr)

    def contrast(self) -> Tensor:
        """Return ``L_c`` of each graphless client (equations 8 and 9); its gradient is phi's."""
        assert self.data is not None and self._lone is not None
        lone, places, learned = self._lone, self.data.made, self.learned()
        self._learned = None  # a gradient can be taken once
        (first, rest), (other, last) = (
            [value.detach()[places] for value in self.network(part)] for part in (GNN, MLP)
        )
        z, lifted = self._logits(lone, None, other, last), propagate(lone.x, first.flatten(0, 1))
        bias, weight, last = self.lay(rest)
        hidden = weighted_propagate(learned.pattern, learned.entries, lifted)
        hidden = F.relu(grouped_add(hidden, bias, lone.ptr))
        around = weighted_propagate(learned.pattern, learned.entries, hidden)
        h, every = grouped_linear(around, weight, last, lone.ptr), torch.arange(lone.ptr[-1])
        every, sizes = every.to(h.device), torch.tensor(lone.sizes, device=h.device)
        return nt_xent(h, z, every, lone.ptr, lone.ptr, self.how.tau) / sizes

    # Graphs

    def graph(self) -> Adjacency:
        """Return the normalised graph of all clients, made graphs among the given ones."""
        assert self.data is not None
        learned = None if self._lone is None else self.learned()
        if self._graph is None or self._graph[0] is not learned:
            graphs = [*self.data.graphs]
            if learned is not None and self._lone is not None:
                whole = to_adjacency(learned.pattern, learned.entries)
                if self.kind == KNN:
                    whole = gcn_adjacency(self.neighbours(), self._lone.ptr[-1])
                made = iter(whole.blocks(self._lone.ptr))
                graphs = [next(made) if one is None else one for one in graphs]
            joined = block_diagonal([one for one in graphs if one is not None])
            self._graph = learned, joined
        return self._graph[1]

    def neighbours(self) -> Tensor:
        """Return the edges of the made graphs, ``[2, e]``: both directions, sorted."""
        learned = self.learned()
        weight = entries_of(learned.similarities.detach(), learned.pattern, loops=0)
        return distinct_edges(learned.pattern.edge_index, weight)

    @torch.enable_grad()  # the first caller may need no gradient, but a later step does
    def learned(self) -> Learned:
        """Return the made graphs: the same, with their gradient, until the weights change."""
        lone = self._lone
        assert lone is not None
        in_hidden = self.kind == KNN and self.how.knn_on == ENCODER
        weights = [t._version for n, t in self.items() if n.startswith(LEARNER)]
        key = (self.sent if in_hidden else 0, *weights)
        if self._learned is None or self._learned.weights != key:
            e, k = self._hidden_alone() if in_hidden else self._encoded(), self.how.neighbours
            similarity = self.how.similarity
            if similarity == "cosine":  # the inner product of unit vectors, made for all at once
                e, similarity = comparable(e, similarity), "inner"
            near, kept = [], []
            for begin, own in _pieces(e, lone.ptr):
                found = nearest(own, k, similarity)
                near.append(found.neighbours + begin)
                kept.append(kept_similarity(own, found.neighbours, similarity, found.products))
            pattern, similarities = symmetric_pattern(torch.cat(near)), torch.cat(kept)
            entries = learned_adjacency(similarities, pattern)
            self._learned = Learned(key, pattern, similarities, entries)
        return self._learned

    @torch.no_grad()
    def _hidden_alone(self) -> Tensor:
        """Return the hidden layer of each graphless client's node, without neighbours."""
        assert self.data is not None and self._lone is not None
        first, rest = (value[self.data.made] for value in self.network(GNN))
        lifted = propagate(self._lone.x, first.flatten(0, 1))
        return F.relu(grouped_add(lifted, self.lay(rest)[0], self._lone.ptr))

    def _encoded(self) -> Rows:
        assert self.data is not None and self._lone is not None
        lone, is_knn = self._lone, self.kind == KNN
        names = [] if is_knn else [name for name in self if name.startswith(LEARNER)]
        phi = [self.stack(name)[self.data.made] for name in names]
        if phi and self.how.encoder == "mlp":
            w = self.how.width
            rest = phi[1].view(len(lone.graphs), self.how.layers - 1, w, w)
            return mlp_encode(lone.x, phi[0].flatten(0, 1), rest, lone.ptr)
        e = attentive_encode(lone.rows, phi[0].flatten(0, 1).T) if phi else lone.rows
        return e._replace(col=lone.column)


def _pieces(e: Rows, ptr: list[int]) -> list[tuple[int, Rows]]:
    """Split nodes' vectors by clients, each with its first node."""
    if not isinstance(e, SparseRows):
        return list(zip(ptr, e.split(group_sizes(ptr)), strict=False))
    starts = torch.searchsorted(e.row, torch.tensor(ptr, device=e.row.device)).tolist()
    parts = zip(*(one.split(group_sizes(starts)) for one in e[:3]), strict=True)
    return [
        (begin, SparseRows(row - begin, col, value, (end - begin, e.shape[1])))
        for (begin, end), (row, col, value) in zip(pairwise(ptr), parts, strict=True)
    ]


@torch.no_grad()
def first_model(settings: StructureSettings) -> StructureModel:
    """Draw the model from which all clients start.

    Networks are drawn as PyG's GCN is. An attentive encoder starts with ones: its first graph joins
    the nodes that are most alike. An MLP's matrices are drawn as a GCN's are.
    """
    how, (h, k) = settings.graph, (settings.model.hidden, settings.num_classes)
    model = StructureModel(settings.num_features, h, k, settings.strategy.name, asdict(how))
    for part in (GNN, MLP)[: 1 + (f"{MLP}-first" in model)]:
        rng = generator(settings.seed, "structure", part)
        _draw(model[f"{part}-first"], rng)
        _draw(model[f"{part}-rest"][h : h + h * k].view(h, k), rng)
    draw_learner(model, how, settings.seed)
    return model


@torch.no_grad()
def draw_learner(model: StructureModel, how: GraphSection, seed: int) -> None:
    """Give a model the graph learner that a client begins with, and its settings."""
    model.how = how
    if f"{LEARNER}-rest" in model:
        rng = generator(seed, "graph-learner")
        rest = model[f"{LEARNER}-rest"].view(how.layers - 1, how.width, how.width)
        for matrix in (model[f"{LEARNER}-first"], *rest):
            _draw(matrix, rng)
    elif f"{LEARNER}-first" in model:
        model[f"{LEARNER}-first"].fill_(1)


def _draw(matrix: Tensor, rng: torch.Generator) -> None:
    nn.init.xavier_uniform_(matrix.data, generator=rng)


# Newcomers ----------------------------------------------------------------------------------------


def predict(model: StructureModel, graph: NewGraph, steps: int = 0) -> Tensor:
    """Classify the nodes of a graph that a run has not seen, ``[n, k]``.

    Without edges FedGLS's phi first takes ``steps`` on ``L_c`` (equations 8 and 9), between the
    run's theta and omega, without labels or messages.
    """
    x, edges = graph.x, graph.edge_index
    edges = edges if edges is not None and edges.numel() else None
    if edges is None and model.kind == TRUE:
        raise DataError("the graph has no edges, which the client's model needs")
    if edges is None and model.kind in (LEARNED, KNN) and len(x) <= model.how.neighbours:
        more = f"must have more than graph.neighbours={model.how.neighbours}"
        raise DataError(f"the graph has {len(x)} nodes, {more}")
    if model.kind == OWN and not model[f"{MLP if edges is None else GNN}-share"] > 0:
        raise OutputError("no client of the run has a model for such a graph")
    model.hold(x, [edges], [len(x)])
    if edges is None and model.kind == LEARNED:
        phi = [value for name, value in model.items() if name.startswith(LEARNER)]
        adam = Adam(phi, lr=model.how.learning_rate)
        for _ in range(steps):
            adam.zero_grad()
            model.contrast().sum().backward()
            adam.step()
    with torch.no_grad():
        return model.logits()
