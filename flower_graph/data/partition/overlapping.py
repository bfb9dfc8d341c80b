"""Clients whose graphs overlap: public nodes that all hold, and private nodes of each alone.

The setting of PPFL-GNN (Zhang et al., 2023, section 4.1): four clients hold 40 % of one graph's
nodes in common and 15 % each alone. Public nodes are chosen at random, by degree, or by a greedy
cover.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_graph.config.schema import check_settings
from flower_graph.data.graph import OverlappingGraph as OverlappingGraph
from flower_graph.data.graph import WholeGraph, cut_out, neighbours_of
from flower_graph.data.splits import check_roles, stratified_split
from flower_graph.errors import DataError
from flower_graph.ops.graph import SortedEdges
from flower_graph.rng import generator

EVERYBODY, NOBODY = -1, -2  # holders of a node that is no single client's


# Any: the section `partition` of a method whose clients overlap
def overlapping_graphs(data: WholeGraph, partition: Any, seed: int) -> list[OverlappingGraph]:
    """Cut a graph into clients that share their public nodes.

    Every client has all edges among its nodes; a client without edges is allowed, and so are
    isolated nodes. Roles are drawn once for the whole graph, class by class; its own masks play no
    part. ``seed``, of the run, stands in for ``partition.seed`` None.

    Raises
    ------
    ConfigError
        If a setting is impossible.
    DataError
        If the graph has no nodes or no edges, is too small for a share, or a client has no node
        in a role whose share is not 0, which names the client.
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
