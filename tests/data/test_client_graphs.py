"""Clients cut out of one graph: how it is cut, nodes, edges, splits, who is graphless, refusals."""

from __future__ import annotations

import logging
import math
import random
import sys
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
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

from flower_graph.config.common import DataConfig
from flower_graph.config.partition import PartitionSection
from flower_graph.data import Graph, csbm, to_undirected
from flower_graph.data.folders.party import deciding_settings
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


def lists(parts: list[Tensor]) -> list[list[int]]:
    return [part.tolist() for part in parts]


# --- Louvain


def test_the_largest_communities_come_first_and_the_rest_is_left_out() -> None:
    parts = louvain(CLIQUES, 8, clients=2, resolution=1.0, seed=0)
    assert lists(parts) == [[0, 2, 4, 6], [1, 3, 5]]
    assert lists(louvain(CLIQUES, 8, clients=3, resolution=1.0, seed=0))[2] == [7]
    with pytest.raises(DataError, match="clients = 4"):
        louvain(CLIQUES, 8, clients=4, resolution=1.0, seed=0)


def test_of_two_equally_large_the_one_with_the_lowest_node_is_first() -> None:
    edges = torch.tensor([*clique(3, 4, 5), *clique(0, 2, 7), *clique(1, 6, 8)]).t()
    for seed in range(5):
        found = louvain(edges, 9, clients=2, resolution=1.0, seed=seed)
        assert lists(found) == [[0, 2, 7], [1, 6, 8]]


def test_every_node_is_assigned_the_rest_to_the_smallest_client() -> None:
    parts = louvain(CLIQUES, 8, clients=2, resolution=1.0, seed=0, every_node=True)
    assert lists(parts) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    alone = louvain(CLIQUES, 8, clients=3, resolution=50.0, seed=0, every_node=True)
    assert lists(alone) == [[0, 3, 6], [1, 4, 7], [2, 5]]


NOISY = csbm(600, 4, degree=4.0, features=8, active=2, homophily=0.6, seed=1).edge_index


def test_louvain_without_a_resolution_finds_one_that_gives_all_clients_something() -> None:
    enough = louvain(CLIQUES, 8, clients=2, resolution=None, seed=0)
    assert lists(enough) == lists(louvain(CLIQUES, 8, clients=2, resolution=1.0, seed=0))
    parts = louvain(CLIQUES, 8, clients=6, resolution=None, seed=0, every_node=True)
    assert len(parts) == 6 and all(part.numel() for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(8))


def test_louvain_without_a_resolution_finds_communities_that_are_large_enough() -> None:
    def sizes(least: int) -> list[int]:
        def fits(nodes: Tensor) -> bool:
            return nodes.numel() >= least

        how: dict[str, Any] = {"clients": 60, "resolution": None, "seed": 0, "every_node": True}
        return [part.numel() for part in louvain(NOISY, 600, **how, fits=fits)]

    assert min(sizes(0)) < 8 <= min(sizes(8))
    assert sizes(11) == sizes(0)  # 60 times 11 are more nodes than there are


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


def test_a_part_that_is_too_small_is_joined_to_that_with_most_edges_to_it() -> None:
    parts = [torch.tensor(nodes) for nodes in ([0, 2, 4, 6], [1, 3], [5], [7])]

    def joined_to(least: int) -> list[list[int]]:
        return lists(joined(parts, CLIQUES, 8, lambda nodes: nodes.numel() >= least))

    assert joined_to(1) == lists(parts)
    # 5 has two edges to 1 and 3, and one to 6; 7, which has none, joins the smallest
    assert joined_to(2) == [[0, 2, 4, 6], [1, 3, 5, 7]] == joined_to(4)
    assert joined_to(5) == [list(range(8))] == joined_to(9)


# --- METIS


def test_metis_cuts_where_there_are_few_edges() -> None:
    edges = torch.tensor([*clique(0, 2, 4, 6), *clique(1, 3, 5, 7), (5, 6)]).t()
    parts = sorted(lists(metis(edges, 8, clients=2, seed=0)))
    assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_without_pymetis_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(DataError, match=r"'flower-graph\[metis\]'"):
        metis(CLIQUES, 8, clients=2, seed=0)


