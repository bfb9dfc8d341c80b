"""What FedGLS and its baselines leave: modules that compute what the cohort does."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_structure import FEDGLS
from structure_helpers import SETTINGS, close, settings_of, toy_clients
from torch import Tensor

from flower_graph.data.new_graph import NewGraph
from flower_graph.errors import DataError, OutputError
from flower_graph.method.load import load_config
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import SavedModels
from flower_graph.strategies.fedgls.cohort import StructureCohort
from flower_graph.strategies.fedgls.method import KINDS, METHOD
from flower_graph.strategies.fedgls.modules import (
    called,
    models_of,
    newcomers_logits,
    predictions_of,
)
from flower_graph.strategies.fedgls.networks import StructureSettings, initial_models
from flower_graph.strategies.fedgls.strategy import LocalClient

LEARNERS: list[dict[str, Any]] = [
    {},
    {"similarity": "euclidean", "layers": 1},
    {"encoder": "mlp"},
    {"encoder": "mlp", "layers": 1, "similarity": "inner"},
]


def trained(method: str, settings: StructureSettings) -> StructureCohort:
    """Give a cohort after three rounds, of which a server with others' weights was a part."""
    cohort = StructureCohort(toy_clients(), settings)
    for server_round in (1, 2, 3):
        if is_shared(method):
            cohort.start_from(initial_models(settings._replace(seed=server_round)))
        cohort.train(server_round)
    if is_shared(method):
        cohort.start_from(cohort.mean_models([])[0])
    return cohort


def is_shared(method: str) -> bool:
    return not issubclass(KINDS[method].client, LocalClient)


def logits_of(cohort: StructureCohort, client: int) -> Tensor:
    place = cohort.clients.index(client)
    return cohort.logits()[cohort.batch.ptr[place] : cohort.batch.ptr[place + 1]]


@pytest.mark.parametrize(
    ("method", "learner"),
    [*((method, {}) for method in KINDS), *((FEDGLS, learner) for learner in LEARNERS[1:])],
)
def test_modules_compute_what_the_cohort_does(method: str, learner: dict[str, Any]) -> None:
    settings = settings_of(method)
    settings = settings._replace(learner=settings.learner._replace(**learner))
    cohort = trained(method, settings)
    forms = models_of(cohort, shared=is_shared(method))
    assert sorted(c for form in forms for c in form.clients) == [20, 21, 22, 23, 24, 25]
    for graph in toy_clients():
        (form,) = (form for form in forms if graph.client in form.clients)
        edges = graph.hidden_edges if method == "fed-gnn" and graph.is_graphless else None
        edges = graph.edge_index if edges is None else edges
        x = graph.x.to_dense() if graph.x.layout != torch.strided else graph.x
        said = build_module(form, graph.client)(x, edges)
        torch.testing.assert_close(said, logits_of(cohort, graph.client), atol=1e-5, rtol=1e-5)


def test_a_module_finds_neighbours_in_its_hidden_layer() -> None:
    # By distance: nodes with one number above 0 all have a cosine of 1, and rounding decides
    learner = SETTINGS.learner._replace(similarity="euclidean")
    cohort = trained("fed-gnn-knn", settings_of("fed-gnn-knn", knn_on="encoder", learner=learner))
    _, graphless = models_of(cohort, shared=True)
    for graph in toy_clients():
        if graph.is_graphless:
            said = build_module(graphless, graph.client)(graph.x, None)
            wanted = logits_of(cohort, graph.client)
            torch.testing.assert_close(said, wanted, atol=1e-5, rtol=1e-5)


def test_a_mean_is_there_once_and_whole() -> None:
    settings = settings_of(FEDGLS)
    cohort = trained(FEDGLS, settings)
    mean = cohort.mean_models([])[0]
    with_edges, graphless = models_of(cohort, shared=True)
    assert with_edges.clients == [20, 22, 25] and not with_edges.own and with_edges.rows is None
    # Nobody has the last feature: its row is of the model that the server sent.
    assert torch.equal(with_edges.shared["network.first"][-1], mean[0].first[-1])
    assert graphless.rows is not None and graphless.rows.name == "learner.first"
    phi = graphless.state_dict(24)["learner.first"]
    assert torch.equal(phi[[0, -1]], torch.ones(2, 2)) and bool((phi[1:-1] != 1).all())


