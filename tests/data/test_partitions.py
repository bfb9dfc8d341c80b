"""Clients cut out of one graph: nodes, edges, splits, public nodes, figures, refusals."""

import math
import random
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import chain, pairwise
from typing import Any

import igraph
import pymetis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from partition_helpers import EDGES, ONE_WAY, RATIOS, chance, large, mask, roles, same
from torch import Tensor
from torch_geometric.utils import k_hop_subgraph, subgraph

from flower_graph.config.common import PartitionSection
from flower_graph.data import Graph, csbm, to_undirected
from flower_graph.data.folders.client_folder import Clients
from flower_graph.data.graph import (
    ClientGraph,
    Masks,
    check_roles,
    labelled_split,
    neighbours_of,
    stratified_split,
)
from flower_graph.data.partition.client_graphs import (
    CHUNK,
    DRAWS,
    LEAST_NODES,
    check_features,
    check_neighbours,
    choose_public,
    cut_out,
    dirichlet,
    ego_networks,
    finished,
    greedy_cover,
    louvain,
    metis,
    metis_overlapping,
    noisy_labels,
    overlapping_graphs,
    partition_graph,
    random_parts,
    sample_egos,
    split_nodes,
    split_per_client,
)
from flower_graph.data.partition.statistics import client_statistics, node_statistics
from flower_graph.data.sources.datasets import random_split
from flower_graph.errors import ConfigError, DataError
from flower_graph.ops.graph import SortedEdges
from flower_graph.strategies.ppfl.config import PartitionConfig


def clique(*nodes: int) -> list[tuple[int, int]]:
    return [(a, b) for a in nodes for b in nodes if a < b]


def around(edges: Tensor, n: int) -> SortedEdges:
    return neighbours_of(Graph(torch.empty(n, 0), edges, torch.zeros(n), 1))


# Four nodes and three nodes, all linked, with one edge between them; 7 has no neighbour.
CLIQUES = around(torch.tensor([*clique(0, 2, 4, 6), *clique(1, 3, 5), (5, 6)]).t(), 8)

Y = torch.tensor([0, 1, 2, 0, 1, -1])  # 5 has no label
COUNTS = {"train_per_class": 2, "num_val": 3, "num_test": 4}


def lists(parts: list[Tensor]) -> list[list[int]]:
    return [part.tolist() for part in parts]


# Parts ------------------------------------------------------------------------------------------


def test_the_largest_communities_come_first_of_equal_ones_that_with_the_lowest_node():
    for clients, found in ((2, [[0, 2, 4, 6], [1, 3, 5]]), (3, [[0, 2, 4, 6], [1, 3, 5], [7]])):
        assert lists(louvain(CLIQUES, clients, 1.0, seed=0)) == found
    edges = around(torch.tensor([*clique(3, 4, 5), *clique(0, 2, 7), *clique(1, 6, 8)]).t(), 9)
    for seed in range(5):
        assert lists(louvain(edges, 2, 1.0, seed=seed)) == [[0, 2, 7], [1, 6, 8]]
    # With every node, the rest goes to the smallest client
    for clients, resolution, found in (
        (2, 1.0, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (3, 50.0, [[0, 3, 6], [1, 4, 7], [2, 5]]),
    ):
        assert lists(louvain(CLIQUES, clients, resolution, seed=0, every_node=True)) == found


NOISY = neighbours_of(csbm(600, 4, degree=4.0, features=8, active=2, homophily=0.6, seed=1))


def test_louvain_without_a_resolution_finds_one_at_which_all_have_enough():
    assert lists(louvain(CLIQUES, 2, None, seed=0)) == [[0, 2, 4, 6], [1, 3, 5]]

    def sizes(least):
        def fits(nodes):
            return nodes.numel() >= least

        return [*map(len, louvain(NOISY, 60, None, seed=0, every_node=True, fits=fits))]

    assert min(sizes(0)) < 8 <= min(sizes(8))
    assert sizes(11) == sizes(0)  # 60 times 11 are more nodes than there are


def test_the_seed_alone_decides_and_random_numbers_of_python_and_igraph_stay():
    before, first = random.getstate(), lists(louvain(NOISY, 6, 1.0, seed=3))
    igraph.set_random_number_generator(random.Random(0))
    assert lists(louvain(NOISY, 6, 1.0, seed=3)) == first
    assert lists(louvain(NOISY, 6, 1.0, seed=4)) != first and random.getstate() == before


SHARED = neighbours_of(csbm(120, 3, degree=6.0, features=8, active=2, homophily=0.8, seed=2))


def test_metis_cuts_where_there_are_few_edges_and_leaves_nobody_out(monkeypatch):
    edges = around(torch.tensor([*clique(0, 2, 4, 6), *clique(1, 3, 5, 7), (5, 6)]).t(), 8)
    parts = sorted(lists(metis(edges, 2, seed=0)))
    assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]]
    monkeypatch.setattr(pymetis, "part_graph", lambda *_, **__: (0, [0, 0, 2, 2, 2, 2, 2, 2]))
    with pytest.raises(DataError, match="clients = 4"):
        metis(edges, 4, seed=0)
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(DataError, match=r"'flower-graph\[metis\]'"):
        metis(edges, 2, seed=0)


