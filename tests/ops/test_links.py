"""Held-out edges, scores of pairs and how good these are, on graphs worked out by hand."""

import math

import pytest
import torch

from flower_graph.ops.links import (
    STEPS,
    adamic_adar,
    both_directions,
    common_neighbours,
    dot_products,
    draw_absent,
    hits_of,
    rank_counts,
    split_links,
    undirected,
)

# A square 0-1-2-3 with the diagonal 0-2, and a node 4 that hangs on 3
EDGES = both_directions(torch.tensor([[0, 1, 2, 0, 0, 3], [1, 2, 3, 3, 2, 4]]))
N = 5


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes(pairs: torch.Tensor, n: int) -> set[int]:
    return set(undirected(pairs, n).tolist())


@pytest.mark.parametrize("seed", range(3))
def test_no_held_out_edge_is_passed_over(seed: int) -> None:
    n = 60
    graph = torch.randint(n, (2, 400), generator=rng(seed))
    whole = codes(graph, n)
    split = split_links(graph, n, 0.1, 0.2, rng(seed))
    by_role = [split.pairs[:, (split.role == role) & split.is_edge] for role in range(3)]
    train, val, test = (codes(pairs, n) for pairs in by_role)
    assert train | val | test == whole and len(train) + len(val) + len(test) == len(whole)
    assert (len(val), len(test)) == (int(0.1 * len(whole)), int(0.2 * len(whole)))
    assert codes(split.messages, n) == train and codes(split.later, n) == train | val
    assert split.messages.shape[1] == 2 * len(train)
    absent = split.pairs[:, ~split.is_edge]
    assert not codes(absent, n) & whole and bool((absent[0] != absent[1]).all())
    assert len(codes(absent, n)) == absent.shape[1] == len(whole)  # one for each edge, none twice
    assert [int(((split.role == r) & ~split.is_edge).sum()) for r in range(3)] == [
        *map(len, (train, val, test))
    ]
    again = split_links(graph, n, 0.1, 0.2, rng(seed))
    assert torch.equal(split.pairs, again.pairs)


def test_a_dense_graph_has_few_pairs_without_an_edge() -> None:
    n, edges = 4, torch.combinations(torch.arange(4)).t()
    assert not len(draw_absent(undirected(edges, n), n, 3, rng()))
    found = draw_absent(undirected(edges[:, :4], n), n, 9, rng())
    assert sorted(found.tolist()) == sorted((edges[0] * n + edges[1])[4:].tolist())


def test_scores_of_pairs_by_hand() -> None:
    pairs = torch.tensor([[1, 0, 0, 1], [3, 4, 2, 4]])
    # 1 and 3 have 0 and 2 in common; 0 and 4 have 3; 0 and 2 have 1 and 3; 1 and 4 nothing.
    assert common_neighbours(EDGES, N, pairs).tolist() == [2, 1, 2, 0]
    three = 1 / math.log(3)  # nodes 0, 2 and 3 have three neighbours, 1 has two
    expected = [2 * three, three, three + 1 / math.log(2), 0]
    assert adamic_adar(EDGES, N, pairs).tolist() == pytest.approx(expected)
    rows = torch.tensor([[1.0, 0], [2.0, 1], [0, 3.0], [1.0, 1], [0, 0]])
    assert dot_products(rows, pairs).tolist() == [3, 0, 0, 0]


def test_figures_of_scores_by_hand() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 1.0])
    is_edge = torch.tensor([True, True, False, False])
    # The first edge is ahead of both others; the second is behind one and tied with one.
    counted = rank_counts(scores, is_edge)
    assert counted.tolist() == [2, 2, 2, STEPS + round(STEPS / 2.5)]
    assert hits_of(counted)["mrr"] == pytest.approx((1 + 1 / 2.5) / 2, abs=1e-6)
    many = torch.cat([torch.tensor([30.5, 80.5]), torch.arange(100.0)])
    ranked = rank_counts(many, torch.arange(102) < 2)  # 69 and 19 others are ahead
    assert hits_of(ranked) == pytest.approx(
        {"hits@20": 1 / 2, "hits@50": 1 / 2, "mrr": (1 / 70 + 1 / 20) / 2}, abs=1e-5
    )
