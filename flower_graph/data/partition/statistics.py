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
    joined_edges,
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
    clients, sizes = len(graphs), torch.tensor([graph.y.numel() for graph in graphs])
    owner, y = torch.arange(clients).repeat_interleave(sizes), torch.cat([g.y for g in graphs])
    edges = [g.hidden_edges if g.edge_index is None else g.edge_index for g in graphs]
    is_known = torch.tensor([one is not None for one in edges])
    source, target = joined_edges(graphs, edges)  # as all clients' nodes are numbered together
    judged = (y[source] >= 0) & (y[target] >= 0)
    same = judged & (y[source] == y[target])
    alike, ends = (owner[source[kind]].bincount(minlength=clients) for kind in (same, judged))
    classes = class_counts(graphs)
    per_client = {
        "nodes": sizes,
        "edges": owner[source].bincount(minlength=clients)[is_known] // 2,
        "classes": torch.tensor([sum(map(bool, own)) for own in classes]),
    }
    means = {f"{name}-per-client": _mean(size) for name, size in per_client.items()}
    masks = {role: torch.cat([getattr(g, f"{role}_mask") for g in graphs]) for role in ROLES}
    figures = {
        "clients": clients,
        "features": graphs[0].x.size(1),
        "classes": _classes(y),
        **means,
        "directed-edges-per-client": 2 * means["edges-per-client"],
        "homophily-per-client": _mean((alike.double() / ends)[ends > 0]),
        "fewest-nodes": int(sizes.min()),
        "most-nodes": int(sizes.max()),
        "graphless-clients": sum(graph.is_graphless for graph in graphs),
        "clients-without-edges": sum(_edge_count(graph) == 0 for graph in graphs),
        "clients-without-training": clients - owner[masks["train"]].unique().numel(),
        **{f"{role}-per-client": int(mask.sum()) / clients for role, mask in masks.items()},
    }
    found = PartitionStatistics(
        figures, {f"{name} per client": counts(size) for name, size in per_client.items()}, classes
    )
    numbers: Tensor | None = None  # of nodes, the same at all clients
    if whole is not None or isinstance(graphs[0], OverlappingGraph):
        numbers = torch.cat([graph.nodes for graph in graphs])
    elif egos := [graph for graph in graphs if isinstance(graph, EgoNetwork)]:
        number: dict[int | str, int] = {}
        names = (name for ego in egos for name in ego.identities)
        numbers = torch.tensor([number.setdefault(name, len(number)) for name in names])
    if numbers is not None:
        nodes, holders = numbers.unique(return_counts=True)
        links = _distinct_edges(graphs, numbers)
        figures |= {
            "nodes": nodes.numel(),
            "edges": links,
            "density": links / nodes.numel(),
            # The paper's figure is this quotient of means, not the mean of quotients.
            "density-per-client": means["edges-per-client"] / means["nodes-per-client"],
            "clients-per-node": _mean(holders),
            "most-clients-per-node": int(holders.max()),
            "shared-share": _mean(holders >= 2),
            "tested-and-trained-share": _mean(
                torch.isin(numbers[masks["test"]], numbers[masks["train"]])
            ),
        }
        found.distributions["clients per node"] = counts(holders)
    if whole is not None:
        _describe_cut(figures, graphs, whole)
    if sharing := [graph for graph in graphs if isinstance(graph, OverlappingGraph)]:
        public = torch.cat([graph.public for graph in sharing])
        source, target = joined_edges(sharing, [graph.edge_index for graph in sharing])
        degree = source.bincount(minlength=len(y))
        reach = source[public[target]].bincount(minlength=len(y))[~public]
        figures |= {
            "public-per-client": int(public.sum()) / clients,
            "private-per-client": int((~public).sum()) / clients,
            "isolated-share": _mean(degree == 0),
            "neighbours-of-public": _mean(degree[public]),
            "reached-share": _mean(reach >= 1),
            "reached-twice-share": _mean(reach >= 2),
        }
        found.distributions["public neighbours per private node"] = counts(reach)
        if whole is not None and numbers is not None:
            n = whole.y.numel()
            degree = to_undirected(whole.edge_index, n)[0].bincount(minlength=n)
            figures["degree-of-public"] = _mean(degree[numbers[public].unique()])
    return found


def _describe_cut(
    figures: dict[str, float], graphs: Sequence[ClientGraph], whole: WholeGraph
) -> None:
    """Add which nodes ``[n]`` and which edges ``[e]`` of the whole graph clients have."""
    source, target = whole.edge_index
    held, kept = torch.zeros(whole.y.numel(), dtype=torch.bool), torch.zeros_like(source).bool()
    for graph in graphs:
        here = torch.zeros_like(held)
        here[graph.nodes] = True
        held |= here
        kept |= here[source] & here[target]
    figures["kept-nodes-share"], figures["kept-edges-share"] = _mean(held), _mean(kept)
    figures["cut-edges-share"] = _mean(~kept[held[source] & held[target]])


def node_statistics(data: Graph) -> PartitionStatistics:
    """Describe a graph whose every node is a client: neighbours, features in use, split."""
    nodes, edges = data.y.numel(), data.edge_index.size(1) // 2
    neighbours = torch.bincount(data.edge_index[0], minlength=nodes)
    masks = dict(zip(ROLES, data.masks.values(), strict=True))
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


def _edge_count(graph: ClientGraph) -> int:
    return 0 if graph.edge_index is None else graph.edge_index.size(1) // 2


def _distinct_edges(graphs: Sequence[ClientGraph], numbers: Tensor) -> int:
    ends = numbers[joined_edges(graphs, [graph.edge_index for graph in graphs])]
    return ends.unique(dim=1).size(1) // 2 if ends.numel() else 0


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
    return "; ".join([f"{clients:,} {called}{each}", *_roles([graph])])


def graphs_held(graphs: Sequence[ClientGraph], called: str, *, is_cut: bool) -> str:
    """Describe clients with graphs; `is_cut`: their ``nodes`` are numbers in one whole graph."""
    sizes, edges = [graph.y.numel() for graph in graphs], [*map(_edge_count, graphs)]
    least, most, total = min(sizes), max(sizes), sum(sizes)
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    without = edges.count(0)
    some = f", {without:,} of them without edges" if without else ""
    held, links = total, sum(edges)
    if is_cut:
        numbers = torch.cat([graph.nodes for graph in graphs])
        held, links = numbers.unique().numel(), _distinct_edges(graphs, numbers)
    nodes = f"{held:,} nodes" if held == total else f"{held:,} different nodes, {total:,} in all"
    whole = f"{len(graphs):,} {called} of {each} nodes{some}: {nodes}, {links:,} edges"
    again = f" ({AGAIN})" if held < total else ""
    return "; ".join([whole, *_roles(graphs)]) + again


def _roles(graphs: Sequence[Graph | ClientGraph]) -> list[str]:
    masks = {role: [getattr(one, f"{role}_mask") for one in graphs] for role in ROLES}
    counts = {role: sum(int(one.sum()) for one in own) for role, own in masks.items()}
    shown = ", ".join(f"{role} {count:,}" for role, count in counts.items() if count)
    return [shown] if shown else []
