"""Who sums under a server that may lie, the graph of their partners, and what a list must be like.

Pure functions: parties here are places, 0 to n - 1, in the ascending order of their numbers.

*Graph.* Every party commits to a seed before it sees another's. The seeds are shown when all have
seen the same list of commitments, and the graph comes from all of them: one honest party is enough
for nobody to have chosen it. It is over all parties of the epoch, whoever takes part in a round, so
that nobody chooses partners by choosing who takes part.

*Lists.* A round has two: who prepared (its masks are in the others' vectors) and who sent a vector.
Both are signed together, as a server that told some that a neighbour is not there, and others that
it is, could cut the circle of partners by that alone.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import RefusedError
from flower_graph.messages.fields import RUN_BYTES, Bytes, Integers
from flower_graph.secure.channel import framed
from flower_graph.secure.sum.partners import BROKEN, circle, plan

DOMAIN = b"flower-graph epoch 1"
FEWEST = 5  # parties; with fewer, a partner or two and the sum tell what one sent
# So many lists of commitments a party answers in a run. Whoever shows a list, sees the graph that
# it gives, and shows another, has so many draws.
MOST_LISTS = 8
MASKS = NDArray[np.bool_]


def commit(run_id: bytes, party: int, seed: bytes) -> bytes:
    """Commit to a party's part of the graph's seed."""
    return hashlib.sha256(framed(DOMAIN, b"seed", run_id, struct.pack("<q", party), seed)).digest()


@dataclass(frozen=True)
class Epoch:
    """Parties whose partners stay the same, with all that was agreed on when it began."""

    run_id: bytes  # of the sum, as the bindings have it
    registry: bytes  # digest of the registry
    number: int
    parties: Integers  # [n] ascending
    commitments: Bytes  # [n, 32]
    seeds: Bytes  # [n, 32]
    dropout: float
    corrupt: float
    minimum: int  # parties in a sum

    @cached_property
    def digest(self) -> bytes:
        """The hash of everything in it."""
        head = struct.pack("<qqdd", self.number, self.minimum, self.dropout, self.corrupt)
        rows = (self.parties.astype("<i8"), self.commitments, self.seeds)
        parts = [DOMAIN, self.run_id, self.registry, head, *(part.tobytes() for part in rows)]
        return hashlib.sha256(framed(*parts)).digest()

    @property
    def id(self) -> bytes:
        """What its rounds name as their run: in the context of each key, packet and commitment."""
        return self.digest[:RUN_BYTES]

    @cached_property
    def plan(self) -> tuple[int, int]:
        """Number of partners, and threshold."""
        return plan(self.parties.size, self.dropout, self.corrupt, BROKEN / MOST_LISTS)[:2]

    @property
    def threshold(self) -> int:
        """Shares that give a secret back, and signatures without which none is shown."""
        return self.plan[1]

    @cached_property
    def partners(self) -> Integers:
        """The graph, places of each party's partners, ``[n, k]``."""
        # By a hash for each place, so that no version of a random generator matters.
        places = range(self.parties.size)
        keys = [hashlib.sha256(self.digest + struct.pack("<q", each)).digest() for each in places]
        return circle(np.array(sorted(places, key=keys.__getitem__)), self.plan[0])

    def place(self, party: int) -> int:
        """Return a party's place; ``RefusedError`` if it is not in the epoch."""
        place = int(np.searchsorted(self.parties, party))
        if place == self.parties.size or self.parties[place] != party:
            raise RefusedError(f"party {party} is not in epoch {self.number}")
        return place

    def check_seeds(self) -> None:
        """Refuse seeds that nobody committed to."""
        for party, seed, promised in zip(
            self.parties.tolist(), self.seeds, self.commitments, strict=True
        ):
            if commit(self.run_id, party, seed.tobytes()) != promised.tobytes():
                raise RefusedError(f"party {party} has committed to another seed of the graph")

    def check_present(self, present: MASKS, what: str) -> None:
        """Refuse a list that is too short, or on which somebody has too few partners."""
        # present [n]
        if present.shape != self.parties.shape:
            raise RefusedError(f"the list of those who {what} is not over the epoch's parties")
        if (count := int(present.sum())) < self.minimum:
            raise RefusedError(f"{count} parties {what}, at least {self.minimum} must")
        few = present & (present[self.partners].sum(1) < self.threshold)
        if few.any():
            party = self.parties[np.argmax(few)]
            raise RefusedError(
                f"party {party} is said to have {what}, but fewer than {self.threshold} of its "
                "partners: the circle of partners could be cut there"
            )

    def signed_parts(self, number: int, ready: MASKS, listed: MASKS) -> tuple[bytes, ...]:
        """Write what a party signs about a round, for its identity's ``sign``."""
        lists = np.packbits(ready).tobytes(), np.packbits(listed).tobytes()
        return self.digest, struct.pack("<q", number), *lists


def check_list(
    parties: Integers, commitments: Bytes, own: tuple[int, bytes], minimum: int, least: int
) -> None:
    """Refuse a list of commitments without one's own, or with fewer parties than one wants."""
    # Commitments [n, 32]; own: number and commitment; minimum: as the server has it
    if minimum < max(least, FEWEST) or parties.size < minimum:
        raise RefusedError(
            f"a minimum of {minimum} of {parties.size} parties; here at least "
            f"{max(least, FEWEST)} must be in a sum"
        )
    if (np.diff(parties) <= 0).any() or commitments.shape[0] != parties.size:
        raise RefusedError("the list of commitments has parties twice, or in another order")
    mine = commitments[parties == own[0]]
    if mine.shape[0] != 1 or mine.tobytes() != own[1]:
        raise RefusedError("the own commitment is not on the list that the server shows")
