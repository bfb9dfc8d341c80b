"""Classification of a new client's nodes by a run's models, without a round of training.

A client without edges first learns a graph, as graphless clients of the run did: φ takes steps on
``L_c`` (equations 8 and 9), between the run's θ and ω, without labels or messages.

This file needs neither Flower nor Ray.
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
from flower_graph.outputs.files import SavedModels
from flower_graph.outputs.form import GCN
from flower_graph.strategies.fedgls.cohort import StructureCohort
from flower_graph.strategies.fedgls.kept import MLP, MODEL, learner_arguments, names_of
from flower_graph.strategies.fedgls.networks import KNN, LEARNED, NONE, OWN, TRUE, StructureSettings

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