def test_an_empty_part_of_metis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pymetis, "part_graph", lambda *_, **__: (0, [0, 0, 2, 2, 2, 2, 2, 2]))
    with pytest.raises(DataError, match="clients = 4"):
        metis(CLIQUES, 8, clients=4, seed=0)


# --- METIS, drawn_parts


SHARED = csbm(120, 3, degree=6.0, features=8, active=2, homophily=0.8, seed=2).edge_index


def drawn_parts(clients: int, **changes: Any) -> list[Tensor]:
    how: dict[str, Any] = {"draws": 3, "seed": 1} | changes
    return metis_overlapping(SHARED, 120, clients=clients, **how)


def test_half_of_each_part_is_drawn_for_each_of_its_clients() -> None:
    cut = lists(metis(SHARED, 120, clients=2, seed=1))
    found = lists(drawn_parts(6))
    assert len({tuple(nodes) for nodes in found}) == len(found) == 6
    for number, nodes in enumerate(found):
        assert set(nodes) < set(cut[number // 3])
        assert len(nodes) == round(0.5 * len(cut[number // 3]))
        assert nodes == sorted(nodes)
    assert lists(drawn_parts(6)) == lists(drawn_parts(6)) != lists(drawn_parts(6, seed=2))


def test_half_of_a_node_is_nobody() -> None:
    with pytest.raises(DataError, match="clients = 120"):
        drawn_parts(120, draws=1)


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
    with pytest.raises(DataError, match=f"{DRAWS}.*4"):
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


# Clients ----------------------------------------------------------------------------------------


def graph(**changes: Any) -> Graph:
    x = torch.eye(6) * torch.arange(1, 7)
    return replace(Graph(x, EDGES, torch.tensor([0, 1, 2, 0, 1, -1]), 3), **changes)


def parts(*nodes: list[int]) -> list[Tensor]:
    return [torch.tensor(each, dtype=torch.int64) for each in nodes]


def settings(**changes: Any) -> PartitionSection:
    return PartitionSection(**{"method": "random", "clients": 5, "ratios": RATIOS, **changes})


# --- nodes and edges


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30), st.data())
def test_edges_are_those_of_pygs_subgraph(pairs: list[tuple[int, int]], data: Any) -> None:
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


@pytest.mark.parametrize("method", WAYS)
def test_every_way_to_cut_gives_clients_that_share_no_node(method: str) -> None:
    clients = partition_graph(large(), settings(method=method), 0.4, seed=0)
    assert [client.client for client in clients] == list(range(5))
    nodes = torch.cat([client.nodes for client in clients])
    assert nodes.unique().numel() == nodes.numel()
    assert method == "louvain" or nodes.numel() == 200


@pytest.mark.parametrize("method", ["louvain", "metis"])
def test_communities_that_cannot_be_split_are_joined(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    y = large().y.clone()
    y[::2] = -1
    caplog.set_level(logging.INFO, "flower_graph.data")
    cut = partition_graph(
        large(y=y), settings(clients=40, method=method, resolution=30.0), 0.0, seed=0
    )
    assert 1 < len(cut) < 40 and [client.client for client in cut] == list(range(len(cut)))
    assert all(all(role) for role in map(roles, cut))
    assert f"{len(cut)} clients" in caplog.text


def test_alpha_and_resolution_reach_the_cut() -> None:
    def sizes(**changes: Any) -> list[int]:
        cut = partition_graph(large(), settings(clients=3, **changes), 0.0, seed=0)
        return [client.y.numel() for client in cut]

    assert max(sizes(method="louvain", resolution=3.0)) < max(sizes(method="louvain"))
    assert sizes(method="dirichlet", alpha=1.0) != sizes(method="dirichlet", alpha=100.0)


@pytest.mark.parametrize(
    ("changes", "ratio", "said"),
    [
        ({"method": "leiden"}, 0.5, "partition.method: 'leiden'"),
        ({"clients": 7, "method": "metis-overlapping"}, 0.5, "partition.clients: 7"),
        ({}, 1.1, "graphless_ratio: 1.1"),
        ({}, math.nan, "graphless_ratio: nan"),
        *(({"clients": 201, "method": way}, 0.5, "clients: 201") for way in WAYS),
        ({"clients": 80}, 0.0, r"^client \d+.*80"),
        ({"method": "metis-overlapping", "clients": 60, "draws": 1}, 0.0, r"client \d.*60"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], ratio: float, said: str) -> None:
    with pytest.raises((DataError, ConfigError), match=said):
        partition_graph(large(), settings(**changes), ratio, seed=0)


# --- split


def test_each_client_splits_its_labelled_nodes_60_20_20() -> None:
    y = large().y.clone()
    y[::2] = -1
    for client in partition_graph(large(y=y), settings(clients=2), 0.5, seed=0):
        train, val, test = roles(client)
        labelled = client.nodes[client.y >= 0].tolist()
        assert sorted(train + val + test) == labelled
        count = len(labelled)
        ends = [round(0.6 * count), round(0.8 * count), count]
        assert [len(train), len(val), len(test)] == [ends[0], ends[1] - ends[0], ends[2] - ends[1]]


def test_a_split_depends_on_seed_and_client_alone() -> None:
    one, two = cut_out(large(), [torch.arange(0, 50), torch.arange(50, 100)])
    split = split_nodes(one, RATIOS, seed=0)
    assert same([split], [split_nodes(split, RATIOS, seed=0)])
    assert not torch.equal(split.train_mask, split_nodes(one, RATIOS, seed=1).train_mask)
    assert not torch.equal(split.train_mask, split_nodes(two, RATIOS, seed=0).train_mask)


def test_fewer_labels_train_and_the_same_nodes_validate_and_test() -> None:
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


@pytest.mark.parametrize(
    ("nodes", "ratios", "said"),
    [
        ([0], RATIOS, "client 0: partition.ratios.*1"),
        ([5], RATIOS, "client 0: partition.ratios.*0 labelled"),
        ([0, 1, 5], RATIOS, "client 0: partition.ratios.*2 labelled"),
        ([0, 1, 2, 3, 4], [0.8, 0.0, 0.2], r"ratios = \[0.8, 0.0, 0.2\]"),
    ],
)
def test_a_client_too_small_for_its_split(nodes: list[int], ratios: list[float], said: str) -> None:
    [client] = cut_out(graph(), parts(nodes))
    with pytest.raises(DataError, match=said):
        split_nodes(client, ratios, seed=0)


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
def test_the_seed_of_the_partition_goes_before_that_of_the_run(cut: Any, how: Any) -> None:
    def made(seed: int, own: int | None = None) -> Any:
        return cut({"seed": own, **how}, seed)

    assert same(made(3), made(4, own=3)) and same(made(4, own=3), made(5, own=3))
    assert not torch.equal(made(3)[0].nodes, made(4)[0].nodes)


# --- graphless clients


def graphless(ratio: float, seed: int = 0) -> set[int]:
    clients = partition_graph(large(), settings(clients=8), ratio, seed)
    return {client.client for client in clients if client.is_graphless}


def test_a_larger_ratio_has_the_graphless_clients_of_a_smaller_one() -> None:
    found = [graphless(ratio) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert [len(each) for each in found] == [0, 2, 4, 6, 8]
    assert all(small < large for small, large in pairwise(found))
    assert len({frozenset(graphless(0.5, seed)) for seed in range(5)}) > 1


def test_a_graphless_client_hides_its_edges_and_is_the_same_otherwise() -> None:
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
@pytest.mark.parametrize("sparse", [False, True])
def test_constant_features_without_edges_are_refused(sparse: bool) -> None:
    def features(x: Tensor) -> Tensor:
        return x.to_sparse_csr() if sparse else x

    constant = features(torch.tensor([[0.0, 2.0]]).repeat(5, 1))
    nearly = features(torch.tensor([[0.0, 2.0]] * 4 + [[0.0, 1.0]]))
    check_client_graph(trainable(x=constant))
    check_client_graph(trainable(x=nearly, edge_index=None))
    with pytest.raises(DataError, match=r"client 0.*5"):
        check_client_graph(trainable(x=constant, edge_index=None))


def test_nothing_to_train_on_is_refused() -> None:
    nobody = torch.zeros(5, dtype=torch.bool)
    with pytest.raises(DataError, match=r"client 0.*5"):
        check_client_graph(trainable(train_mask=nobody))
    with pytest.raises(DataError, match=r"client 0.*5"):
        check_client_graph(trainable(y=torch.full((5,), -1), train_mask=nobody))


def test_more_neighbours_than_a_graphless_client_has_nodes() -> None:
    graphs = [trainable(), trainable(client=4, edge_index=None)]
    check_neighbours(graphs, 4)
    with pytest.raises(ConfigError, match=r"graph.neighbours: 5.*client 4"):
        check_neighbours(graphs, 5)
    check_neighbours(graphs[:1], 5)


# --- clients that share nodes


def test_a_node_has_one_role_at_all_clients_that_hold_it() -> None:
    clients = partition_graph(
        large(), settings(method="metis-overlapping", clients=10), 0.5, seed=0
    )
    assert [one.client for one in clients] == list(range(10))
    assert sum(one.is_graphless for one in clients) == 5
    found: dict[int, int] = {}
    for client in clients:
        for role, nodes in enumerate(roles(client)):
            assert nodes
            assert all(found.setdefault(node, role) == role for node in nodes)
    held = sum(one.nodes.numel() for one in clients)
    assert len(found) <= 200 < held


def test_ego_networks_are_those_of_fedscem_and_overlapping_graphs_those_of_ppfl() -> None:
    """Who holds what, and who trains on what: only the graph's class is another."""
    graph = csbm(200, 3, degree=6.0, features=8, active=2, seed=1)
    for split in ("per-client", "global"):
        how = settings(method="ego-networks", hops=1, min_nodes=10, split=split)
        for mine, ego in zip(
            partition_graph(graph, how, 0.0, 4), partition_egos(graph, how, 4), strict=True
        ):
            for name in ("client", "nodes", "x", "y", "edge_index", "train_mask", "test_mask"):
                assert torch.equal(*(torch.as_tensor(getattr(one, name)) for one in (mine, ego)))
    how = settings(method="overlapping", clients=4)
    theirs = PPFLPartition(ratios=how.ratios)
    for mine, other in zip(
        partition_graph(graph, how, 0.0, 4), overlapping_graphs(graph, theirs, 4), strict=True
    ):
        for name in ("client", "nodes", "x", "y", "edge_index", "train_mask", "test_mask"):
            assert torch.equal(*(torch.as_tensor(getattr(one, name)) for one in (mine, other)))
    with pytest.raises(ConfigError, match=r"partition.private_share.*0.06"):
        settings(method="overlapping", clients=10).validate()


def test_keys_of_another_way_of_cutting_decide_nothing() -> None:
    def deciding(**changes: Any) -> set[str]:
        partition = asdict(settings(**changes))
        config = {"app": "a", "seed": 0, "data": asdict(DataConfig()), "partition": partition}
        found = deciding_settings(config)
        return {key.partition(".")[2] for key in found if key.startswith("partition.")}

    for method, keys in (
        ("ego-networks", {"hops", "min_nodes", "split"}),
        ("overlapping", {"public", "public_share", "private_share"}),
        ("metis-overlapping", {"draws"}),
    ):
        assert deciding(method=method) - deciding(method="random") == keys


def draw(y: torch.Tensor, seed: int = 0, **changes: int) -> Masks:
    counts = {"train_per_class": 2, "num_val": 3, "num_test": 4, **changes}
    return random_split(y, int(y.max()) + 1, **counts, generator=chance(seed))


def assert_disjoint(masks: Masks) -> None:
    assert int(torch.stack(masks).sum(0).max()) <= 1


def test_random_split_has_the_sizes_that_were_asked_for() -> None:
    y = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 0, 1, 2, 2, 2])
    masks = draw(y)
    assert torch.bincount(y[masks.train]).tolist() == [2, 2, 2]
    assert [int(mask.sum()) for mask in masks] == [6, 3, 4]
    assert_disjoint(masks)
    y = torch.tensor([0, 2] * 10)  # a class without nodes is passed over
    assert torch.bincount(y[draw(y).train]).tolist() == [2, 0, 2]


def test_random_split_says_what_is_too_small() -> None:
    with pytest.raises(DataError, match=r"data\.num_test = 7: 6"):
        draw(torch.tensor([0, 1] * 5))
    with pytest.raises(DataError, match=r"train_per_class = 2: class 1"):
        draw(torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0, 0]))


def test_stratified_split_by_hand() -> None:
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, -1, 0, 1, 1, 1, 1, 1, 1])
    train, val, test = stratified_split(y, [0.6, 0.2, 0.2], generator=chance())
    assert torch.stack([train, val, test]).sum(0).tolist() == [1] * 7 + [0] + [1] * 7
    assert [torch.bincount(y[mask]).tolist() for mask in (train, val, test)] == [
        [3, 5],
        [1, 2],
        [1, 2],
    ]