def test_a_small_alpha_gives_few_classes_and_a_large_one_gives_all():
    y = torch.arange(2000) % 10
    few, many = dirichlet(y, 4, 0.05, seed=0), dirichlet(y, 4, 1000.0, seed=0)
    assert sum(y[part].unique().numel() for part in few) / len(few) < 6
    for part in many:  # nearly a quarter of each class
        assert torch.bincount(y[part]).sub(50).abs().max() < 10
    y = torch.where(torch.arange(100) < 80, torch.arange(100) % 2, -1)
    found = [dirichlet(y, 4, 0.3, seed=seed) for seed in (0, 0, 1, 2, 3)]
    for parts in found:  # all get enough nodes, with and without a label
        assert sorted(chain(*lists(parts))) == list(range(100))
        assert min(part.numel() for part in parts) >= LEAST_NODES
    assert lists(found[0]) == lists(found[1]) != lists(found[2])
    assert all((y[part] < 0).any() for part in dirichlet(y, 4, 10.0, seed=0))


@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 99))
def test_random_parts_have_every_node_once_and_even_sizes(n, clients, seed):
    parts = lists(random_parts(n, min(n, clients), seed))
    assert len(parts) == min(n, clients) and sorted(chain(*parts)) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part == sorted(part) for part in parts)
    assert parts == lists(random_parts(n, len(parts), seed))


# Clients ----------------------------------------------------------------------------------------


def whole(edges: Any = ONE_WAY, nodes: int = 6, y: list[int] | None = None) -> Graph:
    labels = torch.arange(nodes) % 3 if y is None else torch.tensor(y)
    x = torch.eye(nodes) * torch.arange(1, nodes + 1)
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(2, -1)
    return Graph(x, to_undirected(edge_index, nodes), labels, 3)


def parts(*nodes: list[int]) -> list[Tensor]:
    return [torch.tensor(each, dtype=torch.int64) for each in nodes]


def settings(**changes: Any) -> PartitionSection:
    return PartitionSection(**{"method": "random", "clients": 5, "ratios": RATIOS, **changes})


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30), st.data())
def test_edges_are_those_of_pygs_subgraph(pairs, data):
    edges = to_undirected(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t(), 9)
    whose = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=9, max_size=9)))
    whole = Graph(torch.eye(9), edges, torch.arange(9), 9)
    cut = [(whose == part).nonzero().flatten() for part in range(3)]  # the fourth part is dropped
    cut.append((whose > 0).nonzero().flatten())  # parts may share nodes
    for nodes, client in zip(cut, cut_out(whole, cut), strict=True):
        expected, _ = subgraph(nodes, edges, relabel_nodes=True, num_nodes=9)
        assert torch.equal(client.nodes, nodes) and client.edge_index is not None
        assert torch.equal(client.x, whole.x[nodes]) and torch.equal(client.y, nodes)
        assert roles(client) == [[], [], []]
        assert torch.equal(client.edge_index, expected)


WAYS = ("louvain", "metis", "dirichlet", "random")


