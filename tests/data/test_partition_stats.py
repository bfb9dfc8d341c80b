"""What the figures of a partition say, by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from partition_helpers import EDGES, mask

from flower_graph.data import Graph, to_undirected
from flower_graph.data.partition.client_graphs import ClientGraph, cut_out
from flower_graph.data.partition.ego_networks import EgoNetwork, ego_networks
from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.data.partition.statistics import (
    client_statistics,
    ego_statistics,
    node_statistics,
    overlap_statistics,
)
from flower_graph.errors import DataError

Y = torch.tensor([0, 1, 2, 0, 1, -1])  # 5 has no label
WHOLE = Graph(torch.zeros(6, 7), EDGES, Y, num_classes=3)


def networks() -> list[EgoNetwork]:
    """Clients with the nodes 0 1, then 1 2 3 4, then 5."""
    first, second, alone = ego_networks(WHOLE, [0, 3, 5], hops=1)
    return [
        replace(first, train_mask=mask(0, size=2), test_mask=mask(1, size=2)),
        replace(
            second,
            train_mask=mask(0, 1, size=4),  # 1, which the first client tests, and 2
            val_mask=mask(2, size=4),
            test_mask=mask(3, size=4),
        ),
        alone,
    ]


def worked_out(figures: str) -> Any:
    """Read figures by name, with a fraction for each that is no whole number."""
    pairs = (one.rpartition(" ") for one in " ".join(figures.split()).split(", "))
    return pytest.approx({name: float(Fraction(value)) for name, _, value in pairs})


def test_figures_of_ego_networks_by_hand():
    found = ego_statistics(networks())
    assert found.figures == worked_out("""
        clients 3, nodes 6, edges 5, features 7, classes 3, density 5/6, nodes-per-client 7/3,
        edges-per-client 5/3, classes-per-client 5/3, density-per-client 5/7, fewest-nodes 1,
        most-nodes 4, clients-per-node 7/6, most-clients-per-node 2, shared-share 1/6,
        train-per-client 1, val-per-client 1/3, test-per-client 2/3, clients-without-training 1,
        tested-and-trained-share 1/2""")
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
    assert found.figures == worked_out("""
        clients 6, edges 5, features 4, classes 3, density 5/6, neighbours-per-client 10/6,
        most-neighbours 3, isolated 1, features-per-client 1/2, train 2, val 0, test 3""")
    assert found.distributions == {
        "neighbours per client": {0: 1, 1: 2, 2: 1, 3: 2},
        "classes in train": {0: 1, 1: 1},
        "classes in val": {},
        "classes in test": {0: 1, 1: 1, 2: 1},
    }


def communities() -> list[ClientGraph]:
    """Clients with the nodes 0 1 2, and 3 5 without their edges; nobody has 4."""
    first, second = cut_out(WHOLE, [torch.tensor([0, 1, 2]), torch.tensor([3, 5])])
    first = replace(first, train_mask=mask(0, 1, size=3), test_mask=mask(2, size=3))
    second = replace(second, edge_index=None, hidden_edges=second.edge_index)
    return [first, replace(second, val_mask=mask(0, size=2))]


def test_figures_of_communities_by_hand():
    whole = Graph(torch.zeros(6, 7), EDGES, torch.tensor([0, 1, 1, 0, 1, -1]), num_classes=3)
    first, second = communities()
    found = client_statistics([replace(first, y=whole.y[first.nodes]), second], whole)
    # 0 - 1 and 1 - 2 at the first client, none at the other, which has no homophily; cut are 2 - 3
    # and 1 - 3, of all but 3 - 4
    assert found.figures == worked_out("""
        clients 2, graphless-clients 1, features 7, classes 2, nodes-per-client 5/2,
        edges-per-client 1, directed-edges-per-client 2, classes-per-client 3/2,
        homophily-per-client 1/2, fewest-nodes 2, most-nodes 3, kept-nodes-share 5/6,
        kept-edges-share 2/5, cut-edges-share 2/4, train-per-client 1, val-per-client 1/2,
        test-per-client 1/2""")
    assert found.distributions == {
        "nodes per client": {2: 1, 3: 1},
        "edges per client": {0: 1, 2: 1},
        "classes per client": {1: 1, 2: 1},
    }


def test_clients_of_their_own_graphs_are_not_compared_with_a_whole_one():
    first, second = communities()
    found = client_statistics([first, replace(second, hidden_edges=None)], None)
    assert not {name for name in found.figures if name.endswith("-share")}
    assert found.figures["edges-per-client"] == 2  # of those whose edges are known
    assert found.distributions["edges per client"] == {2: 1}
    unknown = client_statistics([replace(second, hidden_edges=None)], None)
    assert unknown.figures["edges-per-client"] == unknown.figures["homophily-per-client"] == 0
    # Edges to a node without a label say nothing about homophily.
    found = client_statistics([replace(first, y=torch.tensor([-1, 1, 1]))], None)
    assert found.figures["homophily-per-client"] == 1


def overlapping() -> list[OverlappingGraph]:
    """Clients with the nodes 0 1 3 and 1 3 4 5, of which they share 1 and 3; nobody has 2."""

    def client(
        number: int, nodes: list[int], edges: list[list[int]], test: int
    ) -> OverlappingGraph:
        held, n = torch.tensor(nodes), len(nodes)
        masks = mask(0, size=n), mask(size=n), mask(test, size=n)
        public, y = (held == 1) | (held == 3), Y[held]
        both = to_undirected(torch.tensor(edges), n)
        return OverlappingGraph(number, held, public, torch.zeros(n, 7), y, y, both, *masks)

    return [
        client(0, [0, 1, 3], [[0, 1], [1, 2]], test=1),
        client(1, [1, 3, 4, 5], [[0, 1], [1, 2]], test=2),
    ]


def test_figures_of_overlapping_clients_by_hand():
    found = overlap_statistics(overlapping(), WHOLE)
    # Of 0 - 1, 1 - 3 and 3 - 4, kept of five, no two ends have one class. Node 1 has 2 and
    # 1 neighbours, node 3 has 1 and 2; 0 at the first client is reached, and 4 at the second, not 5
    assert found.figures == worked_out("""
        clients 2, features 7, classes 2, nodes-per-client 7/2, public-per-client 2,
        private-per-client 3/2, edges-per-client 2, homophily-per-client 0, clients-without-edges 0,
        isolated-share 1/7, neighbours-of-public 3/2, reached-share 2/3, reached-twice-share 0,
        kept-nodes-share 5/6, lost-edges-share 2/5, degree-of-public 3, train-per-client 1,
        val-per-client 0, test-per-client 1""")
    assert found.distributions == {
        "nodes per client": {3: 1, 4: 1},
        "edges per client": {2: 2},
        "public neighbours per private node": {0: 1, 1: 2},
    }


def test_overlapping_clients_without_a_whole_graph_say_nothing_of_it():
    first, second = overlapping()
    second = replace(second, edge_index=torch.empty(2, 0, dtype=torch.int64))
    figures = overlap_statistics([first, second], None).figures
    assert not {"kept-nodes-share", "lost-edges-share", "degree-of-public"} & set(figures)
    assert figures["clients-without-edges"] == 1
    assert figures["homophily-per-client"] == 0  # a client without edges has none to count


def test_no_clients_are_refused():
    with pytest.raises(DataError):
        ego_statistics([])
    for describe in (client_statistics, overlap_statistics):
        with pytest.raises(DataError):
            describe([], None)
