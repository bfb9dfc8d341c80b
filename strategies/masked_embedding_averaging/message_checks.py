"""What the server can check of the sums that FedSCem's clients send."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.messages import keys
from flower_graph.messages.keys import largest_size
from flower_graph.strategies.masked_embedding_averaging.messages import SUMMED_NAMES, UNREAD, Layout

ROUNDING = 1e-3  # by which a sum of accuracies may be off


def check_plain_sum(total: NDArray[Any], layout: Layout, clients: int) -> None:
    """Check what can be known of a plain sum over so many clients."""
    # total [L]
    if total.dtype != np.float64:
        raise MalformedReplyError(f"{keys.TOTAL} has type {total.dtype}, expected float64")
    if total.size and (largest := largest_size(total)) > clients * keys.MAX_NUMBER:
        raise MalformedReplyError(
            f"{keys.TOTAL} has a number of size {largest:g}, {clients} clients can make "
            f"{clients * keys.MAX_NUMBER:g} at most"
        )
    _check_counts(total[layout.counts], clients)
    check_measured(total[layout.metrics], clients, ROUNDING)


def check_measured(sums: NDArray[np.float64], clients: int, rounding: float) -> None:
    """Check what can be known of the sums of what so many clients measured."""
    measured = dict(zip(SUMMED_NAMES, sums.tolist(), strict=True))
    counts = [n for name, n in measured.items() if name.startswith("has-") or name == UNREAD]
    _check_counts(np.array(counts), clients)
    for role in ("train", "val", "test"):
        if not -rounding <= measured[role] <= measured[f"has-{role}"] + rounding:
            raise MalformedReplyError(
                f"{keys.TOTAL}: {role} is {measured[role]:g}, a sum of "
                f"{measured[f'has-{role}']:g} accuracies"
            )


def _check_counts(found: NDArray[np.float64], clients: int) -> None:
    if ((found < 0) | (found > clients) | (found != np.rint(found))).any():
        raise MalformedReplyError(f"{keys.TOTAL}: expected counts from 0 to {clients} clients")
