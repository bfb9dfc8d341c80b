"""Clients that hold a part of one graph each: ways of cutting it, and who has edges and roles.

In FedGLS (Fu et al., TMLR 2024, section 5.1.1) communities of one graph are the clients, a share of
them is graphless, and each splits its own nodes. In PPFL-GNN (Zhang et al., 2023, section 4.1) four
clients hold 40 % of the nodes in common, chosen at random, by degree or by a greedy cover, and 15 %
each alone.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_graph.config.common import (
    DIRICHLET,
    EGO_NETWORKS,
    GLOBAL,
    LOUVAIN,
    METIS,
    METIS_OVERLAPPING,
    OVERLAPPING,
)
from flower_graph.config.rules import FRACTION, require
from flower_graph.config.schema import check_settings
from flower_graph.data.description import tell
from flower_graph.data.graph import (
    ClientGraph,
    WholeGraph,
    check_roles,
    cut_by_shares,
    labelled_split,
    neighbours_of,
    stratified_split,
    take_rows,
)
from flower_graph.data.graph import cut_out as cut_out
from flower_graph.errors import DataError
from flower_graph.ops.graph import SortedEdges
from flower_graph.rng import derive_seed, generator

# Ways of cutting by which clients share nodes, each of which has one role at all of them
WITH_COMMON_ROLES = (METIS_OVERLAPPING, OVERLAPPING)


# Any, here and below: the section `partition` of a method, with the keys of its way to cut
def partition_graph(
    data: WholeGraph,
    partition: Any,
    graphless_ratio: float,
    seed: int,
    *,
    keeps_cut: bool = False,
) -> list[ClientGraph]:
    """Divide a graph among clients, split their nodes, and remove the edges of some clients.

    The whole graph's own masks play no part. ``partition`` is that section of a config, ``seed``
    the run's, which stands in for ``partition.seed`` None. ``graphless_ratio``, 0 to 1, is the
    share of clients without edges, rounded to whole clients; those of a smaller share are among
    those of a larger one. ``keeps_cut`` is as of ``cut_out``. ``ConfigError`` if a setting is
    impossible; ``DataError`` if it is for this graph, no client has a node for training, or one has
    no edges and all its features constant.
    """
    seed, neighbours = checked_seed(partition, seed), neighbours_of(data)
    method, ratios, clients = partition.method, partition.ratios, partition.clients
    most = neighbours.num_nodes
    require(clients <= most, "partition.clients", clients, f"at most {most}, the graph's nodes")
    parts = parts_of(data.y, neighbours, partition, seed)
    cut = cut_out(data, parts, neighbours, keeps_cut=keeps_cut)
    if method in WITH_COMMON_ROLES:
        cut = split_by_class(cut, data.y, ratios, seed)
    elif method != EGO_NETWORKS:
        cut = [split_nodes(graph, ratios, seed) for graph in cut]
    elif partition.split == GLOBAL:
        cut = split_global(cut, data.y, ratios, seed)
    else:
        cut = split_per_client(cut, ratios, seed)
    return finished(cut, graphless_ratio, partition.train_share, seed)


def overlapping_graphs(data: WholeGraph, partition: Any, seed: int) -> list[ClientGraph]:
    """Cut a graph into clients that share their public nodes.

    Every client has all edges among its nodes; a client without edges is allowed, and so are
    isolated nodes. Roles are drawn once for the whole graph, class by class; its own masks play no
    part. ``seed``, of the run, stands in for ``partition.seed`` None. ``ConfigError`` if a setting
    is impossible, ``DataError`` if it is for this graph.
    """
    seed, neighbours = checked_seed(partition, seed), neighbours_of(data)
    owner, graphs = deal_nodes(neighbours, partition, seed), []
    cut = cut_out(data, held_parts(owner, partition.clients), neighbours)
    classes = data.y[data.y >= 0].unique()
    for graph in split_by_class(cut, data.y, partition.ratios, seed):
        check_roles(graph.client, graph.masks.values(), partition.ratios)
        noisy = noisy_labels(graph, classes, partition.label_noise, seed)
        public = owner[graph.nodes] == EVERYBODY
        graphs.append(replace(graph, public=public, train_y=noisy))
    return graphs


def checked_seed(partition: Any, seed: int) -> int:
    """Check a section's settings, and return its seed, or else the run's."""
    check_settings(partition, "partition.")
    if hasattr(partition, "validate"):
        partition.validate()
    return seed if partition.seed is None else int(partition.seed)


def parts_of(y: Tensor, neighbours: SortedEdges, partition: Any, seed: int) -> list[Tensor]:
    """Return the nodes of each client, ascending, by the section's method."""
    clients, method = partition.clients, partition.method
    if method == EGO_NETWORKS:
        return sample_egos(neighbours, partition, seed)
    if method == LOUVAIN:

        def fits(nodes: Tensor) -> bool:
            return all(map(len, cut_by_shares(nodes[y[nodes] >= 0], partition.ratios)))

        resolution, every_node = partition.resolution, partition.every_node
        return louvain(neighbours, clients, resolution, seed, every_node=every_node, fits=fits)
    if method == METIS:
        return metis(neighbours, clients, seed)
    if method == METIS_OVERLAPPING:
        return metis_overlapping(neighbours, clients, partition.draws, seed)
    if method == DIRICHLET:
        return dirichlet(y, clients, partition.alpha, seed)
    if method == OVERLAPPING:
        return held_parts(deal_nodes(neighbours, partition, seed), clients)
    return random_parts(neighbours.num_nodes, clients, seed)


