"""The learners of a cohort against a dense learner for each client; faults, state, memory."""

from dataclasses import replace

import pytest
import torch
from learner_helpers import Largest, matrix
from torch import Tensor

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.graph_batch import pack_graphs
from flower_graph.ops.graph_learner import Pattern
from flower_graph.strategies.fedgls.config import GraphSection
from flower_graph.strategies.fedgls.learners import GraphLearners

SIZES, FEATURES = (7, 5, 9), 12
ATTENTIVE = GraphSection(neighbours=3, learning_rate=0.05)
MLP = replace(ATTENTIVE, encoder="mlp", layers=2, width=6, learning_rate=0.01)


def features(client: int, n: int = 0) -> Tensor:
    """Draw a client's features; each client lacks one that others have."""
    chance = torch.Generator().manual_seed(client)
    x = torch.rand(n or SIZES[client], FEATURES, generator=chance)
    x *= torch.rand(x.shape, generator=chance) < 0.5
    x[:, client] = 0
    return x


def network(client: int, x: Tensor) -> ClientGraph:
    y, mask = torch.zeros(len(x), dtype=torch.int64), torch.ones(len(x), dtype=torch.bool)
    edges = torch.zeros(2, 0, dtype=torch.int64)
    return ClientGraph(client, y, x, y, edges, None, mask, mask, mask)


def alone(x: Tensor, settings: GraphSection) -> GraphLearners:
    """Make the learner of one client."""
    return GraphLearners(pack_graphs([network(0, x)]), settings)


def learners(clients: list[int], settings: GraphSection) -> GraphLearners:
    batch = pack_graphs([network(client, features(client)) for client in clients])
    return GraphLearners(batch, settings)


def wish(client: int) -> Tensor:
    """Draw what the loss multiplies a client's adjacency with."""
    n = SIZES[client]
    return torch.randn(n, n, generator=torch.Generator().manual_seed(50 + client))


def learn(cohort: GraphLearners, clients: list[int], steps: int) -> None:
    goal = torch.block_diag(*(wish(client) for client in clients))
    for _ in range(steps):
        cohort.learn(lambda pattern, weight: (goal[tuple(pattern.edge_index)] * weight).sum())


def graphs(cohort: GraphLearners, clients: list[int]) -> list[Tensor]:
    """Return each client's adjacency; nothing joins two clients."""
    sizes = [SIZES[client] for client in clients]
    pattern, weight = cohort.edges()
    whole = matrix(pattern.edge_index, weight, sum(sizes))
    parts = [w.split(sizes, dim=1)[i] for i, w in enumerate(whole.split(sizes))]
    assert torch.equal(whole, torch.block_diag(*parts))
    return parts


def test_a_graph_that_was_asked_for_without_gradients_can_still_be_learned_from():
    one, other = learners([0, 1], ATTENTIVE), learners([0, 1], ATTENTIVE)
    with torch.no_grad():
        assert not one.edges()[1].requires_grad
    for cohort in (one, other):
        learn(cohort, [0, 1], 1)
    assert torch.equal(one.edges()[1], other.edges()[1])


@pytest.mark.parametrize("settings", [ATTENTIVE, MLP], ids=["attentive", "mlp"])
def test_a_client_whose_weights_are_no_numbers_begins_anew(settings: GraphSection):
    cohort, sound = learners([0, 1, 2], settings), learners([0, 1, 2], settings)
    learn(cohort, [0, 1, 2], 2)
    learn(sound, [0, 1, 2], 3)
    n = SIZES[0]

    def loss(pattern: Pattern, weight: Tensor) -> Tensor:
        edges = pattern.edge_index
        goal = torch.block_diag(*(wish(client) for client in range(3)))
        inside = (edges[0] >= n) & (edges[0] < n + SIZES[1])
        return (goal[edges[0], edges[1]] * weight * torch.where(inside, torch.nan, 1.0)).sum()

    cohort.learn(loss)
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


def test_neighbours_are_the_edges_that_weigh_something():
    """Inner products of nodes without a common feature are 0: they are kept, and no edges."""
    x = torch.eye(4)
    x[1] = x[0]
    cohort = alone(x, replace(ATTENTIVE, similarity="inner"))
    assert cohort.neighbours().tolist() == [[0, 1], [1, 0]]
    cohort = learners([0, 1, 2], ATTENTIVE)
    edges, found = cohort.edges()[0].edge_index, cohort.neighbours()
    pairs = {(a, b) for a, b in edges.T.tolist() if a != b}
    assert found.T.tolist() == [list(pair) for pair in sorted(pairs)]


@pytest.mark.parametrize("settings", [ATTENTIVE, MLP], ids=["attentive", "mlp"])
def test_a_round_holds_no_matrix_of_nodes_times_nodes(settings: GraphSection):
    n = 4000
    cohort = alone(features(0, n), settings)
    with Largest() as largest:
        cohort.learn(lambda _, weight: weight.square().sum())
        cohort.edges()
    assert n * FEATURES <= largest.numbers <= n * n // 50