def test_every_way_to_cut_gives_clients_that_share_no_node_by_its_settings():
    def sizes(way, **changes):
        clients = partition_graph(large(), settings(method=way, **changes), 0.4, seed=0)
        assert [client.client for client in clients] == list(range(5))
        nodes = torch.cat([client.nodes for client in clients])
        assert nodes.unique().numel() == nodes.numel()
        assert way == "louvain" or nodes.numel() == 200
        return [client.y.numel() for client in clients]

    found = {way: sizes(way) for way in WAYS}
    assert max(sizes("louvain", resolution=3.0)) < max(found["louvain"])
    assert found["random"] == [40] * 5 and sizes("dirichlet", alpha=100.0) != found["dirichlet"]
    # Of METIS's two parts, half of the nodes are drawn for each of three clients
    cut, drawn = lists(metis(SHARED, 2, 1)), lists(metis_overlapping(SHARED, 6, 3, 1))
    assert len({*map(tuple, drawn)}) == 6 and drawn != lists(metis_overlapping(SHARED, 6, 3, 2))
    for number, nodes in enumerate(drawn):
        assert set(nodes) < set(cut[number // 3]) and len(nodes) == len(cut[number // 3]) / 2


def test_fewer_labels_train_and_the_same_nodes_validate_and_test():
    y = large().y.index_fill(0, torch.arange(0, 200, 2), -1)

    def first(**how):
        return partition_graph(large(y=y), settings(clients=2, **how), 0.5, seed=0)[0]

    whole, before = first(), set[int]()
    for share in (0.01, 0.1, 0.3, 0.6):
        one = first(train_share=share)
        assert roles(one)[1:] == roles(whole)[1:] and before < {*roles(one)[0]}
        before = {*roles(one)[0]}
        assert len(before) == max(1, round(share * int((whole.y >= 0).sum())))
    assert before == {*roles(whole)[0]}


EGOS, SHARE = (
    {"method": "ego-networks", "hops": 1, "min_nodes": 1},
    {"method": "overlapping", "clients": 4},
)


@pytest.mark.parametrize(
    ("cut", "how"),
    [
        (lambda how, seed: partition_graph(large(), settings(**how), 0.4, seed), {}),
        (lambda how, seed: partition_graph(large(), settings(**how), 0, seed), EGOS),
        (lambda how, seed: partition_graph(large(), settings(**how), 0, seed), SHARE),
        (lambda how, seed: overlapping_graphs(large(), PartitionConfig(**how), seed), {}),
    ],
    ids=["parts", "egos", "overlapping", "overlapping of PPFL-GNN"],
)
def test_the_seed_of_the_partition_goes_before_that_of_the_run(cut, how):
    def made(seed, own=None):
        return cut({"seed": own, **how}, seed)

    assert same(made(3), made(4, own=3)) and same(made(4, own=3), made(5, own=3))
    assert not torch.equal(made(3)[0].nodes, made(4)[0].nodes)


def test_a_larger_ratio_has_the_graphless_clients_of_a_smaller_one():
    def cut(ratio, seed=0):
        return partition_graph(large(), settings(clients=8), ratio, seed)

    def graphless(ratio, seed=0):
        return {client.client for client in cut(ratio, seed) if client.is_graphless}

    found = [graphless(ratio) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert [len(each) for each in found] == [0, 2, 4, 6, 8]
    assert all(small < large for small, large in pairwise(found))
    assert len({frozenset(graphless(0.5, seed)) for seed in range(5)}) > 1
    for open_one, hidden in zip(cut(0.0), cut(1.0), strict=True):
        shown = replace(hidden, edge_index=hidden.hidden_edges, hidden_edges=None)
        assert same([shown], [open_one])


def trainable(**changes: Any) -> ClientGraph:
    [client] = cut_out(whole(y=Y.tolist()), parts([0, 1, 2, 3, 4]))
    return replace(split_nodes(client, RATIOS, seed=0), **changes)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_client_that_cannot_train_is_refused():
    constant = torch.tensor([[0.0, 2.0]]).repeat(5, 1)
    nearly = constant.clone()
    nearly[4, 1] = 1
    finished([trainable(x=constant)], 0.0, None, 0)
    for form in (Tensor.clone, Tensor.to_sparse_csr):
        check_features(trainable(x=form(nearly), edge_index=None))
        for graph in (trainable(x=form(constant), edge_index=None), trainable(x=form(constant))):
            with pytest.raises(DataError, match=r"client 0.*5"):
                finished([graph], 1.0, None, 0)
    with pytest.raises(DataError, match="none of the 1 clients"):
        finished([trainable(train_mask=torch.zeros(5, dtype=torch.bool))], 0.0, None, 0)
    graphs = [trainable(), trainable(client=4, edge_index=None)]
    check_neighbours(graphs, 4)
    check_neighbours(graphs[:1], 5)  # whose edges are known
    with pytest.raises(ConfigError, match=r"graph.neighbours: 5.*client 4"):
        check_neighbours(graphs, 5)


DRAWS_OF_METIS = {"method": "metis-overlapping", "clients": 10}
ALL_EGOS = {"clients": 300, "hops": 1, "split": "global"}
SHARING: dict[str, Any] = {
    "overlaps": lambda graph, how: overlapping_graphs(graph, PartitionConfig(**how), seed=1),
    "draws": lambda graph, how: partition_graph(graph, settings(**DRAWS_OF_METIS, **how), 0.5, 0),
    "egos": lambda graph, how: partition_graph(graph, partition(**ALL_EGOS, **how), 0, 2),
}


@pytest.mark.parametrize("way", SHARING)
def test_a_node_has_one_role_at_all_clients_that_hold_it_and_roles_have_their_shares(way):
    graph, role = large(300), torch.full((300,), -1)
    for client in SHARING[way](graph, {"ratios": [0.5, 0.2, 0.3]}):
        masks = torch.stack([*client.masks.values()])
        assert masks.sum(0).tolist() == [1] * client.nodes.numel()
        mine = masks.int().argmax(0)
        assert bool(((role[client.nodes] == -1) | (role[client.nodes] == mine)).all())
        role[client.nodes] = mine
    if way == "egos":  # drawn over all nodes; else class by class
        assert torch.bincount(role).tolist() == [150, 60, 90]
    else:
        held = role >= 0
        for label in range(3):
            counts = torch.bincount(role[held & (graph.y == label)], minlength=3)
            shares = (counts / counts.sum()).tolist()
            assert shares == pytest.approx([0.5, 0.2, 0.3], abs=0.011 if held.all() else 0.1)


# --- splits of one graph


def test_splits_of_one_graph_by_hand():
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, -1, 0, 1, 1, 1, 1, 1, 1])
    masks = stratified_split(y, [0.6, 0.2, 0.2], generator=chance())
    assert torch.stack(masks).sum(0).tolist() == [1] * 7 + [0] + [1] * 7
    assert [torch.bincount(y[mask]).tolist() for mask in masks] == [[3, 5], [1, 2], [1, 2]]
    y = torch.tensor([0, 2] * 10)  # a class without nodes is passed over
    masks = random_split(y, 3, **COUNTS, generator=chance())
    assert torch.bincount(y[masks.train]).tolist() == [2, 0, 2]
    assert [int(mask.sum()) for mask in masks] == [4, 3, 4]
    assert int(torch.stack(masks).sum(0).max()) <= 1


# Ego-networks -----------------------------------------------------------------------------------


def partition(**changes: Any) -> PartitionSection:
    return settings(**{"method": "ego-networks", "clients": 3, "min_nodes": 1, **changes})


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    st.integers(1, 4),
    st.permutations(range(10)),
)
def test_it_is_what_pyg_gives(pairs, hops, egos):
    one_way = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    data = whole(one_way.tolist(), 10)
    made = ego_networks(replace(data, edge_index=one_way), egos, hops)
    assert [one.client for one in made] == [*range(10)]
    for ego, network in zip(egos, made, strict=True):  # edges are those of any part, as above
        nodes, *_ = k_hop_subgraph(ego, hops, data.edge_index, num_nodes=10)
        assert torch.equal(network.nodes, nodes)


