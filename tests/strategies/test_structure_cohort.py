"""What a cohort that shares weights begins with, measures, and leaves; newcomers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from structure_helpers import (
    METHODS,
    SETTINGS,
    close,
    plain_federation,
    settings_of,
    toy_clients,
    weights_of,
)
from torch import Tensor

from flower_graph.data.new_graph import NewGraph
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.errors import DataError, OutputError
from flower_graph.method.load import load_config
from flower_graph.ops.graph_learner import edge_agreement
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import SavedModels
from flower_graph.strategies.fedgls.cohort import StructureCohort, initial_models
from flower_graph.strategies.fedgls.config import FEDGLS, StructureSettings
from flower_graph.strategies.fedgls.method import METHOD
from flower_graph.strategies.fedgls.modules import (
    called,
    models_of,
    newcomers_logits,
    snapshot_of,
)
from flower_graph.strategies.fedgls.strategy import StructureClient


def changed(place: int, **values: Any) -> list[ClientGraph]:
    graphs = toy_clients()
    graphs[place] = replace(graphs[place], **values)
    return graphs


def test_all_clients_start_from_one_draw() -> None:
    start, cohort = initial_models(SETTINGS), StructureCohort(toy_clients(), SETTINGS)
    for (_, number), model in weights_of(cohort).items():
        assert torch.equal(model.rest, start[number].rest)
    assert start[0].first.abs().max() <= (6 / (8 + 5)) ** 0.5
    assert not torch.equal(start[0].first, start[1].first)
    other = initial_models(SETTINGS._replace(seed=4))
    assert not torch.equal(other[0].first, start[0].first)
    for matrix in (start[0].first, start[0].rest[5:25]):
        assert matrix.unique().numel() == matrix.numel()
    assert not start[0].rest[:5].any() and not start[0].rest[25:].any()


# What it measures --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FEDGLS, "fed-gnn-knn"])
def test_learned_graphs_against_the_true_ones(method: str) -> None:
    own = settings_of(method)
    cohort, plain = StructureCohort(toy_clients(), own), plain_federation(own)
    for number in (1, 2):
        cohort.train(number)
        for client in plain.clients:
            client.train()
    found = cohort.structure()
    assert found is not None
    for place, client in enumerate(c for c in plain.clients if c.graph.is_graphless):
        learned = (client.adjacency > 0).nonzero().T
        true, y = client.graph.hidden_edges, client.graph.y
        wanted = edge_agreement(learned, true, y, [0, len(y)])
        assert found.keys() == wanted.keys()
        for name, values in found.items():
            close(values[place], wanted[name][0])


def test_graphs_are_not_compared_where_nobody_knows_the_true_ones() -> None:
    graphs = changed(3, hidden_edges=None)
    assert StructureCohort(graphs, SETTINGS).structure() is None
    assert StructureCohort(toy_clients(), settings_of("fed-gnn")).structure() is None
    with_edges = [graph for graph in graphs if not graph.is_graphless]
    assert StructureCohort(with_edges, SETTINGS).structure() is None
    with pytest.raises(ValueError, match="client 23"):
        StructureCohort(graphs, settings_of("fed-gnn"))


def test_accuracy_is_of_each_client_and_role() -> None:
    graphs = changed(2, test_mask=torch.zeros(8, dtype=torch.bool))
    cohort = StructureCohort(graphs, settings_of("fed-gnn"))
    accuracy, loss = cohort.evaluate()
    assert loss.isfinite().all()
    assert accuracy.isnan().nonzero().tolist() == [[1, 2]]  # client 22 comes second
    with torch.no_grad():
        cohort.weights.weights()[1][0].fill_(torch.nan)
    accuracy, loss = cohort.evaluate()
    assert loss.isnan().tolist() == [True, False, False, False, False, False]
    assert accuracy[0].isnan().all() and not accuracy[2:].isnan().any()
    good = snapshot_of(cohort).predictions
    assert good is not None and len(good.client) == sum(len(graph.y) for graph in graphs)


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


# What stays --------------------------------------------------------------------------------------


def trained(
    settings: StructureSettings, graphs: list[ClientGraph] | None = None
) -> StructureCohort:
    """Give a cohort after three rounds, of which a server with others' weights was a part."""
    cohort = StructureCohort(toy_clients() if graphs is None else graphs, settings)
    for server_round in (1, 2, 3):
        cohort.start_from(initial_models(settings._replace(seed=server_round)))
        cohort.train(server_round)
    cohort.start_from(cohort.mean_models(cohort.clients)[0])
    return cohort


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
def test_modules_compute_what_the_cohort_does(method: str, learner: dict[str, Any]) -> None:
    cohort = trained(settings_of(method, graph=learner))
    forms, logits = models_of(cohort), cohort.logits()
    assert sorted(c for form in forms for c in form.clients) == [20, 21, 22, 23, 24, 25]
    for graph in toy_clients():
        (form,) = (form for form in forms if graph.client in form.clients)
        edges = graph.hidden_edges if method == "fed-gnn" and graph.is_graphless else None
        edges = graph.edge_index if edges is None else edges
        said = build_module(form, graph.client)(graph.x.to_dense(), edges)
        place = cohort.clients.index(graph.client)
        wanted = logits[cohort.batch.ptr[place] : cohort.batch.ptr[place + 1]]
        torch.testing.assert_close(said, wanted, atol=1e-5, rtol=1e-5)


