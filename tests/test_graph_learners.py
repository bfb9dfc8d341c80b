"""The learners of a cohort against a dense learner for each client; assignment, state, memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_helpers import matrix, slow_adjacency, slow_nearest, slow_similarity
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flower_graph.engine.graph_batch import GraphBatch, pack_graphs
from flower_graph.errors import DataError
from flower_graph.rng import generator
from flower_graph.strategies.structure_fedavg import graph_learners
from flower_graph.strategies.structure_fedavg.graph_learners import (
    GraphLearners,
    LearnerSettings,
    Tensors,
)

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


def batch(clients: list[int]) -> GraphBatch:
    """Pack clients, with one in front of them that has edges and is not asked to learn."""
    graphs = []
    for client in [-1, *clients]:
        x = torch.ones(2, FEATURES) if client < 0 else features(client)
        masks = {f"{role}_mask": torch.ones(len(x), dtype=torch.bool) for role in ("val", "test")}
        edges = torch.tensor([[0, 1], [1, 0]])[:, : 2 if client < 0 else 0]
        y = torch.zeros(len(x), dtype=torch.int64)
        graph = SimpleNamespace(client=client, x=x, y=y, edge_index=edges, **masks)
        graph.train_mask = masks["val_mask"]
        graphs.append(graph)
    return pack_graphs(graphs)


def learners(
    clients: list[int], settings: LearnerSettings, tensors: Tensors | None = None
) -> GraphLearners:
    return GraphLearners(batch(clients), slice(1, len(clients) + 1), settings, tensors)


def wish(client: int) -> Tensor:
    """Draw what the loss multiplies a client's adjacency with."""
    n = SIZES[client]
    return torch.randn(n, n, generator=torch.Generator().manual_seed(50 + client))


def learn(cohort: GraphLearners, clients: list[int], steps: int) -> None:
    goal = torch.block_diag(*(wish(client) for client in clients))
    for _ in range(steps):
        cohort.step(lambda edges, weight: (goal[edges[0], edges[1]] * weight).sum())


def graphs(cohort: GraphLearners, clients: list[int]) -> list[Tensor]:
    """Return each client's adjacency; nothing joins two clients."""
    sizes = [SIZES[client] for client in clients]
    whole = matrix(*cohort.edges(), sum(sizes))
    parts = [w.split(sizes, dim=1)[i] for i, w in enumerate(whole.split(sizes))]
    assert torch.equal(whole, torch.block_diag(*parts))
    return parts


class Slow:
    """One client's learner, with all its features and all its pairs of nodes."""

    def __init__(self, client: int, settings: LearnerSettings) -> None:
        self.x, self.goal, self.settings = features(client), wish(client), settings
        if settings.encoder == "attentive":
            self.weights = [torch.ones(FEATURES) for _ in range(settings.layers)]
        else:
            chance, w = generator(settings.seed, "graph-learner"), settings.width
            shapes = [(FEATURES, w), *[(w, w)] * (settings.layers - 1)]
            self.weights = [
                torch.nn.init.xavier_uniform_(torch.empty(shape), generator=chance)
                for shape in shapes
            ]
        leaves = [weight.requires_grad_() for weight in self.weights]
        self.optimiser = torch.optim.Adam(leaves, lr=settings.learning_rate)

    def adjacency(self) -> Tensor:
        e, settings = self.x, self.settings
        for weight in self.weights:
            e = F.relu(e * weight if settings.encoder == "attentive" else e @ weight)
        similarity = slow_similarity(e, settings.similarity)
        return slow_adjacency(similarity, slow_nearest(similarity, settings.neighbours))

    def step(self) -> None:
        self.optimiser.zero_grad()
        (self.goal * self.adjacency()).sum().backward()
        self.optimiser.step()


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: f"{s.encoder}-{s.layers}-{s.similarity}")
def test_equals_a_dense_learner_for_each_client(settings: LearnerSettings):
    clients = [0, 1, 2]
    cohort, slow = learners(clients, settings), [Slow(client, settings) for client in clients]
    for steps in (0, 1, 4):
        learn(cohort, clients, steps)
        for client, found in enumerate(graphs(cohort, clients)):
            for _ in range(steps):
                slow[client].step()
            wanted = slow[client].adjacency().detach()
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_graph_moves_where_the_loss_wants_it():
    before, cohort = learners([0, 1, 2], ATTENTIVE), learners([0, 1, 2], ATTENTIVE)
    learn(cohort, [0, 1, 2], 20)
    for client in range(3):
        first, last = (graphs(one, [0, 1, 2])[client] for one in (before, cohort))
        assert (wish(client) * last).sum() < (wish(client) * first).sum()