def test_the_first_of_more_egos_with_enough_nodes_are_drawn():
    def sampled(graph, clients, least, seed):
        how = partition(clients=clients, hops=1, min_nodes=least)
        return lists(sample_egos(neighbours_of(graph), how, seed))

    alone = whole([[], []], 50)
    ten = sampled(alone, 10, 1, 3)
    assert ten[:4] == sampled(alone, 4, 1, 3) and ten != sampled(alone, 10, 1, 4)
    assert len({*chain(*ten)}) == 10
    around = [[0, 1], [0, 1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [3, 4], [5]]  # within one hop
    for least in (4, 3, 2):
        enough = [nodes for nodes in around if len(nodes) >= least]
        assert sorted(sampled(whole(), len(enough), least, 0)) == sorted(enough)
    ring = torch.arange(3 * CHUNK)  # more than are searched at once
    circle = whole(torch.stack([ring, ring.roll(-1)]).tolist(), len(ring))
    networks = ego_networks(circle, ring, 1)
    assert [one.nodes.tolist() for one in networks[1:-1]] == [[n - 1, n, n + 1] for n in ring[1:-1]]
    # A view would carry the storage of all clients with it when it is saved or sent.
    for value in (networks[0].nodes, networks[0].edge_index, networks[0].x, networks[0].y):
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


@pytest.mark.parametrize(
    ("nodes", "ratios", "sizes"),
    [
        (1, RATIOS, [1, 0, 0]),
        (5, RATIOS, [3, 1, 1]),
        (2, [0.1, 0.5, 0.4], [1, 0, 1]),  # one training node is kept
        (10, [0.3, 0.2, 0.2], [3, 2, 2]),  # shares below one leave nodes out
    ],
)
def test_shares_within_a_client(nodes, ratios, sizes):
    hub = whole([[0] * (nodes + 1), list(range(1, nodes + 2))], nodes + 2, [0] * nodes + [-1] * 2)
    (network,) = split_per_client(ego_networks(hub, [0], 1), ratios, seed=1)
    assert [len(part) for part in roles(network)] == sizes
    dealt = [node for part in roles(network) for node in part]
    assert len(set(dealt)) == sum(sizes) and max(dealt) < nodes  # with a label


def test_a_clients_split_depends_on_the_seed_and_its_number_alone():
    hub = whole([[0] * 19, list(range(1, 20))], 20)
    networks = ego_networks(hub, [0, 7, 11], hops=2)
    done, other = (split_per_client(networks, RATIOS, seed) for seed in (5, 6))
    ways = [partition_graph(hub, partition(split=way), 0.0, 0) for way in ("global", "per-client")]
    assert [roles(one) == roles(two) for one, two, _ in ways] == [True, False]
    assert same(done[2:], split_per_client(networks[2:], RATIOS, seed=5))
    assert roles(done[0]) not in (roles(done[1]), roles(other[0]))  # [1] has the same nodes


# What is refused --------------------------------------------------------------------------------


def shares(**changes: Any) -> PartitionConfig:
    return PartitionConfig(**{"ratios": RATIOS, **changes})


def refused(**changes: Any) -> Any:
    ratio = changes.pop("graphless_ratio", 0.5)
    return lambda: partition_graph(large(), settings(**changes), ratio, seed=0)


def egos_of(**changes: Any) -> Any:
    return lambda: partition_graph(whole(), partition(**changes), 0.0, 0)


def overlaps(label: int | None = None, **changes: Any) -> Any:
    graph = large() if label is None else large(y=torch.full((200,), label))
    return lambda: overlapping_graphs(graph, shares(**changes), seed=0)


def drawn(y: list[int], **changes: int) -> Any:
    return lambda: random_split(torch.tensor(y), 2, **{**COUNTS, **changes}, generator=chance())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (refused(clients=7, method="metis-overlapping"), "partition.clients: 7"),
        (refused(graphless_ratio=1.1), "graphless_ratio: 1.1"),
        (refused(graphless_ratio=math.nan), "graphless_ratio: nan"),
        (refused(clients=201), "clients: 201"),
        (refused(method="overlapping", clients=10), r"partition.private_share.*0.06"),
        (lambda: louvain(CLIQUES, 4, 1.0, seed=0), "clients = 4"),
        (lambda: metis_overlapping(SHARED, 120, 1, seed=1), "clients = 120"),
        (lambda: dirichlet(torch.zeros(39).long(), 4, 1e6, seed=0), f"one of 4.*{DRAWS}"),
        (lambda: dirichlet(torch.zeros(1000).long(), 4, 1e-6, seed=0), f"one of 4.*{DRAWS}"),
        (lambda: labelled_split(torch.zeros(10), [0.5, 0.01, 0.4], generator=chance()), "10"),
        (drawn([0, 1] * 5), r"data\.num_test = 7: 6"),
        (drawn([0, 0, 0, 1, 0, 0, 0, 0, 0, 0]), r"train_per_class = 2: class 1"),
        (egos_of(hops=1, min_nodes=4), "partition.clients = 3.*partition.min_nodes"),
        (lambda: ego_networks(whole(), [0, 6], 1), r"egos \[6\]"),
        (lambda: ego_networks(whole(), [2, 0, 2], 1), r"egos \[2\]"),
        (lambda: client_statistics([]), "no clients"),
        (overlaps(clients=0), "partition.clients: 0"),
        (overlaps(private_share=0.2), "private_share: 0.2"),
        (overlaps(private_share=0.001), "private_share = 0.001.*0.005"),
        (overlaps(0, label_noise=0.5), "partition.label_noise = 0.5"),
        (overlaps(-1, clients=1, private_share=0), "client 0.*80"),
        (lambda: overlapping_graphs(whole([[], []]), shares(), seed=0), "graph.*6"),
    ],
)
def test_impossible_settings_are_refused(call, words):
    with pytest.raises((DataError, ConfigError), match=words):
        call()


