"""Figures and distributions that describe a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.data.graph import Graph, HeldGraph, WholeGraph, to_undirected
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.errors import DataError
from flower_graph.wire.keys import ROLES


class PartitionStatistics(NamedTuple):
    """Figures by name, and for each distribution the count of each whole number."""

    figures: dict[str, float]
    distributions: dict[str, dict[int, int]]
    # Nodes of each class, of each client; none where a client is a node
    classes: list[list[int]] = []  # noqa: RUF012  nobody changes it


def ego_statistics(networks: Sequence[EgoNetwork]) -> PartitionStatistics:
    """Describe ego-networks as FedSCem's Table 2 and Figure 4 do, with overlap and split.

    ``docs/partition.md`` says what each figure means. ``DataError`` if there are no clients.
    """
    if not networks:
        raise DataError("no ego-networks to describe: at least one client is needed")
    networks = _numbered(networks)
    nodes = torch.cat([network.nodes for network in networks])
    held, holders = torch.unique(nodes, return_counts=True)
    sizes = torch.tensor([network.nodes.numel() for network in networks])
    links = torch.tensor([network.edge_index.size(1) // 2 for network in networks])
    classes = torch.tensor([_classes(network.y) for network in networks])
    edges = _distinct_edges(networks)
    return PartitionStatistics(
        figures={
            "clients": len(networks),
            "nodes": held.numel(),
            "edges": edges,
            "features": networks[0].x.size(1),
            "classes": _classes(torch.cat([network.y for network in networks])),
            "density": edges / held.numel(),
            "nodes-per-client": _mean(sizes),
            "edges-per-client": _mean(links),
            "classes-per-client": _mean(classes),
            # The paper's figure is this quotient of means, not the mean of quotients.
            "density-per-client": _mean(links) / _mean(sizes),
            "fewest-nodes": int(sizes.min()),
            "most-nodes": int(sizes.max()),
            **_overlap_figures(holders),
            **_split_figures(networks),
        },
        distributions={
            "nodes per client": counts(sizes),
            "edges per client": counts(links),
            "classes per client": counts(classes),
            "clients per node": counts(holders),
        },
        classes=class_counts(networks),
    )


def class_counts(graphs: Sequence[HeldGraph]) -> list[list[int]]:
    """Count each client's labelled nodes by class."""
    classes = _classes(torch.cat([graph.y for graph in graphs]))
    return [g.y[g.y >= 0].bincount(minlength=classes).tolist() for g in graphs]


def _numbered(networks: Sequence[EgoNetwork]) -> list[EgoNetwork]:
    """Replace the nodes' numbers by those of their identities, the same at all clients."""
    of: dict[int | str, int] = {}
    return [
        replace(one, nodes=torch.tensor([of.setdefault(i, len(of)) for i in one.identities]))
        for one in networks
    ]


def node_statistics(data: Graph) -> PartitionStatistics:
    """Describe a graph whose every node is a client: neighbours, features in use, split."""
    nodes = data.y.numel()
    neighbours = torch.bincount(data.edge_index[0], minlength=nodes)
    edges = data.edge_index.size(1) // 2
    given = {part: getattr(data, f"{part}_mask") for part in ROLES}
    masks = {part: mask for part, mask in given.items() if mask is not None}
    return PartitionStatistics(
        figures={
            "clients": nodes,
            "edges": edges,
            "features": data.x.size(1),
            "classes": _classes(data.y),
            "density": edges / nodes,
            "neighbours-per-client": _mean(neighbours),
            "most-neighbours": int(neighbours.max()),
            "isolated": int((neighbours == 0).sum()),
            "features-per-client": int(torch.count_nonzero(data.x)) / nodes,
            **{part: int(mask.sum()) for part, mask in masks.items()},
        },
        distributions={
            "neighbours per client": counts(neighbours),
            **{f"classes in {part}": counts(data.y[mask]) for part, mask in masks.items()},
        },
    )


