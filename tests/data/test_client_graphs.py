"""Clients cut out of one graph: how it is cut, nodes, edges, splits, who is graphless, refusals."""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import igraph
import numpy as np
import pymetis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from partition_helpers import EDGES, ONE_WAY, RATIOS, chance, large, roles, same
from torch import Tensor
from torch_geometric.utils import k_hop_subgraph, subgraph

from flower_graph.config.partition import PartitionSection
from flower_graph.data import Graph, csbm, to_undirected
from flower_graph.data.partition.client_graphs import (
    ClientGraph,
    check_client_graph,
    check_neighbours,
    cut_out,
    fewer_trained,
    partition_graph,
    split_nodes,
)
from flower_graph.data.partition.communities import (
    DRAWS,
    LEAST_NODES,
    dirichlet,
    joined,
    louvain,
    metis,
    metis_overlapping,
    random_parts,
)
from flower_graph.data.partition.ego_networks import (
    CHUNK,
    ego_networks,
    partition_egos,
    sample_egos,
    split_global,
    split_per_client,
)
from flower_graph.data.partition.overlapping import overlapping_graphs
from flower_graph.data.splits import (
    Masks,
    geom_gcn_split,
    labelled_split,
    random_split,
    select_column,
    stratified_split,
)
from flower_graph.errors import ConfigError, DataError
from flower_graph.strategies.ppfl.config import PartitionConfig as PPFLPartition


def clique(*nodes: int) -> list[tuple[int, int]]:
    return [(a, b) for a in nodes for b in nodes if a < b]


# Four nodes and three nodes, all linked, with one edge between them; 7 has no neighbour.
CLIQUES = torch.tensor([*clique(0, 2, 4, 6), *clique(1, 3, 5), (5, 6)]).t()


COUNTS = {"train_per_class": 2, "num_val": 3, "num_test": 4}


def lists(parts: list[Tensor]) -> list[list[int]]:
    return [part.tolist() for part in parts]


# Parts ------------------------------------------------------------------------------------------


def test_the_largest_communities_come_first_of_equal_ones_that_with_the_lowest_node():
    for clients, found in ((2, [[0, 2, 4, 6], [1, 3, 5]]), (3, [[0, 2, 4, 6], [1, 3, 5], [7]])):
        assert lists(louvain(CLIQUES, 8, clients=clients, resolution=1.0, seed=0)) == found
    edges = torch.tensor([*clique(3, 4, 5), *clique(0, 2, 7), *clique(1, 6, 8)]).t()
    for seed in range(5):
        equal = louvain(edges, 9, clients=2, resolution=1.0, seed=seed)
        assert lists(equal) == [[0, 2, 7], [1, 6, 8]]


def test_every_node_is_assigned_the_rest_to_the_smallest_client():
    parts = louvain(CLIQUES, 8, clients=2, resolution=1.0, seed=0, every_node=True)
    assert lists(parts) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    alone = louvain(CLIQUES, 8, clients=3, resolution=50.0, seed=0, every_node=True)
    assert lists(alone) == [[0, 3, 6], [1, 4, 7], [2, 5]]


NOISY = csbm(600, 4, degree=4.0, features=8, active=2, homophily=0.6, seed=1).edge_index


def test_louvain_without_a_resolution_finds_one_at_which_all_have_enough():
    enough = louvain(CLIQUES, 8, clients=2, resolution=None, seed=0)
    assert lists(enough) == [[0, 2, 4, 6], [1, 3, 5]]
    parts = louvain(CLIQUES, 8, clients=6, resolution=None, seed=0, every_node=True)
    assert len(parts) == 6 and all(part.numel() for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(8))

    def sizes(least):
        how = {"clients": 60, "resolution": None, "seed": 0, "every_node": True}
        fits = {"fits": lambda nodes: nodes.numel() >= least}
        return [part.numel() for part in louvain(NOISY, 600, **how, **fits)]

    assert min(sizes(0)) < 8 <= min(sizes(8))
    assert sizes(11) == sizes(0)  # 60 times 11 are more nodes than there are


def test_the_seed_alone_decides_and_random_numbers_of_python_and_igraph_stay():
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


