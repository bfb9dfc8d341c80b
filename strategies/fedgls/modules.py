"""FedGLS's model as it is saved and built, of one client or of several at once, and its newcomers.

What the model computes is in ``algorithm.py``. Both files need PyTorch alone: they run where Flower
and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

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
from flower_graph.ops.dropout import turn_of
from flower_graph.ops.graph import Adjacency, gcn_adjacency
from flower_graph.ops.graph_learner import LearnedGraph
from flower_graph.ops.grouped import group_sum
from flower_graph.outputs.build import COUNT, LAYERS, WIDTH, built_with, mapping
from flower_graph.rng import generator
from flower_graph.strategies.fedgls.algorithm import (
    GNN,
    LEARNER,
    MLP,
    SHARE,
    ClientModels,
    Graphless,
)
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

# Settings of the section `graph` that determine a saved model, and what is allowed
SAVED: dict[str, Rule] = {
    "encoder": choice(*ENCODERS),
    "layers": LAYERS,
    "width": WIDTH,
    "similarity": choice(*SIMILARITIES),
    "neighbours": COUNT,
    "knn_on": choice(*KNN_ON),
}


def parts_of(kind: str) -> tuple[str, ...]:
    """Return the parts of a model that has this kind of graph for graphless clients."""
    return (GNN, MLP, LEARNER)[: {LEARNED: 3, OWN: 2}.get(kind, 1)]


@built_with(
    features=WIDTH, hidden=WIDTH, classes=WIDTH, name=choice(*METHODS), graph=mapping(SAVED)
)
class StructureModel(ClientModels):
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
        self.kind = GRAPHS[name]
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
                self[f"{part}-{SHARE}"] = nn.Parameter(torch.ones(1), requires_grad=False)
        self.how, self.widths = how, [hidden, hidden * classes, classes]
        self.arguments = {"features": features, "hidden": hidden, "classes": classes, "name": name}
        self.arguments["graph"] = {key: asdict(how)[key] for key in SAVED}
        self.is_held = False  # whether it has its clients' graphs
        self._made: LearnedGraph | None = None
        self._versions: list[int] = []  # of the phi that it was made with
        self._graph: tuple[LearnedGraph | None, Adjacency] | None = None

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
        data = joined([placed], by_rows=True)
        stacks = {
            name: value[data.rows.feature] if name.endswith("-first") else value[None]
            for name, value in self.state_dict().items()
        }
        assert data.layout is not None
        model = group_modules(self, stacks, data.layout)
        assert isinstance(model, StructureModel)
        model.hold(data, {0: placed} if edge_index is None else {})
        return model

    def hold(self, data: GraphOnDevice, graphless: Mapping[int, GraphOnDevice]) -> None:
        """Work with a group's graph from now on, and its graphless clients' own, by place."""
        self.data, n, device, self.is_held = data, len(data.y), data.y.device, True
        self.given = gcn_adjacency(data.edge_index.cpu(), n).to(device)
        self.turn = turn_of(data.x)
        self.shares, self.train_shares = (
            chosen / group_sum(chosen, data.ptr).clamp(min=1)[data.owner]
            for chosen in (torch.ones(n, device=device), data.masks["train"].float())
        )
        self.has_edges = torch.ones(len(data.clients), dtype=torch.bool, device=device)
        self.has_edges[[*graphless]] = False
        if graphless and self.kind in (LEARNED, KNN):
            nodes = torch.cat([torch.arange(data.ptr[at], data.ptr[at + 1]) for at in graphless])
            own, rows = joined([*graphless.values()], by_rows=True), data.rows.at([*graphless])
            self.graphless = Graphless(own, [*graphless], rows.to(device), nodes.to(device))

    # Graphs are kept until phi has stepped

    def graph(self) -> Adjacency:
        made = None if self.graphless is None else self.made_graph(self.graphless)
        if self._graph is None or self._graph[0] is not made:
            self._graph = made, super().graph()
        return self._graph[1]

    @torch.enable_grad()  # the first caller may need no gradient, but a later step does
    def made_graph(self, graphless: Graphless) -> LearnedGraph:
        versions = [value._version for name, value in self.items() if name.startswith(LEARNER)]
        if self._made is None or self._versions != versions:
            self._made, self._versions = super().made_graph(graphless), versions
        return self._made

    def contrast(self) -> dict[int, Tensor]:
        if losses := super().contrast():
            self._made = None  # a gradient can be taken once
        return losses

    def forget_neighbours(self) -> None:
        """Make anew the graphs that compare the hidden layers of the server's model."""
        if self.how.knn_on == ENCODER:
            self._made = None


def used_graph(graph: ClientGraph, kind: str) -> ClientGraph:
    """Return a client's graph with the edges that a method gives its network."""
    edges = graph.hidden_edges if kind == TRUE and graph.is_graphless else graph.edge_index
    return replace(graph, edge_index=None if kind == NONE else edges, edge_weight=None)


# First weights -----------------------------------------------------------------------------------


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
    if model.kind == OWN and not model[f"{MLP if edges is None else GNN}-{SHARE}"] > 0:
        raise OutputError("no client of the run has a model for such a graph")
    model = model.on(x, edges)
    adam = Adam([model[name] for name in model if name.startswith(LEARNER)])
    for _ in range(steps):
        model.learn(adam)
    with torch.no_grad():
        return model.logits()
