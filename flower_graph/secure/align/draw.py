"""The draw of key-holders, from the operating system's randomness."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence


def draw_holders(
    free: Iterable[int], holders: Sequence[int], node_of: Mapping[int, int], count: int
) -> list[int]:
    """Draw further key-holders, on different machines as far as possible."""
    draw, left = secrets.SystemRandom(), list(free)
    nodes = sorted({node_of[client] for client in left})
    draw.shuffle(left)
    draw.shuffle(nodes)  # by SuperNode: hosting more clients is not likelier
    rank = {node: number for number, node in enumerate(nodes)}
    drawn = sorted(left, key=lambda client: rank[node_of[client]])
    chosen: list[int] = []
    while drawn and len(chosen) < count:
        taken = {node_of[client] for client in (*holders, *chosen)}
        best = next((c for c in drawn if node_of[c] not in taken), drawn[0])
        drawn.remove(best)
        chosen.append(best)
    return chosen