def test_a_part_that_is_too_small_is_joined_to_that_with_most_edges_to_it():
    parts = [torch.tensor(nodes) for nodes in ([0, 2, 4, 6], [1, 3], [5], [7])]

    def joined_to(least):
        return lists(joined(parts, CLIQUES, 8, lambda nodes: nodes.numel() >= least))

    assert joined_to(1) == lists(parts)
    # 5 has two edges to 1 and 3, and one to 6; 7, which has none, joins the smallest
    assert joined_to(2) == [[0, 2, 4, 6], [1, 3, 5, 7]] == joined_to(4)
    assert joined_to(5) == [list(range(8))] == joined_to(9)


def test_metis_cuts_where_there_are_few_edges():
    edges = torch.tensor([*clique(0, 2, 4, 6), *clique(1, 3, 5, 7), (5, 6)]).t()
    parts = sorted(lists(metis(edges, 8, clients=2, seed=0)))
    assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_without_pymetis_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(DataError, match=r"'flower-graph\[metis\]'"):
        metis(CLIQUES, 8, clients=2, seed=0)


SHARED = csbm(120, 3, degree=6.0, features=8, active=2, homophily=0.8, seed=2).edge_index


def drawn_parts(clients: int, **changes: Any) -> list[Tensor]:
    how: dict[str, Any] = {"draws": 3, "seed": 1} | changes
    return metis_overlapping(SHARED, 120, clients=clients, **how)


