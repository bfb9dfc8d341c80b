"""Ways to cut a graph: communities and parts by hand, chance, refusals."""

from __future__ import annotations

import random
import sys
from itertools import chain
from typing import Any

import igraph
import pymetis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.data import csbm
from flower_graph.data.partition.communities import (
    DRAWS,
    LEAST_NODES,
    dirichlet,
    louvain,
    metis,
    metis_overlapping,
    random_parts,
)
from flower_graph.errors import DataError


def clique(*nodes: int) -> list[tuple[int, int]]:
    return [(a, b) for a in nodes for b in nodes if a < b]


# Four nodes and three nodes, all linked, with one edge between them; 7 has no neighbour.
EDGES = torch.tensor([*clique(0, 2, 4, 6), *clique(1, 3, 5), (5, 6)]).t()


def lists(parts: list[Tensor]) -> list[list[int]]:
    return [part.tolist() for part in parts]


# --- Louvain


def test_the_largest_communities_come_first_and_the_rest_is_left_out() -> None:
    parts = louvain(EDGES, 8, clients=2, resolution=1.0, seed=0)
    assert lists(parts) == [[0, 2, 4, 6], [1, 3, 5]]
    assert lists(louvain(EDGES, 8, clients=3, resolution=1.0, seed=0))[2] == [7]


def test_of_two_equally_large_the_one_with_the_lowest_node_is_first() -> None:
    edges = torch.tensor([*clique(3, 4, 5), *clique(0, 2, 7), *clique(1, 6, 8)]).t()
    for seed in range(5):
        found = louvain(edges, 9, clients=2, resolution=1.0, seed=seed)
        assert lists(found) == [[0, 2, 7], [1, 6, 8]]


def test_every_node_is_assigned_the_rest_to_the_smallest_client() -> None:
    parts = louvain(EDGES, 8, clients=2, resolution=1.0, seed=0, every_node=True)
    assert lists(parts) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    alone = louvain(EDGES, 8, clients=3, resolution=50.0, seed=0, every_node=True)
    assert lists(alone) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_too_few_communities_are_counted() -> None:
    with pytest.raises(DataError, match=r"clients = 4: Louvain found 3 .*resolution above 1 "):
        louvain(EDGES, 8, clients=4, resolution=1.0, seed=0)


NOISY = csbm(600, 4, degree=4.0, features=8, active=2, homophily=0.6, seed=1).edge_index


def test_the_seed_alone_decides_and_random_numbers_of_python_and_igraph_stay() -> None:
    random.seed(1)
    first = lists(louvain(NOISY, 600, clients=6, resolution=1.0, seed=3))
    random.seed(2)
    assert lists(louvain(NOISY, 600, clients=6, resolution=1.0, seed=3)) == first
    assert lists(louvain(NOISY, 600, clients=6, resolution=1.0, seed=4)) != first
    before = random.getstate()
    louvain(NOISY, 600, clients=6, resolution=1.0, seed=3)
    assert random.getstate() == before
    drawn = []
    for _ in range(2):
        random.seed(9)
        drawn.append(igraph.Graph.Erdos_Renyi(n=50, m=60).get_edgelist())
    assert drawn[0] == drawn[1]


# --- METIS


def test_metis_cuts_where_there_are_few_edges() -> None:
    edges = torch.tensor([*clique(0, 2, 4, 6), *clique(1, 3, 5, 7), (5, 6)]).t()
    parts = sorted(lists(metis(edges, 8, clients=2, seed=0)))
    assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_metis_depends_on_its_seed() -> None:
    first = lists(metis(NOISY, 600, clients=6, seed=0))
    assert lists(metis(NOISY, 600, clients=6, seed=0)) == first
    assert any(lists(metis(NOISY, 600, clients=6, seed=seed)) != first for seed in (1, 2, 3))
    assert sorted(chain(*first)) == list(range(600))


def test_without_pymetis_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(DataError, match=r"needs pymetis: pip install 'flower-graph\[metis\]'"):
        metis(EDGES, 8, clients=2, seed=0)


def test_an_empty_part_of_metis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pymetis, "part_graph", lambda *_, **__: (0, [0, 0, 2, 2, 2, 2, 2, 2]))
    with pytest.raises(DataError, match="clients = 4: METIS left 2 of them without a node of"):
        metis(EDGES, 8, clients=4, seed=0)


