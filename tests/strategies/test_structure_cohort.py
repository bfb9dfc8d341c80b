"""What a cohort that shares weights begins with and measures; what its host refuses and keeps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from plain_structure import FEDGLS, NoDrops, PlainFederation
from structure_helpers import close, settings_of, toy_clients, weights_of

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.ops.graph_learner import edge_agreement
from flower_graph.strategies.fedgls.cohort import StructureCohort
from flower_graph.strategies.fedgls.networks import initial_models
from flower_graph.strategies.fedgls.strategy import PrototypeClient, StructureClient

SETTINGS = settings_of(FEDGLS)


BY_FEATURES = settings_of("fed-gnn-knn")


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
    assert torch.equal(initial_models(SETTINGS)[1].rest, start[1].rest)
    other = initial_models(SETTINGS._replace(seed=4))
    assert not torch.equal(other[0].first, start[0].first)
    for matrix in (start[0].first, start[0].rest[5:25]):
        assert matrix.unique().numel() == matrix.numel()
    assert not start[0].rest[:5].any() and not start[0].rest[25:].any()


# What it measures --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FEDGLS, "fed-gnn-knn"])
def test_learned_graphs_against_the_true_ones(method: str) -> None:
    cohort = StructureCohort(toy_clients(), settings_of(method))
    plain = PlainFederation(toy_clients(), method, cohort.settings)
    for number in (1, 2):
        cohort.train(number)
        for client in plain.clients:
            client.train([NoDrops, NoDrops][: len(client.nets)], {})
    found = cohort.structure()
    assert found is not None
    for place, client in enumerate(c for c in plain.clients if c.graph.is_graphless):
        learned = (client.adjacency > 0).nonzero().T
        wanted = edge_agreement(
            learned, client.graph.hidden_edges, client.graph.y, [0, client.nodes]
        )
        assert found.keys() == wanted.keys()
        for name, values in found.items():
            close(values[place], wanted[name][0])


def test_neighbours_in_the_hidden_layer_of_the_model_received() -> None:
    settings = settings_of("fed-gnn-knn", knn_on="encoder")
    cohort, plain = (StructureCohort(toy_clients(), one) for one in (settings, BY_FEATURES))
    (sent,) = initial_models(settings._replace(seed=9))
    sent.rest.add_(0.1)  # with a bias
    for one in (cohort, plain):
        one.start_from([sent])

    def wanted() -> set[tuple[int, int]]:
        """By hand: client 21's two nearest by the cosine of ReLU(X W + b), in either direction."""
        [graph] = [graph for graph in toy_clients() if graph.client == 21]
        hidden = torch.relu(graph.x.to_dense() @ sent.first + sent.rest[:5])
        likeness = torch.nn.functional.cosine_similarity(hidden[:, None], hidden[None], dim=2)
        near = likeness.fill_diagonal_(-2).topk(2, dim=1)
        pairs = {(row, int(col)) for row in range(7) for col in near.indices[row]
                 if likeness[row, col] > 0}  # fmt: skip
        return pairs | {(col, row) for row, col in pairs}

    def found(one: StructureCohort) -> set[tuple[int, int]]:
        assert one.learners is not None
        pairs: list[list[int]] = one.learners.neighbours().T.tolist()
        return {(row, col) for row, col in pairs if row < 7}

    assert found(cohort) == wanted() != found(plain)
    # They stand while a client trains, and are found anew in the next model
    cohort.train(1)
    assert found(cohort) == wanted()
    assert cohort.structure() is not None
    sent = initial_models(settings._replace(seed=4))[0]
    cohort.start_from([sent])
    assert found(cohort) == wanted()
    again = StructureCohort(toy_clients(), settings, cohort.tensors())
    assert torch.equal(again.logits(), cohort.logits())


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


# Its host ----------------------------------------------------------------------------------------

NOBODY = torch.zeros(7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("graphs", "said"),
    [
        ([], "graphs"),
        (changed(1, client=20), "numbers.*20, 20"),
        (changed(1, x=torch.ones(7, 9)), "client 21.*9"),
        (changed(1, y=torch.full((7,), 4)), "client 21.*4"),
        (changed(1, train_mask=NOBODY), "client 21"),
    ],
)
def test_clients_that_do_not_fit_are_refused(graphs: list[ClientGraph], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StructureClient(Context(1, 2, {}, RecordDict(), {}), graphs, SETTINGS)


def prototype_client(places: list[int]) -> PrototypeClient:
    context = Context(len(places), places[0] + 1, {"state-dir": ""}, RecordDict(), {})
    graphs = [toy_clients()[place] for place in places]
    return PrototypeClient(context, graphs, settings_of("fedproto"))


def test_a_client_sends_the_means_of_its_classes() -> None:
    nothing = [np.zeros((4, 5), np.float32), np.zeros(4, np.float32)]
    (vectors, share), weight, metrics = prototype_client([0, 5]).fit(nothing, {"server-round": 1})
    assert weight == 6 + 11
    assert metrics["array-names"] == ["prototypes", "prototypes-share"]
    graphs = [toy_clients()[0], toy_clients()[5]]
    federation = PlainFederation(graphs, "fedproto", settings_of("fedproto"))
    federation.round(1)
    labels = [label for one in federation.clients for label, _ in one.training_vectors()]
    np.testing.assert_allclose(share * weight, np.bincount(labels, minlength=4), atol=1e-5)
    for label, wanted in federation.prototypes.items():
        close(torch.from_numpy(vectors[label] / share[label]), wanted)
