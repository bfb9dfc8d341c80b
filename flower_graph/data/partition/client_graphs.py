"""Clients that hold a part of one graph each, some of them without its edges.

The setting of FedGLS (Fu et al., TMLR 2024, section 5.1.1): communities of one graph are the
clients, a share of them is graphless, and each splits its own nodes into training, validation and
test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flower_graph.config.partition import (
    DIRICHLET,
    EGO_NETWORKS,
    LOUVAIN,
    METIS,
    METIS_OVERLAPPING,
    OVERLAPPING,
    PartitionSection,
)
from flower_graph.config.rules import FRACTION, require
from flower_graph.config.schema import check_settings
from flower_graph.data.description import WEIGHT, tell
from flower_graph.data.features import CHANGES
from flower_graph.data.graph import (
    PARTS,
    HeldGraph,
    Neighbours,
    Treatment,
    WholeGraph,
    cut_parts,
    take_rows,
)
from flower_graph.data.partition import communities
from flower_graph.data.partition.ego_networks import partition_egos
from flower_graph.data.partition.overlapping import overlapping_parts
from flower_graph.data.splits import (
    Masks,
    can_be_split,
    check_roles,
    labelled_split,
    stratified_split,
    with_masks,
)
from flower_graph.errors import DataError
from flower_graph.ops.graph import values_at
from flower_graph.rng import generator

# Ways of cutting by which clients share nodes, each of which has one role at all of them
WITH_COMMON_ROLES = (METIS_OVERLAPPING, OVERLAPPING)


@dataclass(frozen=True)
class ClientGraph(HeldGraph):
    """One client's graph, or its nodes alone.

    Parameters
    ----------
    client
        Number of the client; unique over the run.
    nodes
        Number of each node in the whole graph, int64 ``[n]``; ascending if made here.
    x
        Features, float ``[n, f]``, dense or sparse CSR as in the whole graph.
    y
        Class of each node, int64 ``[n]``; below 0 without a label. With ``targets``, 0 for each
        node that has one.
    edge_index
        Both directions of every edge, by place in ``nodes``, int64 ``[2, e]``, sorted, no
        self-loops; None for a graphless client.
    hidden_edges
        A graphless client's true edges, in the same form, in a simulation: only Fed-GNN, the upper
        bound, trains on them, and learnt graphs are compared with them.
    train_mask, val_mask, test_mask
        Boolean ``[n]``, disjoint; nodes without a label are in none.
    called
        The user's names of the nodes; None if the data have no names.
    targets
        Number that each node is to learn, float32 ``[n]``, NaN for none; None for classes.
    edge_weight
        Weight of each edge, float32 ``[e]``, in the order of ``edge_index``; None: all equal.
    """

    client: int
    nodes: Tensor
    x: Tensor
    y: Tensor
    edge_index: Tensor | None
    hidden_edges: Tensor | None
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    called: tuple[str, ...] | None = None
    targets: Tensor | None = None
    edge_weight: Tensor | None = None

    @property
    def is_graphless(self) -> bool:
        return self.edge_index is None


def partition_graph(
    data: WholeGraph, partition: PartitionSection, graphless_ratio: float, seed: int
) -> list[ClientGraph]:
    """Divide a graph among clients, split their nodes, and remove the edges of some clients.

    Parameters
    ----------
    data
        The whole graph; its own masks play no part.
    partition
        The partition section of a config.
    graphless_ratio
        Share of the clients without edges, 0 to 1, rounded to whole clients; those of a smaller
        share are among those of a larger one.
    seed
        Seed of the run, for ``partition.seed`` None.

    Raises
    ------
    ConfigError
        If a setting is impossible.
    DataError
        If a setting is impossible for this graph, or a client has too few nodes with a label for
        the split, or no edges and all its features constant; names the client.
    """
    check_settings(partition, "partition.")
    partition.validate()
    seed = seed if partition.seed is None else partition.seed
    is_split, roles = partition.method == EGO_NETWORKS, None
    if is_split:
        of_all = ("client", "nodes", "x", "y", "edge_index", *PARTS, "called")
        cut = [
            ClientGraph(hidden_edges=None, **{key: getattr(ego, key) for key in of_all})
            for ego in partition_egos(data, partition, seed)
        ]
    else:
        cut = cut_out(data, _parts(data, partition, seed))
    graphless = graphless_clients(len(cut), graphless_ratio, seed)
    if partition.method in WITH_COMMON_ROLES:  # drawn for the whole graph, class by class
        roles = stratified_split(data.y, partition.ratios, generator=generator(seed, "roles"))
    graphs = []
    try:
        for graph in cut:
            graph = _with_values(graph, data)
            graph = without_edges(graph) if graph.client in graphless else graph
            graph = graph if is_split else split_nodes(graph, partition.ratios, seed, roles)
            graph = fewer_trained(graph, partition.train_share, seed)
            check_client_graph(graph, getattr(data, "treatment", None))
            graphs.append(graph)
    except DataError as error:
        raise DataError(f"{error}; use less than {partition.clients} partition.clients") from error
    return graphs


def graphless_clients(count: int, ratio: float, seed: int) -> set[int]:
    """Draw the clients that get no edges."""
    FRACTION.check("graph.graphless_ratio", ratio)
    # The order in which clients lose their edges as the share grows
    order = torch.randperm(count, generator=generator(seed, "graphless")).tolist()
    return set(order[: round(ratio * count)])


def _with_values(graph: ClientGraph, data: WholeGraph) -> ClientGraph:
    """Give a client its nodes' targets and its edges' weights, if the whole graph has some."""
    targets, weight = getattr(data, "targets", None), getattr(data, WEIGHT, None)
    if targets is not None:
        graph = replace(graph, targets=targets[graph.nodes])
    if weight is not None and graph.edge_index is not None:
        ends = graph.nodes[graph.edge_index]
        own = values_at(ends, data.edge_index, weight, int(data.y.numel()))
        graph = replace(graph, edge_weight=own)
    return graph


def without_edges(graph: ClientGraph) -> ClientGraph:
    """Hide a client's edges; learnt edges are compared with them."""
    if graph.edge_index is None:
        return graph
    return replace(graph, edge_index=None, edge_weight=None, hidden_edges=graph.edge_index)