def test_a_share_without_a_node_is_refused() -> None:
    with pytest.raises(DataError, match=r"leaves.*10"):
        labelled_split(torch.zeros(10), [0.5, 0.01, 0.4], generator=chance())


def columns() -> Masks:
    train = torch.eye(4, dtype=torch.uint8)[:, :3]
    return Masks(train, train.roll(1, 0), torch.tensor([True, False, False, True]))


@pytest.mark.parametrize(("seed", "column"), [(2, 2), (4, 1), (3, 0)])
def test_select_column_chooses_by_the_seed(seed: int, column: int) -> None:
    chosen = select_column(columns(), seed)
    assert all(mask.dtype == torch.bool for mask in chosen)
    assert chosen.train.nonzero().flatten().tolist() == [column]
    assert chosen.val.nonzero().flatten().tolist() == [column + 1]
    assert chosen.test.tolist() == [True, False, False, True]
    train, val, test = columns()
    with pytest.raises(DataError, match=r"\[2, 3\]"):
        select_column(Masks(train, val[:, :2], test), 0)


def write_split(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_geom_gcn_split_reads_bytes_as_booleans(tmp_path: Path) -> None:
    path = write_split(
        tmp_path / "split.npz",
        train_mask=np.array([1, 0, 0, 0], np.uint8),
        val_mask=np.array([False, True, False, False]),
        test_mask=np.array([0, 0, 1, 0], np.uint8),
    )
    masks = geom_gcn_split(path, 4)
    assert [mask.tolist().index(True) for mask in masks] == [0, 1, 2]
    assert all(mask.dtype == torch.bool for mask in masks)


def test_geom_gcn_split_refuses_another_graph_a_missing_key_and_a_pickle(tmp_path: Path) -> None:
    mask = np.array([True, False])
    path = write_split(tmp_path / "a.npz", train_mask=mask, val_mask=mask, test_mask=mask)
    with pytest.raises(DataError, match=r"\(2,\).*\(3,\)"):
        geom_gcn_split(path, 3)
    with pytest.raises(DataError, match="test_mask"):
        geom_gcn_split(write_split(tmp_path / "b.npz", train_mask=mask, val_mask=mask), 2)
    pickled = np.array([{}, {}], dtype=object)
    path = write_split(tmp_path / "c.npz", train_mask=pickled, val_mask=mask, test_mask=mask)
    with pytest.raises(DataError):
        geom_gcn_split(path, 2)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError):
        geom_gcn_split(path, 2)


