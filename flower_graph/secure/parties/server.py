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

from flower_graph.errors import IdentityError, MalformedReplyError, RefusedError
from flower_graph.secure.channel import rows_of
from flower_graph.secure.node_config import (
    DIFFER_BY,
    MOST_BLOCK,
    MOST_POINTS,
    USUAL_DIFFERENCE,
)
from flower_graph.secure.parties.differences import choose, members_of, set_of
from flower_graph.secure.parties.epoch import (
    LIST,
    MASKS,
    MOST_LISTS,
    ROUND_KEY,
    Epoch,
    commit,
    fewest_in_a_sum,
)
from flower_graph.secure.parties.identity import SIGNATURE_BYTES
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.ring import RingArray
from flower_graph.secure.sum.messages import (
    BindReply,
    BindRequest,
    EpochReply,
    EpochRequest,
    ListReply,
    ListRequest,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    RevealReply,
    RevealRequest,
    SumTerms,
    UnmaskRequest,
)
from flower_graph.secure.sum.round import Blame, Cause, Circle, Reason, SumRound
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
        registry: Registry,
        earlier: dict[str, list[int]],
        number: int,
        nodes: list[int | None],
        hosted: list[list[int]],
        channel_keys: Bytes,
        blame: Blame,
    ) -> None:
        # earlier: parties in earlier sums, by purpose
        circle = Circle(epoch.id, epoch.parties, epoch.partners, epoch.threshold, epoch.minimum)
        super().__init__(circle, number, nodes, hosted, channel_keys, blame)
        self.epoch, self._registry, self._earlier = epoch, registry, earlier
        self.keys = np.zeros((epoch.parties.size, SIGNATURE_BYTES), np.uint8)
        self.lists = np.zeros_like(self.keys)
        self.signed: MASKS = np.zeros(epoch.parties.size, np.bool_)
        self._sums: list[int] = []  # earlier sums of the purpose
        self._spare: list[int] = []  # parties, those that are left out first
        self._kept: dict[int, RingArray] = {}  # their sums

    def _take_prepare(self, row: int, reply: PrepareReply) -> None:
        parts = self.epoch.key_parts(self.number, reply.round_keys.tobytes())
        self.keys[row] = self._verified(row, reply.signature, ROUND_KEY, parts)
        super()._take_prepare(row, reply)

    def mask_requests(
        self, length: int, word: int, terms: SumTerms, out: Collection[int] = ()
    ) -> dict[int, MaskRequest]:
        """Choose parties to leave out, too, if the sum is not allowed with them."""
        requests = super().mask_requests(length, word, terms, out)
        earlier = self._sums = self._earlier.setdefault(terms.purpose, [])
        apart, ready = self.epoch.differ_by, self.parties[self.live].tolist()
        start = self.number * (apart + SPARE) % max(1, len(ready))
        # First those that an earlier sum was made without: its set can be had again.
        order = sorted(
            ready[start:] + ready[:start],
            key=lambda party: -sum(not one >> party & 1 for one in earlier),
        )
        chosen = self._choose(set_of(ready), order)
        left_out = [] if chosen is None else members_of(set_of(ready) & ~chosen)
        others = [party for party in order if party not in left_out]
        self._spare = left_out + others[: apart + SPARE]
        return requests

    def _mask_request(self, row: int, length: int, word: int) -> MaskRequest:
        request, partners = super()._mask_request(row, length, word), self.partners[row]
        signatures = self.keys[partners[self.live[partners]]]
        return replace(request, ready=self.live.copy(), signatures=signatures)

    def _take_masked(self, row: int, reply: MaskedReply) -> None:
        super()._take_masked(row, reply)
        if (party := int(self.parties[row])) in self._spare:
            self._kept[party] = reply.total

    def list_requests(self) -> dict[int, ListRequest]:
        """Leave out parties that this sum's list may not have; ask the others to sign it."""
        if self.skipped is not None:
            return {}
        present = set_of(self.parties[self.contributed].tolist())
        chosen = self._choose(present, [one for one in self._spare if one in self._kept])
        if chosen is None:
            self.skip(
                f"whoever is left out, this sum differs by fewer than {self.epoch.differ_by} "
                f"SuperNodes from an earlier one ({DIFFER_BY}), or {self.minimum} are not left; "
                "nothing is revealed"
            )
            return {}
        for party in members_of(present & ~chosen):
            self._leave_out(party, self._kept[party])
        self._kept.clear()
        listed = self.contributed.copy()
        try:
            self.epoch.check_present(listed, "sent their vectors")
        except RefusedError as error:
            self.skip(f"{error}; nothing is revealed")
            return {}
        if chosen not in self._sums:
            self._sums.append(chosen)
        request = ListRequest(self.run_id, self.number, listed)
        return {node: request for node, row in self._rows.items() if listed[row]}

    def take_list(self, node: int, reply: ListReply) -> None:
        row = self._row(node)
        parts = self.epoch.signed_parts(self.number, self.live, self.contributed, self.terms)
        self.lists[row], self.signed[row] = self._verified(row, reply.signature, LIST, parts), True

    def unmask_requests(self) -> dict[int, UnmaskRequest]:
        """Ask the parties whose lists enough of their partners have signed; others would refuse."""
        result = {}
        for node, request in super().unmask_requests().items():
            partners = self.partners[row := self._rows[node]]
            columns = np.flatnonzero(self.signed[partners])[: self.threshold]
            if self.signed[row] and columns.size == self.threshold:
                lists = self.lists[partners[columns]]
                result[node] = replace(request, columns=columns, signatures=lists)
        return result

    def _leave_out(self, party: int, total: RingArray) -> None:
        row = self.epoch.index(party)
        self.total -= total
        self.contributed[row] = False
        why = f"or this sum and an earlier one would differ by too few SuperNodes ({DIFFER_BY})"
        for client in self._hosted[row]:
            self._note(Cause.LEFT_OUT, client, f"{why} (party {party})")

    def _choose(self, present: int, spare: list[int]) -> int | None:
        apart, fewest, number = self.epoch.differ_by, self.minimum, self.number
        return choose(present, self._sums, apart, spare=spare, fewest=fewest, number=number)

    def _verified(
        self, row: int, signature: Bytes | None, purpose: bytes, parts: tuple[bytes, ...]
    ) -> Bytes:
        party = int(self.parties[row])
        signed = b"" if signature is None else signature.tobytes()
        if signature is None or not self._registry.verify(party, signed, purpose, *parts):
            raise MalformedReplyError(f"party {party}: its signature is not valid")
        return signature

    def _count(self, present: MASKS) -> int:
        return int(present.sum())  # parties, not clients


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
            raise MalformedReplyError(f"{MOST_LISTS} lists were shown: nobody can join any more")
        else:
            self.take_binding(node, reply)
            self._fresh.add(party)

    def take_binding(self, node: int, reply: BindReply) -> None:
        """Store a SuperNode's statement, if its party signed it."""
        self.check_keys(node, reply)
        self.bindings[reply.party] = reply
        self._settle(node, reply)

    def forget(self, node: int) -> None:
        self._fresh.discard(self._at.get(node, -1))
        super().forget(node)

    def exclude(self, clients: Iterable[int]) -> None:
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
        for one in self._rounds.values():
            one.skip(self._too_few)

    @property
    def _too_few(self) -> str:
        return f"{len(self.parties)} parties, a sum needs {self.fewest_nodes}"

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
            raise MalformedReplyError(f"list {reply.number}: not the one that is open")
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

    def _begin(self, number: int, clients: set[int]) -> SumRound:
        """Begin a round of the epoch; parties without any of the clients are absent."""
        if (epoch := self.epoch) is None:
            return self._none(number, self._too_few)
        parties, nodes = epoch.parties.tolist(), list[int | None]()
        members = [self._members[party] for party in parties]
        for party, member in zip(parties, members, strict=True):
            is_there = party not in self._cheating and not clients.isdisjoint(member.clients)
            nodes.append(member.node if is_there else None)
        keys = rows_of([member.channel_key for member in members], len(parties), -1)
        hosted = [member.clients for member in members]
        agreed = epoch, self.registry, self._earlier
        return PartyRound(*agreed, number, nodes, hosted, keys, self._blame)

    def sign(self, number: int, server_round: int, send: Send) -> None:
        lists = self.list_requests(number)
        self._exchange(send, server_round, "sum_list", lists, ListReply, self.take_list)

    def list_requests(self, number: int) -> dict[int, ListRequest]:
        one = self._round(number)
        return self._there(one.list_requests()) if isinstance(one, PartyRound) else {}

    def take_list(self, node: int, reply: ListReply) -> None:
        one = self._round(reply.server_round)
        assert isinstance(one, PartyRound)  # others ask for no list
        one.take_list(node, reply)

    def _exclude_suspects(self, one: SumRound) -> None:
        """Exclude nobody without a proof."""

    def _blame(self, reason: Reason, node: int | None) -> None:
        """Record a party's fault for all its clients; if it is proven, exclude them."""
        party = reason.client
        if party is None or reason.kind is Cause.LEFT_OUT:  # of a client, not of its party
            self.blamed.append(reason)
            return
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
