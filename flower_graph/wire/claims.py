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
    """Return the SuperNodes that may not enrol, since others claim the same clients.

    Parameters
    ----------
    claims : mapping of int to collection of int
        The clients that each SuperNode claims to host.
    holders : mapping of int to int
        The SuperNode of each client whose SuperNode is enrolled or claims it again.
    is_first : bool
        Whether nobody is enrolled yet.
    remedy : str
        How to bind numbers to SuperNodes where the ids do not.

    Returns
    -------
    dict of int to str
        SuperNode to reason.

    Raises
    ------
    MembershipError
        If two claim one client at the first enrolment; it names both.
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
            other = first.setdefault(client, node)
            if other == node:
                continue
            words = (
                f"client {client} is claimed by node {other} and by node {node}: {OWN}; {remedy}"
            )
            if is_first:
                raise MembershipError(words)
            doubles |= {other: words, node: words}
    return refused | doubles


def each_once(clients: NDArray[np.int64]) -> bool:
    """Whether no client is there twice; ``np.unique`` takes a second for a million."""
    return bool(np.diff(np.sort(clients)).all())