# Clients that share public nodes ------------------------------------------------------------------


PUBLIC_WAYS = ("random", "degree", "cover")
# 0 is the middle of 1, 2 and 3, which leads on to 4 and 5; 6 has no neighbour.
MIDDLE = to_undirected(torch.tensor([[0, 0, 0, 3, 4], [1, 2, 3, 4, 5]]), 7)


@st.composite
def drawn_graphs(draw: st.DrawFn, largest: int = 9) -> tuple[Tensor, int]:
    """Draw the edges of a graph, and its number of nodes."""
    n = draw(st.integers(2, largest))
    ends = st.integers(0, n - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=2 * n))
    return to_undirected(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T, n), n


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
        return choose_public(around(MIDDLE, 7), count, how, seed).tolist()

    assert chosen(1, "degree") == [0] and chosen(7, "degree")[-1] == 6
    assert {*chosen(3, "degree")} == {0, 3, 4}
    assert {chosen(4, "degree", seed)[3] for seed in range(20)} == {1, 2, 5}
    assert {chosen(1, "random", seed)[0] for seed in range(60)} == {*range(7)}
    for how in PUBLIC_WAYS:  # fewer nodes are the first of more
        assert sorted(every := chosen(7, how)) == list(range(7)) and chosen(3, how) == every[:3]


