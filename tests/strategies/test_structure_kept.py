"""What FedGLS and its baselines leave: modules that compute what the cohort does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_structure import FEDGLS
from structure_helpers import SETTINGS, settings_of, toy_clients
from torch import Tensor

from flower_graph.outputs.build import build_module
from flower_graph.strategies.fedgls.cohort import StructureCohort
from flower_graph.strategies.fedgls.kept import models_of, predictions_of
from flower_graph.strategies.fedgls.method import KINDS
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
    assert torch.equal(with_edges.shared["gnn.conv1.lin.weight"][:, -1], mean[0].first[-1])
    assert graphless.rows is not None and graphless.rows.name == "learner.weight"
    phi = graphless.state_dict(24)["learner.weight"]
    assert torch.equal(phi[:, [0, -1]], torch.ones(2, 2)) and bool((phi[:, 1:-1] != 1).all())
    names = {*with_edges.state_dict(20), *graphless.state_dict(21)}
    assert not [name for name in names if "first" in name or "rest" in name]


def test_who_diverged_has_no_predictions() -> None:
    cohort = trained("local-gnn-knn", settings_of("local-gnn-knn"))
    cohort.tensors()["weight.rest"][0] = torch.nan
    assert set(predictions_of(cohort).client.tolist()) == set(cohort.clients[1:])
