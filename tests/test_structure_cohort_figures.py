"""What a cohort that shares weights measures and sends, and what lasts between rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_structure import FEDGLS, METHODS, NoDrops, PlainFederation
from structure_helpers import settings_of, toy_clients, weights_of
from torch import Tensor

from flower_graph.strategies.structure_fedavg.cohort import StructureCohort
from flower_graph.strategies.structure_fedavg.networks import initial_models


def close(one: Tensor, other: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def cohort_after(method: str, rounds: int = 2, **changes: Any) -> StructureCohort:
    """All clients in one cohort, trained without a server's mean."""
    cohort = StructureCohort(toy_clients(), settings_of(method, **changes))
    cohort.start_from(initial_models(cohort.settings))
    for number in range(1, rounds + 1):
        cohort.train(number)
    return cohort


def test_clients_with_edges_come_first() -> None:
    cohort = StructureCohort(toy_clients(), settings_of(FEDGLS))
    assert cohort.clients == (20, 22, 25, 21, 23, 24)
    assert cohort.nodes.tolist() == [6, 8, 11, 7, 9, 10]
    assert cohort.batch.clients == cohort.clients * 2


@pytest.mark.parametrize("method", [FEDGLS, "fed-gnn-mlp"])
def test_who_is_left_out_has_no_part_in_the_mean(method: str) -> None:
    cohort = cohort_after(method)
    some = [20, 24, 25]
    weights, (models, parts, nodes) = weights_of(cohort), cohort.mean_models([21, 22, 23])
    assert nodes == 6 + 10 + 11
    sizes, start = {20: 6, 24: 10, 25: 11}, initial_models(cohort.settings)
    for number, model in enumerate(models):
        held = [client for client in some if (client, number) in weights]
        assert parts[number] == pytest.approx(sum(sizes[c] for c in held) / nodes)
        rest = sum(sizes[c] / nodes * weights[c, number].rest for c in held)
        close(model.rest, rest, 1e-6)
        # Nobody has the last feature: its row is as it came.
        close(model.first[-1], parts[number] * start[number].first[-1], 1e-6)


def test_nobody_is_left() -> None:
    cohort = cohort_after(FEDGLS, 1)
    with pytest.raises(ValueError, match=r"clients \[20, 21, .*not finite; nobody is left"):
        cohort.mean_models(range(20, 26))


def test_prototypes_are_sums_by_class() -> None:
    cohort, plain = cohort_after("fedproto", 1), None
    plain = PlainFederation(toy_clients(), "fedproto", cohort.settings)
    plain.train(1)
    for left_out in ([], [22, 25]):
        sums, count = cohort.class_sums(left_out)
        vectors = [
            pair
            for client in plain.clients
            if client.graph.client not in left_out
            for pair in client.training_vectors()
        ]
        for label in range(4):
            own = [vector for other, vector in vectors if other == label]
            assert count[label] == len(own)
            close(sums[label].float(), torch.stack(own).sum(0) if own else torch.zeros(5))
    assert (cohort.class_sums([25])[1] == 0).tolist() == [False, False, True, True]


@pytest.mark.parametrize("method", [FEDGLS, "fed-gnn-knn"])
def test_learned_graphs_against_the_true_ones(method: str) -> None:
    cohort = cohort_after(method)
    plain = PlainFederation(toy_clients(), method, cohort.settings)
    for _ in range(2):
        for client in plain.clients:
            client.train([NoDrops, NoDrops][: len(client.nets)], {})
    found = cohort.structure()
    assert found is not None
    own = [client for client in plain.clients if client.graph.is_graphless]
    for place, client in enumerate(own):
        graph = client.graph
        assert client.adjacency is not None and graph.hidden_edges is not None
        learned = {tuple(e) for e in (client.adjacency > 0).nonzero().tolist()}
        true = {tuple(e) for e in graph.hidden_edges.T.tolist()}
        same = [
            [int(graph.y[a] == graph.y[b]) for a, b in edges if min(graph.y[[a, b]]) >= 0]
            for edges in (learned, true)
        ]
        wanted = {
            "precision": len(learned & true) / len(learned),
            "recall": len(learned & true) / len(true),
            "homophily": sum(same[0]) / len(same[0]),
            "true-homophily": sum(same[1]) / len(same[1]),
            "degree": len(learned) / client.nodes,
            "true-degree": len(true) / client.nodes,
        }
        assert {name: value[place].item() for name, value in found.items()} == pytest.approx(wanted)


def test_graphs_are_not_compared_where_nobody_knows_the_true_ones() -> None:
    graphs = toy_clients()
    graphs[3] = replace(graphs[3], hidden_edges=None)
    assert StructureCohort(graphs, settings_of(FEDGLS)).structure() is None
    assert StructureCohort(toy_clients(), settings_of("fed-gnn")).structure() is None
    with_edges = [graph for graph in graphs if not graph.is_graphless]
    assert StructureCohort(with_edges, settings_of(FEDGLS)).structure() is None
    with pytest.raises(ValueError, match="client 23: has no edges, and its true ones are wanted"):
        StructureCohort(graphs, settings_of("fed-gnn"))


def test_accuracy_is_of_each_client_and_role() -> None:
    graphs = toy_clients()
    none = torch.zeros_like(graphs[2].test_mask)
    graphs[2] = replace(graphs[2], test_mask=none)
    cohort = StructureCohort(graphs, settings_of("fed-gnn"))
    accuracy, loss = cohort.evaluate()
    assert loss.isfinite().all()
    assert accuracy.isnan().nonzero().tolist() == [[1, 2]]  # client 22 comes second
    with torch.no_grad():
        cohort.weights.weights()[1][0].fill_(torch.nan)
    accuracy, loss = cohort.evaluate()
    assert loss.isnan().tolist() == [True, False, False, False, False, False]
    assert accuracy[0].isnan().all() and not accuracy[2:].isnan().any()


# What lasts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_state_goes_on_where_it_was_left(method: str) -> None:
    first = cohort_after(method)
    state = {key: value.clone() for key, value in first.tensors().items()}
    second = StructureCohort(toy_clients(), first.settings, state)
    for cohort in (first, second):
        cohort.start_from(initial_models(cohort.settings))
        cohort.train(3)
    assert second.tensors() is state
    for key, value in first.tensors().items():
        assert torch.equal(value, state[key])


def test_all_clients_start_from_one_draw() -> None:
    settings = settings_of(FEDGLS)
    start, cohort = initial_models(settings), StructureCohort(toy_clients(), settings)
    for (_, number), model in weights_of(cohort).items():
        assert torch.equal(model.rest, start[number].rest)
    assert start[0].first.abs().max() <= (6 / (8 + 5)) ** 0.5
    assert not torch.equal(start[0].first, start[1].first)
    assert torch.equal(initial_models(settings)[1].rest, start[1].rest)
    other = initial_models(settings._replace(seed=4))
    assert not torch.equal(other[0].first, start[0].first)
    for matrix in (start[0].first, start[0].rest[5:25]):
        assert matrix.unique().numel() == matrix.numel()
    assert not start[0].rest[:5].any() and not start[0].rest[25:].any()


def test_learning_learns() -> None:
    cohort = cohort_after(FEDGLS, 0)
    before, first = cohort.evaluate().loss.mean(), cohort.train(1)
    for number in range(2, 30):
        last = cohort.train(number)
    assert cohort.evaluate().loss.mean() < before / 2
    assert last.contrast.mean() < first.contrast.mean()
