"""Outputs of FedGLS's clients: predictions and models; predictions for newcomers.

This file needs neither Flower nor Ray.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_graph.data.new_graph import NewGraph
from flower_graph.engine.stacked_weights import ModelWeights, StackedWeights
from flower_graph.errors import DataError, OutputError
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import Predictions, SavedModels, Snapshot, SparseRows
from flower_graph.outputs.form import predictions_from
from flower_graph.strategies.fedgls.cohort import StructureCohort
from flower_graph.strategies.fedgls.networks import (
    ENCODER,
    GNN,
    KNN,
    LEARNED,
    NONE,
    OWN,
    TRUE,
    StructureSettings,
    new_client,
)

MODEL = "flower_graph.strategies.fedgls.modules.StructureModel"
# Settings of a graph learner that determine a saved model
LEARNER = ("encoder", "layers", "width", "similarity", "neighbours")
NO_EDGES = "the graph has no edges, which the client's model needs"


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
