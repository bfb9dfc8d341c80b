"""Two SuperNodes that claim one client: which of them enrols."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MembershipError

OWN = "give each SuperNode a partition-id or a data-folder of its own"


def sorted_out(
    claims: Mapping[int, Collection[int]],
    holders: Mapping[int, int],
    *,
    is_first: bool,
    remedy: str,
) -> dict[int, str]:
    """Return the SuperNodes that may not enrol, and why: others claim the same clients.

    ``claims`` are the clients of each SuperNode, ``holders`` the SuperNodes of clients that are
    enrolled or claimed again. If two claim one client at the first enrolment, ``MembershipError``
    names both and the ``remedy``.
    """
    if not holders and each_once(np.fromiter(chain.from_iterable(claims.values()), np.int64)):
        return {}
    refused = {}
    for node, clients in claims.items():
        taken = [client for client in clients if holders.get(client, node) != node]
        if taken:
            other = holders[taken[0]]
            refused[node] = f"client {taken[0]} is hosted by node {other} already: {OWN}"
    first = dict[int, int]()
    doubles = dict[int, str]()
    for node in sorted(claims.keys() - refused.keys()):
        for client in claims[node]:
            if (other := first.setdefault(client, node)) != node:
                words = f"client {client} is claimed by nodes {other} and {node}: {OWN}; {remedy}"
                if is_first:
                    raise MembershipError(words)
                doubles |= {other: words, node: words}
    return refused | doubles


def each_once(clients: NDArray[np.int64]) -> bool:
    """Whether no client is there twice; ``np.unique`` takes a second for a million."""
    return bool(np.diff(np.sort(clients)).all())