def test_a_mean_is_there_once_and_whole() -> None:
    cohort = trained(SETTINGS)
    mean = cohort.mean_models(cohort.clients)[0]
    with_edges, graphless = models_of(cohort)
    assert with_edges.clients == [20, 22, 25] and not with_edges.own and with_edges.rows is None
    # Nobody has the last feature: its row is of the model that the server sent.
    assert torch.equal(with_edges.shared["network.first"][-1], mean[0].first[-1])
    assert graphless.rows is not None and graphless.rows.name == "learner.first"
    phi = graphless.state_dict(24)["learner.first"]
    assert torch.equal(phi[[0, -1]], torch.ones(2, 2)) and bool((phi[1:-1] != 1).all())


NEW = toy_clients()[0]  # with edges; the run has the others
STEPS = 4


def given(*, edges: bool) -> NewGraph:
    x = NEW.x.to_dense()
    return NewGraph(x, NEW.edge_index if edges else None, torch.full((len(x),), -1))


def by_hand(cohort: StructureCohort, settings: StructureSettings, *, edges: bool) -> Tensor:
    """Put the newcomer into a cohort of its own."""
    graph = NEW if edges else replace(NEW, edge_index=None, hidden_edges=NEW.edge_index)
    own = StructureCohort([graph], settings)
    own.start_from(cohort.shared_models())
    for _ in range(0 if edges or settings.strategy.name != FEDGLS else STEPS):
        own.learn_structure()
    return own.logits()[: len(NEW.y)]


@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_newcomer_is_a_client_with_the_runs_models(method: str, edges: bool) -> None:
    settings = settings_of(method)
    cohort = trained(settings, toy_clients()[1:])
    ask = models_of(cohort), settings.graph, given(edges=edges), STEPS
    if method == "fed-gnn" and not edges:
        with pytest.raises(DataError):
            newcomers_logits(*ask)
    else:
        close(newcomers_logits(*ask), by_hand(cohort, settings, edges=edges))


def test_whose_model_it_is_is_known_where_there_is_one() -> None:
    config = load_config("fedgls/cora-linqs", ["graph.neighbours=2"])
    forms, graph = models_of(trained(SETTINGS, toy_clients()[1:])), given(edges=False)
    graphless = forms[1]
    alone = SavedModels(graphless.module, graphless.arguments, [21], graphless.state_dict(21), {})
    run: Any = SimpleNamespace(
        clients=[21], all_saved=lambda: [alone], saved=lambda client: (alone, 21)
    )
    found = METHOD.predict(config, run, graph, None)
    close(found, called(graphless, 21, graph).softmax(1))
    run.all_saved, run.clients = lambda: forms, [0, 1]
    assert not torch.allclose(found, METHOD.predict(config, run, graph, None), atol=1e-4)


def test_what_a_graph_lacks_is_said() -> None:
    with_edges, graphless = models_of(trained(SETTINGS, toy_clients()[1:]))
    with pytest.raises(DataError):
        called(with_edges, 22, given(edges=False))
    few = NewGraph(torch.eye(2, 8), None, torch.full((2,), -1))
    for ask in (
        lambda: called(graphless, 21, few),
        lambda: newcomers_logits([with_edges], SETTINGS.graph, few, 1),
    ):
        with pytest.raises(DataError, match="2 nodes"):
            ask()
    own = settings_of("fed-gnn-mlp")
    without_mlp = models_of(trained(own, toy_clients()[1:]))[0]
    with pytest.raises(OutputError):
        newcomers_logits([without_mlp], own.graph, given(edges=False), 1)
