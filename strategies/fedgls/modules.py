"""What FedGLS and its baselines leave: predictions, models, and predictions for newcomers.

A saved model has the engine's tensors. It needs PyTorch alone, without Flower and Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.config.rules import Rule, choice
from flower_graph.data.new_graph import NewGraph
from flower_graph.engine.graph_batch import pack_graphs
from flower_graph.engine.stacked_weights import ModelWeights, StackedWeights
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
from flower_graph.outputs.files import (
    Predictions,
    SavedModels,
    Snapshot,
    SparseRows,
    predictions_from,
)
from flower_graph.strategies.fedgls.cohort import StructureCohort
from flower_graph.strategies.fedgls.networks import (
    ENCODER,
    GNN,
    KNN,
    LEARNED,
    NONE,
    OWN,
    TRUE,
    GraphLearners,
    LearnerSettings,
    StructureSettings,
    learner_sizes,
    network_of,
    new_client,
    split_rest,
)

__all__ = ["StructureModel"]

MODEL = "flower_graph.strategies.fedgls.modules.StructureModel"
NO_EDGES = "the graph has no edges, which the client's model needs"
# Settings of a graph learner that determine a saved model, and what is allowed
LEARNER: dict[str, Rule] = {
    "encoder": choice("attentive", "mlp"),
    "layers": LAYERS,
    "width": WIDTH,
    "similarity": choice("cosine", "euclidean", "inner"),
    "neighbours": COUNT,
}


@built_with(
    features=WIDTH,
    hidden=WIDTH,
    classes=WIDTH,
    dropout=SHARE,
    graphs=choice(LEARNED, KNN, TRUE, OWN, NONE),
    knn_on=choice("features", "encoder"),
    encoder=FLAG,
    learner=mapping(LEARNER),
)
class StructureModel(nn.Module):
    """A client's network; for FedGLS also its feature encoder and its graph learner.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, hidden layer and output.
    dropout : float
        Dropout on the hidden layer; in training mode alone.
    graphs : str
        The network's graph: ``true`` is the graph that ``forward`` gets, ``none`` and ``own`` have
        no edges, ``learned`` and ``knn`` are made from the features.
    knn_on : str
        As of ``StructureSettings``.
    encoder : bool
        Whether there is a feature encoder; ``forward`` does not use it.
    learner : dict, optional
        Arguments of ``LearnerSettings``, for the graphs ``learned`` and ``knn``.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        dropout: float = 0.5,
        graphs: str = TRUE,
        knn_on: str = "features",
        *,
        encoder: bool = False,
        learner: dict[str, Any] | None = None,  # arguments of ``LearnerSettings``
    ) -> None:
        super().__init__()
        how = LearnerSettings(**(learner or {}))
        self.settings = StructureSettings(
            features, classes, graphs, hidden, dropout, learner=how, knn_on=knn_on
        )
        sizes = hidden, hidden + hidden * classes + classes
        self.network = _weights(features, *sizes)
        self.encoder = _weights(features, *sizes) if encoder else None
        self.learner = _weights(features, *learner_sizes(how)) if graphs == LEARNED else None

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and, if ``graphs`` is ``true``, edges.

        ``edge_index`` ``[2, e]`` has both directions of each edge.
        """
        first, rest = self.network["first"], self.network["rest"]
        bias, weight, last = (part[0] for part in split_rest(rest[None], self.settings))
        graph, lifted = self._graph(x, edge_index), x @ first
        hidden = functional.relu(propagate(graph, lifted) + bias)
        hidden = functional.dropout(hidden, self.settings.dropout, self.training)
        return propagate(graph, hidden) @ weight + last

    @torch.no_grad()
    def _graph(self, x: Tensor, edge_index: Tensor | None) -> Adjacency:
        if self.settings.graphs not in (LEARNED, KNN):
            if self.settings.graphs != TRUE:
                edge_index = torch.zeros((2, 0), dtype=torch.int64)
            elif edge_index is None:
                raise ValueError("edge_index: this client's network needs edges")
            return gcn_adjacency(edge_index, len(x))
        batch = pack_graphs([network_of(new_client(x), NONE)])
        learners = GraphLearners(batch, self.settings.graph_learner)
        if self.learner is not None:
            learners.start_from(ModelWeights(**self.learner))
        if self.settings.compares_hidden:
            bias = split_rest(self.network["rest"][None], self.settings)[0]
            learners.compare(functional.relu(x @ self.network["first"] + bias))
        return learners.adjacency()


def _weights(features: int, columns: int, rest: int) -> nn.ParameterDict:
    return nn.ParameterDict({"first": torch.zeros(features, columns), "rest": torch.zeros(rest)})


# Saved ------------------------------------------------------------------------------------------


def snapshot_of(
    cohort: StructureCohort, *, shared: bool, classes: Sequence[str] | None = None
) -> Snapshot:
    """Return predictions and models; ``shared``: the server's models, the same at all clients."""
    if shared:  # a client that was not measured has trained since
        cohort.start_from(cohort.shared_models())
    return Snapshot(predictions_of(cohort, classes), models_of(cohort, shared=shared))


def predictions_of(cohort: StructureCohort, classes: Sequence[str] | None = None) -> Predictions:
    """Return the clients' predictions for all nodes, without clients whose loss is NaN."""
    logits = cohort.logits()
    good = cohort.evaluate(logits).loss.isfinite().repeat_interleave(cohort.nodes)
    return predictions_from(cohort.graphs, logits, classes).rows(good.numpy())