# Roles, and edges ---------------------------------------------------------------------------------


def split_nodes(
    graph: ClientGraph, ratios: Sequence[float], seed: int, purpose: str = "split"
) -> ClientGraph:
    """Split a client's labelled nodes by three shares, each above 0, in sum at most 1.

    The draw depends on the seed and on the client's number alone. A part may be empty; one node
    trains at least.
    """
    rng = generator(seed, purpose, graph.client)
    return graph.with_masks(labelled_split(graph.y, ratios, generator=rng, may_be_empty=True))


def split_by_class(
    cut: Sequence[ClientGraph], y: Tensor, ratios: Sequence[float], seed: int
) -> list[ClientGraph]:
    """Draw each node's role for all clients, class by class."""
    roles = stratified_split(y, ratios, generator=generator(seed, "roles"))
    return [graph.with_masks(mask[graph.nodes] for mask in roles) for graph in cut]


def split_per_client(
    networks: Sequence[ClientGraph], ratios: Sequence[float], seed: int
) -> list[ClientGraph]:
    """Split each client's labelled nodes by themselves."""
    # A node that several clients hold may train at one and be tested at another.
    return [split_nodes(one, ratios, seed, "ego-split") for one in networks]


def split_global(
    networks: Sequence[ClientGraph], y: Tensor, ratios: Sequence[float], seed: int
) -> list[ClientGraph]:
    """Give every node one role, the same at all clients that hold it.

    The stricter split: no client trains on a label that another is tested on. A client may be left
    without any training node. ``y`` are the classes of all nodes of the whole graph; the draw is
    the same for any clients.
    """
    rng = generator(seed, "global-split")
    roles = labelled_split(y, ratios, generator=rng, may_be_empty=True)
    return [one.with_masks(role[one.nodes] for role in roles) for one in networks]


def fewer_trained(graph: ClientGraph, share: float | None, seed: int) -> ClientGraph:
    """Keep a share of a client's labelled nodes for training, at least one; the other masks stay.

    Those of a smaller share are among those of a larger one.
    """
    if share is None:
        return graph
    trained = graph.train_mask.nonzero().flatten()
    order = torch.randperm(trained.numel(), generator=generator(seed, "trained", graph.client))
    kept = trained[order[: max(1, round(share * int((graph.y >= 0).sum())))]]
    return replace(graph, train_mask=torch.zeros_like(graph.train_mask).index_fill(0, kept, True))


