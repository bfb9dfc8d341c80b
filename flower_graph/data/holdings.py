"""One line of text on the data of a run's clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flower_graph.data.graph import Graph, HeldGraph
from flower_graph.wire.keys import ROLES

AGAIN = "a node counts at each client that has it"


def nodes_held(graph: Graph, clients: int, called: str) -> str:
    """Describe clients that share one graph, such as one for each node, by the graph's split."""
    each = " of a node each" if clients == graph.num_nodes else ""
    counts = {part: getattr(graph, f"{part}_mask") for part in ROLES}
    roles = _roles({part: int(mask.sum()) for part, mask in counts.items() if mask is not None})
    return "; ".join(filter(None, [f"{clients:,} {called}{each}", roles]))


def graphs_held(graphs: Sequence[HeldGraph], called: str, *, is_cut: bool) -> str:
    """Describe clients with graphs; `is_cut`: their ``nodes`` are numbers in one whole graph."""
    sizes = [graph.y.numel() for graph in graphs]
    least, most, total = min(sizes), max(sizes), sum(sizes)
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    without = sum(graph.edge_index is None or not graph.edge_index.numel() for graph in graphs)
    some = f", {without:,} of them without edges" if without else ""
    held = torch.cat([graph.nodes for graph in graphs]).unique().numel() if is_cut else total
    nodes = f"{held:,} nodes" if held == total else f"{held:,} different nodes, {total:,} in all"
    counts = {part: sum(int(getattr(g, f"{part}_mask").sum()) for g in graphs) for part in ROLES}
    parts = [f"{len(graphs):,} {called} of {each} nodes{some}: {nodes}, {_edges(graphs, is_cut)}"]
    parts += filter(None, [_roles(counts)])
    return "; ".join(parts) + (f" ({AGAIN})" if held < total else "")


def _edges(graphs: Sequence[HeldGraph], is_cut: bool) -> str:
    linked = [(g.nodes, g.edge_index) for g in graphs if g.edge_index is not None]
    if not linked or not is_cut:
        return f"{sum(edges.size(1) for _, edges in linked) // 2:,} edges"
    n = 1 + max(int(nodes.max()) for nodes, _ in linked)
    ends = torch.cat([nodes[edges] for nodes, edges in linked], 1)  # [2, e]
    return f"{(ends[0] * n + ends[1]).unique().numel() // 2:,} edges"


def _roles(counts: dict[str, int]) -> str:
    return ", ".join(f"{part} {count:,}" for part, count in counts.items() if count)
