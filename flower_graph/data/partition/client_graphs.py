"""Clients that hold a part of one graph each: ways of cutting it, and who has edges and roles.

In FedGLS (Fu et al., TMLR 2024, section 5.1.1) communities of one graph are the clients, a share of
them is graphless, and each splits its own nodes. In PPFL-GNN (Zhang et al., 2023, section 4.1) four
clients hold 40 % of the nodes in common, chosen at random, by degree or by a greedy cover, and 15 %
each alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
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
from flower_graph.data.features import CHANGES, Treatment
from flower_graph.data.graph import (
    ClientGraph,
    OverlappingGraph,
    WholeGraph,
    neighbours_of,
    take_rows,
    to_undirected,
)
from flower_graph.data.graph import cut_out as cut_out
from flower_graph.data.partition.ego_networks import ego_parts, sample_egos, split_egos
from flower_graph.data.partition.ego_networks import split_nodes as split_nodes
from flower_graph.data.splits import check_roles, cut_by_shares, stratified_split
from flower_graph.errors import DataError
from flower_graph.ops.graph import SortedEdges, values_at
from flower_graph.rng import derive_seed, generator

# Ways of cutting by which clients share nodes, each of which has one role at all of them
WITH_COMMON_ROLES = (METIS_OVERLAPPING, OVERLAPPING)


def partition_graph(
    data: WholeGraph, partition: PartitionSection, graphless_ratio: float, seed: int
) -> list[ClientGraph]:
    """Divide a graph among clients, split their nodes, and remove the edges of some clients.

    The whole graph's own masks play no part. ``partition`` is that section of a config, ``seed``
    the run's, which stands in for ``partition.seed`` None. ``graphless_ratio``, 0 to 1, is the
    share of clients without edges, rounded to whole clients; those of a smaller share are among
    those of a larger one. ``ConfigError`` if a setting is impossible; ``DataError`` if it is for
    this graph, no client has a node for training, or one has no edges and all its features
    constant.
    """
    check_settings(partition, "partition.")
    partition.validate()
    seed, how = seed if partition.seed is None else partition.seed, partition.method
    edges, n, clients = data.edge_index, int(data.y.numel()), partition.clients
    require(clients <= n, "partition.clients", clients, f"at most {n}, the nodes of the graph")
    if how == EGO_NETWORKS:
        egos = sample_egos(data, clients, partition.hops, partition.min_nodes, seed)
        parts = ego_parts(data, egos, partition.hops)
    elif how == LOUVAIN:
        parts = louvain(
            edges,
            n,
            clients=clients,
            resolution=partition.resolution,
            seed=seed,
            every_node=partition.every_node,
            fits=lambda nodes: all(
                map(len, cut_by_shares(nodes[data.y[nodes] >= 0], partition.ratios))
            ),
        )
    elif how == METIS:
        parts = metis(edges, n, clients=clients, seed=seed)
    elif how == METIS_OVERLAPPING:
        parts = metis_overlapping(edges, n, clients=clients, draws=partition.draws, seed=seed)
    elif how == DIRICHLET:
        parts = dirichlet(data.y, clients, partition.alpha, seed)
    elif how == OVERLAPPING:
        parts = [nodes for nodes, _ in overlapping_parts(neighbours_of(data), partition, seed)]
    else:
        parts = random_parts(n, clients, seed)
    cut = cut_out(data, parts)
    if how == EGO_NETWORKS:
        cut = split_egos(cut, data.y, partition, seed)
    elif how in WITH_COMMON_ROLES:  # drawn for the whole graph, class by class
        roles = stratified_split(data.y, partition.ratios, generator=generator(seed, "roles"))
        cut = [graph.with_masks(mask[graph.nodes] for mask in roles) for graph in cut]
    else:
        cut = [split_nodes(graph, partition.ratios, seed) for graph in cut]
    targets, weight = getattr(data, "targets", None), getattr(data, WEIGHT, None)
    graphless, graphs = graphless_clients(len(cut), graphless_ratio, seed), []
    for graph in cut:
        if targets is not None:
            graph = replace(graph, targets=targets[graph.nodes])
        if weight is not None and graph.edge_index is not None:
            own = values_at(graph.nodes[graph.edge_index], edges, weight, n)
            graph = replace(graph, edge_weight=own)
        graph = without_edges(graph) if graph.client in graphless else graph
        graph = fewer_trained(graph, partition.train_share, seed)
        try:
            check_client_graph(graph, getattr(data, "treatment", None))
        except DataError as error:
            raise DataError(f"{error}; use less than {clients} partition.clients") from error
        graphs.append(graph)
    check_training(graphs)
    return graphs


def check_training(graphs: Sequence[ClientGraph]) -> None:
    """Refuse clients of which none has a node for training."""
    if not any(bool(graph.train_mask.any()) for graph in graphs):
        raise DataError(f"none of the {len(graphs)} clients has a labelled node for training")


def graphless_clients(count: int, ratio: float, seed: int) -> set[int]:
    """Draw the clients that get no edges."""
    FRACTION.check("graph.graphless_ratio", ratio)
    # The order in which clients lose their edges as the share grows
    order = torch.randperm(count, generator=generator(seed, "graphless")).tolist()
    return set(order[: round(ratio * count)])


def without_edges(graph: ClientGraph) -> ClientGraph:
    """Hide a client's edges; learnt edges are compared with them."""
    if graph.edge_index is None:
        return graph
    return replace(graph, edge_index=None, edge_weight=None, hidden_edges=graph.edge_index)


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
    """Check that a client has edges, or features that differ.

    The treatment is that of all features: features that are alike now may have differed before.
    """
    x = graph.x
    if not graph.is_graphless:
        return
    if x.layout == torch.strided:
        are_alike = bool((x == x[0]).all())
    else:  # row by row, so that a matrix too large to be dense stays sparse
        rows = (take_rows(x, slice(row, row + 1)).to_dense() for row in range(len(x)))
        first = next(rows)
        are_alike = all(torch.equal(row, first) for row in rows)
    if are_alike:
        how = None if treatment is None else CHANGES.get(treatment.how)
        now = f" once they are {how} (data.features=as-is leaves them)" if how else ""
        where = f"client {graph.client}, {graph.y.numel()} nodes"
        raise DataError(f"{where}: no edges, and all nodes have the same features{now}")


