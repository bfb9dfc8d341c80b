"""Ego-networks: which nodes and edges a client gets, who is sampled, and the splits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from partition_helpers import ONE_WAY, RATIOS, roles, same
from torch_geometric.utils import k_hop_subgraph

from flower_graph.data import Graph, to_undirected
from flower_graph.data.partition.ego_networks import (
    CHUNK,
    ego_networks,
    partition_egos,
    sample_egos,
    split_global,
    split_per_client,
)
from flower_graph.errors import DataError


def graph(edges: Any = ONE_WAY, nodes: int = 6, y: list[int] | None = None) -> Graph:
    labels = torch.arange(nodes) % 3 if y is None else torch.tensor(y)
    x = torch.eye(nodes) * torch.arange(1, nodes + 1)
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(2, -1)
    return Graph(x, to_undirected(edge_index, nodes), labels, 3)


def partition(**changes: Any) -> SimpleNamespace:
    given: dict[str, Any] = {"hops": 2, "clients": 3, "min_nodes": 1, "seed": None}
    given |= {"split": "per-client", "ratios": RATIOS}
    return SimpleNamespace(**{**given, **changes})


# --- nodes and edges


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    st.integers(1, 4),
    st.permutations(range(10)),
)
def test_it_is_what_pyg_gives(pairs: list[tuple[int, int]], hops: int, egos: list[int]) -> None:
    one_way = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    data = graph(one_way.tolist(), 10)
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
    data = graph(torch.stack([ring, ring.roll(-1)]).tolist(), 3 * CHUNK)
    networks = ego_networks(data, ring.flip(0), hops=1)
    for network in networks[1:-1]:
        assert network.nodes.tolist() == [network.ego - 1, network.ego, network.ego + 1]
    assert [network.client for network in networks] == list(range(3 * CHUNK))


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_features_stay_sparse() -> None:
    sparse = replace(graph(), x=graph().x.to_sparse_csr())
    for one, other in zip(
        ego_networks(sparse, [3, 5, 0], 1), ego_networks(graph(), [3, 5, 0], 1), strict=True
    ):
        assert one.x.layout == torch.sparse_csr
        assert torch.equal(one.x.to_dense(), other.x)


def test_tensors_hold_no_more_than_their_client() -> None:
    # A view would carry the storage of all clients with it when it is saved or sent.
    for network in ego_networks(graph(), [0, 1, 3], hops=2):
        for value in (network.nodes, network.edge_index, network.x, network.y):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


# --- who is sampled


def test_fewer_clients_are_the_first_of_more() -> None:
    ten = sample_egos(graph([[], []], 50), 10, 1, 1, seed=3)
    assert torch.equal(ten[:4], sample_egos(graph([[], []], 50), 4, 1, 1, seed=3))
    assert ten.unique().numel() == 10
    assert not torch.equal(ten, sample_egos(graph([[], []], 50), 10, 1, 1, seed=4))


def test_only_egos_with_enough_nodes_are_drawn() -> None:
    # Within one hop, 1 and 3 have four nodes, 2 has three, 0 and 4 have two, 5 has one.
    for least, allowed in ((4, [1, 3]), (3, [1, 2, 3]), (2, [0, 1, 2, 3, 4])):
        for seed in range(5):
            egos = sample_egos(graph(), len(allowed), 1, least, seed)
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
    hub = graph([[0] * (nodes - 1), list(range(1, nodes))], nodes)
    (network,) = split_per_client(ego_networks(hub, [0], 1), ratios, seed=1)
    assert [len(part) for part in roles(network)] == sizes
    dealt = [node for part in roles(network) for node in part]
    assert len(set(dealt)) == sum(sizes)


def test_nodes_without_a_label_are_in_no_part() -> None:
    data = graph(y=[-1, 2, -1, -1, -1, -1])
    networks = ego_networks(data, [0, 3, 5], 1)
    for done in (
        split_per_client(networks, RATIOS, seed=0),
        split_global(networks, data.y, RATIOS, seed=0),
    ):
        assert [roles(network) for network in done] == [[[1], [], []], [[1], [], []], [[], [], []]]


def test_a_clients_split_depends_on_the_seed_and_its_number_alone() -> None:
    hub = graph([[0] * 19, list(range(1, 20))], 20)
    networks = ego_networks(hub, [0, 7, 11], hops=2)
    done = split_per_client(networks, RATIOS, seed=5)
    assert same(done[2:], split_per_client(networks[2:], RATIOS, seed=5))
    assert roles(done[0]) != roles(done[1])  # the same nodes, another client
    assert roles(done[0]) != roles(split_per_client(networks, RATIOS, seed=6)[0])


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19))))
def test_global_roles_are_the_same_at_every_client(seed: int, pairs: list[tuple[int, int]]) -> None:
    data = graph(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().tolist(), 20)
    found: dict[int, int] = {}
    for network in split_global(ego_networks(data, range(20), 1), data.y, RATIOS, seed):
        for role, nodes in enumerate(roles(network)):
            for node in nodes:
                assert found.setdefault(node, role) == role
    assert sorted(found) == list(range(20))
    assert [list(found.values()).count(role) for role in range(3)] == [12, 4, 4]


# --- the whole partition


def test_the_split_is_the_one_asked_for() -> None:
    data = graph([[0] * 19, list(range(1, 20))], 20)
    strict = partition_egos(data, partition(split="global"), 0)
    loose = partition_egos(data, partition(), 0)
    assert roles(strict[0]) == roles(strict[1])
    assert roles(loose[0]) != roles(loose[1])


# --- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 7}, "partition.clients = 7"),
        ({"clients": 0}, "partition.clients = 0"),
        ({"hops": 0}, "partition.hops = 0"),
        ({"min_nodes": 0}, "partition.min_nodes = 0"),
        (
            {"hops": 1, "min_nodes": 4},
            "partition.clients = 3.*partition.min_nodes",
        ),
        ({"split": "public"}, "partition.split = 'public'"),
        ({"ratios": [0.6, 0.4]}, r"partition.ratios = \[0.6, 0.4\]"),
        ({"split": "global", "ratios": [0.5, 0.2, float("nan")]}, "partition.ratios"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        partition_egos(graph(), partition(**changes), 0)


@pytest.mark.parametrize(
    ("egos", "hops", "message"),
    [
        ([0, 6], 1, r"egos \[6\]"),
        ([-1], 1, r"egos \[-1\]"),
        ([2, 0, 2], 1, r"egos \[2\]"),
        ([0], 0, r"partition\.hops = 0"),
    ],
)
def test_impossible_egos_are_refused(egos: list[int], hops: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ego_networks(graph(), egos, hops)
    assert ego_networks(graph(), [], hops=1) == []