@given(graph=drawn_graphs(), seed=st.integers(0, 99))
def test_the_cover_is_that_of_the_definition(graph, seed):
    edges, n = graph
    order = torch.randperm(n, generator=chance(seed))
    assert greedy_cover(around(edges, n), order, n).tolist() == plain_cover(edges, order.tolist())


@pytest.mark.parametrize("how", PUBLIC_WAYS)
def test_all_public_nodes_are_every_clients_and_its_private_ones_its_own(how):
    mine = shares(clients=3, public=how, public_share=0.29, private_share=0.2, ratios=[0, 0, 1])
    made = overlapping_graphs(large(100), mine, seed=0)
    assert 0.29 * 100 < 29  # in floats
    for client in made:
        assert client.nodes[client.public].tolist() == made[0].nodes[made[0].public].tolist()
        assert (int(client.public.sum()), int((~client.public).sum())) == (29, 20)
        assert bool((client.nodes.diff() > 0).all())
    assert len({node for client in made for node in client.nodes.tolist()}) == 29 + 3 * 20


def test_a_role_may_have_no_share_and_a_node_no_label():
    y = large().y.index_fill(0, torch.arange(50), -1)
    graphs = overlapping_graphs(replace(large(), y=y), shares(ratios=[0, 0.2, 0.8]), seed=0)
    for client in graphs:
        assert not client.train_mask.any()
        assert torch.equal(client.val_mask | client.test_mask, client.nodes >= 50)
    masks = Masks(*torch.tensor([[True, False], [False, False], [False, True]]))
    check_roles(3, masks, [0.5, 0, 0.5])
    with pytest.raises(DataError, match=r"client 3.*2"):
        check_roles(3, masks, [0.5, 0.1, 0.4])


