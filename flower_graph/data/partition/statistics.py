"""Figures, distributions and one line of text that describe the data of a run's clients.

``docs/partition.md`` says what each figure means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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


def ego_statistics(networks: Sequence[EgoNetwork]) -> PartitionStatistics:
    """Describe ego-networks as FedSCem's Table 2 and Figure 4 do, with overlap and split.

    ``DataError`` if there are no clients.
    """
    result = _common(networks)
    figures = result.figures
    del figures["homophily-per-client"]
    # Numbers of identities, which are the same at all clients
    of: dict[int | str, int] = {}
    networks = [
        replace(one, nodes=torch.tensor([of.setdefault(i, len(of)) for i in one.identities]))
        for one in networks
    ]
    nodes, holders = torch.cat([one.nodes for one in networks]).unique(return_counts=True)
    edges = _distinct_edges(networks)
    trained, tested = (
        torch.cat([one.nodes[getattr(one, f"{role}_mask")] for one in networks])
        for role in ("train", "test")
    )
    figures |= {
        "nodes": nodes.numel(),
        "edges": edges,
        "density": edges / nodes.numel(),
        # The paper's figure is this quotient of means, not the mean of quotients.
        "density-per-client": figures["edges-per-client"] / figures["nodes-per-client"],
        **_overlap_figures(holders),
        "clients-without-training": sum(not bool(one.train_mask.any()) for one in networks),
        "tested-and-trained-share": _mean(torch.isin(tested, trained)),
    }
    result.distributions["clients per node"] = counts(holders)
    return result


def client_statistics(
    graphs: Sequence[ClientGraph], whole: WholeGraph | None
) -> PartitionStatistics:
    """Describe clients with graphs as FedGLS's Table 4 does, with cut edges, overlap and split.

    Edges are those of all clients that have or hide some. ``whole`` is the graph that they were cut
    out of; None for graphs of their own. ``DataError`` if there are no clients.
    """
    result = _common(graphs)
    figures = result.figures
    figures["graphless-clients"] = sum(graph.is_graphless for graph in graphs)
    figures["directed-edges-per-client"] = 2 * figures["edges-per-client"]
    if whole is not None:
        held, kept = _kept(graphs, whole)
        source, target = whole.edge_index
        _, holders = torch.cat([graph.nodes for graph in graphs]).unique(return_counts=True)
        figures |= {
            "kept-nodes-share": _mean(held),
            "kept-edges-share": _mean(kept),
            "cut-edges-share": _mean(~kept[held[source] & held[target]]),
            **(_overlap_figures(holders) if bool((holders > 1).any()) else {}),
        }
    return result


def overlap_statistics(
    graphs: Sequence[OverlappingGraph], whole: WholeGraph | None
) -> PartitionStatistics:
    """Describe clients that share public nodes: sizes as in PPFL-GNN's section 4.1, and reach.

    ``whole`` is the graph that they were cut out of; None for graphs of their own. ``DataError`` if
    there are no clients.
    """
    result = _common(graphs)
    figures = result.figures
    for name in ("classes-per-client", "fewest-nodes", "most-nodes"):
        del figures[name]
    del result.distributions["classes per client"]
    public = torch.cat([graph.public for graph in graphs])
    ends = [(graph, *graph.edge_index) for graph in graphs]
    degree = torch.cat([source.bincount(minlength=len(one.y)) for one, source, _ in ends])
    shared = [
        source[one.public[target]].bincount(minlength=len(one.y)) for one, source, target in ends
    ]
    reach = torch.cat(shared)[~public]
    figures |= {
        "public-per-client": int(public.sum()) / len(graphs),
        "private-per-client": int((~public).sum()) / len(graphs),
        "clients-without-edges": sum(not graph.edge_index.numel() for graph in graphs),
        "isolated-share": _mean(degree == 0),
        "neighbours-of-public": _mean(degree[public]),
        "reached-share": _mean(reach >= 1),
        "reached-twice-share": _mean(reach >= 2),
    }
    if whole is not None:
        n = whole.y.numel()
        edges, shown = to_undirected(whole.edge_index, n), torch.zeros(n, dtype=torch.bool)
        shown[torch.cat([graph.nodes[graph.public] for graph in graphs])] = True
        figures |= {
            "kept-nodes-share": _mean(_kept(graphs, whole)[0]),
            "lost-edges-share": 1 - _distinct_edges(graphs) / (edges.size(1) // 2),
            "degree-of-public": _mean(edges[0].bincount(minlength=n)[shown]),
        }
    result.distributions["public neighbours per private node"] = counts(reach)
    return result


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


def _common(graphs: Sequence[ClientGraph]) -> PartitionStatistics:
    if not graphs:
        raise DataError("no clients to describe: at least one is needed")
    edges = [(g.y, e) for g in graphs if (e := _true_edges(g)) is not None]
    sizes = {
        "nodes": torch.tensor([graph.y.numel() for graph in graphs]),
        "edges": torch.tensor([e.size(1) // 2 for _, e in edges]),
        "classes": torch.tensor([_classes(graph.y) for graph in graphs]),
    }
    alike = torch.tensor([_homophily(y, e) for y, e in edges])
    return PartitionStatistics(
        figures={
            "clients": len(graphs),
            "features": graphs[0].x.size(1),
            "classes": _classes(torch.cat([graph.y for graph in graphs])),
            **{f"{name}-per-client": _mean(size) for name, size in sizes.items()},
            "homophily-per-client": _mean(alike[~alike.isnan()]),
            "fewest-nodes": int(sizes["nodes"].min()),
            "most-nodes": int(sizes["nodes"].max()),
            **{f"{role}-per-client": n / len(graphs) for role, n in _role_counts(graphs).items()},
        },
        distributions={f"{name} per client": counts(size) for name, size in sizes.items()},
        classes=class_counts(graphs),
    )


def class_counts(graphs: Sequence[ClientGraph]) -> list[list[int]]:
    """Count each client's labelled nodes by class."""
    classes = _classes(torch.cat([graph.y for graph in graphs]))
    return [g.y[g.y >= 0].bincount(minlength=classes).tolist() for g in graphs]