def models_of(cohort: StructureCohort, *, shared: bool) -> list[SavedModels]:
    """Return the clients' models by form; ``shared``: the server's models."""
    ends = slice(0, cohort.with_edges), slice(cohort.with_edges, cohort.size)
    return [_form(cohort, one, shared=shared) for one in ends if cohort.clients[one]]


def _form(cohort: StructureCohort, places: slice, *, shared: bool) -> SavedModels:
    settings, kind = cohort.settings, int(cohort.kinds[places.start])
    graphs, learned = settings.graphs, settings.graphs == LEARNED
    if places.start < cohort.with_edges and graphs != NONE:  # clients with edges
        graphs = TRUE
    arguments: dict[str, object] = {
        "features": settings.num_features,
        "hidden": settings.hidden,
        "classes": settings.num_classes,
        "dropout": settings.dropout,
        "graphs": graphs,
        "encoder": learned,
    }
    if graphs in (LEARNED, KNN):
        learner = settings.learner._asdict()
        arguments["learner"] = {name: learner[name] for name in LEARNER}
        arguments["knn_on"] = settings.knn_on
    result = SavedModels(MODEL, arguments, list(cohort.clients[places]), {}, {})
    models = cohort.shared_models()
    if shared:
        _put_shared(result, "network", models[kind])
    else:
        _put_own(result, "network", cohort.weights, places)
    if learned:
        _put_shared(result, "encoder", models[ENCODER])
    if graphs == LEARNED:
        assert cohort.learners is not None
        _put_own(result, "learner", cohort.learners, slice(0, cohort.size - cohort.with_edges))
    return result


def _put_shared(into: SavedModels, name: str, model: ModelWeights) -> None:
    into.shared |= {f"{name}.first": model.first, f"{name}.rest": model.rest}


def _put_own(into: SavedModels, name: str, weights: StackedWeights, places: slice) -> None:
    """Save networks' own weights: of a first layer only the rows of the client's features."""
    first, rest = weights.weights()
    ptr = torch.tensor(weights.batch.row_ptr[places.start : places.stop + 1])
    rows = slice(int(ptr[0]), int(ptr[-1]))
    into.shared[f"{name}.first"] = weights.inactive_rows(int(weights.kind[places.start]))
    into.own[f"{name}.rest"] = rest[places]
    into.rows = SparseRows(
        f"{name}.first", first[rows], weights.batch.feature[rows], ptr - rows.start
    )


# Newcomers ----------------------------------------------------------------------------------------


def newcomers_logits(
    forms: Sequence[SavedModels], settings: StructureSettings, graph: NewGraph, steps: int
) -> Tensor:
    """Classify a newcomer's nodes, ``[n, k]``: a cohort of its own starts from the run's models.

    A client without edges first learns a graph, as graphless clients of the run did: φ takes steps
    on ``L_c`` (equations 8 and 9), between the run's θ and ω, without labels or messages.
    """
    arguments, graphs = forms[0].arguments, settings.graphs
    if graphs == LEARNED and not arguments.get("encoder"):
        graphs = KNN  # all clients were graphless, and learnt no graph
    settings = settings._replace(
        num_features=arguments["features"],
        num_classes=arguments["classes"],
        hidden=arguments["hidden"],
        graphs=graphs,
    )
    has_edges = _has_edges(graph)
    if graphs == TRUE and not has_edges:
        raise DataError(NO_EDGES)
    if graphs in (LEARNED, KNN) and not has_edges:
        _check_size(graph, settings.learner.neighbours)
    local = new_client(graph.x, graph.edge_index if has_edges else None)
    cohort = StructureCohort([local], settings)
    models = {}
    for form in forms:
        kind = ENCODER if form.arguments["graphs"] == OWN else GNN
        models[kind] = _shared_model(form, "network")
        if graphs == LEARNED:
            models[ENCODER] = _shared_model(form, "encoder")
    if (kind := int(cohort.kinds[0])) not in models:
        raise OutputError("no client of the run has a model for such a graph")
    # A model that no client has is not the newcomer's, so any will do.
    cohort.start_from([models.get(each, models[kind]) for each in range(settings.num_models)])
    for _ in range(0 if has_edges or graphs != LEARNED else steps):
        cohort.learn_structure()
    return cohort.logits()


def _shared_model(form: SavedModels, name: str) -> ModelWeights:
    return ModelWeights(form.shared[f"{name}.first"], form.shared[f"{name}.rest"])


def called(models: SavedModels, client: int, graph: NewGraph) -> Tensor:
    """Call a client's model; ``DataError`` if the graph lacks edges or nodes that it needs."""
    if (learner := models.arguments.get("learner")) is not None:
        _check_size(graph, learner["neighbours"])
    elif models.arguments["graphs"] == TRUE and not _has_edges(graph):
        raise DataError(NO_EDGES)
    with torch.no_grad():
        return build_module(models, client)(graph.x, graph.edge_index)  # type: ignore[no-any-return]


def _has_edges(graph: NewGraph) -> bool:
    return graph.edge_index is not None and graph.edge_index.numel() > 0


def _check_size(graph: NewGraph, neighbours: int) -> None:
    if (n := graph.x.shape[0]) <= neighbours:
        raise DataError(
            f"the graph has {n} nodes, must have more than graph.neighbours={neighbours}"
        )