def test_wrong_labels_are_as_many_as_asked_and_for_training_alone():
    for client in overlapping_graphs(large(), shares(label_noise=0.15), seed=0):
        wrong = client.train_y != client.y
        assert int(wrong.sum()) == round(0.15 * int(client.train_mask.sum())) > 0
        assert not (wrong & ~client.train_mask).any()
    for clean in overlapping_graphs(large(), shares(), seed=0):
        assert torch.equal(clean.train_y, clean.y)
    # Each client has its own noise.
    same_nodes = shares(clients=2, private_share=0, label_noise=0.5)
    first, second = overlapping_graphs(large(), same_nodes, seed=0)
    assert torch.equal(first.nodes, second.nodes)
    assert not torch.equal(first.train_y, second.train_y)
    y = torch.full((9000,), 5)  # all other classes are equally likely
    noisy = noisy_labels(
        replace(first, y=y, train_mask=y > 0), torch.tensor([1, 4, 5, 6]), 2 / 3, 0
    )
    counts = torch.bincount(noisy, minlength=7)
    assert int(counts[5]) == 3000
    assert counts[[1, 4, 6]].tolist() == pytest.approx([2000] * 3, abs=150)  # over 4 deviations


# Figures, by hand ---------------------------------------------------------------------------------

WHOLE = Graph(torch.zeros(6, 7), EDGES, Y, num_classes=3)


def with_roles(graph: Any, train: Any, val: Any, test: Any) -> Any:
    """Give a client masks by the places of nodes."""
    masks = zip(("train_mask", "val_mask", "test_mask"), (train, val, test), strict=True)
    return replace(graph, **{name: mask(*own, size=graph.y.numel()) for name, own in masks})


def check(found: Any, figures: str) -> None:
    """Compare figures that are given by name, with a fraction for each that is no whole number."""
    pairs = (one.rpartition(" ") for one in " ".join(figures.split()).split(", "))
    wanted = {name: float(Fraction(value)) for name, _, value in pairs}
    assert {name: found.figures[name] for name in wanted} == pytest.approx(wanted)


def test_figures_of_ego_networks_by_hand():
    first, second, alone = ego_networks(WHOLE, [0, 3, 5], hops=1)  # 0 1, then 1 2 3 4, then 5
    # The second trains on 1, which the first client tests, and on 2
    clients = [with_roles(first, [0], [], [1]), with_roles(second, [0, 1], [2], [3]), alone]
    found = client_statistics(Clients(clients, 3, is_identified=True))
    check(
        found,
        """
        clients 3, nodes 6, edges 5, features 7, classes 3, density 5/6, nodes-per-client 7/3,
        edges-per-client 5/3, classes-per-client 5/3, density-per-client 5/7, fewest-nodes 1,
        most-nodes 4, clients-per-node 7/6, most-clients-per-node 2, shared-share 1/6,
        train-per-client 1, val-per-client 1/3, test-per-client 2/3, clients-without-training 1,
        tested-and-trained-share 1/2""",
    )
    assert found.distributions == {
        "nodes per client": {1: 1, 2: 1, 4: 1},
        "edges per client": {0: 1, 1: 1, 4: 1},
        "classes per client": {0: 1, 2: 1, 3: 1},
        "clients per node": {1: 5, 2: 1},
    }


def test_nodes_as_clients_by_hand():
    x = torch.zeros(6, 4)
    x[0, 1] = x[0, 2] = x[3, 0] = -1.5
    train, val = mask(0, 1, size=6), mask(size=6)
    found = node_statistics(Graph(x, EDGES, Y, 3, train, val, test_mask=mask(2, 3, 4, size=6)))
    check(
        found,
        """
        clients 6, edges 5, features 4, classes 3, density 5/6, neighbours-per-client 10/6,
        most-neighbours 3, isolated 1, features-per-client 1/2, train 2, val 0, test 3""",
    )
    assert found.distributions == {
        "neighbours per client": {0: 1, 1: 2, 2: 1, 3: 2},
        "classes in train": {0: 1, 1: 1},
        "classes in val": {},
        "classes in test": {0: 1, 1: 1, 2: 1},
    }