def _true_edges(graph: ClientGraph) -> Tensor | None:
    hidden: Tensor | None = getattr(graph, "hidden_edges", None)
    return hidden if graph.edge_index is None else graph.edge_index


def _kept(graphs: Sequence[ClientGraph], whole: WholeGraph) -> tuple[Tensor, Tensor]:
    """Return which nodes ``[n]`` and which edges ``[e]`` of the whole graph clients have."""
    source, target = whole.edge_index
    held, kept = torch.zeros(whole.y.numel(), dtype=torch.bool), torch.zeros_like(source).bool()
    for graph in graphs:
        here = torch.zeros_like(held)
        here[graph.nodes] = True
        held |= here
        kept |= here[source] & here[target]
    return held, kept


def _overlap_figures(holders: Tensor) -> dict[str, float]:
    return {
        "clients-per-node": _mean(holders),
        "most-clients-per-node": int(holders.max()),
        "shared-share": _mean(holders >= 2),
    }


def _homophily(y: Tensor, edges: Tensor) -> float:
    source, target = y[edges]
    is_labelled = (source >= 0) & (target >= 0)
    return float((source == target)[is_labelled].double().mean())


def _distinct_edges(graphs: Sequence[ClientGraph]) -> int:
    linked = [(g.nodes, g.edge_index) for g in graphs if g.edge_index is not None]
    n = 1 + max((int(nodes.max()) for nodes, _ in linked), default=0)
    keys = [nodes[edges[0]] * n + nodes[edges[1]] for nodes, edges in linked]
    return int(torch.cat(keys).unique().numel()) // 2 if keys else 0


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
    sizes, edges = [graph.y.numel() for graph in graphs], [graph.edge_index for graph in graphs]
    least, most, total = min(sizes), max(sizes), sum(sizes)
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    without = sum(one is None or not one.numel() for one in edges)
    some = f", {without:,} of them without edges" if without else ""
    held, links = total, sum(0 if one is None else one.size(1) for one in edges) // 2
    if is_cut:
        held = torch.cat([graph.nodes for graph in graphs]).unique().numel()
        links = _distinct_edges(graphs)
    nodes = f"{held:,} nodes" if held == total else f"{held:,} different nodes, {total:,} in all"
    whole = f"{len(graphs):,} {called} of {each} nodes{some}: {nodes}, {links:,} edges"
    again = f" ({AGAIN})" if held < total else ""
    return "; ".join([whole, *_roles(_role_counts(graphs))]) + again


def _roles(counts: dict[str, int]) -> list[str]:
    shown = ", ".join(f"{part} {count:,}" for part, count in counts.items() if count)
    return [shown] if shown else []