def cut_out(data: WholeGraph, parts: Sequence[Tensor]) -> list[ClientGraph]:
    """Make a client from each part ``[n]`` of node numbers: its nodes and the edges among them.

    Parts are ascending and may overlap. Edges count in both directions; masks are empty.
    """
    cut = cut_parts(data, Neighbours.of(data), parts)
    return [ClientGraph(**part, hidden_edges=None) for part in cut]


def split_nodes(
    graph: ClientGraph, ratios: Sequence[float], seed: int, roles: Masks | None = None
) -> ClientGraph:
    """Split a client's labelled nodes by three shares, each above 0, in sum at most 1.

    The draw depends on the seed and on the client's number alone. ``roles`` are masks of the whole
    graph's nodes, used instead of a draw if clients share nodes: a node must not train at one
    client and be tested at another. ``DataError`` names a client that has too few labelled nodes.
    """
    if roles is not None:
        masks = Masks(*(mask[graph.nodes] for mask in roles))
        check_roles(graph.client, masks, ratios)
        return with_masks(graph, masks)
    rng, labelled = generator(seed, "split", graph.client), int((graph.y >= 0).sum())
    try:
        return with_masks(graph, labelled_split(graph.y, ratios, generator=rng))
    except DataError as error:
        key = f"partition.ratios = {list(ratios)}"
        raise DataError(f"client {graph.client}: {key}: {labelled} labelled nodes") from error