def client_statistics(
    graphs: Sequence[ClientGraph], whole: WholeGraph | None
) -> PartitionStatistics:
    """Describe clients with graphs as FedGLS's Table 4 does, with cut edges, overlap and split.

    Edges are those of all clients that have or hide some. ``whole`` is the graph that they were cut
    out of; None for graphs of their own. ``docs/partition.md`` says what each figure means.
    ``DataError`` if there are no clients.
    """
    if not graphs:
        raise DataError("no clients to describe: at least one is needed")
    sizes = torch.tensor([graph.y.numel() for graph in graphs])
    true_edges = [g.hidden_edges if g.edge_index is None else g.edge_index for g in graphs]
    linked = [(g, e) for g, e in zip(graphs, true_edges, strict=True) if e is not None]
    links = torch.tensor([edges.size(1) // 2 for _, edges in linked])
    alike = torch.tensor([_homophily(graph.y, edges) for graph, edges in linked])
    classes = torch.tensor([_classes(graph.y) for graph in graphs])
    return PartitionStatistics(
        figures={
            "clients": len(graphs),
            "graphless-clients": sum(graph.is_graphless for graph in graphs),
            "features": graphs[0].x.size(1),
            "classes": _classes(torch.cat([graph.y for graph in graphs])),
            "nodes-per-client": _mean(sizes),
            "edges-per-client": _mean(links),
            "directed-edges-per-client": 2 * _mean(links),
            "classes-per-client": _mean(classes),
            "homophily-per-client": _mean(alike[~alike.isnan()]),
            "fewest-nodes": int(sizes.min()),
            "most-nodes": int(sizes.max()),
            **({} if whole is None else _cut_figures(graphs, whole)),
            **_roles(graphs),
        },
        distributions={
            "nodes per client": counts(sizes),
            "edges per client": counts(links),
            "classes per client": counts(classes),
        },
        classes=class_counts(graphs),
    )


def overlap_statistics(
    graphs: Sequence[OverlappingGraph], whole: WholeGraph | None
) -> PartitionStatistics:
    """Describe clients that share public nodes: sizes as in PPFL-GNN's section 4.1, and reach.

    ``whole`` is the graph that they were cut out of; None for graphs of their own.
    ``docs/partition.md`` says what each figure means. ``DataError`` if there are no clients.
    """
    if not graphs:
        raise DataError("no clients to describe: at least one is needed")
    sizes = torch.tensor([graph.y.numel() for graph in graphs])
    public = torch.tensor([int(graph.public.sum()) for graph in graphs])
    links = torch.tensor([graph.edge_index.size(1) // 2 for graph in graphs])
    alike = torch.tensor([_homophily(graph.y, graph.edge_index) for graph in graphs])
    return PartitionStatistics(
        figures={
            "clients": len(graphs),
            "features": graphs[0].x.size(1),
            "classes": _classes(torch.cat([graph.y for graph in graphs])),
            "nodes-per-client": _mean(sizes),
            "public-per-client": _mean(public),
            "private-per-client": _mean(sizes - public),
            "edges-per-client": _mean(links),
            "homophily-per-client": _mean(alike[~alike.isnan()]),
            "clients-without-edges": int((links == 0).sum()),
            **_reach_figures(graphs),
            **({} if whole is None else _lost_figures(graphs, whole)),
            **_roles(graphs),
        },
        distributions={
            "nodes per client": counts(sizes),
            "edges per client": counts(links),
            "public neighbours per private node": counts(_public_neighbours(graphs)),
        },
        classes=class_counts(graphs),
    )


def _public_neighbours(graphs: Sequence[OverlappingGraph]) -> Tensor:
    counts = []
    for graph in graphs:
        source, target = graph.edge_index
        around = torch.bincount(target[graph.public[source]], minlength=graph.y.numel())
        counts.append(around[~graph.public])
    return torch.cat(counts)


def _reach_figures(graphs: Sequence[OverlappingGraph]) -> dict[str, float]:
    around = _public_neighbours(graphs)
    degrees = [torch.bincount(graph.edge_index[0], minlength=graph.y.numel()) for graph in graphs]
    isolated = torch.cat([degree == 0 for degree in degrees])
    shared = [degree[graph.public] for degree, graph in zip(degrees, graphs, strict=True)]
    return {
        "isolated-share": _mean(isolated),
        "neighbours-of-public": _mean(torch.cat(shared)),
        "reached-share": _mean(around >= 1),
        "reached-twice-share": _mean(around >= 2),
    }


def _lost_figures(graphs: Sequence[OverlappingGraph], whole: WholeGraph) -> dict[str, float]:
    n = whole.y.numel()
    edges, held = to_undirected(whole.edge_index, n), torch.zeros(n, dtype=torch.bool)
    public = held.clone()
    for graph in graphs:
        held[graph.nodes] = True
        public[graph.nodes[graph.public]] = True
    degree = torch.bincount(edges[0], minlength=n)
    return {
        "kept-nodes-share": _mean(held),
        "lost-edges-share": 1 - _distinct_edges(graphs) / (edges.size(1) // 2),
        "degree-of-public": _mean(degree[public]),
    }


def _homophily(y: Tensor, edges: Tensor) -> float:
    source, target = y[edges]
    is_labelled = (source >= 0) & (target >= 0)
    return float((source == target)[is_labelled].double().mean())


def _cut_figures(graphs: Sequence[ClientGraph], whole: WholeGraph) -> dict[str, float]:
    source, target = whole.edge_index
    held, kept = torch.zeros(whole.y.numel(), dtype=torch.bool), torch.zeros_like(source).bool()
    for graph in graphs:
        here = torch.zeros_like(held)
        here[graph.nodes] = True
        held |= here
        kept |= here[source] & here[target]
    _, holders = torch.unique(torch.cat([graph.nodes for graph in graphs]), return_counts=True)
    return {
        "kept-nodes-share": _mean(held),
        "kept-edges-share": _mean(kept),
        "cut-edges-share": _mean(~kept[held[source] & held[target]]),
        **(_overlap_figures(holders) if bool((holders > 1).any()) else {}),
    }


def _roles(graphs: Sequence[object]) -> dict[str, float]:
    counts = {part: [int(getattr(one, f"{part}_mask").sum()) for one in graphs] for part in ROLES}
    return {f"{part}-per-client": sum(each) / len(graphs) for part, each in counts.items()}


def _overlap_figures(holders: Tensor) -> dict[str, float]:
    return {
        "clients-per-node": _mean(holders),
        "most-clients-per-node": int(holders.max()),
        "shared-share": _mean(holders >= 2),
    }


def _split_figures(networks: Sequence[EgoNetwork]) -> dict[str, float]:
    trained = torch.cat([network.nodes[network.train_mask] for network in networks])
    tested = torch.cat([network.nodes[network.test_mask] for network in networks])
    return {
        **_roles(networks),
        "clients-without-training": sum(not bool(net.train_mask.any()) for net in networks),
        "tested-and-trained-share": _mean(torch.isin(tested, trained)),
    }


def _distinct_edges(networks: Sequence[EgoNetwork] | Sequence[OverlappingGraph]) -> int:
    nodes = 1 + max(int(network.nodes.max()) for network in networks)
    ends = [network.nodes[network.edge_index] for network in networks]
    keys = torch.cat([source * nodes + target for source, target in ends])
    return int(torch.unique(keys).numel()) // 2


def _classes(y: Tensor) -> int:
    return int(y[y >= 0].unique().numel())


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def counts(values: Tensor) -> dict[int, int]:
    """Count how often each whole number occurs."""
    result, times = torch.unique(values, return_counts=True)
    return dict(zip(result.tolist(), times.tolist(), strict=True))