def finished(
    graphs: Sequence[ClientGraph], graphless_ratio: float, train_share: float | None, seed: int
) -> list[ClientGraph]:
    """Hide the edges of some clients, which a learnt graph is compared with, and some labels.

    ``DataError`` if no client has a node for training, or a client cannot learn a graph.
    """
    FRACTION.check("graph.graphless_ratio", graphless_ratio)
    # The order in which clients lose their edges as the share grows
    order = torch.randperm(len(graphs), generator=generator(seed, "graphless")).tolist()
    graphs, none = [*graphs], {"edge_index": None, "edge_weight": None}
    for client in order[: round(graphless_ratio * len(graphs))]:
        hidden = graphs[client].edge_index
        graphs[client] = replace(graphs[client], **none, hidden_edges=hidden)
    if not any(bool(graph.train_mask.any()) for graph in graphs):
        raise DataError(f"none of the {len(graphs)} clients has a labelled node for training")
    return [fewer_trained(check_features(graph), train_share, seed) for graph in graphs]


def check_features(graph: ClientGraph) -> ClientGraph:
    """Return a client's graph; ``DataError`` if it has no edges, and all its features are alike."""
    if graph.edge_index is None:
        # Row by row, so that a matrix too large to be dense stays sparse
        rows = (take_rows(graph.x, slice(row, row + 1)).to_dense() for row in range(len(graph.x)))
        first = next(rows)
        if all(torch.equal(row, first) for row in rows):
            where = f"client {graph.client}, {graph.y.numel()} nodes: no edges, and all nodes"
            raise DataError(f"{where} have the same features (data.features)")
    return graph


def check_neighbours(graphs: Sequence[ClientGraph], k: int) -> None:
    """Check that every client whose graph is to be learnt has more than k nodes."""
    for graph in graphs:
        good = k < (n := graph.y.numel()) or not graph.is_graphless
        require(good, "graph.neighbours", k, f"below the {n} nodes of client {graph.client}")


# Parts of a graph: int64 tensors of ascending node numbers, one a client --------------------------

LEAST_NODES = 10  # least nodes of each client in an accepted Dirichlet draw
DRAWS = 100  # Dirichlet draws before the settings are refused
FINER = 6  # doublings of the resolution, in search of communities that are all large enough


def louvain(
    neighbours: SortedEdges,
    clients: int,
    resolution: float | None,
    seed: int,
    *,
    every_node: bool = False,
    fits: Callable[[Tensor], bool] = lambda _: True,
) -> list[Tensor]:
    """Find communities by Louvain's method (Blondel et al., 2008); keep the largest, or merge.

    ``fits`` says whether some nodes are enough for a client. Without a resolution, one is sought at
    which all clients have enough: it is raised until there are enough communities.
    """
    import igraph  # not at the top: it takes a second

    source, target = neighbours.edge_index
    pairs = torch.stack([source, target], dim=1)[source < target]
    graph = igraph.Graph(neighbours.num_nodes, pairs.numpy())

    def communities(resolution: float) -> list[Tensor]:
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
        held = parts[:clients]
        # The rest goes, the largest first, to the client with the fewest nodes so far
        for part in parts[clients:] if every_node else ():
            smallest = min(range(clients), key=lambda client: held[client].numel())
            held[smallest] = torch.cat([held[smallest], part]).sort().values
        return held

    if resolution is not None:
        return communities(resolution)
    resolution, found = 1.0, dict[float, list[Tensor]]()
    # Far above it every node is a community by itself.
    while len(found) <= FINER:
        with suppress(DataError):
            found[resolution] = communities(resolution)
            if all(map(fits, found[resolution])):
                break
        resolution *= 2
    else:
        resolution = min(found)
    tell("partition.resolution", [f"at {resolution:g} Louvain finds a community for each client"])
    return found[resolution]


def metis(neighbours: SortedEdges, clients: int, seed: int) -> list[Tensor]:
    """Divide the whole graph into parts of nearly equal size with few edges between them."""
    try:
        import pymetis
    except ImportError as error:
        raise DataError("partition.method: pip install 'flower-graph[metis]'") from error
    lists = [others.tolist() for others in neighbours.other.split(neighbours.ptr.diff().tolist())]
    # METIS reads its seed into 32 bits.
    options = pymetis.Options(seed=derive_seed(seed, "metis") % 2**31)
    part = torch.tensor(pymetis.part_graph(clients, lists, options=options)[1])
    if not torch.bincount(part, minlength=clients).all():
        raise DataError(f"partition.clients = {clients}: METIS left one without any node")
    return _nodes_of(part, clients)


