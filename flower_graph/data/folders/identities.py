"""Identities of nodes, by which clients recognise common nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flower_graph.data.folders.client_files import IDENTITIES
from flower_graph.errors import DataError

Identities = Tensor | Sequence[int] | Sequence[str]
Named = tuple[Tensor, tuple[str, ...] | None]  # numbers of nodes, and their names if they have some


# Any: what a user's file holds; ``_named`` checks it
def identities_in(values: Mapping[str, Any], count: int) -> Named:
    """Return the identities of one graph's nodes, from the first key that it has."""
    given = next((values[key] for key in IDENTITIES if values.get(key) is not None), None)
    if given is None:
        raise DataError(
            "has no identities of nodes: give it n_id, int64 [n], or identity, n words or "
            "numbers, the same for a node at all clients"
        )
    return named_by(given, count)


def named_by(identities: Identities, count: int) -> Named:
    """Return the nodes' numbers, and their names if they have any."""
    given = identities.tolist() if isinstance(identities, Tensor) else list(identities)
    kinds = {type(one) for one in given}
    if kinds not in ({int}, {str}):
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"identities are of type {named}: must be all int or all str")
    if len(given) != count:
        raise DataError(f"{len(given)} identities for {count} nodes: must be one a node")
    # The error has the number only, since a server that reads it must not learn identities.
    twice = sum(times > 1 for times in Counter(given).values())
    if twice:
        raise DataError(f"{twice} identities are there more than once: must be all different")
    if kinds == {str}:
        return torch.arange(count), tuple(given)
    return torch.tensor(given, dtype=torch.int64), None
