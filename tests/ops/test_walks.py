"""Walks take edges only, each with the same probability; pairs are drawn as skip-gram sees them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from flower_graph.ops.walks import neighbour_lists, random_walks, sample_pairs

Integers = NDArray[np.int64]

# 0 - 1 - 2, 1 - 3, and 4 alone, in no order.
STAR = np.array([[3, 1, 0, 1, 2, 1], [1, 3, 1, 0, 1, 2]])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Integers, int]:
    """Draw up to 8 nodes and some edges, each in both directions."""
    n = draw(st.integers(1, 8))
    node = st.integers(0, n - 1)
    pairs = draw(st.sets(st.tuples(node, node).filter(lambda pair: pair[0] != pair[1])))
    edges = sorted(pairs | {(b, a) for a, b in pairs})
    return np.array(edges, np.int64).reshape(-1, 2).T, n


def test_lists_of_a_star_by_hand():
    lists = neighbour_lists(STAR, 5)
    assert lists.indptr.tolist() == [0, 1, 4, 5, 6, 6]
    assert lists.neighbours.tolist() == [1, 0, 2, 3, 1, 1]


@given(graphs(), st.integers(1, 9), st.integers(0, 99))
def test_a_walk_takes_edges_only_and_stays_where_there_are_none(
    graph: tuple[Integers, int], length: int, seed: int
) -> None:
    edges, n = graph
    starts = np.random.default_rng(seed).integers(n, size=20)
    lists = neighbour_lists(edges, n)
    walks = random_walks(*lists, starts, length, np.random.default_rng(seed))
    assert walks.shape == (20, length) and walks[:, 0].tolist() == starts.tolist()
    allowed, degree = set(map(tuple, edges.T.tolist())), np.diff(lists.indptr)
    for walk in walks.tolist():
        for here, there in pairwise(walk):
            assert (here, there) in allowed if degree[here] else here == there


def test_each_neighbour_is_as_likely_as_the_others():
    lists = neighbour_lists(STAR, 5)
    walks = random_walks(*lists, np.full(6000, 1), 4, np.random.default_rng(3))
    for step in (1, 3):  # every second step leaves the middle
        seen = Counter(walks[:, step].tolist())
        assert chisquare([seen[0], seen[2], seen[3]]).pvalue > 0.01
    assert set(walks[:, 2].tolist()) == {1}
    # Two steps to a leaf are independent of each other: all nine ways are as likely.
    ways = Counter(map(tuple, walks[:, [1, 3]].tolist()))
    assert len(ways) == 9 and chisquare(list(ways.values())).pvalue > 0.01


def test_an_edge_that_is_there_twice_is_walked_twice_as_often():
    lists = neighbour_lists(np.array([[0, 0, 0], [1, 1, 2]]), 3)
    walks = random_walks(*lists, np.zeros(6000, np.int64), 2, np.random.default_rng(5))
    seen = Counter(walks[:, 1].tolist())
    assert chisquare([seen[1], seen[2]], [4000, 2000]).pvalue > 0.01


def test_the_same_generator_walks_the_same_way_and_another_does_not():
    lists, starts = neighbour_lists(STAR, 5), np.arange(5).repeat(10)
    once, again, other = (
        random_walks(*lists, starts, 20, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert (once == again).all() and (once != other).any()


def test_pairs_are_drawn_as_often_as_windows_that_shrink_see_them():
    """Walk 0 1 2 3, window 2: distance 1 is 3 pairs in all windows, distance 2 is 2 in half."""
    pairs = sample_pairs(np.arange(4)[None], 2, 16_000, np.random.default_rng(7))
    seen = Counter(map(tuple, pairs.T.tolist()))
    expected = {(0, 1): 2, (1, 2): 2, (2, 3): 2, (0, 2): 1, (1, 3): 1}
    both = {pair[::turn]: share for pair, share in expected.items() for turn in (1, -1)}
    assert set(seen) == set(both)
    assert chisquare([seen[pair] for pair in both], [1000 * s for s in both.values()]).pvalue > 0.01


def test_a_window_that_is_wider_than_the_walk_is_cut():
    pairs = sample_pairs(np.array([[5, 6]]), 9, 50, np.random.default_rng(0))
    assert set(map(tuple, pairs.T.tolist())) == {(5, 6), (6, 5)}


@pytest.mark.parametrize("edge", [(0, 3), (-1, 0)])
def test_an_edge_to_a_node_that_is_not_there_is_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"node {3 if 3 in edge else -1}, and nodes are 0 to 2"):
        neighbour_lists(np.array([edge]).T, 3)


def test_walks_without_a_node_and_samples_without_a_pair_are_refused():
    lists, rng = neighbour_lists(STAR, 5), np.random.default_rng(0)
    with pytest.raises(ValueError, match="length = 0"):
        random_walks(*lists, np.arange(5), 0, rng)
    for walks, window in ((np.empty((0, 5), np.int64), 2), (np.zeros((3, 1), np.int64), 2)):
        with pytest.raises(ValueError, match="have no pairs"):
            sample_pairs(walks, window, 10, rng)
    with pytest.raises(ValueError, match="window = 0 have no pairs"):
        sample_pairs(np.zeros((3, 4), np.int64), 0, 10, rng)