def metis_overlapping(neighbours: SortedEdges, clients: int, draws: int, seed: int) -> list[Tensor]:
    """Draw half of each METIS part's nodes several times, each time for another client."""
    # As FED-PUB (Baek et al., ICML 2023) makes overlapping clients: 30 from 6 parts, half of the
    # nodes of each drawn five times. Clients of one part come one after another.
    drawn = []
    for number, part in enumerate(metis(neighbours, clients // draws, seed)):
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


# Ego-networks -------------------------------------------------------------------------------------

# As in FedSCem (Xie et al., CIKM 2024), a client's ego-network is all nodes within some hops of one
# node, the ego, with all edges among them. Every node keeps its number in the whole graph, so that
# clients recognise common nodes.

CHUNK = 64  # egos whose neighbourhoods are searched at once: with hubs, one takes megabytes


def sample_egos(neighbours: SortedEdges, partition: Any, seed: int) -> list[Tensor]:
    """Draw egos with enough nodes around them, without repetition; return these nodes of each."""
    n, least, parts = neighbours.num_nodes, partition.min_nodes, list[Tensor]()
    for drawn in torch.randperm(n, generator=generator(seed, "egos")).split(CHUNK):
        around = _around(neighbours, drawn, partition.hops)
        parts += [nodes for nodes in around if len(nodes) >= least]
        if len(parts) >= partition.clients:
            return parts[: partition.clients]
    found = f"{len(parts)} of {n} nodes have partition.min_nodes = {least} around them"
    raise DataError(f"partition.clients = {partition.clients}: {found}")


def ego_networks(data: WholeGraph, egos: Sequence[int] | Tensor, hops: int) -> list[ClientGraph]:
    """Make the ego-network of each ego, without masks; client numbers follow the egos' order.

    ``egos`` are distinct, otherwise ``DataError``; ``hops`` is at least 1. Edges count in both
    directions.
    """
    neighbours, egos, n = neighbours_of(data), torch.as_tensor(egos).long(), int(data.y.numel())
    values, counts = torch.unique(egos, return_counts=True)
    if wrong := values[(values < 0) | (values >= n) | (counts > 1)].tolist():
        raise DataError(f"egos {wrong[:5]}: must be different nodes, 0 to {n - 1}")
    parts = [nodes for chunk in egos.split(CHUNK) for nodes in _around(neighbours, chunk, hops)]
    return cut_out(data, parts, neighbours)


def _around(neighbours: SortedEdges, egos: Tensor, hops: int) -> list[Tensor]:
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


# Clients that share public nodes ------------------------------------------------------------------

EVERYBODY, NOBODY = -1, -2  # holders of a node that is no single client's


def held_parts(owner: Tensor, clients: int) -> list[Tensor]:
    """Return the nodes that each client holds, ascending: its own, and everybody's."""
    held = [(owner == EVERYBODY) | (owner == client) for client in range(clients)]
    return [mask.nonzero().flatten() for mask in held]


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


def noisy_labels(graph: ClientGraph, classes: Tensor, share: float, seed: int) -> Tensor:
    """Give a share of a client's training nodes another class, each other one equally likely."""
    rng = generator(seed, "label-noise", graph.client)
    members = graph.train_mask.nonzero().flatten()
    order = torch.randperm(members.numel(), generator=rng)
    chosen = members[order[: round(share * members.numel())]]
    if not chosen.numel():
        return graph.y
    if classes.numel() < 2:
        raise DataError(f"partition.label_noise = {share}: there is one class alone")
    steps = torch.randint(1, classes.numel(), chosen.shape, generator=rng)
    wrong = (torch.searchsorted(classes, graph.y[chosen]) + steps) % classes.numel()
    return graph.y.index_put((chosen,), classes[wrong])


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