def fewer_trained(graph: ClientGraph, share: float | None, seed: int) -> ClientGraph:
    """Keep a share of a client's labelled nodes for training, at least one; the other masks stay.

    Those of a smaller share are among those of a larger one.
    """
    if share is None:
        return graph
    trained = graph.train_mask.nonzero().flatten()
    order = torch.randperm(trained.numel(), generator=generator(seed, "trained", graph.client))
    kept = trained[order[: max(1, round(share * int((graph.y >= 0).sum())))]]
    mask = torch.zeros_like(graph.train_mask)
    mask[kept] = True
    return replace(graph, train_mask=mask)


def check_client_graph(graph: ClientGraph, treatment: Treatment | None = None) -> None:
    """Check that a client can train: it has labels, and edges or features that differ.

    The treatment is that of all features: features that are alike now may have differed before.
    """
    where = f"client {graph.client}, {graph.y.numel()} nodes"
    if not graph.train_mask.any():
        what = "is for training" if (graph.y >= 0).any() else "has a label"
        raise DataError(f"{where}: no node {what}")
    if graph.is_graphless and _rows_are_equal(graph.x):
        how = ", ".join(CHANGES.get(treatment.how, ())) if treatment is not None else ""
        now = f" once they are {how} (data.features=as-is leaves them)" if how else ""
        raise DataError(f"{where}: no edges, and all nodes have the same features{now}")


def check_neighbours(graphs: Sequence[ClientGraph], k: int) -> None:
    """Check that every client whose graph is to be learnt has more than k nodes."""
    for graph in graphs:
        allowed = f"below the {graph.y.numel()} nodes of client {graph.client}"
        good = k < graph.y.numel() or not graph.is_graphless
        require(good, "graph.neighbours", k, allowed)


def _parts(data: WholeGraph, partition: PartitionSection, seed: int) -> list[Tensor]:
    edges, n, clients = data.edge_index, int(data.y.numel()), partition.clients
    require(clients <= n, "partition.clients", clients, f"at most {n}, the nodes of the graph")
    how: dict[str, Any] = {"clients": clients, "seed": seed}

    def fits(nodes: Tensor) -> bool:
        return can_be_split(data.y[nodes], partition.ratios)

    if partition.method == LOUVAIN:
        how |= {"resolution": partition.resolution, "every_node": partition.every_node}
        parts = communities.louvain(edges, n, **how, fits=fits)
        remedy = " (partition.resolution=null finds more)"
        return _joined(data, parts, fits, "" if partition.resolution is None else remedy)
    if partition.method == METIS:
        return _joined(data, communities.metis(edges, n, **how), fits)
    if partition.method == METIS_OVERLAPPING:
        return communities.metis_overlapping(edges, n, draws=partition.draws, **how)
    if partition.method == DIRICHLET:
        return communities.dirichlet(data.y, clients, partition.alpha, seed)
    if partition.method == OVERLAPPING:
        return [nodes for nodes, _ in overlapping_parts(Neighbours.of(data), partition, seed)]
    return communities.random_parts(n, clients, seed)


def _joined(
    data: WholeGraph, parts: list[Tensor], fits: Callable[[Tensor], bool], remedy: str = ""
) -> list[Tensor]:
    """Join communities that cannot be split to others; say so, and what finds larger ones."""
    small = sum(not fits(nodes) for nodes in parts)
    if not small:
        return parts
    result = communities.joined(parts, data.edge_index, int(data.y.numel()), fits)
    note = (
        f"{small} of {len(parts)} communities have too few nodes with a label to be split, and are "
        f"joined to others: {len(result)} clients{remedy}"
    )
    tell("partition.clients", [note])
    return result


def _rows_are_equal(x: Tensor) -> bool:
    if x.layout == torch.strided:
        return bool((x == x[0]).all())
    # Row by row, so that a matrix too large to be dense stays sparse.
    first = take_rows(x, torch.tensor([0])).to_dense()
    rows = (take_rows(x, torch.tensor([row])).to_dense() for row in range(1, x.size(0)))
    return all(torch.equal(row, first) for row in rows)