def test_who_diverged_has_no_predictions() -> None:
    cohort = trained("local-gnn-knn", settings_of("local-gnn-knn"))
    cohort.tensors()["weight.rest"][0] = torch.nan
    assert set(predictions_of(cohort).client.tolist()) == set(cohort.clients[1:])


NEW = toy_clients()[0]  # with edges; the run has the others
SHARED = [name for name, kind in KINDS.items() if not issubclass(kind.client, LocalClient)]
STEPS = 4


def left_by(method: str) -> tuple[list[SavedModels], StructureCohort]:
    """Train a round without the newcomer; the models that stay, and the cohort."""
    cohort = StructureCohort(toy_clients()[1:], settings_of(method))
    cohort.train(1)
    shared = method in SHARED
    if shared:
        cohort.start_from(cohort.mean_models([])[0])
    return models_of(cohort, shared=shared), cohort


def given(*, edges: bool) -> NewGraph:
    x = NEW.x if NEW.x.layout == torch.strided else NEW.x.to_dense()
    return NewGraph(x, NEW.edge_index if edges else None, torch.full((len(x),), -1))


def by_hand(method: str, cohort: StructureCohort, *, edges: bool) -> Tensor:
    """Put the newcomer into a cohort of its own."""
    graph = NEW if edges else replace(NEW, edge_index=None, hidden_edges=NEW.edge_index)
    own = StructureCohort([graph], settings_of(method))
    own.start_from(cohort.shared_models())
    for _ in range(0 if edges or method != FEDGLS else STEPS):
        own.learn_structure()
    return own.logits()[: len(NEW.y)]


@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("method", SHARED)
def test_a_newcomer_is_a_client_with_the_runs_models(method: str, edges: bool) -> None:
    forms, cohort = left_by(method)
    ask = settings_of(method), given(edges=edges), STEPS
    if method == "fed-gnn" and not edges:
        with pytest.raises(DataError):
            newcomers_logits(forms, *ask)
    else:
        close(newcomers_logits(forms, *ask), by_hand(method, cohort, edges=edges))


def test_in_a_run_of_graphless_clients_alone_nobody_learns() -> None:
    # Such a run keeps the graphs of nearest neighbours.
    cohort = StructureCohort([toy_clients()[n] for n in (1, 3)], settings_of("fed-gnn-knn"))
    forms = models_of(cohort, shared=True)
    found = newcomers_logits(forms, settings_of(FEDGLS), given(edges=False), STEPS)
    close(found, by_hand("fed-gnn-knn", cohort, edges=False))


def test_whose_model_it_is_is_known_where_there_is_one() -> None:
    config = load_config("fedgls/cora-linqs", ["graph.neighbours=2"])
    graphless, graph = left_by(FEDGLS)[0][1], given(edges=False)
    alone = SavedModels(graphless.module, graphless.arguments, [21], graphless.state_dict(21), {})
    run = SimpleNamespace(clients=[21], all_saved=lambda: [alone], saved=lambda client: (alone, 21))
    found = METHOD.predict(config, run, graph, None)
    close(found, called(graphless, 21, graph).softmax(1))
    run.all_saved, run.clients = lambda: left_by(FEDGLS)[0], [0, 1]
    assert not torch.allclose(found, METHOD.predict(config, run, graph, None), atol=1e-4)


def test_what_a_graph_lacks_is_said() -> None:
    with_edges, graphless = left_by(FEDGLS)[0]
    with pytest.raises(DataError):
        called(with_edges, 22, given(edges=False))
    few = NewGraph(torch.eye(2, 8), None, torch.full((2,), -1))
    with pytest.raises(DataError, match="2 nodes"):
        called(graphless, 21, few)
    with pytest.raises(DataError, match="2 nodes"):
        newcomers_logits([with_edges], settings_of(FEDGLS), few, 1)
    without_mlp, _ = left_by("fed-gnn-mlp")[0]
    with pytest.raises(OutputError):
        newcomers_logits([without_mlp], settings_of("fed-gnn-mlp"), given(edges=False), 1)
