"""Ego-networks: the subgraphs around sampled nodes, one per client, and their splits.

As in FedSCem (Xie et al., CIKM 2024), a client's ego-network is all nodes within some hops of one
node, the ego, with all edges among them. Ego-networks overlap. Every node keeps its number in the
whole graph, so that clients recognise common nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flower_graph.config.partition import PER_CLIENT
from flower_graph.config.rules import RATIOS, at_least
from flower_graph.config.schema import check_settings
from flower_graph.data.graph import ClientGraph, EgoNetwork, WholeGraph, cut_out, neighbours_of
from flower_graph.data.splits import labelled_split
from flower_graph.errors import DataError
from flower_graph.ops.graph import SortedEdges
from flower_graph.rng import generator

# Egos whose neighbourhoods are searched at once: with hubs, one takes megabytes.
CHUNK = 64
G = TypeVar("G", bound=ClientGraph)


# Any: the section `partition` of a method whose clients have ego-networks
def partition_egos(data: WholeGraph, partition: Any, seed: int) -> list[EgoNetwork]:
    """Sample egos, and make and split their ego-networks.

    The whole graph's own masks play no part. ``seed``, of the run, stands in for ``partition.seed``
    None. ``ConfigError`` if a setting is impossible, ``DataError`` if it is for this graph.
    """
    check_settings(partition, "partition.")
    seed = seed if partition.seed is None else partition.seed
    egos = sample_egos(data, partition.clients, partition.hops, partition.min_nodes, seed)
    return split_egos(ego_networks(data, egos, partition.hops), data.y, partition, seed)


def split_egos(networks: Sequence[G], y: Tensor, partition: Any, seed: int) -> list[G]:
    """Split the nodes as ``partition.split`` says."""
    if partition.split == PER_CLIENT:
        return split_per_client(networks, partition.ratios, seed)
    return split_global(networks, y, partition.ratios, seed)


def sample_egos(data: WholeGraph, clients: int, hops: int, min_nodes: int, seed: int) -> Tensor:
    """Draw the egos, without repetition."""
    n, neighbours = int(data.y.numel()), neighbours_of(data)
    chosen = torch.empty(0, dtype=torch.int64)
    for drawn in torch.randperm(n, generator=generator(seed, "egos")).split(CHUNK):
        sizes = torch.tensor([len(nodes) for nodes in _each(neighbours, drawn, hops)])
        chosen = torch.cat([chosen, drawn[sizes >= min_nodes]])
        if chosen.numel() >= clients:
            return chosen[:clients]
    found = f"{chosen.numel()} of {n} nodes have partition.min_nodes = {min_nodes} around them"
    raise DataError(f"partition.clients = {clients}: {found}")


def ego_networks(data: WholeGraph, egos: Sequence[int] | Tensor, hops: int) -> list[EgoNetwork]:
    """Make the ego-network of each ego, without masks; client numbers follow the egos' order.

    ``egos`` are distinct, otherwise ``DataError``; ``hops`` is at least 1, otherwise
    ``ConfigError``. Edges count in both directions.
    """
    cut = cut_out(data, ego_parts(data, egos, hops))
    return [EgoNetwork(**vars(graph)) for graph in cut]


def ego_parts(data: WholeGraph, egos: Sequence[int] | Tensor, hops: int) -> list[Tensor]:
    """Return the nodes within some hops of each ego, ascending."""
    at_least(1).check("partition.hops", hops)
    neighbours, egos, n = neighbours_of(data), torch.as_tensor(egos).long(), int(data.y.numel())
    values, counts = torch.unique(egos, return_counts=True)
    if wrong := values[(values < 0) | (values >= n) | (counts > 1)].tolist():
        raise DataError(f"egos {wrong[:5]}: must be different nodes, 0 to {n - 1}")
    return [nodes for chunk in egos.split(CHUNK) for nodes in _each(neighbours, chunk, hops)]


def split_nodes(graph: G, ratios: Sequence[float], seed: int, purpose: str = "split") -> G:
    """Split a client's labelled nodes by three shares, each above 0, in sum at most 1.

    The draw depends on the seed and on the client's number alone. A part may be empty; one node
    trains at least.
    """
    rng = generator(seed, purpose, graph.client)
    return graph.with_masks(labelled_split(graph.y, ratios, generator=rng, may_be_empty=True))


def split_per_client(networks: Sequence[G], ratios: Sequence[float], seed: int) -> list[G]:
    """Split each client's labelled nodes by themselves."""
    # A node that several clients hold may train at one and be tested at another.
    RATIOS.check("partition.ratios", ratios)
    return [split_nodes(one, ratios, seed, "ego-split") for one in networks]


def split_global(networks: Sequence[G], y: Tensor, ratios: Sequence[float], seed: int) -> list[G]:
    """Give every node one role, the same at all clients that hold it.

    The stricter split: no client trains on a label that another is tested on. A client may be left
    without any training node. ``y`` are the classes of all nodes of the whole graph; the draw is
    the same for any clients.
    """
    RATIOS.check("partition.ratios", ratios)
    rng = generator(seed, "global-split")
    roles = labelled_split(y, ratios, generator=rng, may_be_empty=True)
    return [one.with_masks(role[one.nodes] for role in roles) for one in networks]


def _each(neighbours: SortedEdges, egos: Tensor, hops: int) -> list[Tensor]:
    """Return the nodes within reach of each ego, ascending."""
    # A node within reach of the k-th ego is k * n + node here.
    nodes = neighbours.num_nodes
    members = rim = torch.arange(egos.numel()) * nodes + egos
    for _ in range(hops):
        place, other = neighbours.step(rim % nodes)
        reached = torch.unique(rim[place] // nodes * nodes + other)
        rim = reached[~torch.isin(reached, members)]
        members = torch.cat([members, rim]).sort().values
    sizes = torch.bincount(members // nodes, minlength=egos.numel()).tolist()
    # Copies: a view would keep the whole chunk in memory, and in every message that carries it.
    return [local.clone() for local in (members % nodes).split(sizes)]
