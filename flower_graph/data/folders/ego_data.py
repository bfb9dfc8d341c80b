"""A client's ego-network from a graph of its own, such as PyG's ``Data``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flower_graph.data.graph import to_undirected
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.data.validate import PARTS, check_client, check_tensor, mask_of
from flower_graph.errors import DataError

Identities = Tensor | Sequence[int] | Sequence[str]


def ego_from_data(client: int, data: Any, identities: Identities) -> EgoNetwork:
    """Make a client of a graph that is not cut out of a larger one here.

    Parameters
    ----------
    client
        Number of the client; unique over the run.
    data
        A PyG ``Data`` or anything else with dense ``x`` ``[n, f]``, ``edge_index`` ``[2, e]`` and
        ``y`` ``[n]``, int64 and below 0 for a node without a label. Its masks are boolean ``[n]``;
        one that is missing is empty (``split_per_client`` draws all three).
    identities
        ``n`` integers or ``n`` words, in the order of the rows of ``x``: the same node has the same
        one at every client.

    Returns
    -------
    EgoNetwork
        The client, its nodes in the order of ``data``. It counts the first one as its ego, which
        plays no part in training.

    Raises
    ------
    DataError
        If something is missing, malformed or there twice; names the client.
    """
    try:
        check_tensor(data, "edge_index")
        check_client(data)
        nodes, names = _named(identities, int(data.y.numel()))
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error
    train, val, test = (mask_of(data, part) for part in PARTS)
    edge_index = to_undirected(data.edge_index, nodes.numel())
    x, ego = data.x.float(), int(nodes[0])
    return EgoNetwork(client, ego, nodes, edge_index, x, data.y, train, val, test, names)


def _named(identities: Identities, count: int) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return the nodes' numbers, and their names if they have some."""
    given = identities.tolist() if isinstance(identities, Tensor) else list(identities)
    kinds = {type(one) for one in given}
    if kinds not in ({int}, {str}):
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"identities are of type {named}: must be all int or all str")
    if len(given) != count:
        raise DataError(f"{len(given)} identities for {count} nodes: must be one a node")
    # Says how many, not which: where a server hears of the error, it must not hear identities.
    twice = sum(times > 1 for times in Counter(given).values())
    if twice:
        raise DataError(f"{twice} identities are there more than once: must be all different")
    if kinds == {str}:
        return torch.arange(count), tuple(given)
    return torch.tensor(given, dtype=torch.int64), None
