"""Outputs of FedGLS's clients: predictions, models with PyTorch's names, and what newcomers get.

This file needs neither Flower nor Ray, and PyTorch Geometric only where a model is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_graph.data.new_graph import NewGraph
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import DataError, OutputError
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import Predictions, SavedModels, Snapshot, SparseRows
from flower_graph.outputs.form import GCN, GCN_NAMES, predictions_from
from flower_graph.strategies.fedgls.cohort import StructureCohort, split_rest
from flower_graph.strategies.fedgls.networks import (
    ENCODER,
    KNN,
    LEARNED,
    NONE,
    TRUE,
    StructureSettings,
    initial_learner,
)

MODULES = "flower_graph.strategies.fedgls.modules."
MLP, MODEL = f"{MODULES}MLP", f"{MODULES}StructureModel"
# Names of a network's parts: first layer and its bias, second layer and its bias
PARTS = {
    GCN: tuple(GCN_NAMES.values()),
    MLP: ("lin1.weight", "lin1.bias", "lin2.weight", "lin2.bias"),
}
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
    ends = slice(0, cohort.with_edges), slice(cohort.with_edges, cohort.size)
    return [_form(cohort, one, shared=shared) for one in ends if cohort.clients[one]]


def _form(cohort: StructureCohort, places: slice, *, shared: bool) -> SavedModels:
    settings, kind = cohort.settings, int(cohort.kinds[places.start])
    learned = settings.graphs == LEARNED
    has_learner = places.start >= cohort.with_edges and settings.graphs in (LEARNED, KNN)
    network = MLP if settings.graphs == NONE or kind == ENCODER else GCN
    arguments: dict[str, object] = {
        "features": settings.num_features,
        "hidden": settings.hidden,
        "classes": settings.num_classes,
        "dropout": settings.dropout,
    }
    module, prefix = network, ""
    if learned or has_learner:
        module, prefix, arguments["encoder"] = MODEL, "gnn.", learned
    if has_learner:
        arguments["learner"] = _learner_arguments(settings)
    result = SavedModels(module, arguments, list(cohort.clients[places]), {}, {})
    names, model = _names(network, prefix), cohort.shared_models()[kind]
    if shared:
        result.shared |= _named(model, names, settings)
    else:
        first, rest = cohort.weights.weights()
        start, stop = (cohort.batch.row_ptr[place] for place in (places.start, places.stop))
        result.shared[names[0]] = model.first.T
        parts = (
            part.mT if part.dim() == 3 else part for part in split_rest(rest[places], settings)
        )
        result.own |= dict(zip(names[1:], parts, strict=True))
        result.rows = _active_rows(cohort, places, names[0], first[start:stop])
    if learned:
        encoder = cohort.shared_models()[ENCODER]
        result.shared |= _named(encoder, _names(MLP, "encoder."), settings)
        if has_learner:
            _put_learner(cohort, places, result)
    return result


def _names(network: str, prefix: str = "") -> list[str]:
    return [f"{prefix}{part}" for part in PARTS[network]]


def _named(
    model: ModelWeights, names: Sequence[str], settings: StructureSettings
) -> dict[str, Tensor]:
    bias, weight, last = (part[0] for part in split_rest(model.rest[None], settings))
    return dict(zip(names, (model.first.T, bias, weight.T, last), strict=True))


def _active_rows(cohort: StructureCohort, places: slice, name: str, values: Tensor) -> SparseRows:
    ptr = torch.tensor(cohort.batch.row_ptr[places.start : places.stop + 1])
    feature = cohort.batch.feature[int(ptr[0]) : int(ptr[-1])]
    return SparseRows(name, values, feature, ptr - ptr[0], transposed=True)


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


def _put_learner(cohort: StructureCohort, places: slice, into: SavedModels) -> None:
    assert cohort.learners is not None
    state, how = cohort.learners.tensors(), cohort.settings.learner
    first, features = state["weight.first"], cohort.settings.num_features
    name = "learner.weight" if how.encoder == "attentive" else "learner.linears.0.weight"
    learner = initial_learner(features, how._replace(seed=cohort.settings.seed))
    into.shared[name] = learner.first.T.to(first)
    if how.encoder == "mlp" and how.layers > 1:
        deep = state["weight.rest"].unflatten(1, (how.layers - 1, how.width, how.width))
        deeper = enumerate(deep.unbind(1), start=1)
        into.own |= {f"learner.linears.{n}.weight": one.mT for n, one in deeper}
    into.rows = _active_rows(cohort, places, name, first)


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
    names = [_names(MLP if graphs == NONE else GCN)]
    if settings.num_models > 1:
        names.append(_names(MLP, "encoder." if graphs == LEARNED else ""))
    shared = {name.removeprefix("gnn."): v for form in forms for name, v in form.shared.items()}
    own = names[int(cohort.kinds[0])]
    if own[0] not in shared:
        raise OutputError("no client of the run has a model for such a graph")
    models = []
    for one in names:  # a model that no client has is not the newcomer's, so any will do
        first, bias, second, last = (shared[name] for name in (one if one[0] in shared else own))
        models.append(ModelWeights(first.T, torch.cat([bias, second.T.reshape(-1), last])))
    cohort.start_from(models)
    for _ in range(0 if has_edges or graphs != LEARNED else steps):
        cohort.learn_structure()
    return cohort.logits()


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
