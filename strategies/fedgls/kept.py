"""Outputs of FedGLS's clients: predictions, and models with PyTorch's names.

This file needs neither Flower nor Ray, and PyTorch Geometric only where a model is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_graph.engine.stacked_weights import Tensors
from flower_graph.outputs.files import Predictions, SavedModels, Snapshot, SparseRows
from flower_graph.outputs.form import GCN, GCN_NAMES, predictions_from
from flower_graph.strategies.fedgls.cohort import StructureCohort, split_rest
from flower_graph.strategies.fedgls.networks import (
    ENCODER,
    KNN,
    LEARNED,
    NONE,
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
