"""Outputs of FedGLS's clients: predictions, and models with PyTorch's names.

This file needs neither Flower nor Ray, and PyTorch Geometric only where a model is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_graph.data.new_graph import NewGraph
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.stacked_weights import ModelWeights, Tensors
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
    OWN,
    TRUE,
    StructureSettings,
    initial_matrices,
)

MODULES = "flower_graph.strategies.fedgls.modules."
MLP, MODEL = f"{MODULES}MLP", f"{MODULES}StructureModel"
# Names of a network's parts: first layer and its bias, second layer and its bias
PARTS = {
    GCN: tuple(GCN_NAMES.values()),
    MLP: ("lin1.weight", "lin1.bias", "lin2.weight", "lin2.bias"),
}
WEIGHT = "learner.weight"  # of an attentive graph learner


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
    predictions = predictions_from(cohort.graphs, logits[: good.numel()], classes)
    return predictions if bool(good.all()) else predictions.rows(good.numpy())


def models_of(cohort: StructureCohort, *, shared: bool) -> list[SavedModels]:
    """Return the clients' models by form; ``shared``: the server's models."""
    ends, forms = cohort.with_edges, list[SavedModels]()
    for places in (range(ends), range(ends, cohort.size)):
        if places:
            forms.append(_form(cohort, places, shared=shared))
    return forms


def _form(cohort: StructureCohort, places: range, *, shared: bool) -> SavedModels:
    settings, learned = cohort.settings, cohort.settings.graphs == LEARNED
    has_learner = places.start >= cohort.with_edges and settings.graphs in (LEARNED, KNN)
    kind = int(cohort.kinds[places.start])
    is_mlp, whole = settings.graphs == NONE or kind == ENCODER, learned or has_learner
    network = MLP if is_mlp else GCN
    arguments: dict[str, object] = {
        "features": settings.num_features,
        "hidden": settings.hidden,
        "classes": settings.num_classes,
        "dropout": settings.dropout,
    }
    clients = list(cohort.clients[places.start : places.stop])
    result = SavedModels(MODEL if whole else network, arguments, clients, {}, {})
    _put_network(cohort, places, result, names_of(network, "gnn." if whole else ""), shared=shared)
    if whole:
        arguments["encoder"] = learned
    if learned:
        encoder = cohort.shared_models()[ENCODER]
        result.shared |= _named(encoder.first, encoder.rest, names_of(MLP, "encoder."), settings)
    if has_learner:
        arguments["learner"] = learner_arguments(settings)
        _put_learner(cohort, places, result)
    return result


def names_of(network: str, prefix: str = "") -> tuple[str, ...]:
    """Return the names of a network's parts in a submodule."""
    return tuple(f"{prefix}{part}" for part in PARTS[network])


def _put_network(
    cohort: StructureCohort,
    places: range,
    into: SavedModels,
    names: tuple[str, ...],
    *,
    shared: bool,
) -> None:
    model = cohort.shared_models()[int(cohort.kinds[places.start])]
    named = _named(model.first, model.rest, names, cohort.settings)
    if shared:
        into.shared |= named
        return
    into.shared[names[0]] = named[names[0]]
    first, rest = cohort.weights.weights()
    parts = split_rest(rest[places.start : places.stop], cohort.settings)
    into.own |= {name: part.mT if part.dim() == 3 else part
                 for name, part in zip(names[1:], parts, strict=True)}  # fmt: skip
    ptr = torch.tensor(cohort.batch.row_ptr[places.start : places.stop + 1])
    rows = slice(int(ptr[0]), int(ptr[-1]))
    feature = cohort.batch.feature[rows]
    into.rows = SparseRows(names[0], first[rows], feature, ptr - ptr[0], transposed=True)


def _named(
    first: Tensor, rest: Tensor, names: tuple[str, ...], settings: StructureSettings
) -> Tensors:
    bias, weight, last = (part[0] for part in split_rest(rest[None], settings))
    return dict(zip(names, (first.T, bias, weight.T, last), strict=True))


def learner_arguments(settings: StructureSettings) -> dict[str, object]:
    """Return the arguments of a module's graph learner."""
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