def test_figures_of_communities_by_hand():
    whole = Graph(torch.zeros(6, 7), EDGES, torch.tensor([0, 1, 1, 0, 1, -1]), num_classes=3)
    # The nodes 0 1 2, and 3 5 without their edges; nobody has 4
    first, second = cut_out(WHOLE, parts([0, 1, 2], [3, 5]))
    first, second = with_roles(first, [0, 1], [], [2]), with_roles(second, [], [0], [])
    second = replace(second, edge_index=None, hidden_edges=second.edge_index)
    found = client_statistics([replace(first, y=whole.y[first.nodes]), second], whole)
    # 0 - 1 and 1 - 2 at the first client, none at the other, which has no homophily; cut are 2 - 3
    # and 1 - 3, of all but 3 - 4
    check(
        found,
        """
        clients 2, graphless-clients 1, features 7, classes 2, nodes-per-client 5/2,
        edges-per-client 1, directed-edges-per-client 2, classes-per-client 3/2,
        homophily-per-client 1/2, fewest-nodes 2, most-nodes 3, kept-nodes-share 5/6,
        kept-edges-share 2/5, cut-edges-share 2/4, train-per-client 1, val-per-client 1/2,
        test-per-client 1/2""",
    )
    assert found.distributions == {
        "nodes per client": {2: 1, 3: 1},
        "edges per client": {0: 1, 2: 1},
        "classes per client": {1: 1, 2: 1},
        "clients per node": {1: 5},
    }
    # Clients' own graphs are not compared with a whole one
    second = replace(second, hidden_edges=None)
    found = client_statistics([first, second])
    assert not {name for name in found.figures if name.endswith("-share")}
    assert found.figures["edges-per-client"] == 2  # of those whose edges are known
    assert found.distributions["edges per client"] == {2: 1}
    unknown = client_statistics([second])
    assert unknown.figures["edges-per-client"] == unknown.figures["homophily-per-client"] == 0
    # Edges to a node without a label say nothing about homophily.
    found = client_statistics([replace(first, y=torch.tensor([-1, 1, 1]))], None)
    assert found.figures["homophily-per-client"] == 1


def sharing(number: int, *nodes: int, test: int) -> ClientGraph:
    """Make a client whose first three nodes are a path, and whose nodes 1 and 3 are public."""
    held, both = torch.tensor(nodes), to_undirected(torch.tensor([[0, 1], [1, 2]]), len(nodes))
    graph = ClientGraph.bare(number, torch.zeros(len(nodes), 7), Y[held], both, held)
    return with_roles(replace(graph, public=(held == 1) | (held == 3)), [0], [], [test])


def test_figures_of_overlapping_clients_by_hand():
    first, second = sharing(0, 0, 1, 3, test=1), sharing(1, 1, 3, 4, 5, test=2)
    found = client_statistics([first, second], WHOLE)
    # Of 0 - 1, 1 - 3 and 3 - 4, kept of five, no two ends have one class. Node 1 has 2 and
    # 1 neighbours, node 3 has 1 and 2; 0 at the first client is reached, and 4 at the second, not 5
    check(
        found,
        """
        clients 2, features 7, classes 2, nodes-per-client 7/2, public-per-client 2,
        private-per-client 3/2, edges-per-client 2, homophily-per-client 0, clients-without-edges 0,
        isolated-share 1/7, neighbours-of-public 3/2, reached-share 2/3, reached-twice-share 0,
        kept-nodes-share 5/6, kept-edges-share 3/5, degree-of-public 3, train-per-client 1,
        val-per-client 0, test-per-client 1""",
    )
    assert found.distributions == {
        "nodes per client": {3: 1, 4: 1},
        "edges per client": {2: 2},
        "classes per client": {2: 2},
        "clients per node": {1: 3, 2: 2},
        "public neighbours per private node": {0: 1, 1: 2},
    }
    second = replace(second, edge_index=torch.empty(2, 0, dtype=torch.int64))
    figures = client_statistics([first, second], None).figures
    assert not {"kept-nodes-share", "kept-edges-share", "degree-of-public"} & set(figures)
    assert figures["clients-without-edges"] == 1
    assert figures["homophily-per-client"] == 0  # a client without edges has none to count
