"""PPFL-GNN's models: the GAT, DeepWalk, and the evaluation of embeddings."""

import dataclasses
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import one_fast
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor

import flower_graph as fg
from flower_graph.config import rules
from flower_graph.data.graph import ClientGraph as Client
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.load import load_config
from flower_graph.strategies.ppfl.config import DeepWalkConfig, GATConfig, ModelConfig, PPFLConfig
from flower_graph.strategies.ppfl.evaluation import CLASSIFIERS, check_labels, judge_embeddings
from flower_graph.strategies.ppfl.modules import (
    DeepWalk,
    GATCohort,
    negative_sampling_loss,
    neighbour_lists,
    random_walks,
    sample_pairs,
)

N, F, D, C = 12, 9, 6, 3
ROWS = np.array([1, 4, 5, 11])
SETTINGS = PPFLConfig(
    seed=7,
    model=ModelConfig("gat", D),
    gat=GATConfig(heads=2, epochs=3, learning_rate=0.01, dropout=0.5, beta=10),
)


def make_client(seed: int = 0, client: int = 2, nodes: int = N) -> Client:
    """Draw a graph in which the last two nodes are isolated, and every second node trains."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(nodes, F, generator=draw)
    x *= torch.rand(nodes, F, generator=draw) < 0.5
    upper = (torch.rand(nodes, nodes, generator=draw) < 0.3).triu(1)
    upper[:, -2:] = False
    y = torch.randint(C, (nodes,), generator=draw)
    train = torch.arange(nodes) % 2 == 0
    nobody = torch.zeros_like(train)
    edges, ids = (upper | upper.T).nonzero().T, torch.arange(nodes)
    held = client, ids, x, y, edges, None, train, ~train, nobody
    return Client(*held, public=train, train_y=y)


def make_targets(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(ROWS), D)).astype(np.float32)


def model_of(graph: Client, classes: int = C, seed: int = 7, **changes: Any) -> GATCohort:
    gat = dataclasses.replace(SETTINGS.gat, **changes)
    return GATCohort([graph], dataclasses.replace(SETTINGS, seed=seed, gat=gat), classes)  # type: ignore[arg-type]


def trained(graph: Client, server_round: int = 1, **changes: Any) -> np.ndarray:
    """Embed after a round with targets."""
    model = model_of(graph, **changes)
    model.learn(ROWS, make_targets(), server_round)
    return model.embed()


def test_beta_zero_or_no_public_row_is_training_without_targets():
    graph, none = make_client(), np.empty(0, np.int64)
    local, alone, empty = (model_of(graph, beta=beta) for beta in (0.0, 2.0, 2.0))
    losses = {
        local.learn(ROWS, make_targets(), 1),
        alone.learn(ROWS, None, 1),
        empty.learn(none, np.empty((0, D), np.float32), 1),
    }
    assert len(losses) == 1
    np.testing.assert_array_equal(local.embed(), alone.embed())
    np.testing.assert_array_equal(empty.embed(), alone.embed())
    assert np.abs(local.embed() - trained(graph, beta=2.0)).max() > 1e-4


def test_same_seed_same_bits_and_others_differ():
    graph, one = make_client(), trained(make_client())
    torch.rand(3)  # moves PyTorch's own generator on, which must not show
    # Neither the layout of features nor a judged label matters
    sparse = dataclasses.replace(graph, x=graph.x.to_sparse_csr())
    hidden = dataclasses.replace(graph, train_y=torch.where(graph.train_mask, graph.y, -1))
    for same in (graph, sparse, hidden):
        np.testing.assert_array_equal(trained(same), one)
    other_client = dataclasses.replace(graph, client=3)
    for other in (trained(graph, seed=8), trained(graph, server_round=2), trained(other_client)):
        assert np.abs(other - one).max() > 1e-4


def test_labels_are_needed():
    unlabelled = dataclasses.replace(make_client(), train_y=torch.full((N,), -1))
    with pytest.raises(ValueError, match="client 2"):
        model_of(unlabelled)


SETTINGS_DEEPWALK = DeepWalkConfig(walks=5, length=8, window=2)
ROWS_DEEPWALK = np.array([0, 2])


def cliques(size: int, alone: int = 0) -> tuple[Tensor, int]:
    """Make two cliques without an edge between them, and some nodes without any."""
    pairs = [(a + k * size, b + k * size) for k in (0, 1) for a, b in permutations(range(size), 2)]
    return torch.tensor(pairs).T, 2 * size + alone


def graph_of(edges: Tensor, nodes: int, client: int = 0) -> Any:
    return SimpleNamespace(edges=edges, nodes=torch.arange(nodes), client=client)


def config_of(settings: DeepWalkConfig, seed: int = 3) -> PPFLConfig:
    return PPFLConfig(seed=seed, model=ModelConfig("deepwalk", 4), deepwalk=settings)


def model(
    settings: DeepWalkConfig = SETTINGS_DEEPWALK,
    client: int = 0,
    *,
    size: int = 4,
    alone: int = 1,
    seed: int = 3,
) -> DeepWalk:
    """Make an untrained model of two cliques."""
    return DeepWalk(graph_of(*cliques(size, alone), client), config_of(settings, seed))


def targets(shift: float = 0.0) -> NDArray[np.float32]:
    """Make targets for ``ROWS``, of the size that trained vectors have."""
    return np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4) + np.float32(shift)


def test_without_gensim_the_run_is_refused_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flower-graph\[deepwalk\]") as error:
        fg.run("ppfl/cora-linqs-deepwalk", out=tmp_path / "out")
    assert error.value.key == "model.name" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["seed", "client", "round"])
def test_walks_and_draws_depend_on(what: str) -> None:
    one, other = model(), model(client=int(what == "client"), seed=3 + (what == "seed"))
    other.load_state_dict(one.state_dict())  # the same start, so that only draws differ
    one.learn(ROWS_DEEPWALK, None, 1)
    other.learn(ROWS_DEEPWALK, None, 2 if what == "round" else 1)
    assert not np.array_equal(one.embed(), other.embed())


def test_clients_start_at_different_vectors_of_word2vecs_size_and_hand_out_copies():
    walker = model()
    first = walker.embed()
    assert first.shape == (9, 4) and first.dtype == np.float32
    assert not np.array_equal(first, model(client=1).embed())
    assert 0.2 < np.abs(first).max() <= 1 / 4  # uniform in -1/d to 1/d
    state = walker.state_dict()
    walker.load_state_dict(state)
    for handed in (first, state["vectors"], walker.state_dict()["vectors"]):
        handed[:] = 7
    assert np.abs(walker.embed()).max() < 1


def test_steps_of_a_later_round_are_smaller_by_the_decay():
    """Contexts grow with the step, and vectors move by step times context: steps a quarter of the
    size, in round 3, change a sixteenth."""
    small = replace(SETTINGS_DEEPWALK, learning_rate=1e-4, final_learning_rate=1e-4)
    changes = []
    for decay in (1.0, 0.5):
        walker = model(replace(small, decay=decay))
        walker.learn(ROWS_DEEPWALK, targets(), 3)
        changes.append(walker.embed()[ROWS_DEEPWALK] - targets())
        before, others = (
            model().embed(),
            np.setdiff1d(np.arange(9), ROWS_DEEPWALK),
        )  # they stay, and ROWS
        np.testing.assert_allclose(walker.embed()[others], before[others], atol=1e-3)
        np.testing.assert_allclose(walker.embed()[ROWS_DEEPWALK], targets(), atol=1e-3)
    np.testing.assert_allclose(changes[1], changes[0] / 16, atol=np.abs(changes[0]).max() / 100)


def test_a_node_without_edges_keeps_its_vector_or_its_target():
    walker = model(alone=2)
    before = walker.embed()
    walker.learn(np.array([8]), np.full((1, 4), 0.5, np.float32), 1)
    after = walker.embed()
    assert after[8].tolist() == [0.5] * 4 and np.array_equal(after[9], before[9])
    assert not np.array_equal(after[:8], before[:8])
    none = DeepWalk(graph_of(torch.empty(2, 0, dtype=torch.long), 3), config_of(SETTINGS_DEEPWALK))
    assert none.learn(ROWS_DEEPWALK, targets(), 1) == 0.0 and np.array_equal(
        none.embed()[ROWS_DEEPWALK], targets()
    )


def test_two_cliques_come_apart_and_the_loss_falls():
    walker = model(replace(SETTINGS_DEEPWALK, walks=40, length=20), size=6, alone=0)
    losses = [walker.learn(ROWS_DEEPWALK, None, t) for t in (1, 2, 3)]
    # At contexts of zero, each of a pair's 6 terms is log 2.
    assert losses[2] < losses[1] < 6 * math.log(2)
    unit = walker.embed() / np.linalg.norm(walker.embed(), axis=1, keepdims=True)
    cosine, clique = unit @ unit.T, np.arange(12) // 6
    inside = clique[:, None] == clique
    assert cosine[inside].min() > cosine[~inside].max() + 0.2


def test_loss_of_two_pairs_by_hand():
    """Products ln 3 and 0: σ is 3/4 and 1/2, so -log σ(v·c) is log 4/3, and log 2 twice."""
    vectors = np.array([[math.log(3), 0], [0, 1]], np.float32)
    near = np.array([[1, 5], [7, 0]], np.float32)
    far = np.array([[[-1, 0]], [[3, 0]]], np.float32)  # -v·f is ln 3, and 0
    by_hand = (2 * math.log(4 / 3) + 2 * math.log(2)) / 2
    assert negative_sampling_loss(vectors, near, far) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("length", [1, 10_001])
def test_walks_that_gensim_cannot_take_whole_are_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=r"deepwalk\.length"):
        load_config("ppfl/cora-linqs-deepwalk", [f"deepwalk.length={length}"])


# 0 - 1 - 2, 1 - 3, and 4 alone, in no order.
STAR = np.array([[3, 1, 0, 1, 2, 1], [1, 3, 1, 0, 1, 2]])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[NDArray[np.int64], int]:
    """Draw up to 8 nodes and some edges, each in both directions."""
    n = draw(st.integers(1, 8))
    node = st.integers(0, n - 1)
    pairs = draw(st.sets(st.tuples(node, node).filter(lambda pair: pair[0] != pair[1])))
    edges = sorted(pairs | {(b, a) for a, b in pairs})
    return np.array(edges, np.int64).reshape(-1, 2).T, n


@given(graphs(), st.integers(1, 9), st.integers(0, 99))
def test_a_walk_takes_edges_only_and_stays_where_there_are_none(
    graph: tuple[NDArray[np.int64], int], length: int, seed: int
) -> None:
    edges, n = graph
    starts = np.random.default_rng(seed).integers(n, size=20)
    lists = neighbour_lists(edges, n)
    walks = random_walks(*lists, starts, length, np.random.default_rng(seed))
    assert walks.shape == (20, length) and walks[:, 0].tolist() == starts.tolist()
    allowed, degree = set(map(tuple, edges.T.tolist())), np.diff(lists[0])
    for walk in walks.tolist():
        for here, there in pairwise(walk):
            assert (here, there) in allowed if degree[here] else here == there


def test_each_neighbour_is_as_likely_as_the_others():
    walks = random_walks(*neighbour_lists(STAR, 5), np.full(6000, 1), 4, np.random.default_rng(3))
    assert set(walks[:, 2].tolist()) == {1}
    # Two steps to a leaf are independent of each other: all nine ways are as likely.
    ways = Counter(map(tuple, walks[:, [1, 3]].tolist()))
    assert len(ways) == 9 and chisquare(list(ways.values())).pvalue > 0.01
    # An edge that is there twice is walked twice as often.
    lists = neighbour_lists(np.array([[0, 0, 0], [1, 1, 2]]), 3)
    walks = random_walks(*lists, np.zeros(6000, np.int64), 2, np.random.default_rng(5))
    seen = Counter(walks[:, 1].tolist())
    assert chisquare([seen[1], seen[2]], [4000, 2000]).pvalue > 0.01


def test_pairs_are_drawn_as_often_as_windows_that_shrink_see_them():
    """Walk 0 1 2 3, window 2: distance 1 is 3 pairs in all windows, distance 2 is 2 in half."""
    pairs = sample_pairs(np.arange(4)[None], 2, 16_000, np.random.default_rng(7))
    seen = Counter(map(tuple, pairs.T.tolist()))
    expected = {(0, 1): 2, (1, 2): 2, (2, 3): 2, (0, 2): 1, (1, 3): 1}
    both = {pair[::turn]: share for pair, share in expected.items() for turn in (1, -1)}
    assert set(seen) == set(both)
    assert chisquare([seen[pair] for pair in both], [1000 * s for s in both.values()]).pvalue > 0.01


EACH = one_fast(CLASSIFIERS, "svc")  # the MLP takes seconds
Embeddings = tuple[NDArray[np.float32], NDArray[np.int64]]


def _groups(distance: float, n: int = 60, seed: int = 0) -> Embeddings:
    """Make three groups of nodes at this distance from each other, in eight dimensions."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    z = rng.normal(size=(n, 8))
    z[np.arange(n), y] += distance
    return z.astype(np.float32), y


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_groups_far_apart_are_told_and_groups_in_one_place_are_not(classifier: str) -> None:
    assert judge_embeddings(*_groups(20.0), 5, 0, classifier) == 1.0
    assert judge_embeddings(*_groups(0.0, 300), 5, 0, classifier) == pytest.approx(1 / 3, abs=0.1)