def check_neighbours(graphs: Sequence[ClientGraph], k: int) -> None:
    """Check that every client whose graph is to be learnt has more than k nodes."""
    for graph in graphs:
        allowed = f"below the {graph.y.numel()} nodes of client {graph.client}"
        good = k < graph.y.numel() or not graph.is_graphless
        require(good, "graph.neighbours", k, allowed)


# Parts of a graph: int64 tensors of ascending node numbers, one a client --------------------------

LEAST_NODES = 10  # least nodes of each client in an accepted Dirichlet draw
DRAWS = 100  # Dirichlet draws before the settings are refused
FINER = 6  # doublings of the resolution, in search of communities that are all large enough


def louvain(
    edge_index: Tensor,
    n: int,
    *,
    clients: int,
    resolution: float | None,
    seed: int,
    every_node: bool = False,
    fits: Callable[[Tensor], bool] = lambda _: True,
) -> list[Tensor]:
    """Find communities by Louvain's method (Blondel et al., 2008); keep the largest, or merge.

    ``fits`` says whether some nodes are enough for a client. Without a resolution, one is sought at
    which all clients have enough: it is raised until there are enough communities.
    """
    if resolution is not None:
        return _communities(edge_index, n, clients, resolution, seed, every_node)
    resolution, found = 1.0, dict[float, list[Tensor]]()
    # Far above it every node is a community by itself.
    while len(found) <= FINER:
        with suppress(DataError):
            found[resolution] = _communities(edge_index, n, clients, resolution, seed, every_node)
            if all(map(fits, found[resolution])):
                break
        resolution *= 2
    else:
        resolution = min(found)
    tell("partition.resolution", [f"at {resolution:g} Louvain finds a community for each client"])
    return found[resolution]


