"""Finds the SuperNodes that spoil a sum of tables, by trying sums over subsets.

If the sum over some SuperNodes can be read, all of them are cleared. So random halves of the others
are tried together with the cleared ones, until a single one is left with them: if that sum fails,
its table is wrong. SuperNodes that were in no readable sum are left out. A liar among *n* costs
about 2 log2 *n* sums. A SuperNode that lies only where another takes part can have that one left
out in its place: sums alone cannot tell the two apart.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

MOST_TRIALS = 64
FEWEST = 2  # SuperNodes in a sum: what one holds is not to be seen alone


class Trials:
    """Cleared SuperNodes, suspects, and the SuperNodes whose tables are summed next."""

    def __init__(self, nodes: Collection[int]) -> None:
        self.cleared: set[int] = set()
        self.suspects = set(nodes)
        self.together = set(nodes)  # empty when there is nothing left to try
        self.gone: set[int] = set()  # take no part any more: nothing is said of them
        self._size = len(nodes)
        self._failed: list[set[int]] = []

    def succeeded(self, nodes: Collection[int]) -> None:
        """Clear the SuperNodes of a readable sum; ``nodes`` are all that still take part."""
        self._keep(nodes)
        self.cleared |= self.together
        self.suspects -= self.together
        self._size = len(self.suspects) + 1
        self._next()

    def failed(self) -> None:
        """Record that the SuperNodes of the last sum include one that spoils it."""
        self._failed.append(set(self.together))
        alone = self.together - self.cleared
        if self.cleared and len(alone) == 1:
            self._blame(alone)
        self._next()

    def keep(self, nodes: Collection[int]) -> None:
        if self._keep(nodes):
            self._size = len(self.suspects) + 1
            self._next()

    def _keep(self, nodes: Collection[int]) -> bool:
        gone = (self.cleared | self.suspects).difference(nodes)
        self.gone |= gone
        was_next = bool(self.together & gone)
        for group in (self.cleared, self.suspects, self.together):
            group -= gone
        # Who is gone may be what spoilt a sum.
        self._failed = [others for others in self._failed if not others & gone]
        return was_next

    def _blame(self, alone: Collection[int]) -> None:
        self.suspects.difference_update(alone)
        self._size = len(self.suspects) + 1

    def _next(self) -> None:
        """Draw some uncleared SuperNodes, but no set that is known to spoil a sum."""
        draw = secrets.SystemRandom()
        while self.suspects and len(self._failed) < MOST_TRIALS:
            least = 1 if self.cleared else FEWEST
            self._size = min(max(least, self._size // 2), len(self.suspects))
            for _ in range(MOST_TRIALS):
                chosen = set(draw.sample(sorted(self.suspects), self._size))
                self.together = self.cleared | chosen
                if len(self.together) >= FEWEST and not self._is_spoilt():
                    return
                if self.cleared and len(chosen) == 1:
                    self._blame(chosen)
                    break
            else:
                if self._size <= least:
                    break
        self.together = set()

    def _is_spoilt(self) -> bool:
        return any(others <= self.together for others in self._failed)
