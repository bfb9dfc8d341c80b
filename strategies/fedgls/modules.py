"""What FedGLS and its averaging baselines leave: predictions, models, newcomers' predictions.

A saved model has the engine's tensors. It needs PyTorch alone, without Flower and Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.config.module import GCNSection
from flower_graph.config.rules import Rule, choice
from flower_graph.data.new_graph import NewGraph
from flower_graph.engine.graph_batch import pack_graphs
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import DataError, OutputError
from flower_graph.ops.graph import Adjacency, gcn_adjacency, propagate
from flower_graph.outputs.build import (
    COUNT,
    FLAG,
    LAYERS,
    SHARE,
    WIDTH,
    build_module,
    built_with,
    mapping,
)
from flower_graph.outputs.files import Predictions, SavedModels, Snapshot, SparseRows
from flower_graph.outputs.form import predictions_from
from flower_graph.strategies.fedgls.cohort import (
    ENCODER,
    GNN,
    StructureCohort,
    learners_of,
    new_client,
    split_rest,
    without_edges,
)
from flower_graph.strategies.fedgls.config import (
    ENCODERS,
    FEDGLS,
    KNN,
    KNN_ON,
    LEARNED,
    METHODS,
    NONE,
    OWN,
    SIMILARITIES,
    TRUE,
    FedGLSSection,
    GraphSection,
    StructureSettings,
)
from flower_graph.strategies.fedgls.learners import learner_sizes

__all__ = ["StructureModel"]

MODEL = "flower_graph.strategies.fedgls.modules.StructureModel"
NO_EDGES = "the graph has no edges, which the client's model needs"
# Settings of the section `graph` that determine a saved model, and what is allowed
LEARNER: dict[str, Rule] = {
    "encoder": choice(*ENCODERS),
    "layers": LAYERS,
    "width": WIDTH,
    "similarity": choice(*SIMILARITIES),
    "neighbours": COUNT,
    "knn_on": choice(*KNN_ON),
}


@built_with(
    features=WIDTH,
    hidden=WIDTH,
    classes=WIDTH,
    dropout=SHARE,
    name=choice(*METHODS),
    has_edges=FLAG,
    graph=mapping(LEARNER),
)
class StructureModel(nn.Module):
    """A client's network; for FedGLS also its feature encoder and its graph learner.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, hidden layer and output.
    dropout : float
        Dropout on the hidden layer; in training mode alone.
    name : str
        FedGLS or the baseline, as in ``strategy.name``.
    has_edges : bool
        Whether the client has edges. A graphless client's graph is made from the features.
    graph : dict, optional
        Settings of the section ``graph``.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        dropout: float = 0.5,
        name: str = FEDGLS,
        graph: dict[str, Any] | None = None,  # of different types
        *,
        has_edges: bool = True,
    ) -> None:
        super().__init__()
        how, model = GraphSection(**(graph or {})), GCNSection(hidden=hidden, dropout=dropout)
        self.settings = StructureSettings(features, classes, how, model, FedGLSSection(name=name))
        graphs = self.settings.graphs
        self.graphs = TRUE if has_edges and graphs != NONE else graphs
        sizes = hidden, hidden + hidden * classes + classes
        self.network = _weights(features, *sizes)
        self.encoder = _weights(features, *sizes) if graphs == LEARNED else None
        self.learner = _weights(features, *learner_sizes(how)) if self.graphs == LEARNED else None

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and, if ``has_edges``, edges.

        ``edge_index`` ``[2, e]`` has both directions of each edge.
        """
        first, rest = self.network["first"], self.network["rest"]
        bias, weight, last = (part[0] for part in split_rest(rest[None], self.settings))
        graph, lifted = self._graph(x, edge_index), x @ first
        hidden = functional.relu(propagate(graph, lifted) + bias)
        hidden = functional.dropout(hidden, self.settings.model.dropout, self.training)
        return propagate(graph, hidden) @ weight + last

    @torch.no_grad()
    def _graph(self, x: Tensor, edge_index: Tensor | None) -> Adjacency:
        if self.graphs == TRUE and edge_index is None:
            raise ValueError("edge_index: this client's network needs edges")
        if self.graphs not in (LEARNED, KNN):
            none = torch.zeros((2, 0), dtype=torch.int64)
            return gcn_adjacency(edge_index if self.graphs == TRUE else none, len(x))  # type: ignore[arg-type]
        learners = learners_of(pack_graphs([without_edges(new_client(x))]), self.settings)
        if self.learner is not None:
            learners.start_from(ModelWeights(**self.learner))
        if self.settings.compares_hidden:
            bias = split_rest(self.network["rest"][None], self.settings)[0]
            learners.compare(functional.relu(x @ self.network["first"] + bias))
        return learners.adjacency()


def _weights(features: int, columns: int, rest: int) -> nn.ParameterDict:
    return nn.ParameterDict({"first": torch.zeros(features, columns), "rest": torch.zeros(rest)})


# Saved ------------------------------------------------------------------------------------------


def snapshot_of(cohort: StructureCohort, classes: Sequence[str] | None = None) -> Snapshot:
    """Return predictions and models by the server's last models."""
    cohort.start_from(cohort.shared_models())  # a client that was not measured has trained since
    logits = cohort.logits()
    good = cohort.sound(cohort.evaluate(logits).loss).repeat_interleave(cohort.nodes)
    predictions: Predictions = predictions_from(cohort.graphs, logits, classes)
    return Snapshot(predictions.rows(good.numpy()), models_of(cohort))


