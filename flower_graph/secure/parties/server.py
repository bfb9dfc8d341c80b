"""The server's side of the secure sum without trust: the server carries, the parties check.

An honest server makes the parties' checks too, so that no party's lie makes it look like a liar.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable

import numpy as np

from flower_graph.errors import IdentityError, MalformedReplyError, RefusedError
from flower_graph.secure.align.limits import MOST_BLOCK, MOST_POINTS
from flower_graph.secure.channel import rows_of
from flower_graph.secure.parties.epoch import Epoch, commit, fewest_in_a_sum
from flower_graph.secure.parties.identity import Binding
from flower_graph.secure.parties.messages import (
    BindReply,
    EpochReply,
    EpochRequest,
    ListReply,
    ListRequest,
    Ready,
    RevealReply,
    RevealRequest,
    Signatures,
    SignedKey,
)
from flower_graph.secure.parties.party import LIST, ROUND_KEY
from flower_graph.secure.parties.party_round import PartyRound, warn_of_few
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.parties.trust import USUAL_DIFFERENCE
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.secure.sum.partners import check_shares
from flower_graph.secure.sum.results import Cause, Reason, Skipped, SumResult
from flower_graph.secure.sum.round import SumRound
from flower_graph.secure.sum.terms import SumTerms
from flower_graph.wire.fields import RUN_BYTES, Bytes

LOG = logging.getLogger(__name__)
ABSENT = -1  # and below: ids of parties of the epoch that are not connected


class PartyServer:
    """Carries out secure sums over parties, SuperNodes with keys that the registry has."""

    # An epoch is ``take_binding`` for each party, ``reveal_requests``, ``take_seed``,
    # ``epoch_requests``, ``take_epoch``. A round is ``open_round``, ``mask_requests``,
    # ``list_requests``, ``unmask_requests``, after each of them a ``take_…`` for every reply,
    # and ``result``.

    def __init__(
        self,
        registry: Registry,
        *,
        dropout: float = 0.3,
        corrupt: float = 0.1,
        block_cap: int = MOST_BLOCK,
        most_points: int = MOST_POINTS,
        differ_by: int = USUAL_DIFFERENCE,
    ) -> None:
        for name, share in (("dropout", dropout), ("corrupt", corrupt)):
            if not 0 <= share < 0.5:
                raise ValueError(f"{name} is {share}, must be from 0 to below 0.5")
        check_shares(dropout, corrupt)
        if (active := len(registry.active)) < registry.minimum:
            raise ValueError(f"the registry has {active} parties, a sum needs {registry.minimum}")
        if differ_by < 1:
            raise ValueError(f"differ_by is {differ_by}, must be at least 1")
        self.registry, self.dropout, self.corrupt = registry, dropout, corrupt
        # As TrustSettings has them, unless all have others
        self._block_cap, self._most_points = block_cap, most_points
        self._differ_by = differ_by
        self._earlier: dict[str, list[int]] = {}  # parties in earlier sums, by purpose
        self.run_id = os.urandom(RUN_BYTES)
        self.blamed: list[Reason] = []  # their clients are numbers of parties
        self.excluded: set[int] = set()
        self.homes: dict[int, int] = {}  # party: SuperNode
        self._at: dict[int, int] = {}  # SuperNode: party
        self.bindings: dict[int, tuple[Binding, bytes]] = {}
        self.epoch: Epoch | None = None
        self._number, self._last = -1, -1
        self._request: RevealRequest | None = None
        self._seeds: dict[int, bytes] = {}
        self._rounds: dict[int, PartyRound] = {}

    def exclude(self, parties: Iterable[int]) -> None:
        """Exclude parties whose fault was proven before the run was resumed."""
        self.excluded |= set(parties)

    def renew(self, registry: Registry) -> None:
        """Take another version of the registry: earlier signatures no longer count."""
        old, new = self.registry.parties, registry.parties
        self.registry = registry
        LOG.warning(
            "the registry is another one now, %s: parties that have it bind anew; joined: %s, with "
            "another key: %s, revoked: %s",
            registry.digest.hex()[:16],
            sorted(new.keys() - old.keys()),
            [number for number in old.keys() & new.keys() if old[number].key != new[number].key],
            [n for n in old if n not in new or (new[n].revoked and not old[n].revoked)],
        )
        self.epoch, self._rounds, self.homes, self._at = None, {}, {}, {}

    # Epochs

    def check_binding(self, reply: BindReply) -> Binding:
        commitment = reply.commitment.tobytes()
        key, clients = reply.channel_key.tobytes(), tuple(reply.clients.tolist())
        if reply.declared.size and not np.array_equal(reply.declared[:, 0], reply.clients):
            raise MalformedReplyError(f"party {reply.party}: declares points of other clients")
        blocks = tuple(reply.declared[:, 1].tolist())
        binding = Binding(reply.run_id, reply.party, clients, key, commitment, blocks)
        if reply.run_id != self.run_id:
            raise MalformedReplyError(f"run {reply.run_id.hex()}, expected {self.run_id.hex()}")
        try:
            binding.verify(self.registry, reply.signature.tobytes(), self._block_cap)
        except IdentityError as error:
            raise MalformedReplyError(str(error)) from error
        if sum(blocks) > self._most_points:
            raise MalformedReplyError(
                f"party {reply.party}: declares {sum(blocks)} points in all, at most "
                f"{self._most_points} are taken of one SuperNode"
            )
        return binding

    def take_binding(self, node: int, reply: BindReply) -> None:
        """Store a SuperNode's statement, if its party signed it."""
        self.bindings[reply.party] = self.check_binding(reply), reply.signature.tobytes()
        self.settle(node, reply.party)

    def settle(self, node: int, party: int) -> None:
        self.homes[party], self._at[node] = node, party

    def move(self, old: int, node: int) -> None:
        self.settle(node, self._party(old))
        for one in self._rounds.values():
            one.inner.move(old, node)

    def forget(self, node: int) -> None:
        """Remove a SuperNode; its party counts as absent until the next epoch."""
        self.homes = {party: at for party, at in self.homes.items() if at != node}

    @property
    def minimum(self) -> int:
        return self.registry.minimum

    @property
    def parties(self) -> list[int]:
        return sorted(self.homes.keys() - self.excluded)

    @property
    def lists(self) -> int:
        """Number of lists of commitments that were shown; parties answer ``MOST_LISTS``."""
        return self._number + 1

    def reveal_requests(
        self, limit: float, present: Collection[int] | None = None
    ) -> dict[int, RevealRequest]:
        """Show all present parties the same list of commitments; no party if they are too few."""
        # limit: largest size of a number in the sums
        parties = [party for party in self.parties if present is None or party in present]
        if len(parties) < self.minimum:
            return {}
        self._number, self._seeds = self._number + 1, {}
        commitments = [self.bindings[party][0].seed_commitment for party in parties]
        numbers = np.array(parties, np.int64)
        rows = rows_of(commitments, len(parties), -1)
        bindings = [self.bindings[party][0] for party in parties]
        points = [pair for one in bindings for pair in zip(one.clients, one.blocks, strict=False)]
        self._request = RevealRequest(
            self.run_id,
            self._number,
            self.dropout,
            self.corrupt,
            fewest_in_a_sum(len(parties), self.dropout, self.corrupt, self.minimum),
            self._differ_by,
            limit,
            numbers,
            rows,
            np.array(sorted(points), np.int64).reshape(-1, 2),
        )
        return {self.homes[party]: self._request for party in parties}

    def take_seed(self, node: int, reply: RevealReply) -> None:
        party, seed = self._party(node), reply.seed.tobytes()
        self._check(reply.run_id, self.run_id, reply.number, self._number)
        if commit(self.run_id, party, seed) != self.bindings[party][0].seed_commitment:
            text = "it has committed to another seed of the graph"
            self._blame(Reason(Cause.PROVEN, text, party), node)
            raise MalformedReplyError(f"party {party}: {text}")
        self._seeds[party] = seed

    def epoch_requests(self) -> dict[int, EpochRequest]:
        """Show all seeds; none if one is missing: the next list is without that party."""
        request = self._request
        assert request is not None
        parties = request.parties.tolist()
        if missing := [party for party in parties if party not in self._seeds]:
            for party in missing:
                self.homes.pop(party, None)
            return {}
        seeds = rows_of([self._seeds[party] for party in parties], len(parties), -1)
        self.epoch = Epoch.agreed(request, self.registry.digest, seeds)
        self._rounds = {}
        warn_of_few(len(parties), request.minimum, self._differ_by)
        return {self.homes[party]: self._epoch_request(party, seeds) for party in parties}

    def _epoch_request(self, party: int, seeds: Bytes) -> EpochRequest:
        epoch = self.epoch
        assert epoch is not None
        row = epoch.parties[epoch.partners[epoch.index(party)]].tolist()
        signed = [self.bindings[partner] for partner in row]
        clients = [np.array(binding.clients, np.int64) for binding, _ in signed]
        return EpochRequest(
            self.run_id,
            seeds,
            rows_of([binding.channel_key for binding, _ in signed], len(row), -1),
            rows_of([signature for _, signature in signed], len(row), -1),
            np.array([each.size for each in clients], np.int64),
            np.concatenate(clients),
        )

    def take_epoch(self, node: int, reply: EpochReply) -> None:
        assert self.epoch is not None
        if reply.digest.tobytes() != self.epoch.digest:
            raise MalformedReplyError(f"party {self._party(node)} has another epoch")

    # Rounds

    def open_round(
        self, number: int, present: Collection[int] | None = None
    ) -> dict[int, PrepareRequest]:
        """Begin a round of the epoch; parties that are not connected or not present are absent."""
        epoch = self.epoch
        assert epoch is not None
        if number <= self._last:
            raise ValueError(f"round {number} is not after {self._last}, the last one")
        self._last = number
        for old in sorted(self._rounds)[: 1 - KEPT_ROUNDS]:
            del self._rounds[old]
        present = set(self.parties) & set(self.parties if present is None else present)
        nodes = [
            self.homes[party] if party in present else ABSENT - index
            for index, party in enumerate(epoch.parties.tolist())
        ]
        keys = [self.bindings[party][0].channel_key for party in epoch.parties.tolist()]
        inner = SumRound(
            epoch.id,
            number,
            epoch.parties,
            nodes,
            [[party] for party in epoch.parties.tolist()],
            rows_of(keys, len(keys), -1),
            epoch.partners,
            epoch.threshold,
            epoch.minimum,
            self._blame,
        )
        self._rounds[number] = PartyRound(epoch, inner)
        return {node: one for node, one in inner.prepare_requests().items() if node >= 0}

    def take_prepared(self, node: int, reply: PrepareReply, signed: SignedKey) -> None:
        one, party = self._round(reply.server_round), self._party(node)
        parts = one.epoch.key_parts(reply.server_round, reply.round_keys.tobytes())
        self._verify(party, signed.signature, ROUND_KEY, parts)
        one.inner.take(node, reply)
        one.keys[one.epoch.index(party)] = signed.signature

    def mask_requests(
        self, number: int, length: int, word: int, terms: SumTerms
    ) -> dict[int, tuple[MaskRequest, Ready]]:
        one = self._round(number)
        epoch = one.epoch
        requests = one.mask_requests(length, word, terms, self._earlier.get(terms.purpose, ()))
        ready = one.inner.live.copy()
        result = {}
        for node, request in requests.items():
            if self.homes.get(party := self._at[node]) != node:
                continue  # it has gone since it prepared
            row = epoch.partners[epoch.index(party)]
            result[node] = request, Ready(ready, one.keys[row[ready[row]]])
        return result

    def take_masked(self, node: int, reply: MaskedReply) -> None:
        self._round(reply.server_round).take_masked(node, self._party(node), reply)

    def list_requests(self, number: int) -> dict[int, ListRequest]:
        one = self._round(number)
        epoch = one.epoch
        earlier = self._earlier.setdefault(one.purpose, [])
        if one.inner.skipped is not None or (who := one.settle(earlier)) is None:
            return {}
        listed = one.inner.contributed.copy()
        try:
            epoch.check_present(listed, "sent their vectors")
        except RefusedError as error:
            one.inner.skip(f"{error}; nothing is revealed")
            return {}
        if who not in earlier:
            earlier.append(who)
        request = ListRequest(epoch.id, number, listed)
        return {self.homes[party]: request for party in epoch.parties[listed].tolist()}

    def take_list(self, node: int, reply: ListReply) -> None:
        one, party = self._round(reply.server_round), self._party(node)
        inner = one.inner
        parts = one.epoch.signed_parts(
            reply.server_round, inner.live, inner.contributed, inner.terms
        )
        self._verify(party, reply.signature, LIST, parts)
        index = one.epoch.index(party)
        one.lists[index], one.signed[index] = reply.signature, True

    def unmask_requests(self, number: int) -> dict[int, tuple[UnmaskRequest, Signatures]]:
        one = self._round(number)
        epoch = one.epoch
        result = {}
        for node, request in one.inner.unmask_requests().items():
            if node < 0 or not one.signed[index := epoch.index(self._at[node])]:
                continue
            columns = np.flatnonzero(one.signed[epoch.partners[index]])[: epoch.threshold]
            signatures = one.lists[epoch.partners[index][columns]]
            if columns.size < epoch.threshold:  # it would have to take us for a liar
                continue
            result[node] = request, Signatures(columns.astype(np.int64), signatures)
        return result

    def take_shares(self, node: int, reply: UnmaskReply) -> None:
        self._round(reply.server_round).inner.take(node, reply)

    def result(self, number: int) -> SumResult | Skipped:
        """End a round; contributors are numbers of parties."""
        result = self._round(number).inner.result()
        del self._rounds[number]
        return result

    def clients_of(self, parties: Collection[int]) -> list[int]:
        return sorted(c for party in parties for c in self.bindings[party][0].clients)

    def _round(self, number: int) -> PartyRound:
        if number not in self._rounds:
            raise MalformedReplyError(f"round {number} is not open; open: {sorted(self._rounds)}")
        return self._rounds[number]

    def _party(self, node: int) -> int:
        party = self._at.get(node)
        if party is None or self.homes.get(party) != node:
            raise MalformedReplyError(f"node {node} is no party")
        return party

    def _verify(
        self, party: int, signature: Bytes, purpose: bytes, parts: tuple[bytes, ...]
    ) -> None:
        if not self.registry.verify(party, signature.tobytes(), purpose, *parts):
            raise MalformedReplyError(f"party {party}: its signature is not valid")

    def _check(self, run_id: bytes, wanted: bytes, number: int, expected: int) -> None:
        if run_id != wanted or number != expected:
            raise MalformedReplyError(
                f"run {run_id.hex()}, {number}; expected {wanted.hex()}, {expected}"
            )

    def _blame(self, reason: Reason, node: int | None) -> None:
        # node: where it was proven, so that it is not asked again
        self.blamed.append(reason)
        if node is not None and reason.client is not None:
            self.excluded.add(reason.client)
