"""The learners of a cohort against a dense learner for each client; faults, state, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learner_helpers import Largest, matrix, normalised
from plain_structure import Learner
from torch import Tensor

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.graph_batch import pack_graphs
from flower_graph.ops.graph_learner import Pattern
from flower_graph.strategies.fedgls import networks
from flower_graph.strategies.fedgls.networks import GraphLearners, LearnerSettings

SIZES, FEATURES = (7, 5, 9), 12
ATTENTIVE = LearnerSettings(neighbours=3, learning_rate=0.05)
MLP = LearnerSettings("mlp", layers=2, width=6, neighbours=3, learning_rate=0.01, seed=3)
KINDS = [
    ATTENTIVE,
    ATTENTIVE._replace(layers=1, similarity="euclidean"),
    ATTENTIVE._replace(similarity="inner"),
    MLP,
    MLP._replace(layers=1),
    MLP._replace(layers=3, similarity="euclidean"),
]


def features(client: int, n: int = 0) -> Tensor:
    """Draw a client's features; each client lacks one that others have."""
    chance = torch.Generator().manual_seed(client)
    x = torch.rand(n or SIZES[client], FEATURES, generator=chance)
    x *= torch.rand(x.shape, generator=chance) < 0.5
    x[:, client] = 0
    return x


def network(client: int, x: Tensor, edges: Tensor | None = None) -> ClientGraph:
    """Make a client, without edges unless some are given."""
    y, mask = torch.zeros(len(x), dtype=torch.int64), torch.ones(len(x), dtype=torch.bool)
    own = torch.zeros(2, 0, dtype=torch.int64) if edges is None else edges
    return ClientGraph(client, y, x, y, own, None, mask, mask, mask)


def alone(x: Tensor, settings: LearnerSettings) -> GraphLearners:
    """Make the learner of one client."""
    return GraphLearners(pack_graphs([network(0, x)]), slice(0, 1), settings)


def learners(clients: list[int], settings: LearnerSettings) -> GraphLearners:
    """Make those of some, with a client in front of them that has edges and does not learn."""
    first = network(-1, torch.ones(2, FEATURES), torch.tensor([[0, 1], [1, 0]]))
    batch = pack_graphs([first, *(network(client, features(client)) for client in clients)])
    return GraphLearners(batch, slice(1, len(clients) + 1), settings)


def wish(client: int) -> Tensor:
    """Draw what the loss multiplies a client's adjacency with."""
    n = SIZES[client]
    return torch.randn(n, n, generator=torch.Generator().manual_seed(50 + client))


def learn(cohort: GraphLearners, clients: list[int], steps: int) -> None:
    goal = torch.block_diag(*(wish(client) for client in clients))
    for _ in range(steps):
        cohort.step(lambda pattern, weight: (goal[tuple(pattern.edge_index)] * weight).sum())


def graphs(cohort: GraphLearners, clients: list[int]) -> list[Tensor]:
    """Return each client's adjacency; nothing joins two clients."""
    sizes = [SIZES[client] for client in clients]
    pattern, weight = cohort.edges()
    whole = matrix(pattern.edge_index, weight, sum(sizes))
    parts = [w.split(sizes, dim=1)[i] for i, w in enumerate(whole.split(sizes))]
    assert torch.equal(whole, torch.block_diag(*parts))
    return parts


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: f"{s.encoder}-{s.layers}-{s.similarity}")
def test_equals_a_dense_learner_for_each_client(settings: LearnerSettings):
    clients = [2, 0, 1]
    cohort = learners(clients, settings)
    slow = {client: Learner(settings, FEATURES, settings.seed) for client in clients}
    for steps in (0, 1, 4):
        learn(cohort, clients, steps)
        for client, found in zip(clients, graphs(cohort, clients), strict=True):
            own, x = slow[client], features(client)
            for _ in range(steps):
                own.optimiser.zero_grad()
                (wish(client) * normalised(own.graph(x))).sum().backward()
                own.optimiser.step()
            wanted = normalised(own.graph(x)).detach()
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_step_returns_the_loss_before_it():
    cohort = learners([0, 1], ATTENTIVE)
    total = cohort.edges()[1].sum()
    assert cohort.step(lambda _, weight: weight.sum()) == total
    assert cohort.edges()[1].sum() < total


