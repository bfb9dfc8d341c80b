"""One round of sums over parties at the server, and the parties to leave out of it.

Parties sign no list that differs from an earlier one by too few (``differences.py``). The server
knows which parties to leave out only when all vectors are there, but it adds vectors up as they
come. So the sums of a few parties, by turns, are kept beside the total, to be taken out again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np

from flower_graph.secure.parties.differences import choose, members_of, set_of
from flower_graph.secure.parties.epoch import MASKS, Epoch
from flower_graph.secure.parties.identity import SIGNATURE_BYTES
from flower_graph.secure.parties.trust import DIFFER_BY
from flower_graph.secure.ring import RingArray
from flower_graph.secure.sum.messages import MaskedReply, MaskRequest
from flower_graph.secure.sum.round import SumRound
from flower_graph.secure.sum.terms import SumTerms

LOG = logging.getLogger(__name__)
# Parties beyond `differ-by` that may be left out, should some vanish that are ready
SPARE = 2


class PartyRound:
    """One round: ``SumRound``, with the signatures that travel beside it."""

    def __init__(self, epoch: Epoch, inner: SumRound) -> None:
        n, self.epoch, self.inner = epoch.parties.size, epoch, inner
        self.keys = np.zeros((n, SIGNATURE_BYTES), np.uint8)
        self.lists = np.zeros((n, SIGNATURE_BYTES), np.uint8)
        self.signed: MASKS = np.zeros(n, np.bool_)
        self.purpose = ""
        self._spare: list[int] = []  # parties, those that are left out first
        self._kept: dict[int, RingArray] = {}  # their sums

    def mask_requests(
        self, length: int, word: int, terms: SumTerms, earlier: Collection[int]
    ) -> dict[int, MaskRequest]:
        """Ask for masked sums; choose parties to leave out if the sum is not allowed with them."""
        requests = self.inner.mask_requests(length, word, terms)
        self.purpose, apart = terms.purpose, self.epoch.differ_by
        ready = self.epoch.parties[self.inner.live].tolist()
        start = self.inner.number * (apart + SPARE) % max(1, len(ready))
        # First those that an earlier sum was made without: its set can be had again.
        order = sorted(
            ready[start:] + ready[:start],
            key=lambda party: -sum(not one >> party & 1 for one in earlier),
        )
        chosen = self._choose(set_of(ready), earlier, order)
        out = [] if chosen is None else members_of(set_of(ready) & ~chosen)
        others = [party for party in order if party not in out]
        self._spare = out + others[: apart + SPARE]
        return requests

    def take_masked(self, node: int, party: int, reply: MaskedReply) -> None:
        """Add a party's masked sum, and keep it if it may have to go again."""
        self.inner.take(node, reply)
        if party in self._spare:
            self._kept[party] = reply.total

    def settle(self, earlier: Collection[int]) -> int | None:
        """Leave out parties that this sum's list may not have; return the set, if any is left."""
        epoch, inner = self.epoch, self.inner
        present = set_of(epoch.parties[inner.contributed].tolist())
        chosen = self._choose(present, earlier, [one for one in self._spare if one in self._kept])
        if chosen is None:
            inner.skip(
                f"whoever is left out, this sum differs by fewer than {epoch.differ_by} SuperNodes "
                f"from an earlier one ({DIFFER_BY}), or {epoch.minimum} are not left; nothing is "
                "revealed"
            )
            return None
        for party in members_of(present & ~chosen):
            why = f"or this sum and an earlier one would differ by too few SuperNodes ({DIFFER_BY})"
            inner.leave_out(epoch.index(party), self._kept[party], why)
        self._kept.clear()
        return chosen

    def _choose(self, present: int, earlier: Collection[int], spare: list[int]) -> int | None:
        apart, fewest, number = self.epoch.differ_by, self.epoch.minimum, self.inner.number
        return choose(present, earlier, apart, spare=spare, fewest=fewest, number=number)


def warn_of_few(parties: int, fewest: int, differ_by: int) -> None:
    """Warn, when an epoch begins, that its sums need every party."""
    if differ_by > max(1, parties - fewest):
        LOG.warning(
            "%d SuperNodes, of which %d must be in every sum: once a sum of all was made, there is "
            "none while one is missing, as it would differ by fewer than %d (%s)",
            parties,
            fewest,
            differ_by,
            DIFFER_BY,
        )
