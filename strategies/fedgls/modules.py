"""What FedGLS and its averaging baselines leave: predictions, models, newcomers' predictions.

A saved model has the engine's tensors. It needs PyTorch alone, without Flower and Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flower_graph.config.module import GCNSection
from flower_graph.config.rules import Rule, choice
from flower_graph.data.new_graph import NewGraph
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import DataError, OutputError
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
from flower_graph.outputs.files import SavedModels, Snapshot, SparseRows, predictions_from
from flower_graph.strategies.fedgls.cohort import (
    ENCODER,
    StructureCohort,
    new_client,
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
        Dropout on the hidden layer while the run trained.
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
        self.has_edges, graphs = has_edges, self.settings.graphs
        sizes = hidden, hidden + hidden * classes + classes
        self.network = _weights(features, *sizes)
        self.encoder = _weights(features, *sizes) if graphs == LEARNED else None
        learns = graphs == LEARNED and not has_edges
        self.learner = _weights(features, *learner_sizes(how)) if learns else None

    @property
    def needs_edges(self) -> bool:
        graphs = self.settings.graphs
        return graphs == TRUE or (self.has_edges and graphs != NONE)

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and, if ``has_edges``, edges.

        ``edge_index`` ``[2, e]`` has both directions of each edge.
        """
        cohort = self.cohort(x, edge_index)
        if self.learner is not None and cohort.learners is not None:
            cohort.learners.start_from(ModelWeights(**self.learner))
        return cohort.logits()

    @torch.no_grad()
    def cohort(self, x: Tensor, edge_index: Tensor | None = None) -> StructureCohort:
        """Return a cohort of one client that has these weights and, if graphless, a new learner."""
        settings = self.settings
        if self.needs_edges and edge_index is None:
            raise ValueError("edge_index: this client's network needs edges")
        graph = new_client(x, edge_index if self.needs_edges else None)
        cohort = StructureCohort([graph], settings)
        models = [ModelWeights(**(one or self.network)) for one in (self.network, self.encoder)]
        cohort.start_from(models[: settings.num_models])
        return cohort


def _weights(features: int, columns: int, rest: int) -> nn.ParameterDict:
    return nn.ParameterDict({"first": torch.zeros(features, columns), "rest": torch.zeros(rest)})


# Saved ------------------------------------------------------------------------------------------


def snapshot_of(cohort: StructureCohort, classes: Sequence[str] | None = None) -> Snapshot:
    """Return predictions and models by the server's last models."""
    cohort.start_from(cohort.shared_models())  # a client that was not measured has trained since
    logits = cohort.logits()
    good = cohort.sound(cohort.evaluate(logits).loss).repeat_interleave(cohort.nodes)
    predictions = predictions_from(cohort.graphs, logits, classes)
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
    """Classify a newcomer's nodes, ``[n, k]``, by the run's models.

    A client without edges first learns a graph, as graphless clients of the run did: φ takes steps
    on ``L_c`` (equations 8 and 9), between the run's θ and ω, without labels or messages.
    """
    saved, has_edges = [_built(form) for form in forms], _has_edges(graph)
    model = next((one for one in saved if one.has_edges == has_edges), saved[0])
    graphs = model.settings.graphs
    if graphs == OWN and model.has_edges != has_edges:
        raise OutputError("no client of the run has a model for such a graph")
    if graphs == TRUE and not has_edges:
        raise DataError(NO_EDGES)
    if graphs in (LEARNED, KNN) and not has_edges:
        check_size(graph, how.neighbours)
    model.settings, model.has_edges = model.settings._replace(graph=how), has_edges
    cohort = model.cohort(graph.x, graph.edge_index)
    for _ in range(0 if has_edges or graphs != LEARNED else steps):
        cohort.learn_structure()
    return cohort.logits()


def called(models: SavedModels, client: int, graph: NewGraph) -> Tensor:
    """Call a client's model; ``DataError`` if the graph lacks edges or nodes that it needs."""
    module = _built(models, client)
    if module.needs_edges and not _has_edges(graph):
        raise DataError(NO_EDGES)
    if not module.has_edges and module.settings.graphs in (LEARNED, KNN):
        check_size(graph, module.settings.graph.neighbours)
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