def test_half_of_each_part_is_drawn_for_each_of_its_clients():
    cut = lists(metis(SHARED, 120, clients=2, seed=1))
    found = lists(drawn_parts(6))
    assert len({tuple(nodes) for nodes in found}) == len(found) == 6
    for number, nodes in enumerate(found):
        assert set(nodes) < set(cut[number // 3])
        assert len(nodes) == round(0.5 * len(cut[number // 3]))
        assert nodes == sorted(nodes)
    assert lists(drawn_parts(6)) == lists(drawn_parts(6)) != lists(drawn_parts(6, seed=2))


def test_a_small_alpha_gives_few_classes_and_a_large_one_gives_all():
    y = torch.arange(2000) % 10
    few, many = dirichlet(y, 4, 0.05, seed=0), dirichlet(y, 4, 1000.0, seed=0)
    assert sum(y[part].unique().numel() for part in few) / len(few) < 6
    for part in many:  # nearly a quarter of each class
        assert torch.bincount(y[part]).sub(50).abs().max() < 10


def test_all_get_enough_nodes_with_and_without_a_label():
    y = torch.where(torch.arange(100) < 80, torch.arange(100) % 2, -1)
    found = [dirichlet(y, 4, 0.3, seed=seed) for seed in range(20)]
    for parts in found:
        assert sorted(chain(*lists(parts))) == list(range(100))
        assert min(part.numel() for part in parts) >= LEAST_NODES
    assert lists(found[0]) == lists(dirichlet(y, 4, 0.3, seed=0)) != lists(found[1])
    assert all((y[part] < 0).any() for part in dirichlet(y, 4, 10.0, seed=0))


@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 99))
def test_random_parts_have_every_node_once_and_even_sizes(n, clients, seed):
    if clients > n:
        return
    parts = random_parts(n, clients, seed)
    assert len(parts) == clients
    assert sorted(chain(*lists(parts))) == list(range(n))
    sizes = [part.numel() for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert lists(parts) == lists(random_parts(n, clients, seed))


# Clients ----------------------------------------------------------------------------------------


def graph(**changes: Any) -> Graph:
    x = torch.eye(6) * torch.arange(1, 7)
    return replace(Graph(x, EDGES, torch.tensor([0, 1, 2, 0, 1, -1]), 3), **changes)


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
    assert sizes("dirichlet", alpha=100.0) != found["dirichlet"]


@pytest.mark.parametrize("method", ["louvain", "metis"])
def test_communities_that_cannot_be_split_are_joined(method, caplog):
    y = large().y.clone()
    y[::2] = -1
    caplog.set_level(logging.INFO, "flower_graph.data")
    cut = partition_graph(
        large(y=y), settings(clients=40, method=method, resolution=30.0), 0.0, seed=0
    )
    assert 1 < len(cut) < 40 and [client.client for client in cut] == list(range(len(cut)))
    assert all(all(role) for role in map(roles, cut))
    assert f"{len(cut)} clients" in caplog.text


def test_fewer_labels_train_and_the_same_nodes_validate_and_test():
    y = large().y.clone()
    y[::2] = -1
    [whole, _] = partition_graph(large(y=y), settings(clients=2), 0.5, seed=0)
    counts, labelled = [], int((whole.y >= 0).sum())
    for share in (0.01, 0.1, 0.3, 0.6):
        [one, _] = partition_graph(large(y=y), settings(clients=2, train_share=share), 0.5, seed=0)
        assert roles(one)[1:] == roles(whole)[1:]
        assert {*roles(one)[0]} <= {*roles(whole)[0]}
        counts.append({*roles(one)[0]})
        assert len(counts[-1]) == max(1, round(share * labelled))
    assert all(small < large for small, large in pairwise(counts))
    assert counts[-1] == {*roles(whole)[0]}
    assert fewer_trained(whole, None, seed=0) is whole
    other = fewer_trained(whole, 0.3, seed=1)
    assert {*roles(other)[0]} != counts[2]


EGOS = {"method": "ego-networks", "hops": 1, "min_nodes": 1}


@pytest.mark.parametrize(
    ("cut", "how"),
    [
        (lambda how, seed: partition_graph(large(), settings(**how), 0.4, seed), {}),
        (lambda how, seed: partition_egos(large(), settings(**how), seed), EGOS),
        (lambda how, seed: overlapping_graphs(large(), PPFLPartition(**how), seed), {}),
    ],
    ids=["parts", "egos", "overlapping"],
)
def test_the_seed_of_the_partition_goes_before_that_of_the_run(cut, how):
    def made(seed, own=None):
        return cut({"seed": own, **how}, seed)

    assert same(made(3), made(4, own=3)) and same(made(4, own=3), made(5, own=3))
    assert not torch.equal(made(3)[0].nodes, made(4)[0].nodes)


def graphless(ratio: float, seed: int = 0) -> set[int]:
    clients = partition_graph(large(), settings(clients=8), ratio, seed)
    return {client.client for client in clients if client.is_graphless}


def test_a_larger_ratio_has_the_graphless_clients_of_a_smaller_one():
    found = [graphless(ratio) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert [len(each) for each in found] == [0, 2, 4, 6, 8]
    assert all(small < large for small, large in pairwise(found))
    assert len({frozenset(graphless(0.5, seed)) for seed in range(5)}) > 1


def test_a_graphless_client_hides_its_edges_and_is_the_same_otherwise():
    all_have = partition_graph(large(), settings(), 0.0, seed=0)
    none_has = partition_graph(large(), settings(), 1.0, seed=0)
    for open_one, hidden in zip(all_have, none_has, strict=True):
        assert hidden.is_graphless and open_one.edge_index is not None
        assert open_one.edge_index.numel() > 0
        shown = replace(hidden, edge_index=hidden.hidden_edges, hidden_edges=None)
        assert same([shown], [open_one])


def trainable(**changes: Any) -> ClientGraph:
    [client] = cut_out(graph(), parts([0, 1, 2, 3, 4]))
    return replace(split_nodes(client, RATIOS, seed=0), **changes)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_client_that_cannot_train_is_refused():
    constant = torch.tensor([[0.0, 2.0]]).repeat(5, 1)
    nearly, nobody = constant.clone(), torch.zeros(5, dtype=torch.bool)
    nearly[4, 1] = 1
    check_client_graph(trainable(x=constant))
    for form in (Tensor.clone, Tensor.to_sparse_csr):
        check_client_graph(trainable(x=form(nearly), edge_index=None))
        with pytest.raises(DataError, match=r"client 0.*5"):
            check_client_graph(trainable(x=form(constant), edge_index=None))
    for y in (trainable().y, torch.full((5,), -1)):
        with pytest.raises(DataError, match=r"client 0.*5"):
            check_client_graph(trainable(y=y, train_mask=nobody))
    graphs = [trainable(), trainable(client=4, edge_index=None)]
    check_neighbours(graphs, 4)
    check_neighbours(graphs[:1], 5)  # whose edges are known
    with pytest.raises(ConfigError, match=r"graph.neighbours: 5.*client 4"):
        check_neighbours(graphs, 5)


# --- clients that share nodes


def test_a_node_has_one_role_at_all_clients_that_hold_it():
    how = settings(method="metis-overlapping", clients=10)
    found = {}
    clients = partition_graph(large(), how, 0.5, seed=0)
    assert sum(one.is_graphless for one in clients) == 5
    for client in clients:
        for role, nodes in enumerate(roles(client)):
            assert nodes and all(found.setdefault(node, role) == role for node in nodes)
    assert len(found) <= 200 < sum(one.nodes.numel() for one in clients)


def test_ego_networks_are_those_of_fedscem_and_overlapping_graphs_those_of_ppfl():
    """Who holds what, and who trains on what: only the graph's class is another."""
    graph = csbm(200, 3, degree=6.0, features=8, active=2, seed=1)
    egos = {"method": "ego-networks", "hops": 1, "min_nodes": 10}
    ways = [
        (how := settings(**egos, split=split), partition_egos(graph, how, 4))
        for split in ("per-client", "global")
    ]
    ways.append((settings(method="overlapping", clients=4),
                 overlapping_graphs(graph, PPFLPartition(ratios=RATIOS), 4)))  # fmt: skip
    for how, theirs in ways:
        for pair in zip(partition_graph(graph, how, 0.0, 4), theirs, strict=True):
            for name in ("client", "nodes", "x", "y", "edge_index", "train_mask", "test_mask"):
                assert torch.equal(*(torch.as_tensor(getattr(one, name)) for one in pair))


# --- splits of one graph


def test_random_split_has_the_sizes_that_were_asked_for():
    y = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 0, 1, 2, 2, 2])
    masks = random_split(y, 3, **COUNTS, generator=chance())
    assert torch.bincount(y[masks.train]).tolist() == [2, 2, 2]
    assert [int(mask.sum()) for mask in masks] == [6, 3, 4]
    assert int(torch.stack(masks).sum(0).max()) <= 1
    y = torch.tensor([0, 2] * 10)  # a class without nodes is passed over
    train = random_split(y, 3, **COUNTS, generator=chance()).train
    assert torch.bincount(y[train]).tolist() == [2, 0, 2]


def test_stratified_split_by_hand():
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, -1, 0, 1, 1, 1, 1, 1, 1])
    train, val, test = stratified_split(y, [0.6, 0.2, 0.2], generator=chance())
    assert torch.stack([train, val, test]).sum(0).tolist() == [1] * 7 + [0] + [1] * 7
    assert [torch.bincount(y[mask]).tolist() for mask in (train, val, test)] == [
        [3, 5],
        [1, 2],
        [1, 2],
    ]


def columns() -> Masks:
    train = torch.eye(4, dtype=torch.uint8)[:, :3]
    return Masks(train, train.roll(1, 0), torch.tensor([True, False, False, True]))


@pytest.mark.parametrize(("seed", "column"), [(2, 2), (4, 1), (3, 0)])
def test_select_column_chooses_by_the_seed(seed, column):
    chosen = select_column(columns(), seed)
    assert all(mask.dtype == torch.bool for mask in chosen)
    assert chosen.train.nonzero().flatten().tolist() == [column]
    assert chosen.val.nonzero().flatten().tolist() == [column + 1]
    assert chosen.test.tolist() == [True, False, False, True]
    train, val, test = columns()
    with pytest.raises(DataError, match=r"\[2, 3\]"):
        select_column(Masks(train, val[:, :2], test), 0)


def test_a_split_of_geom_gcn_is_read_or_refused(tmp_path):
    path, parts = tmp_path / "split.npz", ("train_mask", "val_mask", "test_mask")
    rows = np.eye(4, dtype=np.uint8)
    good = dict(zip(parts, (rows[0], rows[1].astype(bool), rows[2]), strict=True))
    np.savez(path, **good)
    masks = geom_gcn_split(path, 4)
    assert [mask.tolist().index(True) for mask in masks] == [0, 1, 2]
    assert all(mask.dtype == torch.bool for mask in masks)
    with pytest.raises(DataError, match=r"\(4,\).*\(3,\)"):
        geom_gcn_split(path, 3)
    without = {key: good[key] for key in parts[:2]}
    pickled = good | {"train_mask": np.array([{}] * 4, dtype=object)}
    for content, words in ((without, "test_mask"), (pickled, "split.npz")):
        np.savez(path, **content)
        with pytest.raises(DataError, match=words):
            geom_gcn_split(path, 4)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"split\.npz"):
        geom_gcn_split(path, 4)