def models_of(cohort: StructureCohort) -> list[SavedModels]:
    """Return the clients' models: one form for clients with edges, one for graphless clients."""
    ends = slice(0, cohort.with_edges), slice(cohort.with_edges, cohort.size)
    return [_form(cohort, one) for one in ends if cohort.clients[one]]


def _form(cohort: StructureCohort, places: slice) -> SavedModels:
    settings, has_edges = cohort.settings, places.start < cohort.with_edges
    arguments: dict[str, object] = {
        "features": settings.num_features,
        "hidden": settings.model.hidden,
        "classes": settings.num_classes,
        "dropout": settings.model.dropout,
        "name": settings.strategy.name,
        "graph": {name: getattr(settings.graph, name) for name in LEARNER},
        "has_edges": has_edges,
    }
    models, shared = cohort.shared_models(), dict[str, Tensor]()
    kinds = {"network": int(cohort.kinds[places.start])}
    if settings.graphs == LEARNED:
        kinds["encoder"] = ENCODER
    for name, kind in kinds.items():
        shared |= {f"{name}.first": models[kind].first, f"{name}.rest": models[kind].rest}
    result = SavedModels(MODEL, arguments, list(cohort.clients[places]), shared, {})
    if settings.graphs == LEARNED and not has_edges:
        learners = cohort.learners
        assert learners is not None
        first, rest = learners.weights()
        ptr = torch.tensor(learners.batch.row_ptr)
        shared["learner.first"], result.own["learner.rest"] = learners.inactive_rows(), rest
        result.rows = SparseRows("learner.first", first, learners.batch.feature, ptr)
    return result


# Newcomers ----------------------------------------------------------------------------------------


def newcomers_logits(
    forms: Sequence[SavedModels], how: GraphSection, graph: NewGraph, steps: int
) -> Tensor:
    """Classify a newcomer's nodes, ``[n, k]``: a cohort of its own starts from the run's models.

    A client without edges first learns a graph, as graphless clients of the run did: φ takes steps
    on ``L_c`` (equations 8 and 9), between the run's θ and ω, without labels or messages.
    """
    saved, models = [_built(form) for form in forms], dict[int, ModelWeights]()
    for one in saved:
        models[ENCODER if one.graphs == OWN else GNN] = ModelWeights(**one.network)
        if one.encoder is not None:
            models[ENCODER] = ModelWeights(**one.encoder)
    settings = saved[0].settings._replace(graph=how)
    graphs, has_edges = settings.graphs, _has_edges(graph)
    if graphs == TRUE and not has_edges:
        raise DataError(NO_EDGES)
    if graphs in (LEARNED, KNN) and not has_edges:
        check_size(graph, how.neighbours)
    cohort = StructureCohort(
        [new_client(graph.x, graph.edge_index if has_edges else None)], settings
    )
    if (kind := int(cohort.kinds[0])) not in models:
        raise OutputError("no client of the run has a model for such a graph")
    # A model that no client has is not the newcomer's, so any will do.
    cohort.start_from([models.get(each, models[kind]) for each in range(settings.num_models)])
    for _ in range(0 if has_edges or graphs != LEARNED else steps):
        cohort.learn_structure()
    return cohort.logits()


def called(models: SavedModels, client: int, graph: NewGraph) -> Tensor:
    """Call a client's model; ``DataError`` if the graph lacks edges or nodes that it needs."""
    module = _built(models, client)
    if module.graphs in (LEARNED, KNN):
        check_size(graph, module.settings.graph.neighbours)
    elif module.graphs == TRUE and not _has_edges(graph):
        raise DataError(NO_EDGES)
    with torch.no_grad():
        return module(graph.x, graph.edge_index)  # type: ignore[no-any-return]


def _built(models: SavedModels, client: int | None = None) -> StructureModel:
    module = build_module(models, client)
    assert isinstance(module, StructureModel)
    return module


def _has_edges(graph: NewGraph) -> bool:
    return graph.edge_index is not None and graph.edge_index.numel() > 0


def check_size(graph: NewGraph, neighbours: int) -> None:
    """Refuse a graph with too few nodes for as many neighbours each."""
    if (n := graph.x.shape[0]) <= neighbours:
        raise DataError(
            f"the graph has {n} nodes, must have more than graph.neighbours={neighbours}"
        )
