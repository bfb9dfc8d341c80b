"""The server's side of the secure sum without trust: the server carries, the parties check.

An honest server makes the parties' checks too, so that no party's lie makes it look like a liar. A
sum takes three exchanges: masked vectors, the signed list and shares; the last also prepares the
next sum. An epoch begins, with three more, when SuperNodes have joined.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from flower_graph.errors import IdentityError, MalformedReplyError, RefusedError, one_line
from flower_graph.secure.channel import rows_of
from flower_graph.secure.node_config import (
    DIFFER_BY,
    MOST_BLOCK,
    MOST_POINTS,
    USUAL_DIFFERENCE,
)
from flower_graph.secure.parties.differences import choose, members_of, set_of
from flower_graph.secure.parties.epoch import MASKS, MOST_LISTS, Epoch, commit, fewest_in_a_sum
from flower_graph.secure.parties.identity import SIGNATURE_BYTES
from flower_graph.secure.parties.messages import (
    BindReply,
    BindRequest,
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
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.ring import RingArray
from flower_graph.secure.sum.messages import (
    MaskedReply,
    MaskRequest,
    PrepareReply,
    SumTerms,
    UnmaskRequest,
)
from flower_graph.secure.sum.round import (
    Blame,
    Cause,
    Reason,
    Skipped,
    StageReply,
    SumResult,
    SumRound,
)
from flower_graph.secure.sum.server import M, Send, SumServer
from flower_graph.wire.codec import Message
from flower_graph.wire.exchange import Replies
from flower_graph.wire.fields import Bytes
from flower_graph.wire.ledger import setup_bytes

LOG = logging.getLogger(__name__)
TRIES = 3  # lists of commitments, while parties show no seed
# Parties beyond `differ-by` that may be left out, should some vanish that are ready
SPARE = 2


class PartyRound(SumRound):
    """A round of sums over parties: with signatures, and the parties to leave out of it."""

    # Parties sign no list that differs from an earlier one by too few (``differences.py``). The
    # server knows which parties to leave out only when all vectors are there, but it adds vectors
    # up as they come. So the sums of a few parties, by turns, are kept beside the total, to be
    # taken out again.

    def __init__(
        self,
        epoch: Epoch,
        number: int,
        nodes: list[int | None],
        channel_keys: Bytes,
        asked: set[int],
        blame: Blame,
    ) -> None:
        # asked: clients; the parties' own numbers stand for clients in the rows of the round
        parties = epoch.parties
        super().__init__(
            epoch.id,
            number,
            parties,
            nodes,
            [[party] for party in parties.tolist()],
            channel_keys,
            epoch.partners,
            epoch.threshold,
            epoch.minimum,
            blame,
        )
        self.epoch, self.asked = epoch, asked
        self.left_out: set[int] = set()  # clients, by their SuperNode
        self.keys = np.zeros((parties.size, SIGNATURE_BYTES), np.uint8)
        self.lists = np.zeros((parties.size, SIGNATURE_BYTES), np.uint8)
        self.signed: MASKS = np.zeros(parties.size, np.bool_)
        self.purpose = ""
        self._spare: list[int] = []  # parties, those that are left out first
        self._kept: dict[int, RingArray] = {}  # their sums

    def ask_masked(
        self, length: int, word: int, terms: SumTerms, earlier: Collection[int]
    ) -> dict[int, MaskRequest]:
        """Ask for masked sums; choose parties to leave out if the sum is not allowed with them."""
        requests = self.mask_requests(length, word, terms)
        self.purpose, apart = terms.purpose, self.epoch.differ_by
        ready = self.parties[self.live].tolist()
        start = self.number * (apart + SPARE) % max(1, len(ready))
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
        self.take(node, reply)
        if party in self._spare:
            self._kept[party] = reply.total

    def settle(self, earlier: Collection[int]) -> int | None:
        """Leave out parties that this sum's list may not have; return the set, if any is left."""
        present = set_of(self.parties[self.contributed].tolist())
        chosen = self._choose(present, earlier, [one for one in self._spare if one in self._kept])
        if chosen is None:
            self.skip(
                f"whoever is left out, this sum differs by fewer than {self.epoch.differ_by} "
                f"SuperNodes from an earlier one ({DIFFER_BY}), or {self.minimum} are not left; "
                "nothing is revealed"
            )
            return None
        for party in members_of(present & ~chosen):
            why = f"or this sum and an earlier one would differ by too few SuperNodes ({DIFFER_BY})"
            self.leave_out(self.epoch.index(party), self._kept[party], why)
        self._kept.clear()
        return chosen

    def _choose(self, present: int, earlier: Collection[int], spare: list[int]) -> int | None:
        apart, fewest, number = self.epoch.differ_by, self.minimum, self.number
        return choose(present, earlier, apart, spare=spare, fewest=fewest, number=number)