# Ego-networks -----------------------------------------------------------------------------------


def whole(edges: Any = ONE_WAY, nodes: int = 6, y: list[int] | None = None) -> Graph:
    labels = torch.arange(nodes) % 3 if y is None else torch.tensor(y)
    x = torch.eye(nodes) * torch.arange(1, nodes + 1)
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(2, -1)
    return Graph(x, to_undirected(edge_index, nodes), labels, 3)


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
    assert [(one.client, one.ego) for one in made] == [*enumerate(egos)]
    for ego, network in zip(egos, made, strict=True):
        nodes, edges, _, _ = k_hop_subgraph(
            ego, hops, data.edge_index, relabel_nodes=True, num_nodes=10
        )
        assert torch.equal(network.nodes, nodes)
        assert torch.equal(network.x, data.x[nodes]) and torch.equal(network.y, data.y[nodes])
        assert torch.equal(network.edge_index, to_undirected(edges, nodes.numel()))


def test_more_egos_than_are_searched_at_once():
    ring = torch.arange(3 * CHUNK)
    data = whole(torch.stack([ring, ring.roll(-1)]).tolist(), 3 * CHUNK)
    networks = ego_networks(data, ring.flip(0), hops=1)
    for network in networks[1:-1]:
        assert network.nodes.tolist() == [network.ego - 1, network.ego, network.ego + 1]
    assert [network.client for network in networks] == list(range(3 * CHUNK))


