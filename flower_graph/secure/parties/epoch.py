"""Epochs of sums under a server that may lie: parties, graph of partners, checks of lists.

Pure functions. In arrays a party has an *index*, 0 to n - 1, in ascending order of its number.

*Graph.* Every party commits to a seed before it sees another's. The seeds are shown when all have
seen the same list of commitments, and the graph comes from all of them: one honest party is enough
for nobody to have chosen it. It is over all parties of the epoch, present in a round or not, so
that nobody chooses partners by choosing who takes part.

*Lists.* A round has two: of the parties that prepared (whose masks are in the others' vectors) and
of the parties that sent a vector. Both are signed together: a server that told some parties that a
neighbour is absent, and others that it is present, could cut the circle of partners by that alone.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import IdentityError, RefusedError, refuse_if
from flower_graph.secure.channel import framed, pieces
from flower_graph.secure.node_config import DIFFER_BY, FEWEST_PARTIES
from flower_graph.secure.parties.journal import MOST_LISTS
from flower_graph.secure.parties.registry import Registry, TrustSettings
from flower_graph.secure.sum.messages import EpochRequest, KeyReply, RevealRequest
from flower_graph.secure.sum.partners import BROKEN, circle, order_by, plan, steps
from flower_graph.wire.codec import RUN_BYTES, Bytes, Integers

DOMAIN = b"flower-graph epoch 2"
MASKS = NDArray[np.bool_]
ROUND_KEY, LIST = b"round key", b"list"  # what signatures are for


def commit(run_id: bytes, party: int, seed: bytes) -> bytes:
    """Commit to a party's part of the graph's seed."""
    return hashlib.sha256(framed(DOMAIN, b"seed", run_id, struct.pack("<q", party), seed)).digest()


@dataclass(frozen=True)
class Epoch:
    """Parties with a fixed graph of partners, and their agreement at its beginning."""

    number: int
    parties: Integers  # [n] ascending
    dropout: float
    corrupt: float
    minimum: int  # parties in a sum
    differ_by: int  # parties that two sums differ by, unless they are of the same ones
    limit: float  # largest size of a number in their sums
    declared: Integers  # [b, 2] clients that are to be aligned, ascending, and the points of each
    digest: bytes  # the hash of all this, of run and registry, of all commitments and seeds
    order: Integers  # [n] the circle that follows from it: the parties' indices in its order

    @classmethod
    def agreed(cls, shown: RevealRequest, registry: bytes, seeds: Bytes) -> Epoch:
        """Make the epoch of a list of commitments, with the terms that stand beside it.

        ``registry`` is the registry's digest, ``seeds`` [n, 32] what the parties committed to.
        ``RefusedError`` if a seed is missing, or is not the one its party committed to.
        """
        parties, commitments = shown.parties, shown.commitments
        why = f"{seeds.shape[0]} seeds of {parties.size} parties"
        refuse_if(seeds.shape != commitments.shape, why)
        both = zip(pieces(seeds), pieces(commitments), strict=True)
        for party, (seed, promised) in zip(parties.tolist(), both, strict=True):
            if commit(shown.run_id, party, seed) != promised:
                raise RefusedError(f"party {party} has committed to another seed of the graph")
        shares, numbers = (shown.dropout, shown.corrupt), (shown.minimum, shown.differ_by)
        head = struct.pack("<qqqddd", shown.number, *numbers, *shares, shown.limit)
        who = parties.astype("<i8").tobytes(), shown.declared.astype("<i8").tobytes()
        rows = commitments.tobytes(), seeds.tobytes()
        digest = hashlib.sha256(framed(DOMAIN, shown.run_id, registry, head, *who, *rows)).digest()
        circle_of = hashlib.shake_128(framed(DOMAIN, b"circle", digest)).digest(8 * parties.size)
        terms = *shares, *numbers, shown.limit, shown.declared
        return cls(shown.number, parties, *terms, digest, order_by(circle_of))

    @property
    def id(self) -> bytes:
        """The run's name in its rounds: in the context of each key, packet and commitment."""
        return self.digest[:RUN_BYTES]

    @cached_property
    def plan(self) -> tuple[int, int]:
        return plan_of(self.parties.size, self.dropout, self.corrupt)

    @property
    def threshold(self) -> int:
        """Number of shares that reconstruct a secret, and of signatures that each share needs."""
        return self.plan[1]

    @cached_property
    def partners(self) -> Integers:
        return circle(self.order, self.plan[0])

    def partners_of(self, index: int) -> Integers:
        """Compute one row of ``partners`` alone: the graph of many parties is large."""
        at = int(np.flatnonzero(self.order == index)[0])
        row: Integers = self.order[(at + steps(self.parties.size, self.plan[0])) % self.order.size]
        return row

    @cached_property
    def points(self) -> dict[int, int]:
        """For each client the points that its party declared before any seed was shown."""
        return dict(self.declared.tolist())

    def index(self, party: int) -> int:
        index = int(np.searchsorted(self.parties, party))
        is_other = index == self.parties.size or self.parties[index] != party
        refuse_if(is_other, f"party {party} is not in epoch {self.number}")
        return index

    def check_present(self, present: MASKS, what: str) -> None:
        """Refuse a list that is too short, or on which a party has too few partners."""
        # present [n]
        n, k = self.parties.size, self.plan[0]
        refuse_if(present.shape != (n,), f"a list of {present.size} parties, not {n}")
        count = int(present.sum())
        refuse_if(count < self.minimum, f"{count} parties {what}, at least {self.minimum} must")
        # Along the circle, repeated on both sides: parties up to k/2 places away, except oneself
        around, places = np.tile(present[self.order], 3).cumsum(), n + np.arange(n)
        partners = np.empty(n, np.int64)
        partners[self.order] = around[places + (k + 1) // 2] - around[places - k // 2 - 1]
        few = present & (partners - present < self.threshold)
        party = self.parties[np.argmax(few)]
        why = f"party {party}: fewer than {self.threshold} of its partners {what}"
        refuse_if(few.any(), why)

    def key_parts(self, number: int, key: bytes) -> tuple[bytes, ...]:
        """Write what a party signs of its key of a round, for its identity's ``sign``."""
        return self.digest, struct.pack("<q", number), key

    def signed_parts(
        self, number: int, ready: MASKS, listed: MASKS, terms: bytes
    ) -> tuple[bytes, ...]:
        """Write what a party signs about a round, for its identity's ``sign``."""
        lists = np.packbits(ready).tobytes(), np.packbits(listed).tobytes()
        return self.digest, struct.pack("<q", number), *lists, terms


def plan_of(parties: int, dropout: float, corrupt: float) -> tuple[int, int]:
    """Choose partners and threshold of an epoch with so many parties."""
    return plan(parties, dropout, corrupt, BROKEN / MOST_LISTS)[:2]


def check_shown(
    request: RevealRequest, trust: TrustSettings, own: bytes, points: Mapping[int, int | None]
) -> None:
    """Refuse a list of commitments, or terms beside it, that a party does not take."""
    # own: the party's commitment; points: of each client hosted here, None where it brings none
    parties, declared, registry = request.parties, request.declared, trust.registry
    least = max(trust.minimum, FEWEST_PARTIES)
    is_few = request.minimum < least or parties.size < request.minimum
    refuse_if(is_few, f"a minimum of {request.minimum} of {parties.size}, here {least}")
    is_odd = (np.diff(parties) <= 0).any() or request.commitments.shape[0] != parties.size
    refuse_if(is_odd, "the list of commitments has parties twice, or in another order")
    mine = request.commitments[parties == trust.identity.party]
    is_other = mine.shape[0] != 1 or mine.tobytes() != own
    refuse_if(is_other, "our own commitment is not on the list")
    is_odd = not (trust.corrupt <= request.corrupt < 0.5 and 0 <= request.dropout < 0.5)
    shares = f"corrupt is {request.corrupt} and dropout {request.dropout}"
    refuse_if(is_odd, f"{shares}; here at least {trust.corrupt}, and below 0.5")
    is_odd = not 0 < request.limit < math.inf
    refuse_if(is_odd, f"limit is {request.limit}, must be a positive number")
    why = f"{request.differ_by} differ, {DIFFER_BY} is {trust.differ_by}"
    refuse_if(request.differ_by < trust.differ_by, why)
    is_odd = (np.diff(declared[:, 0]) <= 0).any()
    refuse_if(is_odd, "the clients that are to be aligned are there twice, or not ascending")
    listed = dict(declared.tolist())
    for client, count in listed.items():
        why = f"client {client}: {count} points, block-cap is {trust.block_cap}"
        refuse_if(not 1 <= count <= trust.block_cap, why)
    is_other = any(listed.get(client) != count for client, count in points.items())
    refuse_if(is_other, "the points that our clients are to bring are not as we declared them")
    for party in sorted(set(parties.tolist()) - set(registry.active)):
        raise RefusedError(f"party {party} is revoked or not in the registry")
    # What a key-holder would have to multiply, of the clients that each party may speak for
    ends = np.concatenate([[0], declared[:, 1].cumsum()])
    for party in parties.tolist():
        parts = registry.parties[party].clients
        bounds = [np.searchsorted(declared[:, 0], (part.start, part.stop)) for part in parts]
        work, most = sum(int(ends[b] - ends[a]) for a, b in bounds), trust.most_points
        refuse_if(work > most, f"party {party}: {work} points, most-points is {most}")


def check_partners(
    epoch: Epoch, own: int, shown: RevealRequest, request: EpochRequest, registry: Registry
) -> None:
    """Check the bindings of a party's partners against the registry."""
    row = epoch.partners_of(epoch.index(own))
    keys, count = request.channel_keys.shape[0], request.counts.sum()
    why = f"{keys} bindings of {count} clients for {row.size} partners"
    refuse_if(keys != row.size or count != request.clients.size, why)
    refuse_if((request.counts < 1).any(), "a partner hosts no clients")
    ends = np.cumsum(request.counts)[:-1]
    for index, key, signature, clients in zip(
        row.tolist(),
        request.channel_keys,
        request.signatures,
        np.split(request.clients, ends),
        strict=True,
    ):
        party, promised = int(epoch.parties[index]), shown.commitments[index]
        points = [epoch.points[one] for one in clients.tolist() if one in epoch.points]
        declared = np.array(points, np.int64)
        binding = KeyReply(shown.run_id, clients, key, party, promised, signature, declared)
        try:
            binding.verify(registry)
        except IdentityError as error:
            raise RefusedError(str(error)) from error
