"""DeepWalk: the same bits in any process, going on from its state, and what it does to nodes."""

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
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor

import flower_graph as fg
from flower_graph.config import rules
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.strategies.ppfl.config import DeepWalkConfig, ModelConfig, PPFLConfig
from flower_graph.strategies.ppfl.modules import (
    DeepWalk,
    negative_sampling_loss,
    neighbour_lists,
    random_walks,
    sample_pairs,
)

SETTINGS = DeepWalkConfig(walks=5, length=8, window=2)
ROWS = np.array([0, 2])


def cliques(size: int, alone: int = 0) -> tuple[Tensor, int]:
    """Make two cliques without an edge between them, and some nodes without any."""
    pairs = [(a + k * size, b + k * size) for k in (0, 1) for a, b in permutations(range(size), 2)]
    return torch.tensor(pairs).T, 2 * size + alone


def graph_of(edges: Tensor, nodes: int, client: int = 0) -> Any:
    return SimpleNamespace(edges=edges, nodes=torch.arange(nodes), client=client)


def config_of(settings: DeepWalkConfig, seed: int = 3) -> PPFLConfig:
    return PPFLConfig(seed=seed, model=ModelConfig("deepwalk", 4), deepwalk=settings)


def model(
    settings: DeepWalkConfig = SETTINGS,
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
    one.learn(ROWS, None, 1)
    other.learn(ROWS, None, 2 if what == "round" else 1)
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
    small = replace(SETTINGS, learning_rate=1e-4, final_learning_rate=1e-4)
    changes = []
    for decay in (1.0, 0.5):
        walker = model(replace(small, decay=decay))
        walker.learn(ROWS, targets(), 3)
        changes.append(walker.embed()[ROWS] - targets())
        before, others = model().embed(), np.setdiff1d(np.arange(9), ROWS)  # they stay, and ROWS
        np.testing.assert_allclose(walker.embed()[others], before[others], atol=1e-3)
        np.testing.assert_allclose(walker.embed()[ROWS], targets(), atol=1e-3)
    np.testing.assert_allclose(changes[1], changes[0] / 16, atol=np.abs(changes[0]).max() / 100)


def test_a_node_without_edges_keeps_its_vector_or_its_target():
    walker = model(alone=2)
    before = walker.embed()
    walker.learn(np.array([8]), np.full((1, 4), 0.5, np.float32), 1)
    after = walker.embed()
    assert after[8].tolist() == [0.5] * 4 and np.array_equal(after[9], before[9])
    assert not np.array_equal(after[:8], before[:8])
    none = DeepWalk(graph_of(torch.empty(2, 0, dtype=torch.long), 3), config_of(SETTINGS))
    assert none.learn(ROWS, targets(), 1) == 0.0 and np.array_equal(none.embed()[ROWS], targets())


def test_two_cliques_come_apart_and_the_loss_falls():
    walker = model(replace(SETTINGS, walks=40, length=20), size=6, alone=0)
    losses = [walker.learn(ROWS, None, t) for t in (1, 2, 3)]
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
