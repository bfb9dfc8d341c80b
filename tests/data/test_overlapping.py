"""Clients that share public nodes: how these are chosen, who holds what, roles, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from partition_helpers import RATIOS, chance, large
from torch import Tensor
from torch_geometric.utils import subgraph

from flower_graph.config.common import DataConfig
from flower_graph.data import Graph, load_graph, to_undirected
from flower_graph.data.graph import Neighbours
from flower_graph.data.partition.overlapping import (
    EVERYBODY,
    NOBODY,
    choose_public,
    deal_nodes,
    greedy_cover,
    noisy_labels,
    overlapping_graphs,
)
from flower_graph.data.splits import Masks, check_roles
from flower_graph.errors import ConfigError, DataError
from flower_graph.strategies.ppfl.config import PartitionConfig


def partition(**changes: Any) -> PartitionConfig:
    return PartitionConfig(**{"ratios": RATIOS, **changes})


WAYS = ("random", "degree", "cover")
# 0 is the middle of 1, 2 and 3, which leads on to 4 and 5; 6 has no neighbour.
EDGES = to_undirected(torch.tensor([[0, 0, 0, 3, 4], [1, 2, 3, 4, 5]]), 7)


@st.composite
def drawn_graphs(draw: st.DrawFn, largest: int = 9) -> tuple[Tensor, int]:
    """Draw the edges of a graph, and its number of nodes."""
    n = draw(st.integers(2, largest))
    ends = st.integers(0, n - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=2 * n))
    return to_undirected(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T, n), n


def around(edges: Tensor, n: int) -> Neighbours:
    return Neighbours.of(Graph(torch.empty(n, 0), edges, torch.zeros(n), 1))


def plain_cover(edges: Tensor, order: list[int]) -> list[int]:
    """Choose all nodes as ``greedy_cover`` does, from the definition at every step."""
    beside = [set(edges[1, edges[0] == node].tolist()) for node in range(len(order))]
    chosen: list[int] = []
    while True:
        counts = {v: len(beside[v] & set(chosen)) for v in order}
        lacking = [v for v in order if v not in chosen and counts[v] < len(beside[v])]
        if not lacking:
            return chosen + [v for v in order if v not in chosen]
        # Levels follow each other: none is open while a lower one is.
        level = min(counts[v] for v in lacking)
        due = {v for v in lacking if counts[v] == level}
        gains = [len(due & {v, *beside[v]}) if v not in chosen else 0 for v in order]
        chosen.append(order[gains.index(max(gains))])


def test_the_highest_degrees_come_first_and_equal_ones_in_a_random_order():
    def chosen(count, how, seed=0):
        return choose_public(around(EDGES, 7), count, how, seed).tolist()

    assert chosen(1, "degree") == [0] and chosen(7, "degree")[-1] == 6
    assert {*chosen(3, "degree")} == {0, 3, 4}
    assert {chosen(4, "degree", seed)[3] for seed in range(20)} == {1, 2, 5}
    assert {chosen(1, "random", seed)[0] for seed in range(60)} == {*range(7)}


@pytest.mark.parametrize("how", WAYS)
@given(count=st.integers(0, 7), seed=st.integers(0, 50))
def test_fewer_nodes_are_the_first_of_more(how, count, seed):
    every = choose_public(around(EDGES, 7), 7, how, seed).tolist()
    assert sorted(every) == list(range(7))
    assert choose_public(around(EDGES, 7), count, how, seed).tolist() == every[:count]


@given(graph=drawn_graphs(), seed=st.integers(0, 99))
def test_the_cover_is_that_of_the_definition(graph, seed):
    edges, n = graph
    order = torch.randperm(n, generator=chance(seed))
    assert greedy_cover(around(edges, n), order, n).tolist() == plain_cover(edges, order.tolist())


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("name", "sizes"), [("Cora", (1489, 1083, 406)), ("CiteSeer", (1829, 1330, 499))]
)
def test_sizes_are_the_papers(name, sizes, how, data_root):
    graph = load_graph(DataConfig(name=name, root=str(data_root)))
    for client in overlapping_graphs(graph, partition(public=how), seed=0):
        nodes, public = client.nodes.numel(), int(client.public.sum())
        assert (nodes, public, nodes - public) == sizes


@given(
    nodes=st.integers(20, 120),
    clients=st.integers(1, 6),
    how=st.sampled_from(WAYS),
    shares=st.tuples(st.floats(0.06, 1), st.floats(0, 1)),
    seed=st.integers(0, 99),
)
def test_shares_edges_and_roles_hold_for_any_settings(nodes, clients, how, shares, seed):
    public, private = shares[0], (1 - shares[0]) / clients * shares[1]
    private = private if private * nodes >= 1 else 0.0
    graph = large(nodes, seed)
    mine = partition(clients=clients, public=how, public_share=public, private_share=private)
    mine.ratios = [0, 0, 1]
    made = overlapping_graphs(graph, mine, seed)
    assert len(made) == clients
    assert len({tuple(client.nodes[client.public].tolist()) for client in made}) == 1
    alone = torch.cat([client.nodes[~client.public] for client in made])
    assert alone.unique().numel() == alone.numel()
    for client in made:
        assert int(client.public.sum()) == int(round(public * nodes, 6))
        assert int((~client.public).sum()) == int(round(private * nodes, 6))
        assert bool((client.nodes.diff() > 0).all())
        expected, _ = subgraph(client.nodes, graph.edge_index, relabel_nodes=True, num_nodes=nodes)
        assert torch.equal(client.edge_index, to_undirected(expected, client.nodes.numel()))


def test_what_is_left_over_is_nobodys_and_a_share_that_floats_make_too_small_is_whole():
    owner = deal_nodes(Neighbours.of(large()), partition(private_share=0.1), seed=0)
    counts = {value: int((owner == value).sum()) for value in (EVERYBODY, NOBODY, 0, 1, 2, 3)}
    assert counts == {EVERYBODY: 80, NOBODY: 40, 0: 20, 1: 20, 2: 20, 3: 20}
    assert 0.29 * 100 < 29
    owner = deal_nodes(Neighbours.of(large(100)), partition(public_share=0.29), seed=0)
    assert int((owner == EVERYBODY).sum()) == 29


def test_private_nodes_are_dealt_from_one_order_for_all_ways():
    one, other = (
        deal_nodes(Neighbours.of(large()), partition(public=how), seed=0)
        for how in ("degree", "random")
    )
    both = (one >= 0) & (other >= 0)
    earlier = one[both][:, None] < one[both][None, :]
    later = other[both][:, None] > other[both][None, :]
    assert earlier.any() and later.any()
    assert not (earlier & later).any()
    assert not torch.equal(one, other)


def test_a_node_has_one_role_everywhere_and_classes_their_shares():
    graph = large(300)
    role = torch.full((300,), -1)
    for client in overlapping_graphs(graph, partition(ratios=[0.5, 0.2, 0.3]), seed=1):
        masks = torch.stack([client.train_mask, client.val_mask, client.test_mask])
        assert masks.sum(0).tolist() == [1] * client.nodes.numel()
        mine = masks.int().argmax(0)
        assert bool(((role[client.nodes] == -1) | (role[client.nodes] == mine)).all())
        role[client.nodes] = mine
    assert bool((role >= 0).all())
    for label in range(3):
        counts = torch.bincount(role[graph.y == label], minlength=3) / (graph.y == label).sum()
        assert counts.tolist() == pytest.approx([0.5, 0.2, 0.3], abs=0.011)


def test_a_role_may_have_no_share_and_a_node_no_label():
    y = large().y.index_fill(0, torch.arange(50), -1)
    graphs = overlapping_graphs(replace(large(), y=y), partition(ratios=[0, 0.2, 0.8]), seed=0)
    for client in graphs:
        assert not client.train_mask.any()
        assert torch.equal(client.val_mask | client.test_mask, client.nodes >= 50)
    masks = Masks(*torch.tensor([[True, False], [False, False], [False, True]]))
    check_roles(3, masks, [0.5, 0, 0.5])
    with pytest.raises(DataError, match=r"client 3.*2"):
        check_roles(3, masks, [0.5, 0.1, 0.4])


def test_wrong_labels_are_as_many_as_asked_and_for_training_alone():
    graphs = overlapping_graphs(large(), partition(label_noise=0.15), seed=0)
    for client in graphs:
        wrong = client.train_y != client.y
        assert int(wrong.sum()) == round(0.15 * int(client.train_mask.sum())) > 0
        assert not (wrong & ~client.train_mask).any()
        assert bool((client.train_y >= 0).all()) and int(client.train_y.max()) <= 2
    for clean in overlapping_graphs(large(), partition(), seed=0):
        assert torch.equal(clean.train_y, clean.y)
    # Each client has its own noise.
    same_nodes = partition(clients=2, private_share=0, label_noise=0.5)
    first, second = overlapping_graphs(large(), same_nodes, seed=0)
    assert torch.equal(first.nodes, second.nodes)
    assert not torch.equal(first.train_y, second.train_y)

    y = torch.full((9000,), 5)  # all other classes are equally likely
    noisy = noisy_labels(y, y > 0, torch.tensor([1, 4, 5, 6]), 2 / 3, generator=chance())
    counts = torch.bincount(noisy, minlength=7)
    assert int(counts[5]) == 3000
    assert int(counts[[1, 4, 5, 6]].sum()) == 9000
    assert counts[[1, 4, 6]].tolist() == pytest.approx([2000] * 3, abs=150)  # over 4 deviations


def edgeless(nodes: int) -> Graph:
    none = torch.empty(2, 0, dtype=torch.int64)
    return Graph(torch.zeros(nodes, 3), none, torch.zeros(nodes, dtype=torch.int64), 1)


@pytest.mark.parametrize(
    ("graph", "changes", "message"),
    [
        (large(), {"clients": 0}, "partition.clients: 0"),
        (large(), {"public": "best"}, "partition.public: 'best'"),
        (large(), {"private_share": 0.2}, "private_share: 0.2"),
        (large(), {"public_share": 0.001}, "public_share = 0.001"),
        (large(), {"private_share": 0.001}, "private_share = 0.001.*0.005"),
        (large(), {"label_noise": float("nan")}, "partition.label_noise: nan"),
        (large(y=torch.zeros(200).long()), {"label_noise": 0.5}, "partition.label_noise = 0.5"),
        (large(y=torch.full((200,), -1)), {"clients": 1, "private_share": 0}, "client 0.*80"),
        (edgeless(0), {}, "graph.*0"),
        (edgeless(5), {}, "graph.*5"),
    ],
)
def test_impossible_settings_are_refused(graph, changes, message):
    with pytest.raises((DataError, ConfigError), match=message):
        overlapping_graphs(graph, partition(**changes), seed=0)