def test_the_first_of_more_egos_with_enough_nodes_are_drawn():
    ten = sample_egos(whole([[], []], 50), 10, 1, 1, seed=3)
    assert torch.equal(ten[:4], sample_egos(whole([[], []], 50), 4, 1, 1, seed=3))
    assert ten.unique().numel() == 10
    assert not torch.equal(ten, sample_egos(whole([[], []], 50), 10, 1, 1, seed=4))
    # Within one hop, 1 and 3 have four nodes, 2 has three, 0 and 4 have two, 5 has one.
    for least, allowed in ((4, [1, 3]), (3, [1, 2, 3]), (2, [0, 1, 2, 3, 4])):
        for seed in range(5):
            egos = sample_egos(whole(), len(allowed), 1, least, seed)
            assert sorted(egos.tolist()) == allowed
    # A view would carry the storage of all clients with it when it is saved or sent.
    for network in ego_networks(whole(), [0, 1, 3], hops=2):
        for value in (network.nodes, network.edge_index, network.x, network.y):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert ego_networks(whole(), [], hops=1) == []


@pytest.mark.parametrize(
    ("nodes", "ratios", "sizes"),
    [
        (1, RATIOS, [1, 0, 0]),
        (2, RATIOS, [1, 1, 0]),
        (5, RATIOS, [3, 1, 1]),
        (20, RATIOS, [12, 4, 4]),
        (2, [0.1, 0.5, 0.4], [1, 0, 1]),  # one training node is kept
        (10, [0.3, 0.2, 0.2], [3, 2, 2]),  # shares below one leave nodes out
    ],
)
def test_shares_within_a_client(nodes, ratios, sizes):
    hub = whole([[0] * (nodes - 1), list(range(1, nodes))], nodes)
    (network,) = split_per_client(ego_networks(hub, [0], 1), ratios, seed=1)
    assert [len(part) for part in roles(network)] == sizes
    dealt = [node for part in roles(network) for node in part]
    assert len(set(dealt)) == sum(sizes)


def test_nodes_without_a_label_are_in_no_part():
    data = whole(y=[-1, 2, -1, -1, -1, -1])
    networks = ego_networks(data, [0, 3, 5], 1)
    for done in (
        split_per_client(networks, RATIOS, seed=0),
        split_global(networks, data.y, RATIOS, seed=0),
    ):
        assert [roles(network) for network in done] == [[[1], [], []], [[1], [], []], [[], [], []]]


def test_a_clients_split_depends_on_the_seed_and_its_number_alone():
    hub = whole([[0] * 19, list(range(1, 20))], 20)
    networks = ego_networks(hub, [0, 7, 11], hops=2)
    done = split_per_client(networks, RATIOS, seed=5)
    ways = [partition_egos(hub, partition(split=way), 0) for way in ("global", "per-client")]
    assert [roles(one) == roles(two) for one, two, _ in ways] == [True, False]
    assert same(done[2:], split_per_client(networks[2:], RATIOS, seed=5))
    assert roles(done[0]) != roles(done[1])  # the same nodes, another client
    assert roles(done[0]) != roles(split_per_client(networks, RATIOS, seed=6)[0])


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19))))
def test_global_roles_are_the_same_at_every_client(seed, pairs):
    data = whole(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().tolist(), 20)
    found = {}
    for network in split_global(ego_networks(data, range(20), 1), data.y, RATIOS, seed):
        for role, nodes in enumerate(roles(network)):
            for node in nodes:
                assert found.setdefault(node, role) == role
    assert sorted(found) == list(range(20))
    assert [list(found.values()).count(role) for role in range(3)] == [12, 4, 4]