def _put_learner(cohort: StructureCohort, places: range, into: SavedModels) -> None:
    assert cohort.learners is not None
    state, how = cohort.learners.tensors(), cohort.settings.learner
    first, features = state["weight.first"], cohort.settings.num_features
    if cohort.settings.graphs != LEARNED or not first.shape[1]:
        return
    batch = cohort.batch
    ptr = torch.tensor(batch.row_ptr[places.start : places.stop + 1])
    feature = batch.feature[int(ptr[0]) : int(ptr[-1])]
    if how.encoder == "attentive":
        into.shared[WEIGHT] = first.new_ones(how.layers, features)
        into.rows = SparseRows(WEIGHT, first, feature, ptr - ptr[0], transposed=True)
        return
    name = "learner.linears.{}.weight"
    learner = how._replace(seed=cohort.settings.seed)
    into.shared[name.format(0)] = initial_matrices(features, learner)[0].T.to(first)
    into.rows = SparseRows(name.format(0), first, feature, ptr - ptr[0], transposed=True)
    if how.layers > 1:
        w = how.width
        deep = state["weight.rest"].view(len(places), how.layers - 1, w, w)
        into.own |= {name.format(n + 1): deep[:, n].mT for n in range(how.layers - 1)}


NOBODY = -1  # the number of a client outside the run


def newcomers_logits(
    forms: Sequence[SavedModels], settings: StructureSettings, graph: NewGraph, steps: int
) -> Tensor:
    """Classify a newcomer's nodes, ``[n, k]``, by the models that all clients share."""
    settings, shared = _settings(forms, settings), _shared(forms)
    if settings.graphs == NONE or (settings.graphs == OWN and not has_edges(graph)):
        kind = MLP
    elif has_edges(graph) or settings.graphs == TRUE:
        kind = GCN
    elif settings.graphs == LEARNED:
        return _learnt(shared, settings, graph, steps)
    else:
        kind = MODEL
    names, prefix = names_of(MLP if kind == MLP else GCN), "gnn." if kind == MODEL else ""
    if names[0] not in shared:
        raise OutputError("no client of the run has a model for such a graph")
    state = {f"{prefix}{name}": shared[name] for name in names}
    sizes = settings.num_features, settings.hidden, settings.num_classes
    arguments: dict[str, object] = dict(zip(("features", "hidden", "classes"), sizes, strict=True))
    if kind == MODEL:
        arguments |= {"encoder": False, "learner": learner_arguments(settings)}
    return called(SavedModels(kind, arguments, [NOBODY], state, {}), NOBODY, graph)


def called(models: SavedModels, client: int, graph: NewGraph) -> Tensor:
    """Call a client's model; ``DataError`` if the graph lacks edges or nodes that it needs."""
    learner, edges = models.arguments.get("learner"), graph.edge_index
    if learner is not None:
        _check_size(graph, learner["neighbours"])
    elif models.module != MLP and not has_edges(graph):
        raise DataError("the graph has no edges, which the client's model needs")
    if edges is None:
        edges = torch.zeros((2, 0), dtype=torch.int64)
    with torch.no_grad():
        return build_module(models, client)(graph.x, edges)  # type: ignore[no-any-return]


def has_edges(graph: NewGraph) -> bool:
    """Whether there is any edge."""
    return graph.edge_index is not None and graph.edge_index.numel() > 0


def _learnt(
    shared: dict[str, Tensor], settings: StructureSettings, graph: NewGraph, steps: int
) -> Tensor:
    n = graph.x.shape[0]
    _check_size(graph, settings.learner.neighbours)
    nobody, unknown = torch.zeros(n, dtype=torch.bool), torch.full((n,), -1)
    masks = nobody, nobody, nobody
    local = ClientGraph(NOBODY, torch.arange(n), graph.x, unknown, None, None, *masks)
    cohort = StructureCohort([local], settings)
    networks = ((GCN, "gnn."), (MLP, "encoder."))
    cohort.start_from([_weights(shared, names_of(*network)) for network in networks])
    for _ in range(steps):
        cohort.learn_structure()
    return cohort.logits()[:n]


def _check_size(graph: NewGraph, neighbours: int) -> None:
    n = graph.x.shape[0]
    if n <= neighbours:
        raise DataError(
            f"the graph has {n} nodes: one whose edges are made has more than "
            f"graph.neighbours = {neighbours}"
        )


def _shared(forms: Sequence[SavedModels]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for form in forms:
        for name, value in form.shared.items():
            result[name] = result[name.removeprefix("gnn.")] = value
    return result


def _weights(shared: dict[str, Tensor], names: Sequence[str]) -> ModelWeights:
    first, bias, second, last = (shared[name] for name in names)
    return ModelWeights(first.T, torch.cat([bias, second.T.reshape(-1), last]))


def _settings(forms: Sequence[SavedModels], settings: StructureSettings) -> StructureSettings:
    arguments, graphs = forms[0].arguments, settings.graphs
    if graphs == LEARNED and not arguments.get("encoder"):
        graphs = KNN  # all clients were graphless, and learnt no graph
    return settings._replace(
        num_features=arguments["features"],
        num_classes=arguments["classes"],
        hidden=arguments["hidden"],
        graphs=graphs,
    )