def test_a_graph_that_was_asked_for_without_gradients_can_still_be_learned_from():
    one, other = learners([0, 1], ATTENTIVE), learners([0, 1], ATTENTIVE)
    with torch.no_grad():
        assert not one.edges()[1].requires_grad
    for cohort in (one, other):
        learn(cohort, [0, 1], 1)
    assert torch.equal(one.edges()[1], other.edges()[1])


@pytest.mark.parametrize("settings", [ATTENTIVE, MLP], ids=["attentive", "mlp"])
def test_a_client_whose_weights_are_no_numbers_begins_anew(settings: LearnerSettings):
    cohort, sound = learners([0, 1, 2], settings), learners([0, 1, 2], settings)
    learn(cohort, [0, 1, 2], 2)
    learn(sound, [0, 1, 2], 3)
    n = SIZES[0]

    def loss(pattern: Pattern, weight: Tensor) -> Tensor:
        edges = pattern.edge_index
        goal = torch.block_diag(*(wish(client) for client in range(3)))
        inside = (edges[0] >= n) & (edges[0] < n + SIZES[1])
        return (goal[edges[0], edges[1]] * weight * torch.where(inside, torch.nan, 1.0)).sum()

    cohort.step(loss)
    assert cohort.tensors()["step"].tolist() == [3, 0, 3]
    for found, wanted, fresh in zip(
        graphs(cohort, [0, 1, 2]),
        graphs(sound, [0, 1, 2]),
        graphs(learners([0, 1, 2], settings), [0, 1, 2]),
        strict=True,
    ):
        assert torch.equal(found, fresh if len(found) == SIZES[1] else wanted)
    learn(cohort, [0, 1, 2], 1)
    assert cohort.edges()[1].isfinite().all()


def test_neighbours_are_looked_for_once_for_the_same_weights(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    search = networks.nearest

    def counted(*args: Any) -> Tensor:
        asked.append(1)
        return search(*args)

    monkeypatch.setattr(networks, "nearest", counted)
    cohort = learners([0, 1], ATTENTIVE)
    assert asked == []
    for number in (2, 4, 6):  # one search a client
        cohort.edges()
        assert len(asked) == number
        cohort.neighbours()
        learn(cohort, [0, 1], 1)
        assert len(asked) == number


def test_state_has_the_engines_names_and_active_rows_only():
    rows = sum(int(features(client).any(0).sum()) for client in (0, 1))
    moments = ("weight", "exp-avg", "exp-avg-sq")
    found = {name: tuple(t.shape) for name, t in learners([0, 1], ATTENTIVE).tensors().items()}
    assert found == {"step": (2,), **{f"{moment}.first": (rows, 2) for moment in moments}}
    found = {name: tuple(t.shape) for name, t in learners([0, 1], MLP).tensors().items()}
    assert found == {
        "step": (2,),
        **{f"{moment}.first": (rows, 6) for moment in moments},
        **{f"{moment}.rest": (2, 36) for moment in moments},
    }


def test_neighbours_are_the_edges_that_weigh_something():
    """Inner products of nodes without a common feature are 0: they are kept, and no edges."""
    x = torch.eye(4)
    x[1] = x[0]
    cohort = alone(x, ATTENTIVE._replace(similarity="inner"))
    assert cohort.neighbours().tolist() == [[0, 1], [1, 0]]
    cohort = learners([0, 1, 2], ATTENTIVE)
    edges, found = cohort.edges()[0].edge_index, cohort.neighbours()
    pairs = {(a, b) for a, b in edges.T.tolist() if a != b}
    assert found.T.tolist() == [list(pair) for pair in sorted(pairs)]


@pytest.mark.parametrize("settings", [ATTENTIVE, MLP], ids=["attentive", "mlp"])
def test_a_round_holds_no_matrix_of_nodes_times_nodes(settings: LearnerSettings):
    n = 4000
    cohort = alone(features(0, n), settings)
    with Largest() as largest:
        cohort.step(lambda _, weight: weight.square().sum())
        cohort.edges()
    assert n * FEATURES <= largest.numbers <= n * n // 50