class PartySums(SumServer):
    """Carries out sums over parties, SuperNodes with registered keys; callers see only clients.

    `begin` begins an epoch once all that joined have enrolled; `sign` comes between masked vectors
    and shares.

    Parameters
    ----------
    registry : Path or str
        The registry's file, which is read again before each sum.
    dropout, corrupt : float
        Shares of the parties that may vanish during a sum, and that may collude with the server.
    differ_by : int
        SuperNodes that two sums of a purpose differ by at least, unless they have the same; the
        server leaves out more to comply. No party takes less than its own ``differ-by``.

    Raises
    ------
    IdentityError
        If the registry cannot be read.
    ValueError
        If a share is impossible, or the registry has too few parties for a sum.
    """

    enrolment = ("sum_bind", BindRequest, BindReply)
    prepared = (PrepareReply, SignedKey)

    def __init__(
        self,
        registry: Path | str,
        *,
        dropout: float = 0.3,
        corrupt: float = 0.1,
        differ_by: int = USUAL_DIFFERENCE,
    ) -> None:
        super().__init__(dropout=dropout, corrupt=corrupt)
        for name, share in (("dropout", dropout), ("corrupt", corrupt)):
            if share >= 0.5:
                raise ValueError(f"{name} is {share}, must be from 0 to below 0.5")
        if differ_by < 1:
            raise ValueError(f"differ_by is {differ_by}, must be at least 1")
        self._registry_file, self.registry = registry, Registry.read(registry)
        if (active := len(self.registry.active)) < self.fewest_nodes:
            raise ValueError(f"the registry has {active} parties, a sum needs {self.fewest_nodes}")
        self._differ_by = differ_by
        self._earlier: dict[str, list[int]] = {}  # parties in earlier sums, by purpose
        self._cheating: set[int] = set()  # parties
        self.bindings: dict[int, BindReply] = {}  # of parties
        self._unbound: set[int] = set()  # SuperNodes that are to bind under another registry
        self._fresh: set[int] = set()  # parties that have bound themselves for the next epoch
        # The parties' agreement; None before the first epoch, or under a new registry
        self.epoch: Epoch | None = None
        self.lists = 0  # of commitments that were shown; parties answer ``MOST_LISTS``
        self._request: RevealRequest | None = None
        self._seeds: dict[int, bytes] = {}

    @property
    def fewest_nodes(self) -> int:
        return self.registry.minimum

    @property
    def parties(self) -> list[int]:
        """Parties that are connected and have not cheated, ascending."""
        return sorted(set(self._at.values()) - self._cheating)

    @property
    def members(self) -> list[int]:
        """Parties of the epoch, absent ones too, ascending; none before there is one."""
        return [] if self.epoch is None else self.epoch.parties.tolist()

    @property
    def _taking_part(self) -> set[int]:
        return set(self.members) - self._cheating

    @property
    def excluded(self) -> set[int]:
        return set(self.hosted(self._cheating & self._members.keys()))

    @property
    def out(self) -> set[int]:
        return set(self.hosted(self._members.keys() - self._taking_part))

    def hosted(self, parties: Iterable[int]) -> list[int]:
        return sorted(client for party in parties for client in self._members[party].clients)

    def epoch_clients(self) -> dict[int, list[int]]:
        return {party: self.hosted([party]) for party in sorted(self._taking_part)}

    # Who is there

    def check_keys(self, node: int, reply: BindReply) -> None:
        """Refuse a statement that its party has not signed, or may not sign."""
        if reply.run_id != self.run_id:
            raise MalformedReplyError(f"run {reply.run_id.hex()}, expected {self.run_id.hex()}")
        try:
            reply.verify(self.registry, MOST_BLOCK)
        except IdentityError as error:
            raise MalformedReplyError(str(error)) from error
        if (points := reply.declared[:, 1].sum()) > MOST_POINTS:
            raise MalformedReplyError(f"party {reply.party}: {points} points, above {MOST_POINTS}")

    def party_of(self, reply: BindReply) -> int:
        return reply.party

    def knows(self, old: int, reply: BindReply) -> bool:
        """Tell whether a SuperNode's party is in the epoch with exactly these clients and key."""
        return reply.party in self._taking_part and super().knows(old, reply)

    def enroll(self, node: int, reply: BindReply, gone: Collection[int] = ()) -> None:
        self.check_keys(node, reply)
        party, home = reply.party, self.node_of_party(reply.party)
        if home not in (None, node, *gone):
            raise MalformedReplyError(f"party {party} is at node {home} already")
        shown = self._member(node, reply)
        if party in self._taking_part and replace(self._members[party], node=node) == shown:
            self._settle(node, reply)  # it goes on, with the statement that all know
        elif self.lists >= MOST_LISTS:
            raise MalformedReplyError(
                f"parties answer {MOST_LISTS} lists of commitments a run: nobody can join any more"
            )
        else:
            self.take_binding(node, reply)
            self._fresh.add(party)

    def take_binding(self, node: int, reply: BindReply) -> None:
        """Store a SuperNode's statement, if its party signed it."""
        self.check_keys(node, reply)
        self.bindings[reply.party] = reply
        self._settle(node, reply)

    def forget(self, node: int) -> None:
        """Remove a SuperNode; its party counts as absent until it is back."""
        self._fresh.discard(self._at.get(node, -1))
        super().forget(node)

    def exclude(self, clients: Iterable[int]) -> None:
        """Exclude the parties of clients whose fault was proven before the run was resumed."""
        parties = self.registry.parties.values()
        self._cheating |= {p.number for c in clients for p in parties if p.may_host([c])}

    def renew(self) -> None:
        """Read the registry again; under another version all must bind anew, and begin an epoch."""
        try:
            registry = Registry.read(self._registry_file)
        except IdentityError as error:
            LOG.error("%s: the version before goes on", error)
            return
        if registry.digest == self.registry.digest:
            return
        old, new = self.registry.parties, registry.parties
        LOG.warning(
            "the registry is another one now, %s: parties that have it bind anew; joined: %s, with "
            "another key: %s, revoked: %s",
            registry.digest.hex()[:16],
            sorted(new.keys() - old.keys()),
            [number for number in old.keys() & new.keys() if old[number].key != new[number].key],
            [n for n in old if n not in new or (new[n].revoked and not old[n].revoked)],
        )
        self.registry, self._unbound, self.epoch = registry, set(self._at), None
        self._give_up_rounds()
        for node in self._unbound:
            self.forget(node)

    def _give_up_rounds(self) -> None:
        self._unopened |= {number: self._too_few(number) for number in self._rounds}
        self._rounds.clear()

    def _too_few(self, number: int) -> Skipped:
        few = f"{len(self.parties)} parties, a sum needs {self.fewest_nodes}"
        return Skipped(Reason(Cause.SKIPPED, few, round=number))

    # Epochs

    def begin(self, server_round: int, send: Send, nodes: Collection[int], limit: float) -> bool:
        """Begin an epoch if a party has joined; return whether one has begun."""
        self._fresh |= self._bind(server_round, send, self._unbound.intersection(nodes))
        self._unbound.clear()
        present = {party for party in self.parties if self.node_of_party(party) in nodes}
        if present <= self._taking_part - self._fresh:
            return False
        for _ in range(TRIES):
            if self.lists >= MOST_LISTS:
                return False
            old = {node for node, party in self._at.items() if party in present - self._fresh}
            present &= self._bind(server_round, send, old) | self._fresh
            if not (lists := self.reveal_requests(limit, present)):
                return False
            self._fresh -= present  # whatever comes of it, these seeds are shown
            self._exchange(send, server_round, "sum_reveal", lists, RevealReply, self.take_seed)
            if epochs := self.epoch_requests():
                self._exchange(send, server_round, "sum_epoch", epochs, EpochReply, self.take_epoch)
                return True
            present &= set(self._at.values())
        return False

    def _bind(self, server_round: int, send: Send, nodes: Collection[int]) -> set[int]:
        """Have the parties of some SuperNodes commit to another seed; return those that did."""
        requests = dict.fromkeys(sorted(nodes), BindRequest(self.run_id))
        take = self.take_binding
        replies = self._exchange(send, server_round, "sum_bind", requests, BindReply, take)
        for entry in replies.rejected:  # with a version of the registry that is old, for one
            self.forget(entry.node_id)
        return {party for node, party in self._at.items() if node in replies.values}

    def reveal_requests(
        self, limit: float, present: Collection[int] | None = None
    ) -> dict[int, RevealRequest]:
        """Show all present parties the same list of commitments; no party if they are too few."""
        # limit: largest size of a number in the sums
        parties = [party for party in self.parties if present is None or party in present]
        if len(parties) < self.fewest_nodes:
            return {}
        bindings = [self.bindings[party] for party in parties]
        declared = np.concatenate([one.declared for one in bindings])
        self._request = RevealRequest(
            self.run_id,
            self.lists,
            self.dropout,
            self.corrupt,
            fewest_in_a_sum(len(parties), self.dropout, self.corrupt, self.fewest_nodes),
            self._differ_by,
            limit,
            np.array(parties, np.int64),
            np.stack([one.commitment for one in bindings]),
            declared[np.argsort(declared[:, 0])],
        )
        self.lists, self._seeds = self.lists + 1, {}
        return {node: self._request for node, party in self._at.items() if party in parties}

    def take_seed(self, node: int, reply: RevealReply) -> None:
        party, seed, request = self._party(node), reply.seed.tobytes(), self._request
        assert request is not None
        if (reply.run_id, reply.number) != (self.run_id, request.number):
            raise MalformedReplyError(
                f"run {reply.run_id.hex()}, {reply.number}: not the list that is open"
            )
        if commit(self.run_id, party, seed) != self.bindings[party].commitment.tobytes():
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
            for node in [node for node, party in self._at.items() if party in missing]:
                self._leave(node)
            return {}
        seeds = rows_of([self._seeds[party] for party in parties], len(parties), -1)
        epoch = self.epoch = Epoch.agreed(request, self.registry.digest, seeds)
        self._give_up_rounds()
        if self._differ_by > max(1, len(parties) - epoch.minimum):
            LOG.warning(
                "%d SuperNodes, of which %d must be in every sum: once a sum of all was made, "
                "there is none while one is missing, as it would differ by fewer than %d (%s)",
                len(parties),
                epoch.minimum,
                self._differ_by,
                DIFFER_BY,
            )
        return {
            node: self._epoch_request(epoch, party, seeds)
            for node, party in self._at.items()
            if party in self._seeds
        }

    def _epoch_request(self, epoch: Epoch, party: int, seeds: Bytes) -> EpochRequest:
        row = epoch.parties[epoch.partners[epoch.index(party)]].tolist()
        signed = [self.bindings[partner] for partner in row]
        return EpochRequest(
            self.run_id,
            seeds,
            np.stack([binding.channel_key for binding in signed]),
            np.stack([binding.signature for binding in signed]),
            np.array([binding.clients.size for binding in signed], np.int64),
            np.concatenate([binding.clients for binding in signed]),
        )

    def take_epoch(self, node: int, reply: EpochReply) -> None:
        assert self.epoch is not None
        if reply.digest.tobytes() != self.epoch.digest:
            raise MalformedReplyError(f"party {self._party(node)} has another epoch")

    # A round, as ``SumServer`` has it

    def _begin(self, number: int, clients: set[int]) -> SumRound | Skipped:
        """Begin a round of the epoch; parties without any of the clients are absent."""
        if (epoch := self.epoch) is None:
            return self._too_few(number)
        parties, nodes = epoch.parties.tolist(), list[int | None]()
        for party in parties:
            is_there = party not in self._cheating
            is_there = is_there and not clients.isdisjoint(self._members[party].clients)
            nodes.append(self._members[party].node if is_there else None)
        rows = rows_of([self._members[party].channel_key for party in parties], len(parties), -1)
        return PartyRound(epoch, number, nodes, rows, clients, self._blame)

    def take(self, node: int, reply: StageReply, *more: Message) -> None:
        number = reply.server_round
        one = self._round(number)
        if isinstance(reply, PrepareReply):
            party, (key,) = self._party(node), more
            assert isinstance(key, SignedKey)  # as ``prepared`` says
            parts = one.epoch.key_parts(number, reply.round_keys.tobytes())
            self._verify(party, key.signature, ROUND_KEY, parts)
            one.take(node, reply)
            one.keys[one.epoch.index(party)] = key.signature
        elif isinstance(reply, MaskedReply):
            party = self._party(node)
            one.take_masked(node, party, replace(reply, left_out={}))
            for client in sorted(one.asked.intersection(self.hosted([party]), reply.left_out)):
                one.left_out.add(client)
                why = one_line(reply.left_out[client])
                self.blamed.append(Reason(Cause.LEFT_OUT, why, client, number))
        else:
            one.take(node, reply)

    def mask_requests(
        self, number: int, length: int, word: int, terms: SumTerms
    ) -> dict[int, tuple[MaskRequest, Ready]]:
        if number in self._unopened:
            return {}
        one = self._round(number)
        epoch = one.epoch
        requests = one.ask_masked(length, word, terms, self._earlier.get(terms.purpose, ()))
        ready = one.live.copy()
        result = {}
        for node, request in requests.items():
            if node not in self._at:
                continue  # it has gone since it prepared
            row = epoch.partners[epoch.index(self._at[node])]
            result[node] = request, Ready(ready, one.keys[row[ready[row]]])
        return result

    def sign(self, number: int, server_round: int, send: Send) -> None:
        lists = {} if number in self._unopened else self.list_requests(number)
        self._exchange(send, server_round, "sum_list", lists, ListReply, self.take_list)

    def list_requests(self, number: int) -> dict[int, ListRequest]:
        one = self._round(number)
        earlier = self._earlier.setdefault(one.purpose, [])
        if one.skipped is not None or (who := one.settle(earlier)) is None:
            return {}
        listed = one.contributed.copy()
        try:
            one.epoch.check_present(listed, "sent their vectors")
        except RefusedError as error:
            one.skip(f"{error}; nothing is revealed")
            return {}
        if who not in earlier:
            earlier.append(who)
        request = ListRequest(one.epoch.id, number, listed)
        parties = set(one.parties[listed].tolist())
        return {node: request for node, party in self._at.items() if party in parties}

    def take_list(self, node: int, reply: ListReply) -> None:
        one, party = self._round(reply.server_round), self._party(node)
        parts = one.epoch.signed_parts(reply.server_round, one.live, one.contributed, one.terms)
        self._verify(party, reply.signature, LIST, parts)
        index = one.epoch.index(party)
        one.lists[index], one.signed[index] = reply.signature, True

    def unmask_requests(self, number: int) -> dict[int, tuple[UnmaskRequest, Signatures]]:
        if number in self._unopened:
            return {}
        one = self._round(number)
        epoch, result = one.epoch, {}
        for node, request in one.unmask_requests().items():
            if node not in self._at or not one.signed[index := epoch.index(self._at[node])]:
                continue
            columns = np.flatnonzero(one.signed[epoch.partners[index]])[: epoch.threshold]
            signatures = one.lists[epoch.partners[index][columns]]
            if columns.size < epoch.threshold:  # it would have to take us for a liar
                continue
            result[node] = request, Signatures(columns.astype(np.int64), signatures)
        return result

    def _ended(self, one: SumRound, result: SumResult | Skipped) -> SumResult | Skipped:
        assert isinstance(one, PartyRound)
        if isinstance(result, Skipped):
            return result
        local = one.asked.intersection(self.hosted(result.contributors.tolist())) - one.left_out
        return SumResult(result.total, np.array(sorted(local), np.int64))

    def _round(self, number: int) -> PartyRound:
        one = super()._round(number)
        assert isinstance(one, PartyRound)
        return one

    def _verify(
        self, party: int, signature: Bytes, purpose: bytes, parts: tuple[bytes, ...]
    ) -> None:
        if not self.registry.verify(party, signature.tobytes(), purpose, *parts):
            raise MalformedReplyError(f"party {party}: its signature is not valid")

    def _blame(self, reason: Reason, node: int | None) -> None:
        """Record a party's fault for all its clients; if it is proven, exclude them."""
        party = reason.client
        assert party is not None  # in the rows of a round parties stand for clients
        text = f"{reason.text} (party {party})"
        self.blamed += [replace(reason, client=c, text=text) for c in self.hosted([party])]
        if node is not None:
            self._cheating.add(party)

    def _exchange(
        self,
        send: Send,
        server_round: int,
        action: str,
        requests: Mapping[int, Message],
        kind: type[M],
        take: Callable[[int, M], object],
    ) -> Replies[object]:
        if not requests:
            return Replies()
        return send(
            {node: request.to_record() for node, request in requests.items()},
            server_round,
            lambda node, content: take(node, kind.read(content)),
            message_type=f"train.{action}",
            max_reply_bytes=setup_bytes(),
        )