def _communities(
    edge_index: Tensor, n: int, clients: int, resolution: float, seed: int, every_node: bool
) -> list[Tensor]:
    import igraph  # not at the top: it takes a second

    source, target = to_undirected(edge_index, n)
    pairs = torch.stack([source, target], dim=1)[source < target]
    graph = igraph.Graph(n, pairs.numpy())
    igraph.set_random_number_generator(random.Random(derive_seed(seed, "louvain")))
    try:
        result = graph.community_multilevel(resolution=resolution)
    finally:
        igraph.set_random_number_generator(random)  # Python's, which is igraph's default
    if len(result) < clients:
        found = f"Louvain found {len(result)}; set partition.resolution above {resolution:g} or"
        raise DataError(f"partition.clients = {clients}: {found} null")
    parts = _nodes_of(torch.tensor(result.membership), len(result))
    parts.sort(key=lambda part: (-part.numel(), int(part[0])))
    if not every_node:
        return parts[:clients]
    held = [torch.empty(0, dtype=torch.int64)] * clients
    for part in parts:  # the largest first, to the client with the fewest nodes so far
        smallest = min(range(clients), key=lambda client: held[client].numel())
        held[smallest] = torch.cat([held[smallest], part])
    return [nodes.sort().values for nodes in held]


def metis(edge_index: Tensor, n: int, *, clients: int, seed: int) -> list[Tensor]:
    """Divide the whole graph into parts of nearly equal size with few edges between them."""
    try:
        import pymetis
    except ImportError as error:
        raise DataError("partition.method: pip install 'flower-graph[metis]'") from error
    source, target = to_undirected(edge_index, n)
    counts = torch.bincount(source, minlength=n).tolist()
    neighbours = [others.tolist() for others in target.split(counts)]
    # METIS reads its seed into 32 bits.
    options = pymetis.Options(seed=derive_seed(seed, "metis") % 2**31)
    part = torch.tensor(pymetis.part_graph(clients, neighbours, options=options)[1])
    sizes = torch.bincount(part, minlength=clients)
    if not sizes.all():
        raise DataError(f"partition.clients = {clients}: METIS left one without any of {n} nodes")
    return _nodes_of(part, clients)