@pytest.mark.parametrize("settings", [ATTENTIVE, MLP], ids=["attentive", "mlp"])
def test_the_dealing_does_not_matter(settings: LearnerSettings):
    together = learners([2, 0, 1], settings)
    learn(together, [2, 0, 1], 3)
    for place, client in enumerate([2, 0, 1]):
        alone = learners([client], settings)
        learn(alone, [client], 3)
        torch.testing.assert_close(
            graphs(alone, [client])[0], graphs(together, [2, 0, 1])[place], rtol=1e-5, atol=1e-6
        )


def test_a_step_returns_the_loss_before_it():
    cohort = learners([0, 1], ATTENTIVE)
    total = cohort.edges()[1].sum()
    assert cohort.step(lambda edges, weight: weight.sum()) == total
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

    def loss(edges: Tensor, weight: Tensor) -> Tensor:
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
    search = graph_learners.nearest

    def counted(*args: Any) -> Tensor:
        asked.append(1)
        return search(*args)

    monkeypatch.setattr(graph_learners, "nearest", counted)
    cohort = learners([0, 1], ATTENTIVE)
    assert asked == []
    for number in (2, 4, 6):  # one search a client
        cohort.edges()
        assert len(asked) == number
        cohort.neighbours()
        learn(cohort, [0, 1], 1)
        assert len(asked) == number


@pytest.mark.parametrize("settings", [ATTENTIVE, MLP], ids=["attentive", "mlp"])
def test_goes_on_from_its_tensors(settings: LearnerSettings):
    whole, first = learners([0, 1], settings), learners([0, 1], settings)
    learn(whole, [0, 1], 5)
    learn(first, [0, 1], 2)
    kept = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second = learners([0, 1], settings, kept)
    learn(second, [0, 1], 3)
    for one, other in zip(second.edges(), whole.edges(), strict=True):
        assert torch.equal(one, other)
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, kept[name]), "the tensors given are those that change"


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
    graph = SimpleNamespace(
        client=0,
        x=x,
        y=torch.zeros(4, dtype=torch.int64),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        **{f"{role}_mask": torch.ones(4, dtype=torch.bool) for role in ("train", "val", "test")},
    )
    settings = ATTENTIVE._replace(similarity="inner")
    cohort = GraphLearners(pack_graphs([graph]), slice(0, 1), settings)
    assert cohort.neighbours().tolist() == [[0, 1], [1, 0]]
    cohort = learners([0, 1, 2], ATTENTIVE)
    edges, found = cohort.edges()[0], cohort.neighbours()
    pairs = {(a, b) for a, b in edges.T.tolist() if a != b}
    assert found.T.tolist() == [list(pair) for pair in sorted(pairs)]


def test_without_layers_the_features_themselves_are_compared():
    cohort = learners([0, 1], ATTENTIVE._replace(layers=0))
    for client, found in enumerate(graphs(cohort, [0, 1])):
        similarity = slow_similarity(features(client), "cosine")
        wanted = slow_adjacency(similarity, slow_nearest(similarity, ATTENTIVE.neighbours))
        torch.testing.assert_close(found, wanted)


def test_too_few_nodes_are_named():
    with pytest.raises(DataError, match="client 1 has 5 nodes: 5 neighbours each need at least 6"):
        learners([0, 1], ATTENTIVE._replace(neighbours=5))


class Largest(TorchDispatchMode):
    """Notes the most numbers that any one result has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, Tensor):
                held = one.values() if one.layout == torch.sparse_csr else one
                self.numbers = max(self.numbers, held.numel())
        return out


@pytest.mark.parametrize("settings", [ATTENTIVE, MLP], ids=["attentive", "mlp"])
def test_a_round_holds_no_matrix_of_nodes_times_nodes(settings: LearnerSettings):
    n = 4000
    x = features(0, n)
    mask = torch.ones(n, dtype=torch.bool)
    graph = SimpleNamespace(
        client=0,
        x=x,
        y=mask.long(),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        train_mask=mask,
        val_mask=mask,
        test_mask=mask,
    )
    cohort = GraphLearners(pack_graphs([graph]), slice(0, 1), settings)
    with Largest() as largest:
        cohort.step(lambda edges, weight: weight.square().sum())
        cohort.edges()
    assert n * FEATURES <= largest.numbers <= n * n // 50
