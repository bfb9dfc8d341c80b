"""Methods that divide one graph into parts, one for each client: lists of nodes.

Every function returns ``clients`` int64 tensors of ascending node numbers, which depend on its
arguments alone: the same seed gives the same parts in any process. No node is in two parts, except
with ``metis_overlapping``.
"""

from __future__ import annotations

import random

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


def louvain(
    edge_index: Tensor,
    n: int,
    *,
    clients: int,
    resolution: float | None,
    seed: int,
    every_node: bool = False,
) -> list[Tensor]:
    """Find communities by Louvain's method (Blondel et al., 2008); keep the largest, or merge."""
    if resolution is None:
        return _enough(edge_index, n, clients=clients, seed=seed, every_node=every_node)
    import igraph  # not at the top: it takes a second

    _check_clients(clients, n)
    source, target = to_undirected(edge_index, n)
    pairs = torch.stack([source, target], dim=1)[source < target]
    graph = igraph.Graph(n, pairs.numpy())
    igraph.set_random_number_generator(random.Random(derive_seed(seed, "louvain")))
    try:
        result = graph.community_multilevel(resolution=resolution)
    finally:
        igraph.set_random_number_generator(random)  # Python's, which is igraph's default
    if len(result) < clients:
        raise DataError(
            f"partition.clients = {clients}: Louvain found {len(result)} communities; use fewer "
            f"clients, or raise partition.resolution above {resolution:g} for smaller communities "
            "(partition.resolution=null does)"
        )
    parts = _parts(torch.tensor(result.membership), len(result))
    parts.sort(key=lambda part: (-part.numel(), int(part[0])))
    return _merged(parts, clients) if every_node else parts[:clients]


def _enough(
    edge_index: Tensor, n: int, *, clients: int, seed: int, every_node: bool
) -> list[Tensor]:
    """Raise the resolution until there are enough communities for all clients."""
    resolution = 1.0
    # Far above it every node is a community by itself.
    while True:
        try:
            result = louvain(
                edge_index,
                n,
                clients=clients,
                resolution=resolution,
                seed=seed,
                every_node=every_node,
            )
        except DataError:
            if not 1 <= clients <= n:
                raise
            resolution *= 2
        else:
            tell(
                "partition.resolution",
                [f"at {resolution:g} Louvain finds a community for each client"],
            )
            return result


def _merged(parts: list[Tensor], clients: int) -> list[Tensor]:
    """Assign each community, the largest first, to the client with the fewest nodes so far."""
    held: list[list[Tensor]] = [[] for _ in range(clients)]
    sizes = [0] * clients
    for part in parts:
        client = sizes.index(min(sizes))
        held[client].append(part)
        sizes[client] += part.numel()
    return [torch.cat(local).sort().values for local in held]


def metis(edge_index: Tensor, n: int, *, clients: int, seed: int) -> list[Tensor]:
    """Divide the whole graph into parts of nearly equal size with few edges between them."""
    try:
        import pymetis
    except ImportError as error:
        raise DataError(
            "partition.method = 'metis' needs pymetis: pip install 'flower-graph[metis]'"
        ) from error
    _check_clients(clients, n)
    source, target = to_undirected(edge_index, n)
    counts = torch.bincount(source, minlength=n).tolist()
    neighbours = [others.tolist() for others in target.split(counts)]
    # METIS reads its seed into 32 bits.
    options = pymetis.Options(seed=derive_seed(seed, "metis") % 2**31)
    part = torch.tensor(pymetis.part_graph(clients, neighbours, options=options)[1])
    sizes = torch.bincount(part, minlength=clients)
    if not sizes.all():
        empty = int((sizes == 0).sum())
        raise DataError(
            f"partition.clients = {clients}: METIS left {empty} of them without a node of the "
            f"{n}; use fewer clients"
        )
    return _parts(part, clients)


def metis_overlapping(
    edge_index: Tensor, n: int, *, clients: int, draws: int, share: float, seed: int
) -> list[Tensor]:
    """Draw a share of each METIS part's nodes several times, each time for another client."""
    # As FED-PUB (Baek et al., ICML 2023) makes overlapping clients: 30 from 6 parts, half of the
    # nodes of each drawn five times. Clients of one part come one after another.
    parts_wanted, rest = divmod(clients, draws)
    if rest or not parts_wanted:
        raise DataError(
            f"partition.clients = {clients}: must be a multiple of partition.draws = {draws}, the "
            "clients that are drawn from each METIS part"
        )
    drawn = []
    for number, part in enumerate(metis(edge_index, n, clients=parts_wanted, seed=seed)):
        count = round(share * part.numel())
        if not count:
            raise DataError(
                f"partition.drawn_share = {share:g}: less than one of the {part.numel()} nodes of "
                f"METIS part {number}; use fewer clients or a larger share"
            )
        for draw in range(draws):
            rng = generator(seed, "metis-overlapping", number, draw)
            chosen = torch.randperm(part.numel(), generator=rng)[:count]
            drawn.append(part[chosen.sort().values])
    return drawn


def dirichlet(y: Tensor, clients: int, alpha: float, seed: int) -> list[Tensor]:
    """Divide each class among the clients in shares drawn from a Dirichlet distribution."""
    # A draw that leaves a client fewer than 10 nodes is drawn again, at most 100 times.
    _check_clients(clients, y.numel())
    rng = np.random.default_rng(derive_seed(seed, "dirichlet"))
    for _ in range(DRAWS):
        part = _assigned(y, clients, alpha, rng)
        if int(torch.bincount(part, minlength=clients).min()) >= LEAST_NODES:
            return _parts(part, clients)
    raise DataError(
        f"partition.alpha = {alpha:g}: in none of {DRAWS} draws did all of partition.clients = "
        f"{clients} get {LEAST_NODES} of the {y.numel()} nodes; raise alpha or use fewer clients"
    )


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
    _check_clients(clients, n)
    part = torch.empty(n, dtype=torch.int64)
    part[torch.randperm(n, generator=generator(seed, "random-parts"))] = torch.arange(n) % clients
    return _parts(part, clients)


def _parts(part: Tensor, count: int) -> list[Tensor]:
    """List the nodes of each part, given the part of each node."""
    sizes = torch.bincount(part, minlength=count).tolist()
    # Copies: a view would keep the whole list in memory, and in every message that carries it.
    return [nodes.clone() for nodes in part.argsort(stable=True).split(sizes)]


def _check_clients(clients: int, n: int) -> None:
    if not 1 <= clients <= n:
        raise DataError(
            f"partition.clients = {clients}: must be at least 1 and at most the graph's {n} nodes"
        )
