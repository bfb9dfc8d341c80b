"""Which sums may follow each other: two sums reveal their difference.

If two sums are of vectors that have changed little, and a SuperNode is in only one of them, they
reveal what that SuperNode sent. So a party signs a list only if the parties on it are the very same
as those of an earlier sum of the run, or differ from those of every earlier sum by at least
``differ-by``; and an unchanged state enters no sum of other parties. Only sums of one purpose are
compared: others have nothing in common.

Sets of parties are whole numbers here, party n being bit n.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from flower_graph.errors import RefusedError
from flower_graph.secure.channel import framed
from flower_graph.secure.node_config import DIFFER_BY

STATE_BYTES = 16


def digest_of(arrays: Iterable[ArrayLike]) -> bytes:
    """Name a state, such as a vector before masks and pads, by a hash of its numbers; 16 bytes."""
    vectors = [np.asarray(one) for one in arrays]
    parts = [f"{one.dtype} {one.shape} ".encode() + one.tobytes() for one in vectors]
    return hashlib.sha256(framed(b"flower-graph state 1", *parts)).digest()[:STATE_BYTES]


def set_of(parties: Sequence[int]) -> int:
    """Write parties as a set."""
    present = np.zeros(max(parties, default=-1) + 1, np.bool_)
    present[list(parties)] = True
    return int.from_bytes(np.packbits(present, bitorder="little").tobytes(), "little")


def members_of(parties: int) -> list[int]:
    """Return the parties in a set, ascending."""
    data = parties.to_bytes((parties.bit_length() + 7) // 8, "little")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return [int(party) for party in np.flatnonzero(bits)]


def check_difference(parties: int, earlier: Collection[int], differ_by: int) -> None:
    """Refuse parties of a sum that are neither those of an earlier sum nor far from all."""
    if parties not in earlier and (near := _near(parties, earlier, differ_by)):
        differ = (parties ^ near[0]).bit_count()
        raise RefusedError(f"{differ} differ from an earlier sum; {DIFFER_BY} is {differ_by}")


def choose(
    present: int,
    earlier: Collection[int],
    differ_by: int,
    *,
    spare: Sequence[int],
    fewest: int,
    number: int,
) -> int | None:
    """Choose the parties of a sum among those present: as many as possible.

    Parameters
    ----------
    present : int
        Parties that could be in it.
    earlier : collection of int
        The parties of each earlier sum.
    differ_by : int
        How many parties two sums differ by, unless they have the same parties.
    spare : sequence of int
        Parties that may be left out, the first ones first.
    fewest : int
        The fewest parties in a sum.
    number : int
        Of the sum. If several earlier sets serve as well, they take turns.

    Returns
    -------
    int or None
        The set; None if there is none. A set of an earlier sum reveals nothing new and is
        preferred, unless a party that is present is in none of those.
    """
    if present in earlier or not _near(present, earlier, differ_by):
        return present
    fixed = present & ~set_of(spare)
    again = [one for one in earlier if one & ~present == 0 and fixed & ~one == 0]
    again = [one for one in again if one.bit_count() >= fewest]
    most = max((one.bit_count() for one in again), default=0)
    again = sorted(one for one in again if one.bit_count() == most)
    served = 0
    for one in again:
        served |= one
    unserved = present & ~served
    order = sorted(spare, key=lambda party: unserved >> party & 1)
    fresh = _thinned(present, earlier, differ_by, order, max(fewest, most))
    if fresh is not None and (fresh.bit_count() > most or fresh & unserved):
        return fresh
    return again[number % len(again)] if again else None


def _near(parties: int, earlier: Collection[int], differ_by: int) -> list[int]:
    return [one for one in earlier if 0 < (parties ^ one).bit_count() < differ_by]


def _thinned(
    parties: int, earlier: Collection[int], differ_by: int, order: Sequence[int], fewest: int
) -> int | None:
    """Leave parties out, one after the other, until the rest may be in a sum."""
    while parties not in earlier and (near := _near(parties, earlier, differ_by)):
        left = [party for party in order if parties >> party & 1]
        if not left or parties.bit_count() <= fewest:
            return None
        # Leaving out a party of an earlier set makes the two sets differ by one more.
        parties ^= 1 << max(left, key=lambda party: sum(one >> party & 1 for one in near))
    return parties