def whole(edges: Any = ONE_WAY, nodes: int = 6, y: list[int] | None = None) -> Graph:
    labels = torch.arange(nodes) % 3 if y is None else torch.tensor(y)
    x = torch.eye(nodes) * torch.arange(1, nodes + 1)
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(2, -1)
    return Graph(x, to_undirected(edge_index, nodes), labels, 3)


def partition(**changes: Any) -> PartitionSection:
    return settings(**{"method": "ego-networks", "clients": 3, "min_nodes": 1, **changes})


# --- nodes and edges


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    st.integers(1, 4),
    st.permutations(range(10)),
)
def test_it_is_what_pyg_gives(pairs: list[tuple[int, int]], hops: int, egos: list[int]) -> None:
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


def test_more_egos_than_are_searched_at_once() -> None:
    ring = torch.arange(3 * CHUNK)
    data = whole(torch.stack([ring, ring.roll(-1)]).tolist(), 3 * CHUNK)
    networks = ego_networks(data, ring.flip(0), hops=1)
    for network in networks[1:-1]:
        assert network.nodes.tolist() == [network.ego - 1, network.ego, network.ego + 1]
    assert [network.client for network in networks] == list(range(3 * CHUNK))


def test_tensors_hold_no_more_than_their_client() -> None:
    # A view would carry the storage of all clients with it when it is saved or sent.
    for network in ego_networks(whole(), [0, 1, 3], hops=2):
        for value in (network.nodes, network.edge_index, network.x, network.y):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