# --- the whole partition


# --- bad input


# What is refused --------------------------------------------------------------------------------


def refused(**changes: Any) -> Any:
    ratio = changes.pop("graphless_ratio", 0.5)
    return lambda: partition_graph(large(), settings(**changes), ratio, seed=0)


def egos_of(**changes: Any) -> Any:
    return lambda: partition_egos(whole(), partition(**changes), 0)


def split_of(*nodes: int, ratios: Sequence[float] = RATIOS) -> Any:
    return lambda: split_nodes(cut_out(graph(), parts([*nodes]))[0], ratios, seed=0)


def drawn(y: list[int], **changes: int) -> Any:
    return lambda: random_split(torch.tensor(y), 2, **{**COUNTS, **changes}, generator=chance())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (refused(method="leiden"), "partition.method: 'leiden'"),
        (refused(clients=7, method="metis-overlapping"), "partition.clients: 7"),
        (refused(graphless_ratio=1.1), "graphless_ratio: 1.1"),
        (refused(graphless_ratio=math.nan), "graphless_ratio: nan"),
        *((refused(clients=201, method=way), "clients: 201") for way in WAYS),
        (refused(clients=80), r"^client \d+.*80"),
        (refused(method="metis-overlapping", clients=60, draws=1), r"client \d.*60"),
        (refused(method="overlapping", clients=10), r"partition.private_share.*0.06"),
        (lambda: louvain(CLIQUES, 8, clients=4, resolution=1.0, seed=0), "clients = 4"),
        (lambda: drawn_parts(120, draws=1), "clients = 120"),
        (lambda: dirichlet(torch.zeros(39).long(), 4, 1e6, seed=0), f"{DRAWS}.*4"),
        (lambda: dirichlet(torch.zeros(1000).long(), 4, 1e-6, seed=0), f"{DRAWS}.*4"),
        (split_of(0), "client 0: partition.ratios.*1"),
        (split_of(5), "client 0: partition.ratios.*0 labelled"),
        (split_of(0, 1, 5), "client 0: partition.ratios.*2 labelled"),
        (split_of(0, 1, 2, 3, 4, ratios=[0.8, 0.0, 0.2]), r"ratios = \[0.8, 0.0, 0.2\]"),
        (lambda: labelled_split(torch.zeros(10), [0.5, 0.01, 0.4], generator=chance()), "10"),
        (drawn([0, 1] * 5), r"data\.num_test = 7: 6"),
        (drawn([0, 0, 0, 1, 0, 0, 0, 0, 0, 0]), r"train_per_class = 2: class 1"),
        (egos_of(clients=7), "partition.clients = 7"),
        (egos_of(clients=0), "partition.clients: 0"),
        (egos_of(hops=1, min_nodes=4), "partition.clients = 3.*partition.min_nodes"),
        (egos_of(split="public"), "partition.split: 'public'"),
        (egos_of(split="global", ratios=[0.5, 0.2, math.nan]), "partition.ratios"),
        (lambda: ego_networks(whole(), [0, 6], 1), r"egos \[6\]"),
        (lambda: ego_networks(whole(), [-1], 1), r"egos \[-1\]"),
        (lambda: ego_networks(whole(), [2, 0, 2], 1), r"egos \[2\]"),
        (lambda: ego_networks(whole(), [0], 0), r"partition\.hops: 0"),
    ],
)
def test_impossible_settings_are_refused(call, words):
    with pytest.raises((DataError, ConfigError), match=words):
        call()


def test_an_empty_part_of_metis_is_refused(monkeypatch):
    monkeypatch.setattr(pymetis, "part_graph", lambda *_, **__: (0, [0, 0, 2, 2, 2, 2, 2, 2]))
    with pytest.raises(DataError, match="clients = 4"):
        metis(CLIQUES, 8, clients=4, seed=0)
