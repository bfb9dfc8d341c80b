"""Writes what the secure sum costs level by level, for ``docs/scale.md``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.layout import duration, table
from flower_graph.records.rounds import format_bytes

Part = dict[str, Any]


def levels(supernodes: int, group: int) -> list[int]:
    """Return the groups at each level in which so many are summed, the lowest level first."""
    found = []
    while supernodes > 1:
        supernodes = math.ceil(supernodes / group)
        found.append(supernodes)
    return found


def levels_section(supernodes: int, parties: int, trust: Part, sums: Part) -> Iterator[str]:
    """Say what sums of so many SuperNodes cost, in groups of the sizes that were measured."""
    yield "## The secure sum by level"
    yield (
        "Sums over *F* parties were measured, with a share of "
        f"{sums['dropout']:.0%} of them lost; their bytes with vectors of {trust['length']:,} "
        f"words. *M* = {supernodes:,} SuperNodes make ⌈M / F⌉ groups, whose sums are summed in "
        "⌈M / F²⌉ groups, and so on. *Party* is one party's processor time and its bytes up and "
        "down besides the vector; *server* is for one group, and *level* for all groups of the "
        "level. The first level is built. Further ones are not; who adds up a group's sum would "
        "see it, unless it is under pads, as nFedGNN's are. Users of one SuperNode need no masks "
        "against each other."
    )
    yield table(
        ("server is", "F", "level", "groups", "party", "bytes", "server", "level, in all"),
        [row for entry in sums["entries"] for row in _rows(supernodes, trust, entry)],
    )
    yield (
        "The uppermost groups may be smaller than *F*, and are counted in full. nFedGNN's sums of "
        f"gradients have room for {parties:,} parties: larger groups are for sums whose numbers "
        "are coarser. Under masks a matrix has words of 8 bytes, twice what it has in the tables "
        "above."
    )


def _rows(supernodes: int, trust: Part, entry: Part) -> Iterator[Sequence[str]]:
    """Give a group size's levels; none where its bytes were not measured."""
    size, trusted = entry["clients"], entry["trusted"]
    like = [
        one
        for one in trust["entries"]
        if one["clients"] == size and one["trusted"] == trusted and not one["corrupt"]
    ]
    for beside in like:
        sent = beside["bytes-up"] + beside["bytes-down"] - beside["vector-bytes"]
        for level, groups in enumerate(levels(supernodes, size), 1):
            yield (
                "trusted" if trusted else "may lie",
                f"{size:,}",
                str(level),
                f"{groups:,}",
                duration(entry["client-seconds"]),
                format_bytes(sent),
                duration(entry["server-seconds"]),
                duration(groups * entry["server-seconds"]),
            )
