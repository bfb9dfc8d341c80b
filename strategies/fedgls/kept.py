"""Outputs of FedGLS's clients: predictions, models with PyTorch's names, and what newcomers get.

This file needs neither Flower nor Ray, and PyTorch Geometric only where a model is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flower_graph.data.new_graph import NewGraph
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import DataError, OutputError
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import Predictions, SavedModels, Snapshot
from flower_graph.outputs.form import GCN, GCN_NAMES, predictions_from
from flower_graph.strategies.fedgls.cohort import StructureCohort, split_rest
from flower_graph.strategies.fedgls.networks import (
    ENCODER,
    KNN,
    LEARNED,
    NONE,
    OWN,
    TRUE,
    GraphLearners,
    StructureSettings,
)

MODULES = "flower_graph.strategies.fedgls.modules."
MLP, MODEL = f"{MODULES}MLP", f"{MODULES}StructureModel"
NOBODY = -1  # the number of a client outside the run
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
    return SavedModels.join([_saved(cohort, at, shared=shared) for at in range(cohort.size)])


def _saved(cohort: StructureCohort, at: int, *, shared: bool) -> SavedModels:
    settings, models, kind = cohort.settings, cohort.shared_models(), int(cohort.kinds[at])
    learned = settings.graphs == LEARNED
    makes_graph = at >= cohort.with_edges and settings.graphs in (LEARNED, KNN)
    arguments: dict[str, object] = {
        "features": settings.num_features,
        "hidden": settings.hidden,
        "classes": settings.num_classes,
        "dropout": settings.dropout,
    }
    module, prefix = MLP if settings.graphs == NONE or kind == ENCODER else GCN, ""
    if learned or makes_graph:
        module, prefix, arguments["encoder"] = MODEL, "gnn.", learned
    common = _named(models[ENCODER], settings, "encoder.") if learned else {}
    own = {} if shared else _named(cohort.weights.model(at), settings, prefix)
    common |= _named(models[kind], settings, prefix) if shared else {}
    if makes_graph:
        assert cohort.learners is not None
        arguments["learner"] = _learner_arguments(settings)
        own |= _learner(cohort.learners, at - cohort.with_edges) if learned else {}
    stacked = {name: value[None] for name, value in own.items()}
    return SavedModels(module, arguments, [cohort.clients[at]], common, stacked)


def _named(model: ModelWeights, settings: StructureSettings, prefix: str = "") -> dict[str, Tensor]:
    bias, weight, last = (part[0] for part in split_rest(model.rest[None], settings))
    names = (prefix + name for name in GCN_NAMES.values())
    return dict(zip(names, (model.first.T, bias, weight.T, last), strict=True))


def _learner_arguments(settings: StructureSettings) -> dict[str, object]:
    how, learned = settings.learner, settings.graphs == LEARNED
    return {
        "encoder": how.encoder if learned else "attentive",
        "layers": how.layers if learned else 0,
        "width": how.width,
        "similarity": how.similarity,
        "neighbours": how.neighbours,
        "weighted": learned,
        **({"hidden": True} if settings.compares_hidden else {}),
    }


def _learner(learners: GraphLearners, place: int) -> dict[str, Tensor]:
    how, model = learners.settings, learners.model(place)
    if how.encoder == "attentive":
        return {"learner.weight": model.first.T}
    layers = [model.first, *model.rest.view(-1, how.width, how.width)]
    return {f"learner.linears.{n}.weight": one.T for n, one in enumerate(layers)}


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
    has_edges, n = _has_edges(graph), graph.x.shape[0]
    if graphs == TRUE and not has_edges:
        raise DataError(NO_EDGES)
    if graphs in (LEARNED, KNN) and not has_edges:
        _check_size(graph, settings.learner.neighbours)
    nobody, unknown = torch.zeros(n, dtype=torch.bool), torch.full((n,), -1)
    edges, masks = graph.edge_index if has_edges else None, (nobody, nobody, nobody)
    local = ClientGraph(NOBODY, torch.arange(n), graph.x, unknown, edges, None, *masks)
    cohort = StructureCohort([local], settings)
    shared = dict[str, Tensor]()
    for form in forms:
        prefix = "encoder." if graphs == OWN and form.module == MLP else ""
        shared |= {prefix + name.removeprefix("gnn."): v for name, v in form.shared.items()}
    models = [_model(shared, prefix) for prefix in ("", "encoder.")[: settings.num_models]]
    own = models[int(cohort.kinds[0])]
    if own is None:
        raise OutputError("no client of the run has a model for such a graph")
    # A model that no client has is not the newcomer's, so any will do
    cohort.start_from([own if model is None else model for model in models])
    for _ in range(0 if has_edges or graphs != LEARNED else steps):
        cohort.learn_structure()
    return cohort.logits()


def _model(shared: Mapping[str, Tensor], prefix: str) -> ModelWeights | None:
    names = [prefix + name for name in GCN_NAMES.values()]
    if names[0] not in shared:
        return None
    first, bias, second, last = (shared[name] for name in names)
    return ModelWeights(first.T, torch.cat([bias, second.T.reshape(-1), last]))


def called(models: SavedModels, client: int, graph: NewGraph) -> Tensor:
    """Call a client's model; ``DataError`` if the graph lacks edges or nodes that it needs."""
    learner, edges = models.arguments.get("learner"), graph.edge_index
    if learner is not None:
        _check_size(graph, learner["neighbours"])
    elif models.module != MLP and not _has_edges(graph):
        raise DataError(NO_EDGES)
    if edges is None:
        edges = torch.zeros((2, 0), dtype=torch.int64)
    with torch.no_grad():
        return build_module(models, client)(graph.x, edges)  # type: ignore[no-any-return]


def _has_edges(graph: NewGraph) -> bool:
    return graph.edge_index is not None and graph.edge_index.numel() > 0


def _check_size(graph: NewGraph, neighbours: int) -> None:
    if (n := graph.x.shape[0]) <= neighbours:
        raise DataError(
            f"the graph has {n} nodes, must have more than graph.neighbours={neighbours}"
        )