def test_the_figure_is_the_share_of_right_guesses_in_folds_of_equal_size() -> None:
    """Two nodes of twenty bear the other group's label: no classifier can tell them."""
    z = np.repeat([[-1.0], [1.0]], 10, axis=0)
    y = np.repeat([0, 1], 10)
    y[0], y[-1] = 1, 0
    assert judge_embeddings(z, y, 5, 0) == pytest.approx(18 / 20)


@pytest.mark.parametrize("classifier", EACH)
def test_seed_alone_says_what_is_drawn_and_columns_are_standardised(classifier: str) -> None:
    z, y = _groups(1.0, 90)
    first = [judge_embeddings(z, y, 5, seed, classifier) for seed in range(4)]
    np.random.seed(7)  # others' use of NumPy's own generator
    assert [judge_embeddings(z, y, 5, seed, classifier) for seed in range(4)] == first
    assert len(set(first)) > 1
    moved = z.astype(np.float64) * (10.0 ** np.arange(-4, 4)) + np.arange(8)
    assert judge_embeddings(moved, y, 5, 3, classifier) == pytest.approx(first[3], abs=0.02)


def test_nodes_without_a_label_are_left_out() -> None:
    z, y = _groups(1.0)
    more = np.concatenate([z, np.full((5, 8), np.nan, np.float32)])
    labels = np.concatenate([y, np.full(5, -1)])
    assert judge_embeddings(more, labels, 5, 0) == judge_embeddings(z, y, 5, 0)


def _check(role: str, y: list[int], folds: int, client: int = 0) -> None:
    """Check a client whose nodes all have this role."""
    everyone = torch.ones(len(y), dtype=torch.bool)
    masks = {"val_mask": ~everyone, "test_mask": ~everyone} | {f"{role}_mask": everyone}
    graph: Any = SimpleNamespace(client=client, y=torch.tensor(y), **masks)
    check_labels([graph], folds)


def test_a_class_with_fewer_nodes_than_folds_is_an_error_that_names_it() -> None:
    y = [0] * 6 + [4] * 4 + [-1] * 3
    _check("test", y, 4)
    with pytest.raises(DataError, match=r"client 2.*class 4: 4 .*judge\.folds=5"):
        _check("test", y, 5, client=2)
    with pytest.raises(ValueError, match=r"class 4.*4"):
        judge_embeddings(np.zeros((13, 2)), np.array(y), 5, 0)
    for y in ([1] * 9, [-1, -1], [1] * 9 + [-1] * 9):
        with pytest.raises(DataError, match="client 0"):
            _check("val", y, 5)
