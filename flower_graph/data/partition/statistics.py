"""Figures, distributions and one line of text that describe the data of a run's clients.

``docs/partition.md`` says what each figure means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.data.graph import (
    ClientGraph,
    EgoNetwork,
    Graph,
    OverlappingGraph,
    WholeGraph,
    to_undirected,
)
from flower_graph.errors import DataError
from flower_graph.wire.keys import ROLES


class PartitionStatistics(NamedTuple):
    """Figures by name, and for each distribution the count of each whole number."""

    figures: dict[str, float]
    distributions: dict[str, dict[int, int]]
    # Nodes of each class, of each client; none where a client is a node
    classes: list[list[int]] = []  # noqa: RUF012  nobody changes it


def client_statistics(
    graphs: Sequence[ClientGraph], whole: WholeGraph | None = None
) -> PartitionStatistics:
    """Describe clients with graphs: sizes, roles, overlap, cut edges and public nodes.

    Edges are those of all clients that have or hide some. ``whole`` is the graph that the clients
    were cut out of; None for graphs of their own, which have nodes in common only if their nodes
    have identities. ``DataError`` if there are no clients.
    """
    if not graphs:
        raise DataError("no clients to describe: at least one is needed")
    both = [(g.y, g.hidden_edges if g.edge_index is None else g.edge_index) for g in graphs]
    linked = [(y, edges) for y, edges in both if edges is not None]
    sizes = {
        "nodes": torch.tensor([graph.y.numel() for graph in graphs]),
        "edges": torch.tensor([edges.size(1) // 2 for _, edges in linked]),
        "classes": torch.tensor([_classes(graph.y) for graph in graphs]),
    }
    alike = torch.tensor([_homophily(y, edges) for y, edges in linked])
    means = {f"{name}-per-client": _mean(size) for name, size in sizes.items()}
    found = PartitionStatistics(
        {
            "clients": len(graphs),
            "features": graphs[0].x.size(1),
            "classes": _classes(torch.cat([graph.y for graph in graphs])),
            **means,
            "directed-edges-per-client": 2 * means["edges-per-client"],
            "homophily-per-client": _mean(alike[~alike.isnan()]),
            "fewest-nodes": int(sizes["nodes"].min()),
            "most-nodes": int(sizes["nodes"].max()),
            "graphless-clients": sum(graph.is_graphless for graph in graphs),
            "clients-without-edges": sum(_edge_count(graph) == 0 for graph in graphs),
            "clients-without-training": sum(not bool(one.train_mask.any()) for one in graphs),
            **{f"{role}-per-client": n / len(graphs) for role, n in _role_counts(graphs).items()},
        },
        {f"{name} per client": counts(size) for name, size in sizes.items()},
        class_counts(graphs),
    )
    numbers = _common_numbers(graphs, whole)
    if numbers is not None:
        _describe_overlap(found, graphs, numbers)
    if whole is not None:
        _describe_cut(found, graphs, whole)
    if sharing := [graph for graph in graphs if isinstance(graph, OverlappingGraph)]:
        _describe_public(found, sharing, whole)
    return found


ego_statistics = overlap_statistics = client_statistics


def _common_numbers(graphs: Sequence[ClientGraph], whole: WholeGraph | None) -> list[Tensor] | None:
    """Return the nodes' numbers, the same at all clients; None if nobody knows them."""
    if whole is not None or isinstance(graphs[0], OverlappingGraph):
        return [graph.nodes for graph in graphs]
    number: dict[int | str, int] = {}
    egos = [graph for graph in graphs if isinstance(graph, EgoNetwork)]
    numbers = [[number.setdefault(i, len(number)) for i in one.identities] for one in egos]
    return [*map(torch.tensor, numbers)] if egos else None


def _describe_overlap(
    found: PartitionStatistics, graphs: Sequence[ClientGraph], numbers: Sequence[Tensor]
) -> None:
    figures = found.figures
    nodes, holders = torch.cat([*numbers]).unique(return_counts=True)
    edges = _distinct_edges(graphs, numbers)
    trained, tested = (
        torch.cat(
            [own[getattr(one, f"{role}_mask")] for one, own in zip(graphs, numbers, strict=True)]
        )
        for role in ("train", "test")
    )
    figures |= {
        "nodes": nodes.numel(),
        "edges": edges,
        "density": edges / nodes.numel(),
        # The paper's figure is this quotient of means, not the mean of quotients.
        "density-per-client": figures["edges-per-client"] / figures["nodes-per-client"],
        "clients-per-node": _mean(holders),
        "most-clients-per-node": int(holders.max()),
        "shared-share": _mean(holders >= 2),
        "tested-and-trained-share": _mean(torch.isin(tested, trained)),
    }
    found.distributions["clients per node"] = counts(holders)