# --- METIS, overlapping


SHARED = csbm(120, 3, degree=6.0, features=8, active=2, homophily=0.8, seed=2).edge_index


def overlapping(clients: int, **changes: Any) -> list[Tensor]:
    how: dict[str, Any] = {"draws": 3, "share": 0.5, "seed": 1} | changes
    return metis_overlapping(SHARED, 120, clients=clients, **how)


def test_half_of_each_part_is_drawn_for_each_of_its_clients() -> None:
    cut = lists(metis(SHARED, 120, clients=2, seed=1))
    found = lists(overlapping(6))
    assert len({tuple(nodes) for nodes in found}) == len(found) == 6
    for number, nodes in enumerate(found):
        assert set(nodes) < set(cut[number // 3])
        assert len(nodes) == round(0.5 * len(cut[number // 3]))
        assert nodes == sorted(nodes)
    assert lists(overlapping(6)) == lists(overlapping(6)) != lists(overlapping(6, seed=2))
    first, second, *_ = lists(overlapping(6, share=1.0))
    assert first == second


def test_clients_of_overlapping_parts_are_counted_in_draws() -> None:
    with pytest.raises(DataError, match=r"clients = 7: must be a multiple of partition.draws = 3"):
        overlapping(7)
    with pytest.raises(DataError, match=r"drawn_share = 0.001: less than one of the .* nodes of"):
        overlapping(6, share=0.001)


# --- by label, and at random


def spread(parts: list[Tensor], y: Tensor) -> float:
    """Mean number of classes of a part."""
    return sum(y[part].unique().numel() for part in parts) / len(parts)


def test_a_small_alpha_gives_few_classes_and_a_large_one_gives_all() -> None:
    y = torch.arange(2000) % 10
    few, many = dirichlet(y, 4, 0.05, seed=0), dirichlet(y, 4, 1000.0, seed=0)
    assert spread(few, y) < 6
    assert spread(many, y) == 10
    for part in many:  # nearly a quarter of each class
        assert torch.bincount(y[part]).sub(50).abs().max() < 10


def test_all_get_enough_nodes_though_the_first_draw_would_not_give_them() -> None:
    y = torch.arange(100) % 2
    found = [dirichlet(y, 4, 0.3, seed=seed) for seed in range(20)]
    assert min(part.numel() for parts in found for part in parts) >= LEAST_NODES
    assert lists(found[0]) == lists(dirichlet(y, 4, 0.3, seed=0)) != lists(found[1])


def test_nodes_without_a_label_are_dealt_too() -> None:
    y = torch.where(torch.arange(90) < 45, 0, -1)
    parts = dirichlet(y, 3, 10.0, seed=0)
    assert sorted(chain(*lists(parts))) == list(range(90))
    assert all((y[part] < 0).any() for part in parts)


@pytest.mark.parametrize(("nodes", "alpha"), [(39, 1e6), (1000, 1e-6)])
def test_settings_that_leave_somebody_too_little_are_refused(nodes: int, alpha: float) -> None:
    with pytest.raises(DataError, match=f"none of {DRAWS} draws did all of .* = 4 get 10 of the"):
        dirichlet(torch.zeros(nodes, dtype=torch.int64), 4, alpha, seed=0)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 99))
def test_random_parts_have_every_node_once_and_even_sizes(n: int, clients: int, seed: int) -> None:
    if clients > n:
        return
    parts = random_parts(n, clients, seed)
    assert len(parts) == clients
    assert sorted(chain(*lists(parts))) == list(range(n))
    sizes = [part.numel() for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert lists(parts) == lists(random_parts(n, clients, seed))


@pytest.mark.parametrize("clients", [0, 9])
def test_a_number_of_clients_that_no_graph_of_this_size_has(clients: int) -> None:
    y = torch.zeros(8, dtype=torch.int64)
    for cut in (
        lambda: louvain(EDGES, 8, clients=clients, resolution=1.0, seed=0),
        lambda: metis(EDGES, 8, clients=clients, seed=0),
        lambda: dirichlet(y, clients, 0.5, seed=0),
        lambda: random_parts(8, clients, seed=0),
    ):
        with pytest.raises(DataError, match=f"clients = {clients}: must be .* 1 and .* 8 nodes"):
            cut()
