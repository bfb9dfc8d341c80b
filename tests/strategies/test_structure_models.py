"""What FedGLS's clients begin with, measure, and leave; newcomers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from graph_helpers import Largest
from plain import fedgls as plain
from structure_helpers import (
    METHODS,
    SETTINGS,
    close,
    plain_federation,
    run,
    settings_of,
    toy_clients,
)

from flower_graph.data.description import NewGraph
from flower_graph.data.graph import ClientGraph
from flower_graph.errors import DataError, OutputError
from flower_graph.method.load import load_config
from flower_graph.ops.graph_learner import edge_agreement
from flower_graph.outputs.build import build_module, form_of
from flower_graph.outputs.files import SavedModels
from flower_graph.strategies.fedgls.config import FEDGLS, StructureSettings
from flower_graph.strategies.fedgls.method import METHOD
from flower_graph.strategies.fedgls.modules import (
    StructureModel,
    draw_learner,
    first_model,
    predict,
)
from flower_graph.strategies.fedgls.strategy import StructureClient


def changed(place: int, **values: Any) -> list[ClientGraph]:
    graphs = toy_clients()
    graphs[place] = replace(graphs[place], **values)
    return graphs


@pytest.mark.parametrize("method", [FEDGLS, "fed-gnn-knn"])
def test_learned_graphs_against_the_true_ones(method: str) -> None:
    own = settings_of(method)
    report, federation = run(own, rounds=1).reports[-1], plain_federation(own)
    federation.train()
    federation.average()
    wanted = []
    for client in (one for one in federation.clients if one.graph.is_graphless):
        learned, y = (client.adjacency > 0).nonzero().T, client.graph.y
        wanted.append(edge_agreement(learned, client.graph.hidden_edges, y, [0, len(y)]))
    assert report.structure.keys() == wanted[0].keys()
    for name, value in report.structure.items():
        assert value == pytest.approx(float(torch.cat([one[name] for one in wanted]).nanmean()))


def test_graphs_are_not_compared_where_nobody_knows_the_true_ones() -> None:
    graphs = changed(3, hidden_edges=None)
    assert run(graphs=graphs, supernodes=1, rounds=1).reports[0].structure == {}
    with_edges = [graph for graph in graphs if not graph.is_graphless]
    assert run(graphs=with_edges, supernodes=1, rounds=1).reports[0].structure == {}
    with pytest.raises(ValueError, match="client 23"):
        StructureClient(Context(1, 2, {}, RecordDict(), {}), graphs, settings_of("fed-gnn"))


@pytest.mark.parametrize(
    ("graphs", "said"),
    [
        ([], "graphs"),
        (changed(1, client=20), "numbers.*20, 20"),
        (changed(1, x=torch.ones(7, 9)), "client 21.*9"),
        (changed(1, y=torch.full((7,), 4)), "client 21.*4"),
    ],
)
def test_clients_that_do_not_fit_are_refused(graphs: list[ClientGraph], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StructureClient(Context(1, 2, {}, RecordDict(), {}), graphs, SETTINGS)


@pytest.mark.parametrize("encoder", ["attentive", "mlp"])
def test_a_step_holds_no_matrix_of_nodes_times_nodes(encoder: str) -> None:
    n, f = 4000, 12
    own = settings_of(graph={"encoder": encoder})._replace(num_features=f)
    x = torch.rand(n, f, generator=torch.Generator().manual_seed(1))
    model = first_model(own).on(x * (x > 0.5), None)
    model.logits()
    with Largest() as largest:
        model.contrast()[0].sum().backward()
        model.logits()
    assert n * f // 2 <= largest.numbers <= n * n // 50


def trained(
    settings: StructureSettings, graphs: list[ClientGraph] | None = None
) -> tuple[list[SavedModels], plain.Federation]:
    """Give the models of clients after three rounds, and plain clients that did the same."""
    graphs = toy_clients() if graphs is None else graphs
    (cohort,) = run(settings, graphs=graphs, supernodes=1).cohorts
    federation = plain_federation(settings, graphs)
    for _ in range(3):
        federation.train()
        federation.average()
    forms = [form_of(one.module, StructureModel, one.graph.client) for one in cohort]
    return SavedModels.join(forms), federation


# By distance: nodes with one number above 0 all have a cosine of 1, and rounding decides
IN_HIDDEN = {"knn_on": "encoder", "similarity": "euclidean"}
LEARNERS: list[dict[str, Any]] = [
    {"similarity": "euclidean", "layers": 1},
    {"encoder": "mlp"},
    {"encoder": "mlp", "layers": 1, "similarity": "inner"},
]


@pytest.mark.parametrize(
    ("method", "learner"),
    [
        *((method, {}) for method in METHODS),
        *((FEDGLS, learner) for learner in LEARNERS),
        ("fed-gnn-knn", IN_HIDDEN),
    ],
)
def test_saved_models_compute_what_the_clients_do(method: str, learner: dict[str, Any]) -> None:
    (cohort,) = run(settings_of(method, graph=learner), supernodes=1).cohorts
    forms = [form_of(one.module, StructureModel, one.graph.client) for one in cohort]
    with torch.no_grad(), cohort.learners([20, 21, 22, 23, 24, 25]) as (group,):
        logits = group.module.logits().split([len(graph.y) for graph in toy_clients()])
    for form, graph, wanted in zip(forms, toy_clients(), logits, strict=True):
        edges = graph.hidden_edges if method == "fed-gnn" and graph.is_graphless else None
        edges = graph.edge_index if edges is None else edges
        close(build_module(form)(graph.x.to_dense(), edges), wanted)


def test_a_mean_is_there_once_and_phi_for_each_client() -> None:
    (form,), _ = trained(SETTINGS)
    assert {*form.shared} == {"gnn-first", "gnn-rest", "encoder-first", "encoder-rest"}
    assert {*form.own} == {"learner-first"}
    # Nobody has the last feature: its row is the first one
    assert torch.equal(form.shared["gnn-first"][-1], first_model(SETTINGS)["gnn-first"][-1])
    phi = form.state_dict(24)["learner-first"]
    assert torch.equal(phi[[0, -1]], torch.ones(2, 2)) and bool((phi[1:-1] != 1).all())


NEW = toy_clients()[0]  # with edges; the run has the others
STEPS = 4


def given(*, edges: bool) -> NewGraph:
    x = NEW.x.to_dense()
    return NewGraph(x, NEW.edge_index if edges else None, torch.full((len(x),), -1))


@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_newcomer_is_a_client_with_the_runs_models(method: str, edges: bool) -> None:
    settings = settings_of(method)
    (form,), federation = trained(settings, toy_clients()[1:])
    model = build_module(form)
    assert isinstance(model, StructureModel)
    draw_learner(model, settings.graph, 0)
    if method == "fed-gnn" and not edges:
        with pytest.raises(DataError):
            predict(model, given(edges=edges), STEPS)
        return
    graph = NEW if edges else replace(NEW, edge_index=None, hidden_edges=NEW.edge_index)
    (client,) = plain_federation(settings, [graph]).clients
    client.begin(federation.models)
    for _ in range(STEPS if client.learner is not None else 0):
        client.learn()
    wanted = client.nets[0](client.x, client.adjacency).detach()
    close(predict(model, given(edges=edges), STEPS), wanted, atol=2e-5)


def test_whose_model_it_is_is_known_where_there_is_one() -> None:
    config = load_config("fedgls/cora-linqs", ["graph.neighbours=2"])
    (form,), _ = trained(SETTINGS, toy_clients()[1:])
    graph = given(edges=False)
    alone = SavedModels(form.module, form.arguments, [21], form.state_dict(21), {})
    found: Any = SimpleNamespace(
        clients=[21], all_saved=lambda: [alone], saved=lambda client: (alone, 21)
    )
    ones = METHOD.predict(config, found, graph, None)
    model = build_module(form, 21)
    assert isinstance(model, StructureModel)
    close(ones, predict(model, graph).softmax(1))
    found.all_saved, found.clients = lambda: [form], [0, 1]
    assert not torch.allclose(ones, METHOD.predict(config, found, graph, None), atol=1e-4)


def test_what_a_graph_lacks_is_said() -> None:
    model = first_model(SETTINGS)
    few = NewGraph(torch.eye(2, 8), None, torch.full((2,), -1))
    with pytest.raises(DataError, match="2 nodes"):
        predict(model, few)
    own = settings_of("fed-gnn-mlp")
    with_edges = [graph for graph in toy_clients()[1:] if not graph.is_graphless]
    (form,), _ = trained(own, with_edges)
    without_mlp = build_module(form)
    assert isinstance(without_mlp, StructureModel)
    with pytest.raises(OutputError):
        predict(without_mlp, given(edges=False))
