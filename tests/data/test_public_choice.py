"""Which nodes become public: three ways, by hand and against a plain greedy cover."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.data import to_undirected
from flower_graph.data.partition.overlapping import choose_public, greedy_cover
from flower_graph.errors import DataError

# 0 is the middle of 1, 2 and 3, which leads on to 4 and 5; 6 has no neighbour.
EDGES = to_undirected(torch.tensor([[0, 0, 0, 3, 4], [1, 2, 3, 4, 5]]), 7)
RING = to_undirected(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)


@st.composite
def graphs(draw: st.DrawFn, largest: int = 9) -> tuple[Tensor, int]:
    """Draw the edges of a graph, and its number of nodes."""
    n = draw(st.integers(2, largest))
    ends = st.integers(0, n - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=2 * n))
    return to_undirected(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T, n), n


def neighbours(edges: Tensor, n: int) -> list[set[int]]:
    return [set(edges[1, edges[0] == node].tolist()) for node in range(n)]


def settled(edges: Tensor, n: int, chosen: set[int]) -> int:
    around = neighbours(edges, n)
    linked = {node for node in range(n) if around[node]}
    return sum(node in chosen or bool(around[node] & chosen) for node in linked)


def plain_cover(edges: Tensor, order: list[int]) -> list[int]:
    """Choose all nodes as ``greedy_cover`` does, from the definition at every step."""
    around, chosen = neighbours(edges, len(order)), []
    while True:
        counts = {v: len(around[v] & set(chosen)) for v in order}
        lacking = [v for v in order if v not in chosen and counts[v] < len(around[v])]
        if not lacking:
            return chosen + [v for v in order if v not in chosen]
        # Levels follow each other: none is open while a lower one is.
        level = min(counts[v] for v in lacking)
        due = {v for v in lacking if counts[v] == level}
        gains = [len(due & {v, *around[v]}) if v not in chosen else 0 for v in order]
        chosen.append(order[gains.index(max(gains))])


def test_the_highest_degrees_come_first() -> None:
    assert choose_public(EDGES, 7, 1, "degree", seed=0).tolist() == [0]
    assert set(choose_public(EDGES, 7, 3, "degree", seed=0).tolist()) == {0, 3, 4}
    assert choose_public(EDGES, 7, 7, "degree", seed=0)[-1] == 6


def test_equal_degrees_come_in_a_random_order() -> None:
    firsts = {int(choose_public(EDGES, 7, 4, "degree", seed)[3]) for seed in range(20)}
    assert firsts == {1, 2, 5}


def test_random_nodes_depend_on_the_seed() -> None:
    draws = [choose_public(EDGES, 7, 3, "random", seed).tolist() for seed in range(20)]
    assert choose_public(EDGES, 7, 3, "random", 0).tolist() == draws[0]
    assert {node for draw in draws for node in draw} == set(range(7))


@pytest.mark.parametrize("how", ["random", "degree", "cover"])
@given(count=st.integers(0, 7), seed=st.integers(0, 50))
def test_fewer_nodes_are_the_first_of_more(how: str, count: int, seed: int) -> None:
    every = choose_public(EDGES, 7, 7, how, seed).tolist()
    assert sorted(every) == list(range(7))
    assert choose_public(EDGES, 7, count, how, seed).tolist() == every[:count]


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(DataError, match=r"partition.public = 'all': must be one of random, degree"):
        choose_public(EDGES, 7, 3, "all", seed=0)


@pytest.mark.parametrize(
    ("order", "cover"),
    [
        # 0 settles itself and 1, 2, 3; then 4 and 5 both settle what is left, 4 and 5. After
        # that every other node has all its neighbours chosen.
        ([0, 3, 4, 1, 2, 5, 6], [0, 4, 3, 1, 2, 5, 6]),
        ([6, 5, 4, 3, 2, 1, 0], [0, 5, 4, 6, 3, 2, 1]),
    ],
)
def test_a_cover_by_hand(order: list[int], cover: list[int]) -> None:
    # In the second order 5 leaves 4 lacking no neighbour but 3: 4 has one chosen of two.
    assert greedy_cover(EDGES, torch.tensor(order), 7).tolist() == cover


def test_the_second_cover_gives_each_node_a_second_neighbour_by_hand() -> None:
    # 0 settles 3, 0 and 1; of 1, 2 and 3, which would settle 2, the first. Then 2 and 3 have one
    # chosen neighbour of two each, and either of them would settle both.
    assert greedy_cover(RING, torch.arange(4), 4).tolist() == [0, 1, 2, 3]
    assert greedy_cover(RING, torch.tensor([0, 3, 2, 1]), 3).tolist() == [0, 3, 2]


@given(graph=graphs(), seed=st.integers(0, 99))
def test_the_cover_is_that_of_the_definition(graph: tuple[Tensor, int], seed: int) -> None:
    edges, n = graph
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert greedy_cover(edges, order, n).tolist() == plain_cover(edges, order.tolist())


@given(graph=graphs(largest=7), count=st.integers(1, 3))
def test_no_choice_is_much_better(graph: tuple[Tensor, int], count: int) -> None:
    edges, n = graph
    count = min(count, n)
    ours = settled(edges, n, set(greedy_cover(edges, torch.arange(n), count).tolist()))
    best = max(settled(edges, n, set(some)) for some in combinations(range(n), count))
    assert ours >= (1 - 1 / math.e) * best