def metis_overlapping(
    edge_index: Tensor, n: int, *, clients: int, draws: int, seed: int
) -> list[Tensor]:
    """Draw half of each METIS part's nodes several times, each time for another client."""
    # As FED-PUB (Baek et al., ICML 2023) makes overlapping clients: 30 from 6 parts, half of the
    # nodes of each drawn five times. Clients of one part come one after another.
    drawn = []
    for number, part in enumerate(metis(edge_index, n, clients=clients // draws, seed=seed)):
        if not (count := round(part.numel() / 2)):
            raise DataError(f"partition.clients = {clients}: half of METIS part {number} is nobody")
        for draw in range(draws):
            rng = generator(seed, "metis-overlapping", number, draw)
            chosen = torch.randperm(part.numel(), generator=rng)[:count]
            drawn.append(part[chosen.sort().values])
    return drawn


def dirichlet(y: Tensor, clients: int, alpha: float, seed: int) -> list[Tensor]:
    """Divide each class among the clients in shares drawn from a Dirichlet distribution."""
    # A draw that leaves a client fewer than 10 nodes is drawn again, at most 100 times.
    rng = np.random.default_rng(derive_seed(seed, "dirichlet"))
    for _ in range(DRAWS):
        part = torch.empty(y.numel(), dtype=torch.int64)
        for label in y.unique().tolist():
            members = rng.permutation((y == label).nonzero().flatten().numpy())
            shares = rng.dirichlet(np.full(clients, alpha))
            # The running sum is rounded, so that every node goes to a client.
            ends = np.rint(shares.cumsum()[:-1] * members.size)
            owners = np.searchsorted(ends, np.arange(members.size), side="right")
            part[torch.from_numpy(members)] = torch.from_numpy(owners)
        if int(torch.bincount(part, minlength=clients).min()) >= LEAST_NODES:
            return _nodes_of(part, clients)
    few = f"less than {LEAST_NODES} nodes in {DRAWS} draws; use fewer clients, or a larger alpha"
    raise DataError(f"partition.alpha = {alpha:g}: one of {clients} clients has {few}")


def random_parts(n: int, clients: int, seed: int) -> list[Tensor]:
    """Divide the nodes at random into parts whose sizes differ by at most one."""
    part = torch.empty(n, dtype=torch.int64)
    part[torch.randperm(n, generator=generator(seed, "random-parts"))] = torch.arange(n) % clients
    return _nodes_of(part, clients)


def _nodes_of(part: Tensor, count: int) -> list[Tensor]:
    sizes = torch.bincount(part, minlength=count).tolist()
    # Copies: a view would keep the whole list in memory, and in every message that carries it.
    return [nodes.clone() for nodes in part.argsort(stable=True).split(sizes)]


# Clients that share public nodes ------------------------------------------------------------------

EVERYBODY, NOBODY = -1, -2  # holders of a node that is no single client's


# Any: the section `partition` of a method whose clients overlap
def overlapping_graphs(data: WholeGraph, partition: Any, seed: int) -> list[OverlappingGraph]:
    """Cut a graph into clients that share their public nodes.

    Every client has all edges among its nodes; a client without edges is allowed, and so are
    isolated nodes. Roles are drawn once for the whole graph, class by class; its own masks play no
    part. ``seed``, of the run, stands in for ``partition.seed`` None. ``ConfigError`` if a setting
    is impossible, ``DataError`` if it is for this graph.
    """
    check_settings(partition, "partition.")
    partition.validate()
    seed = seed if partition.seed is None else partition.seed
    neighbours = neighbours_of(data)
    parts = overlapping_parts(neighbours, partition, seed)
    roles = stratified_split(data.y, partition.ratios, generator=generator(seed, "roles"))
    classes = data.y[data.y >= 0].unique()
    graphs = []
    cut = cut_out(data, [nodes for nodes, _ in parts], neighbours)
    for (nodes, public), graph in zip(parts, cut, strict=True):
        graph = graph.with_masks(mask[nodes] for mask in roles)
        check_roles(graph.client, graph.masks.values(), partition.ratios)
        rng, noise = generator(seed, "label-noise", graph.client), partition.label_noise
        noisy = noisy_labels(graph.y, graph.train_mask, classes, noise, generator=rng)
        graphs.append(OverlappingGraph(**vars(graph), public=public, train_y=noisy))
    return graphs


def overlapping_parts(
    neighbours: SortedEdges, partition: Any, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Return each client's nodes, int64 ``[n_c]``, ascending, and which are public, bool."""
    owner = deal_nodes(neighbours, partition, seed)
    held = [(owner == EVERYBODY) | (owner == client) for client in range(partition.clients)]
    parts = [mask.nonzero().flatten() for mask in held]
    return [(nodes, owner[nodes] == EVERYBODY) for nodes in parts]


def deal_nodes(neighbours: SortedEdges, partition: Any, seed: int) -> Tensor:
    """Return the holder of each node: everybody, one client, or nobody."""
    # Private nodes are assigned from one random order of all nodes, whichever way public ones are
    # chosen: client after client takes the next that are not public.
    n = neighbours.num_nodes
    if not neighbours.other.numel():
        raise DataError(f"the graph has {n} nodes and no edges: clients need some to embed nodes")
    counts = []
    for key in ("public_share", "private_share"):
        share = getattr(partition, key)
        # Rounded before it is cut off: 0.29 of 100 nodes is 28.999999999999996 in floats.
        counts.append(int(round(share * n, 6)))
        if share > 0 and not counts[-1]:
            raise DataError(f"partition.{key} = {share}: must be at least {1 / n:.2g}, one node")
    public, private = counts
    owner = torch.full((n,), NOBODY)
    owner[choose_public(neighbours, public, partition.public, seed)] = EVERYBODY
    order = torch.randperm(n, generator=generator(seed, "private-nodes"))
    rest = order[owner[order] == NOBODY][: private * partition.clients]
    owner[rest] = torch.arange(partition.clients).repeat_interleave(private)
    return owner


def noisy_labels(
    y: Tensor, train_mask: Tensor, classes: Tensor, share: float, *, generator: torch.Generator
) -> Tensor:
    """Give a share of the training nodes another class, each other one equally likely."""
    members = train_mask.nonzero().flatten()
    order = torch.randperm(members.numel(), generator=generator)
    chosen = members[order[: round(share * members.numel())]]
    if not chosen.numel():
        return y
    if classes.numel() < 2:
        raise DataError(f"partition.label_noise = {share}: there is one class alone")
    steps = torch.randint(1, classes.numel(), chosen.shape, generator=generator)
    wrong = (torch.searchsorted(classes, y[chosen]) + steps) % classes.numel()
    return y.index_put((chosen,), classes[wrong])


def choose_public(neighbours: SortedEdges, count: int, how: str, seed: int) -> Tensor:
    """Choose the public nodes; a smaller number with the same seed are the first of a larger."""
    order = torch.randperm(neighbours.num_nodes, generator=generator(seed, "public-nodes"))
    if how == "random":
        return order[:count]
    order = order[neighbours.ptr.diff()[order].argsort(descending=True, stable=True)]
    return order[:count] if how == "degree" else greedy_cover(neighbours, order, count)


def greedy_cover(neighbours: SortedEdges, order: Tensor, count: int) -> Tensor:
    """Choose nodes one by one so that as many others as possible have a chosen neighbour."""
    # Each choice is the node that settles most: itself and its neighbours, as far as they are not
    # chosen and have no chosen neighbour. What a choice settles only shrinks as others are chosen,
    # so with the same number of nodes no choice settles more than 1 / (1 - 1/e) as many (Nemhauser
    # et al., 1978). Once all are settled the same begins anew for a second chosen neighbour, and so
    # on; a node that has fewer neighbours than that is settled when all of them are chosen.
    # Nodes are numbered by their place in `order` here, so that `argmax` finds the first of equals.
    n, rank = order.numel(), order.argsort()
    owner, nodes = (one.numpy() for one in neighbours.step(order))
    other, degree = rank.numpy()[nodes], np.bincount(owner, minlength=n)
    beside = np.split(other, degree.cumsum()[:-1])
    is_chosen, around, chosen = np.zeros(n, dtype=bool), np.zeros(n, dtype=np.int64), list[int]()
    while len(chosen) < count and (lacking := ~is_chosen & (around < degree)).any():
        # Of the nodes that lack a chosen neighbour more, those with the fewest are settled first
        due = lacking & (around == around[lacking].min())
        gain = (due + np.bincount(owner, due[other], n)).astype(np.int32)
        gain[is_chosen] = 0
        while len(chosen) < count and gain[node := int(gain.argmax())] > 0:
            chosen.append(node)
            is_chosen[node], gain[node] = True, -n
            around[beside[node]] += 1
            for settled in (node, *beside[node].tolist()):
                if due[settled]:
                    due[settled] = False
                    gain[settled] -= 1
                    gain[beside[settled]] -= 1
    left = np.flatnonzero(~is_chosen)
    return order[torch.from_numpy(np.concatenate([np.array(chosen, dtype=int), left])[:count])]
