"""What can be known of a sum of vectors: that numbers fit, and what of predictions is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.ops.counts import Counts
from flower_graph.strategies.masked_embedding_averaging.messages import (
    SUMMED_NAMES,
    UNREAD,
    Layout,
    SumArray,
)
from flower_graph.wire import keys
from flower_graph.wire.arrays import largest_size
from flower_graph.wire.counts import as_counts

if TYPE_CHECKING:
    from flower_graph.secure.ring import Ring

ROUNDING = 1e-3  # by which a sum of accuracies may be off


def check_plain_sum(total: SumArray, layout: Layout, clients: int) -> None:
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
    read_counted(total, layout, None)


def read_counted(total: SumArray, layout: Layout, ring: Ring | None) -> Counts | None:
    """Read the counts in a sum; None where none are asked for."""
    if not layout.counting:
        return None
    words = total[layout.predictions]
    numbers = words if ring is None else ring.decode(words) * 2.0**ring.fraction_bits
    return as_counts(np.rint(numbers).astype(np.int64), layout.classes, layout.counting)


def check_measured(sums: NDArray[np.float64], clients: int, rounding: float) -> None:
    """Check what can be known of the sums of what so many clients measured."""
    measured = dict(zip(SUMMED_NAMES, sums.tolist(), strict=True))
    counts = [n for name, n in measured.items() if name.startswith("has-") or name == UNREAD]
    _check_counts(np.array(counts), clients)
    for role in keys.ROLES:
        if not -rounding <= measured[role] <= measured[f"has-{role}"] + rounding:
            raise MalformedReplyError(
                f"{keys.TOTAL}: {role} is {measured[role]:g}, a sum of "
                f"{measured[f'has-{role}']:g} accuracies"
            )


def _check_counts(found: NDArray[np.float64], clients: int) -> None:
    if not are_counts(found, clients):
        raise MalformedReplyError(f"{keys.TOTAL}: expected counts from 0 to {clients} clients")


def are_counts(found: NDArray[np.float64], clients: int) -> bool:
    """Say whether all are whole numbers that so many clients can make."""
    return bool(((found >= 0) & (found <= clients) & (found == np.rint(found))).all())