def _describe_cut(
    found: PartitionStatistics, graphs: Sequence[ClientGraph], whole: WholeGraph
) -> None:
    """Add which nodes ``[n]`` and which edges ``[e]`` of the whole graph clients have."""
    source, target = whole.edge_index
    held, kept = torch.zeros(whole.y.numel(), dtype=torch.bool), torch.zeros_like(source).bool()
    for graph in graphs:
        here = torch.zeros_like(held)
        here[graph.nodes] = True
        held |= here
        kept |= here[source] & here[target]
    figures = found.figures
    figures |= {
        "kept-nodes-share": _mean(held),
        "kept-edges-share": _mean(kept),
        "cut-edges-share": _mean(~kept[held[source] & held[target]]),
    }


def _describe_public(
    found: PartitionStatistics, graphs: Sequence[OverlappingGraph], whole: WholeGraph | None
) -> None:
    public = torch.cat([graph.public for graph in graphs])
    ends = [(graph, *graph.edge_index) for graph in graphs]
    degree = torch.cat([source.bincount(minlength=len(one.y)) for one, source, _ in ends])
    shared = [
        source[one.public[target]].bincount(minlength=len(one.y)) for one, source, target in ends
    ]
    reach = torch.cat(shared)[~public]
    figures = found.figures
    figures |= {
        "public-per-client": int(public.sum()) / len(graphs),
        "private-per-client": int((~public).sum()) / len(graphs),
        "isolated-share": _mean(degree == 0),
        "neighbours-of-public": _mean(degree[public]),
        "reached-share": _mean(reach >= 1),
        "reached-twice-share": _mean(reach >= 2),
    }
    if whole is not None:
        n = whole.y.numel()
        edges, shown = to_undirected(whole.edge_index, n), torch.zeros(n, dtype=torch.bool)
        shown[torch.cat([graph.nodes[graph.public] for graph in graphs])] = True
        degree_there = edges[0].bincount(minlength=n)[shown]
        figures["degree-of-public"] = _mean(degree_there)
    found.distributions["public neighbours per private node"] = counts(reach)


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


def class_counts(graphs: Sequence[ClientGraph]) -> list[list[int]]:
    """Count each client's labelled nodes by class."""
    classes = _classes(torch.cat([graph.y for graph in graphs]))
    return [g.y[g.y >= 0].bincount(minlength=classes).tolist() for g in graphs]


def _homophily(y: Tensor, edges: Tensor) -> float:
    source, target = y[edges]
    is_labelled = (source >= 0) & (target >= 0)
    return float((source == target)[is_labelled].double().mean())


def _edge_count(graph: ClientGraph) -> int:
    return 0 if graph.edge_index is None else graph.edge_index.size(1) // 2


def _distinct_edges(graphs: Sequence[ClientGraph], numbers: Sequence[Tensor]) -> int:
    pairs = zip(numbers, (graph.edge_index for graph in graphs), strict=True)
    ends = [own[edges] for own, edges in pairs if edges is not None]
    return torch.cat(ends, 1).unique(dim=1).size(1) // 2 if ends else 0


def _role_counts(graphs: Sequence[ClientGraph]) -> dict[str, int]:
    return {part: sum(int(getattr(g, f"{part}_mask").sum()) for g in graphs) for part in ROLES}


def _classes(y: Tensor) -> int:
    return int(y[y >= 0].unique().numel())


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def counts(values: Tensor) -> dict[int, int]:
    """Count how often each whole number occurs."""
    result, times = torch.unique(values, return_counts=True)
    return dict(zip(result.tolist(), times.tolist(), strict=True))


# One line of text -------------------------------------------------------------------------------

AGAIN = "a node counts at each client that has it"


def nodes_held(graph: Graph, clients: int, called: str) -> str:
    """Describe clients that share one graph, such as one for each node, by the graph's split."""
    each = " of a node each" if clients == graph.num_nodes else ""
    masks = {part: getattr(graph, f"{part}_mask") for part in ROLES}
    roles = _roles({part: int(mask.sum()) for part, mask in masks.items() if mask is not None})
    return "; ".join([f"{clients:,} {called}{each}", *roles])


def graphs_held(graphs: Sequence[ClientGraph], called: str, *, is_cut: bool) -> str:
    """Describe clients with graphs; `is_cut`: their ``nodes`` are numbers in one whole graph."""
    sizes, edges = [graph.y.numel() for graph in graphs], [*map(_edge_count, graphs)]
    least, most, total = min(sizes), max(sizes), sum(sizes)
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    without = edges.count(0)
    some = f", {without:,} of them without edges" if without else ""
    held, links = total, sum(edges)
    if is_cut:
        numbers = [graph.nodes for graph in graphs]
        held, links = torch.cat(numbers).unique().numel(), _distinct_edges(graphs, numbers)
    nodes = f"{held:,} nodes" if held == total else f"{held:,} different nodes, {total:,} in all"
    whole = f"{len(graphs):,} {called} of {each} nodes{some}: {nodes}, {links:,} edges"
    again = f" ({AGAIN})" if held < total else ""
    return "; ".join([whole, *_roles(_role_counts(graphs))]) + again


def _roles(counts: dict[str, int]) -> list[str]:
    shown = ", ".join(f"{part} {count:,}" for part, count in counts.items() if count)
    return [shown] if shown else []
