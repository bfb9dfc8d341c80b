"""The server's side of the secure sum without trust: the server carries, the parties check.

An honest server makes the parties' checks too, so that no party's lie makes it look like a liar. A
sum takes three exchanges: masked vectors, the signed list and shares; the last also prepares the
next sum. An epoch begins, with three more, when SuperNodes have joined.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from flower_graph.errors import IdentityError, MalformedReplyError
from flower_graph.secure.channel import rows_of
from flower_graph.secure.node_config import (
    DIFFER_BY,
    MOST_BLOCK,
    MOST_POINTS,
    USUAL_DIFFERENCE,
)
from flower_graph.secure.parties.epoch import (
    MOST_LISTS,
    Epoch,
    commit,
    fewest_in_a_sum,
)
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.sum.messages import (
    EpochReply,
    EpochRequest,
    KeyReply,
    KeyRequest,
    RevealReply,
    RevealRequest,
)
from flower_graph.secure.sum.round import Cause, Distrust, Reason, SumRound
from flower_graph.secure.sum.server import Send, SumServer
from flower_graph.wire.fields import Bytes

LOG = logging.getLogger(__name__)
TRIES = 3  # lists of commitments, while parties show no seed


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
        self.bindings: dict[int, KeyReply] = {}  # of parties
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

    def question(self) -> KeyRequest:
        return KeyRequest(self.run_id, signed=True)

    def check_keys(self, node: int, reply: KeyReply) -> None:
        if reply.run_id != self.run_id:
            raise MalformedReplyError(f"run {reply.run_id.hex()}, expected {self.run_id.hex()}")
        try:
            reply.verify(self.registry, MOST_BLOCK)
        except IdentityError as error:
            raise MalformedReplyError(str(error)) from error
        if (points := reply.declared[:, 1].sum()) > MOST_POINTS:
            raise MalformedReplyError(f"party {reply.number}: {points} points, above {MOST_POINTS}")

    def knows(self, old: int, reply: KeyReply) -> bool:
        return reply.number in self._taking_part and super().knows(old, reply)

    def enroll(self, node: int, reply: KeyReply, gone: Collection[int] = ()) -> None:
        self.check_keys(node, reply)
        party, home = reply.number, self.node_of_party(reply.number)
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

    def take_binding(self, node: int, reply: KeyReply) -> None:
        """Store a SuperNode's statement, if its party signed it."""
        self.check_keys(node, reply)
        self.bindings[reply.number] = reply
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
        requests = dict.fromkeys(sorted(nodes), self.question())
        take = self.take_binding
        replies = self._exchange(send, server_round, "sum_enroll", requests, KeyReply, take)
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
        distrust = Distrust(epoch, self.registry, self._earlier)
        return SumRound(epoch, number, nodes, hosted, keys, self._blame, distrust)

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