# --- who is sampled


def test_fewer_clients_are_the_first_of_more() -> None:
    ten = sample_egos(whole([[], []], 50), 10, 1, 1, seed=3)
    assert torch.equal(ten[:4], sample_egos(whole([[], []], 50), 4, 1, 1, seed=3))
    assert ten.unique().numel() == 10
    assert not torch.equal(ten, sample_egos(whole([[], []], 50), 10, 1, 1, seed=4))


def test_only_egos_with_enough_nodes_are_drawn() -> None:
    # Within one hop, 1 and 3 have four nodes, 2 has three, 0 and 4 have two, 5 has one.
    for least, allowed in ((4, [1, 3]), (3, [1, 2, 3]), (2, [0, 1, 2, 3, 4])):
        for seed in range(5):
            egos = sample_egos(whole(), len(allowed), 1, least, seed)
            assert sorted(egos.tolist()) == allowed


# --- splits


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
def test_shares_within_a_client(nodes: int, ratios: list[float], sizes: list[int]) -> None:
    hub = whole([[0] * (nodes - 1), list(range(1, nodes))], nodes)
    (network,) = split_per_client(ego_networks(hub, [0], 1), ratios, seed=1)
    assert [len(part) for part in roles(network)] == sizes
    dealt = [node for part in roles(network) for node in part]
    assert len(set(dealt)) == sum(sizes)


