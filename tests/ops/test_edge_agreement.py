"""Learned edges against true ones, by hand and against sets of pairs."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.ops.edge_agreement import distinct_edges, edge_agreement


def undirected(pairs: list[tuple[int, int]]) -> Tensor:
    both = sorted([*pairs, *((b, a) for a, b in pairs)])
    return torch.tensor(both, dtype=torch.int64).reshape(-1, 2).T


def figures(found: dict[str, Tensor], client: int) -> list[float]:
    return [value[client].item() for value in found.values()]


def test_two_clients_by_hand():
    """Client 0 has nodes 0 to 3 and learned one of two true edges; client 1 has nodes 4 and 5."""
    y = torch.tensor([0, 0, 1, -1, 1, 0])
    learned, true = undirected([(0, 1), (0, 2), (0, 3)]), undirected([(0, 1), (1, 2), (4, 5)])
    found = edge_agreement(learned, true, y, [0, 4, 6])
    names = ["precision", "recall", "homophily", "true-homophily", "degree", "true-degree"]
    assert list(found) == names
    assert figures(found, 0) == [1 / 3, 1 / 2, 1 / 2, 1 / 2, 6 / 4, 4 / 4]
    undefined, recall, homophily, *rest = figures(found, 1)
    assert math.isnan(undefined) and recall == 0 and math.isnan(homophily)
    assert rest == [0, 0, 1]


@st.composite
def two_graphs(draw: st.DrawFn) -> tuple[list[set[tuple[int, int]]], list[int], list[int]]:
    """Draw two sets of edges over some clients, classes, and the clients' bounds."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ptr = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    pairs = [
        (a, b)
        for first, last in pairwise(ptr)
        for a in range(first, last)
        for b in range(a + 1, last)
    ]
    some = st.sets(st.sampled_from(pairs)) if pairs else st.just(set[tuple[int, int]]())
    y = draw(st.lists(st.integers(-1, 2), min_size=ptr[-1], max_size=ptr[-1]))
    return [draw(some), draw(some)], y, ptr


@settings(deadline=None)
@given(case=two_graphs())
def test_equals_counting_pairs(case: tuple[list[set[tuple[int, int]]], list[int], list[int]]):
    (learned, true), y, ptr = case
    edges = [undirected(sorted(pairs)) for pairs in (learned, true)]
    found = edge_agreement(edges[0], edges[1], torch.tensor(y), ptr)

    def share(part: int, whole: int) -> float:
        return part / whole if whole else math.nan

    def homophily(pairs: set[tuple[int, int]]) -> float:
        known = [y[a] == y[b] for a, b in pairs if min(y[a], y[b]) >= 0]
        return share(sum(known), len(known))

    for client, (first, last) in enumerate(pairwise(ptr)):
        own, wanted = ({e for e in pairs if first <= e[0] < last} for pairs in (learned, true))
        expected = [
            share(len(own & wanted), len(own)),
            share(len(own & wanted), len(wanted)),
            homophily(own),
            homophily(wanted),
            2 * len(own) / (last - first),
            2 * len(wanted) / (last - first),
        ]
        torch.testing.assert_close(
            torch.tensor(figures(found, client)), torch.tensor(expected), equal_nan=True
        )


def test_distinct_edges_leave_out_loops_repeats_and_what_weighs_nothing():
    edge_index = torch.tensor([[0, 0, 1, 1, 2, 2, 1], [0, 1, 0, 0, 1, 0, 2]])
    weight = torch.tensor([1.0, 0.5, 0.2, 0.3, 0.0, 0.1, 0.0])
    assert distinct_edges(edge_index, weight, 3).tolist() == [[0, 1, 2], [1, 0, 0]]
