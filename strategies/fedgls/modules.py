"""FedGLS's model of one client, or of several at once: GNN, feature encoder and graph learner.

A two-layer MLP is a two-layer GCN on a graph without edges. So FedGLS's GNN (theta), its feature
encoder (omega) and the models of its baselines are *networks* of one form: ``<name>-first``
``[f, h]``, and ``<name>-rest``, the first bias, the second layer and its bias, flat. A graph
learner (phi) turns features into a graph by ``flower_graph.ops.graph_learner``. As a group
(``flower_graph.engine.cohort``) each parameter is a stack with a client's part a row.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flower_graph.config.rules import Rule, choice
from flower_graph.data.description import NewGraph
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import (
    GraphOnDevice,
    check_classes,
    group_modules,
    joined,
    placed_on,
)
from flower_graph.errors import DataError, OutputError
from flower_graph.ops.adam import Adam
from flower_graph.ops.contrast import nt_xent
from flower_graph.ops.dropout import DropoutMask, turn_of, with_dropout
from flower_graph.ops.graph import Adjacency, entries, gcn_adjacency, propagate, with_part
from flower_graph.ops.graph_learner import LearnedGraph, attentive_encode, mlp_encode
from flower_graph.ops.grouped import group_sizes, group_sum, grouped_add, grouped_linear
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
NO_DROPS = DropoutMask(None, None)
Network = tuple[Tensor, Tensor, Tensor, Tensor]  # a two-layer GCN or MLP of each client
# Settings of the section `graph` that determine a saved model, and what is allowed
SAVED: dict[str, Rule] = {
    "encoder": choice(*ENCODERS),
    "layers": LAYERS,
    "width": WIDTH,
    "similarity": choice(*SIMILARITIES),
    "neighbours": COUNT,
    "knn_on": choice(*KNN_ON),
}


def networks_of(kind: str) -> tuple[str, ...]:
    """Return the networks that a client trains."""
    return (GNN, MLP) if kind == LEARNED else (GNN,)


def parts_of(kind: str) -> tuple[str, ...]:
    """Return the parts of a model that has this kind of graph for graphless clients."""
    return (GNN, MLP, LEARNER)[: {LEARNED: 3, OWN: 2}.get(kind, 1)]


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
        self.kind: str = GRAPHS[name]
        shapes = dict[str, tuple[int, ...]]()
        for part in parts_of(self.kind)[:2]:
            shapes |= {f"{part}-first": (features, hidden), f"{part}-rest": (rest,)}
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
        self.batch: GraphOnDevice | None = None  # the clients
        self.has_edges = torch.zeros(0, dtype=torch.bool)  # [c]
        # [n] a node's weight in its client's mean over all nodes, or over the training nodes
        self.shares = self.train_shares = self._turn = torch.zeros(0)
        self._lone: GraphOnDevice | None = None  # the clients whose graphs are made
        self._made: list[int] = []  # their places
        self._lone_rows = self._lone_nodes = torch.zeros(0)  # their active rows and their nodes
        self._given: Adjacency  # the clients' own graphs
        self._learned: LearnedGraph | None = None
        self._versions: list[int] = []  # of the weights that made it
        self._graph: tuple[object, Adjacency] | None = None

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and, where there are any, edges.

        ``edge_index`` ``[2, e]`` has both directions of each edge; without it, the model makes a
        graph of the features.
        """
        with torch.no_grad():
            return self.on(x, edge_index).logits()

    def on(self, x: Tensor, edge_index: Tensor | None) -> StructureModel:
        """Return the model of a group of one client that has this graph."""
        if edge_index is None and self.kind == TRUE:
            raise DataError("the graph has no edges, which the client's model needs")
        graph = ClientGraph.bare(-1, x, torch.full((len(x),), -1), edge_index)
        placed = placed_on(used_graph(graph, self.kind), torch.device("cpu"), is_dense=False)
        batch = joined([placed], by_rows=True)
        stacks = {
            name: value[batch.rows.feature] if name.endswith("-first") else value[None]
            for name, value in self.state_dict().items()
        }
        assert batch.layout is not None
        model = group_modules(self, stacks, batch.layout)
        assert isinstance(model, StructureModel)
        model.hold(batch, {0: placed} if edge_index is None else {})
        return model

    def hold(self, batch: GraphOnDevice, graphless: Mapping[int, GraphOnDevice]) -> None:
        """Work with a group's graph from now on, and its graphless clients' own, by place."""
        self.batch, n, device = batch, len(batch.y), batch.y.device
        self._given = gcn_adjacency(batch.edge_index.cpu(), n).to(device)
        self._turn = turn_of(batch.x)
        self.shares, self.train_shares = (
            chosen / group_sum(chosen, batch.ptr).clamp(min=1)[batch.owner]
            for chosen in (torch.ones(n, device=device), batch.masks["train"].float())
        )
        self.has_edges = torch.ones(len(batch.clients), dtype=torch.bool, device=device)
        self.has_edges[[*graphless]] = False
        self._made = [*graphless] if self.kind in (LEARNED, KNN) else []
        if self._made:
            self._lone = joined([*graphless.values()], by_rows=True)
            self._lone_rows = batch.rows.at(self._made).to(device)
            nodes = [torch.arange(batch.ptr[at], batch.ptr[at + 1]) for at in self._made]
            self._lone_nodes = torch.cat(nodes).to(device)

    # Networks

    def network(self, part: str, *, is_lone: bool = False) -> Network:
        """Return a network of all clients, or, without its gradient, of those that make graphs.

        It is the active rows of the first layers ``[r, h]``, their biases ``[c, h]``, the second
        layers ``[c, h, k]`` and their biases ``[c, k]``.
        """
        first, rest = self[f"{part}-first"], self[f"{part}-rest"]
        if is_lone:
            first = first.detach().index_select(0, self._lone_rows)
            rest = rest.detach()[self._made]
        elif self.kind == OWN:  # each client has one of the two
            assert self.batch is not None
            has = self.has_edges[:, None]
            first = torch.where(has[self.batch.rows.owner], first, self[f"{MLP}-first"])
            rest = torch.where(has, rest, self[f"{MLP}-rest"])
        bias, weight, last = rest.split(self.split, dim=1)
        return first, bias, weight.unflatten(1, (self.split[0], self.split[2])), last

    def logits(self) -> Tensor:
        """Return the logits of all nodes ``[n, k]``, ``H``."""
        return self.outputs([NO_DROPS])[0]

    def outputs(self, drops: Sequence[DropoutMask]) -> list[Tensor]:
        """Return ``H``, and of FedGLS ``Z``, if there are as many dropout masks."""
        assert self.batch is not None
        each = zip(networks_of(self.kind), (self.graph(), None), drops, strict=False)
        return [self._logits(self.batch, graph, self.network(p), drop) for p, graph, drop in each]

    def _logits(
        self,
        batch: GraphOnDevice,
        graph: Adjacency | LearnedGraph | None,
        network: Network,
        drops: DropoutMask = NO_DROPS,
    ) -> Tensor:
        def around(rows: Tensor) -> Tensor:
            if graph is None:
                return rows
            return propagate(graph, rows) if isinstance(graph, Adjacency) else graph.propagate(rows)

        first, bias, weight, last = network
        x = batch.x if drops.inputs is None else with_dropout(batch.x, self._turn, drops.inputs)
        hidden = F.relu_(grouped_add(around(propagate(x, first)), bias, batch.ptr))
        hidden = hidden if drops.hidden is None else hidden * drops.hidden
        # Multiplying by the weights after the neighbours' sum gives the same, and includes the bias
        return grouped_linear(around(hidden), weight, last, batch.ptr)

    def contrast(self) -> dict[int, Tensor]:
        """Return ``L_c`` of each graphless client (equations 8 and 9); its gradient is phi's."""
        if self.kind != LEARNED or self._lone is None:
            return {}
        lone, learned = self._lone, self.learned(self._lone)
        self._learned = None  # a gradient can be taken once
        graphs = zip((learned, None), (GNN, MLP), strict=True)
        h, z = (self._logits(lone, graph, self.network(p, is_lone=True)) for graph, p in graphs)
        every = torch.arange(lone.ptr[-1], device=h.device)
        sums = nt_xent(h, z, every, lone.ptr, lone.ptr, self.how.tau)
        each = zip(sums.unbind(), group_sizes(lone.ptr), strict=True)
        return {at: one / n for at, (one, n) in zip(self._made, each, strict=True)}

    # Graphs

    def graph(self) -> Adjacency:
        """Return the normalised graph of all clients, made graphs among the given ones."""
        if (lone := self._lone) is None:
            return self._given
        learned = self.learned(lone)
        if self._graph is None or self._graph[0] is not learned:
            is_knn, n = self.kind == KNN, lone.ptr[-1]
            made = gcn_adjacency(learned.edges(), n) if is_knn else learned.adjacency()
            self._graph = learned, with_part(self._given, self._lone_nodes, made)
        return self._graph[1]

    def made_edges(self) -> Tensor | None:
        """Return the edges of the graphs that graphless clients make, if there are any."""
        return None if self._lone is None else self.learned(self._lone).edges()

    def forget_neighbours(self) -> None:
        """Make anew the graphs that compare the hidden layers of the server's model."""
        if self.how.knn_on == ENCODER:
            self._learned = None

    @torch.enable_grad()  # the first caller may need no gradient, but a later step does
    def learned(self, lone: GraphOnDevice) -> LearnedGraph:
        """Return the made graphs: the same, with their gradient, until the weights change."""
        versions = [t._version for n, t in self.items() if n.startswith(LEARNER)]
        if self._learned is None or self._versions != versions:
            e, k, similarity = self._compared(lone), self.how.neighbours, self.how.similarity
            if similarity == "cosine":  # the inner product of unit vectors, made for all at once
                e, similarity = comparable(e, similarity), "inner"
            near, kept = [], []
            for begin, own in _pieces(e, lone.ptr):
                found = nearest(own, k, similarity)
                near.append(found.neighbours + begin)
                kept.append(kept_similarity(own, found.neighbours, similarity, found.products))
            self._versions = versions
            self._learned = LearnedGraph.of(torch.cat(near), torch.cat(kept))
        return self._learned

    def _compared(self, lone: GraphOnDevice) -> Rows:
        """Return what is compared of each node: encoded features, or a hidden layer."""
        if self.kind == KNN and self.how.knn_on == ENCODER:  # without neighbours
            first, bias, *_ = self.network(GNN, is_lone=True)
            return F.relu(grouped_add(propagate(lone.x, first), bias, lone.ptr))
        row, column, value = entries(lone.x.matrix)
        e = SparseRows(row, column, value, (lone.ptr[-1], max(group_sizes(lone.rows.ptr))))
        if self.kind == LEARNED:
            first = self[f"{LEARNER}-first"].index_select(0, self._lone_rows)
            if self.how.encoder == "mlp":
                w = self.how.width
                deeper = self[f"{LEARNER}-rest"][self._made].view(len(self._made), -1, w, w)
                return mlp_encode(lone.x, first, deeper, lone.ptr)
            e = attentive_encode(e, first.T)
        # Nodes of two clients are never compared, so columns of different clients share numbers
        starts = torch.tensor(lone.rows.ptr, device=row.device)[lone.owner[row]]
        return e._replace(col=column - starts)


def used_graph(graph: ClientGraph, kind: str) -> ClientGraph:
    """Return a client's graph with the edges that a method gives its network."""
    edges = graph.hidden_edges if kind == TRUE and graph.is_graphless else graph.edge_index
    return replace(graph, edge_index=None if kind == NONE else edges, edge_weight=None)


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
    for part in parts_of(model.kind)[:2]:
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
    if edges is None and model.kind in (LEARNED, KNN) and len(x) <= model.how.neighbours:
        more = f"must have more than graph.neighbours={model.how.neighbours}"
        raise DataError(f"the graph has {len(x)} nodes, {more}")
    if model.kind == OWN and not model[f"{MLP if edges is None else GNN}-share"] > 0:
        raise OutputError("no client of the run has a model for such a graph")
    model = model.on(x, edges)
    adam = Adam([model[n] for n in model if n.startswith(LEARNER)], lr=model.how.learning_rate)
    for _ in range(steps if edges is None else 0):
        for loss in model.contrast().values():
            adam.zero_grad()
            loss.backward()
            adam.step()
    with torch.no_grad():
        return model.logits()