def test_nodes_without_a_label_are_in_no_part() -> None:
    data = whole(y=[-1, 2, -1, -1, -1, -1])
    networks = ego_networks(data, [0, 3, 5], 1)
    for done in (
        split_per_client(networks, RATIOS, seed=0),
        split_global(networks, data.y, RATIOS, seed=0),
    ):
        assert [roles(network) for network in done] == [[[1], [], []], [[1], [], []], [[], [], []]]


def test_a_clients_split_depends_on_the_seed_and_its_number_alone() -> None:
    hub = whole([[0] * 19, list(range(1, 20))], 20)
    networks = ego_networks(hub, [0, 7, 11], hops=2)
    done = split_per_client(networks, RATIOS, seed=5)
    assert same(done[2:], split_per_client(networks[2:], RATIOS, seed=5))
    assert roles(done[0]) != roles(done[1])  # the same nodes, another client
    assert roles(done[0]) != roles(split_per_client(networks, RATIOS, seed=6)[0])


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19))))
def test_global_roles_are_the_same_at_every_client(seed: int, pairs: list[tuple[int, int]]) -> None:
    data = whole(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().tolist(), 20)
    found: dict[int, int] = {}
    for network in split_global(ego_networks(data, range(20), 1), data.y, RATIOS, seed):
        for role, nodes in enumerate(roles(network)):
            for node in nodes:
                assert found.setdefault(node, role) == role
    assert sorted(found) == list(range(20))
    assert [list(found.values()).count(role) for role in range(3)] == [12, 4, 4]


# --- the whole partition


def test_the_split_is_the_one_asked_for() -> None:
    data = whole([[0] * 19, list(range(1, 20))], 20)
    strict = partition_egos(data, partition(split="global"), 0)
    loose = partition_egos(data, partition(), 0)
    assert roles(strict[0]) == roles(strict[1])
    assert roles(loose[0]) != roles(loose[1])


# --- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 7}, "partition.clients = 7"),
        ({"clients": 0}, "partition.clients: 0"),
        ({"hops": 1, "min_nodes": 4}, "partition.clients = 3.*partition.min_nodes"),
        ({"split": "public"}, "partition.split: 'public'"),
        ({"split": "global", "ratios": [0.5, 0.2, float("nan")]}, "partition.ratios"),
    ],
)
def test_impossible_settings_of_ego_networks_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        partition_egos(whole(), partition(**changes), 0)


@pytest.mark.parametrize(
    ("egos", "hops", "message"),
    [
        ([0, 6], 1, r"egos \[6\]"),
        ([-1], 1, r"egos \[-1\]"),
        ([2, 0, 2], 1, r"egos \[2\]"),
        ([0], 0, r"partition\.hops: 0"),
    ],
)
def test_impossible_egos_are_refused(egos: list[int], hops: int, message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        ego_networks(whole(), egos, hops)
    assert ego_networks(whole(), [], hops=1) == []
