"""Methods that divide one graph into parts, one for each client: lists of nodes.

Every function returns ``clients`` int64 tensors of ascending node numbers, which depend on its
arguments alone. No node is in two parts, except with ``metis_overlapping``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.data.description import tell
from flower_graph.data.graph import to_undirected
from flower_graph.errors import DataError
from flower_graph.rng import derive_seed, generator

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
        found = (
            f"Louvain found {len(result)}; set partition.resolution above {resolution:g} or null"
        )
        raise DataError(f"partition.clients = {clients}: {found}")
    parts = _parts(torch.tensor(result.membership), len(result))
    parts.sort(key=lambda part: (-part.numel(), int(part[0])))
    return _merged(parts, clients) if every_node else parts[:clients]


def joined(
    parts: list[Tensor], edge_index: Tensor, n: int, fits: Callable[[Tensor], bool]
) -> list[Tensor]:
    """Join each part that is too small, the smallest first, to the part with most edges to it.

    A part without edges to others joins the smallest.
    """
    source, target = to_undirected(edge_index, n)
    part_of = torch.full((n,), -1)
    for number, nodes in enumerate(parts):
        part_of[nodes] = number
    left = dict(enumerate(parts))

    def size(number: int) -> tuple[int, int]:
        return left[number].numel(), number

    while len(left) > 1 and (small := [one for one, nodes in left.items() if not fits(nodes)]):
        nodes = left.pop(smallest := min(small, key=size))
        beside = part_of[target[part_of[source] == smallest]]
        edges = torch.bincount(beside[(beside >= 0) & (beside != smallest)], minlength=len(parts))
        other = int(edges.argmax()) if edges.any() else min(left, key=size)
        left[other] = torch.cat([left[other], nodes]).sort().values
        part_of[nodes] = other
    return [*left.values()]


def _merged(parts: list[Tensor], clients: int) -> list[Tensor]:
    """Assign each community, the largest first, to the client with the fewest nodes so far."""
    held = [torch.empty(0, dtype=torch.int64) for _ in range(clients)]
    for part in parts:
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
    return _parts(part, clients)


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
        part = _assigned(y, clients, alpha, rng)
        if int(torch.bincount(part, minlength=clients).min()) >= LEAST_NODES:
            return _parts(part, clients)
    few = f"less than {LEAST_NODES} nodes in {DRAWS} draws; use fewer clients, or a larger alpha"
    raise DataError(f"partition.alpha = {alpha:g}: one of {clients} clients has {few}")


def _assigned(y: Tensor, clients: int, alpha: float, chance: np.random.Generator) -> Tensor:
    part: NDArray[np.int64] = np.empty(y.numel(), dtype=np.int64)
    for label in y.unique().tolist():
        members = chance.permutation((y == label).nonzero().flatten().numpy())
        shares = chance.dirichlet(np.full(clients, alpha))
        # The running sum is rounded, so that every node goes to a client.
        ends = np.rint(shares.cumsum()[:-1] * members.size).astype(np.int64)
        part[members] = np.searchsorted(ends, np.arange(members.size), side="right")
    return torch.from_numpy(part)


def random_parts(n: int, clients: int, seed: int) -> list[Tensor]:
    """Divide the nodes at random into parts whose sizes differ by at most one."""
    part = torch.empty(n, dtype=torch.int64)
    part[torch.randperm(n, generator=generator(seed, "random-parts"))] = torch.arange(n) % clients
    return _parts(part, clients)


def _parts(part: Tensor, count: int) -> list[Tensor]:
    sizes = torch.bincount(part, minlength=count).tolist()
    # Copies: a view would keep the whole list in memory, and in every message that carries it.
    return [nodes.clone() for nodes in part.argsort(stable=True).split(sizes)]
