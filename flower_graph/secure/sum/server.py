"""The server's side of the secure sum: the enrolled clients, and the open rounds.

The server is trusted to follow the protocol, not to look away. It draws the partners and carries
the packets that SuperNodes seal for each other. From a round it learns the contributors and the
sum, and nothing about a SuperNode's sum as long as fewer than ``corrupt`` of them tell it what they
hold. ``partners.py`` has the graph of shared secrets.

The parties of the protocol are the SuperNodes; the interface is in clients. A party has the lowest
number of its clients.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flower_graph.errors import IdentityError, MalformedReplyError, refuse_if
from flower_graph.secure.channel import is_low_order, rows_of
from flower_graph.secure.node_config import DIFFER_BY, MOST_BLOCK, MOST_POINTS, USUAL_DIFFERENCE
from flower_graph.secure.parties.epoch import MOST_LISTS, Epoch, commit, plan_of
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    EpochReply,
    EpochRequest,
    KeyReply,
    KeyRequest,
    RevealReply,
    RevealRequest,
)
from flower_graph.secure.sum.partners import check_shares, partners, plan
from flower_graph.secure.sum.round import (
    Cause,
    Circle,
    Reason,
    SumRound,
)
from flower_graph.wire.codec import Message
from flower_graph.wire.exchange import Replies
from flower_graph.wire.fields import RUN_BYTES

LOG = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)


# Sends messages of an action in a round, and has each reply taken: ``SecureSum.tell``. Any: what is
# made of replies
Send = Callable[
    [int, str, Mapping[int, Message], type[Any], Callable[[int, Any], object]], Replies[Any]
]
MOST_BEGINNINGS = 8  # times that a client enrols with keys of its own in a run
MOST_CHEATS = 3  # SuperNodes that are proven to cheat before nobody new is taken any more
ALONE = 0, 0, 0  # the plan of a SuperNode whose clients are all in the sum


class SumServer:
    """Carries out secure sums over clients that SuperNodes host.

    Parameters
    ----------
    dropout : float
        Share of the clients, and of the SuperNodes, that may vanish during a sum.
    corrupt : float
        Share of them that may tell the server all they hold.
    """

    # A round is a `SumRound` that `open_round` returns. Two may be open at once, so the next can be
    # prepared while this one is unmasked.

    registry: Registry | None = None  # of SuperNodes that sign what they enrol with

    def __init__(self, *, dropout: float = 0.3, corrupt: float = 0.1) -> None:
        check_shares(dropout, corrupt)
        self.dropout, self.corrupt = dropout, corrupt
        self.run_id = os.urandom(RUN_BYTES)
        # What each party enrolled with last, those that have gone too; and where the others are
        self.bindings: dict[int, KeyReply] = {}
        self.nodes: dict[int, int] = {}  # SuperNode: party
        self.homes: dict[int, int] = {}  # client: SuperNode
        self.blamed: list[Reason] = []  # clients at fault and what they did, oldest first
        self._named = 0  # of these that `take_blamed` has returned
        self._excluded: set[int] = set()
        self._barred: set[int] = set()  # those SuperNodes
        self._beginnings = Counter[int]()  # of each client, with new keys
        self._cheats = 0  # SuperNodes that were proven to cheat
        self.rounds: list[SumRound] = []  # that may be open
        self._last = -1
        self.earlier: dict[str, list[int]] = {}  # parties in the epochs' sums, by purpose
        self._warned = False  # of what sums over time tell

    @property
    def fewest_nodes(self) -> int:
        return 1

    @property
    def excluded(self) -> set[int]:
        """Clients that are in no sum any more: all of SuperNodes that stopped a sum by a fault."""
        return self._excluded

    @property
    def clients(self) -> list[int]:
        """Numbers of all connected clients that may be in the next sum, ascending."""
        return sorted(self.homes.keys() - self.out)

    @property
    def out(self) -> set[int]:
        """Numbers of clients that are not in the next sum, though they are enrolled."""
        return self.excluded

    def node_of(self, client: int) -> int | None:
        return self.homes.get(client)

    def node_of_party(self, party: int) -> int | None:
        keys = self.bindings.get(party)
        node = None if keys is None else self.homes.get(int(keys.clients[0]))
        return None if node is None or self.nodes[node] != party else node

    # For servers that clients need not trust (``flower_graph.secure.parties``)

    def renew(self) -> None:
        """Read the permitted clients again; here every client that enrols is permitted."""

    def begin(self, server_round: int, send: Send, nodes: Collection[int], limit: float) -> bool:
        """Have clients agree on the members; return whether they began anew, here never."""
        # limit: largest size of a number, which they agree on, too
        return False

    # Who is there

    def question(self) -> KeyRequest:
        """Return the request to a SuperNode that is to enrol."""
        return KeyRequest(self.run_id, signed=None if self.registry is None else True)

    def check_keys(self, node: int, reply: KeyReply) -> None:
        """Refuse keys of another run, keys of low order, and clients that may not begin anew."""
        self._check_run(reply)
        clients = reply.clients.tolist()
        refuse = partial(refuse_if, error=MalformedReplyError)
        refuse(reply.party is not None, "it signs for a party, and there are none in this sum")
        low = is_low_order(reply.channel_key.tobytes())
        refuse(low, f"the channel key of client {clients[0]} is of low order")
        home = self.node_of(clients[0])
        if home is not None and self.knows(home, reply):
            return  # it goes on
        times = [self._beginnings[client] for client in clients]
        # Whoever cheated before this run went on is let in once, and has no part in any sum.
        has_cheated = node in self._barred or (any(times) and self.excluded.issuperset(clients))
        why = f"client {clients[0]} is of a SuperNode that has cheated: it does not begin anew"
        refuse(has_cheated, why)
        is_late = not all(times) and self._cheats >= MOST_CHEATS
        refuse(is_late, f"it is new, and {self._cheats} SuperNodes have cheated")
        refuse(max(times) >= MOST_BEGINNINGS, f"client {clients[0]} has begun anew too often")

    def _check_run(self, reply: KeyReply) -> None:
        why = f"run {reply.run_id.hex()}, expected {self.run_id.hex()}"
        refuse_if(reply.run_id != self.run_id, why, MalformedReplyError)

    def enroll(self, node: int, reply: KeyReply) -> None:
        """Enrol a SuperNode's clients; if it enrols again, its new keys replace the old."""
        self.check_keys(node, reply)
        clients = reply.clients.tolist()
        for client in clients:
            owner = self.node_of(client)
            why = f"client {client} belongs to node {owner}"
            refuse_if(owner not in (None, node), why, MalformedReplyError)
        self.forget(node)
        self._settle(node, reply)
        self._beginnings.update(clients)

    def take_blamed(self) -> list[Reason]:
        """Return who was blamed since the last call, and why."""
        blamed, self._named = self.blamed[self._named :], len(self.blamed)
        return blamed

    def exclude(self, clients: Iterable[int]) -> None:
        """Exclude clients whose fault was proven before the run was resumed."""
        self._excluded |= set(clients)

    def forget(self, node: int) -> None:
        """Remove a SuperNode; another SuperNode may host its clients."""
        if (party := self.nodes.pop(node, None)) is not None:
            for client in self.bindings[party].clients.tolist():
                del self.homes[client]

    def knows(self, old: int, reply: KeyReply) -> bool:
        """Tell whether a SuperNode enrolled with exactly these clients and this key."""
        return self.nodes.get(old) == reply.number and self._is_same(reply)

    def _is_same(self, reply: KeyReply) -> bool:
        before = self.bindings[reply.number]
        both = (before.clients, reply.clients), (before.channel_key, reply.channel_key)
        return all(np.array_equal(*pair) for pair in both)

    def move(self, old: int, node: int) -> None:
        """Register a SuperNode under another id: it was restarted and has kept its keys."""
        party = self._party(old)
        self._barred |= {node} if old in self._barred else set()
        del self.nodes[old]
        self.nodes[node] = party
        self.homes |= dict.fromkeys(self.bindings[party].clients.tolist(), node)
        for one in self.rounds:
            one.move(old, node)

    def _settle(self, node: int, reply: KeyReply) -> None:
        for old in (self.node_of_party(reply.number), node):
            if old is not None:
                self.forget(old)
        self.bindings[reply.number], self.nodes[node] = reply, reply.number
        self.homes |= dict.fromkeys(reply.clients.tolist(), node)

    def _party(self, node: int) -> int:
        if node not in self.nodes:
            raise MalformedReplyError(f"node {node} is no party")
        return self.nodes[node]

    def open_round(self, number: int, clients: Iterable[int]) -> SumRound:
        if number <= self._last:
            raise ValueError(f"round {number} is not after {self._last}, the last one")
        self._last, opened = number, self._begin(number, set(clients))
        self.rounds = [*self.rounds[1 - KEPT_ROUNDS :], opened]
        return opened

    def _begin(self, number: int, clients: set[int]) -> SumRound:
        chosen = sorted(clients - self.excluded)
        local: dict[int, list[int]] = {}  # by party
        for client in chosen:
            refuse_if(client not in self.homes, f"client {client} is not enrolled", ValueError)
            local.setdefault(self.nodes[self.homes[client]], []).append(client)
        if not self._warned:
            self._warned = True
            LOG.warning(
                "the server is trusted (semi-honest): it could subtract the sums of two rounds, "
                "and so read what those sent together who are in one of them alone, even a single "
                "client (`flower-graph docs security#what-sums-over-time-tell`)"
            )
        m, dropped = len(local), math.floor(self.dropout * len(chosen))
        honest, hosts = (n - math.floor(self.corrupt * n) for n in (len(chosen), m))
        if honest < 2 or hosts < min(m, 2):
            few = f"{len(chosen)} clients, a sum needs at least 2 that do not collude"
            few += f", of {min(m, 2)} SuperNodes (corrupt {self.corrupt:g})"
            return self._none(number, few)
        k, threshold, vanished = ALONE if m == 1 else plan(m, self.dropout, self.corrupt)
        seed = int.from_bytes(self.run_id, "little")
        graph = partners(np.arange(m), k, seed, number) if k else np.zeros((1, 0), np.int64)
        minimum = max(2, threshold + 1, m - vanished, len(chosen) - dropped)
        parties = np.array(sorted(local), np.int64)
        return SumRound(
            self, Circle(self.run_id, parties, graph, threshold, minimum), number, local
        )

    def _none(self, number: int, why: str) -> SumRound:
        """Return a round that is skipped from its beginning."""
        nobody = np.zeros(0, np.int64)
        one = SumRound(self, Circle(self.run_id, nobody, nobody.reshape(0, 0), 0, 0), number, {})
        one.skip(why)
        return one

    def blame(self, reason: Reason, node: int | None) -> None:
        """Record a fault; if it is a SuperNode's, exclude all its clients."""
        client = reason.client
        if node is None or client is None:
            self.blamed.append(reason)
            return
        if reason.kind is Cause.PROVEN:
            self._cheats += node not in self._barred
            self._barred.add(node)
        hosted = {other for other, at in self.homes.items() if at == node} | {client}
        text = f"{reason.text} (client {client}, same SuperNode)"
        for one in sorted(hosted - self._excluded):
            self.blamed.append(reason if one == client else replace(reason, client=one, text=text))
        self._excluded |= hosted


# Without trust: the server carries, the parties check --------------------------------------------

# An honest server makes the parties' checks too, so that no party's lie makes it look like a liar.
# A sum takes three exchanges: masked vectors, the signed list and shares, which also prepares the
# next sum. An epoch begins, with three more, when SuperNodes have joined.

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

    registry: Registry

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
            refuse_if(share >= 0.5, f"{name} is {share}, must be from 0 to below 0.5", ValueError)
        refuse_if(differ_by < 1, f"differ_by is {differ_by}, must be at least 1", ValueError)
        self._registry_file, self.registry = registry, Registry.read(registry)
        active, fewest = len(self.registry.active), self.fewest_nodes
        why = f"the registry has {active} parties, a sum needs {fewest}"
        refuse_if(active < fewest, why, ValueError)
        self._differ_by = differ_by
        self._cheating: set[int] = set()  # parties
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
        return sorted(set(self.nodes.values()) - self._cheating)

    @property
    def members(self) -> list[int]:
        """Parties of the epoch, absent ones too, ascending; none before there is one."""
        return [] if self.epoch is None else self.epoch.parties.tolist()

    @property
    def _taking_part(self) -> set[int]:
        return set(self.members) - self._cheating

    @property
    def excluded(self) -> set[int]:
        return set(self.hosted(self._cheating & self.bindings.keys()))

    @property
    def out(self) -> set[int]:
        return set(self.hosted(self.bindings.keys() - self._taking_part))

    def hosted(self, parties: Iterable[int]) -> list[int]:
        return sorted(c for party in parties for c in self.bindings[party].clients.tolist())

    def epoch_clients(self) -> dict[int, list[int]]:
        return {party: self.hosted([party]) for party in sorted(self._taking_part)}

    # Who is there

    def check_keys(self, node: int, reply: KeyReply) -> None:
        self._check_run(reply)
        try:
            reply.verify(self.registry, MOST_BLOCK)
        except IdentityError as error:
            raise MalformedReplyError(str(error)) from error
        points = reply.declared[:, 1].sum()
        why = f"party {reply.number}: {points} points, above {MOST_POINTS}"
        refuse_if(points > MOST_POINTS, why, MalformedReplyError)

    def knows(self, old: int, reply: KeyReply) -> bool:
        return reply.number in self._taking_part and super().knows(old, reply)

    def enroll(self, node: int, reply: KeyReply) -> None:
        self.check_keys(node, reply)
        party, home = reply.number, self.node_of_party(reply.number)
        why = f"party {party} is at node {home} already"
        refuse_if(home not in (None, node), why, MalformedReplyError)
        if party in self._taking_part and self._is_same(reply):
            self._settle(node, self.bindings[party])  # it goes on, as all know it
            return
        why = f"{MOST_LISTS} lists were shown: nobody can join any more"
        refuse_if(self.lists >= MOST_LISTS, why, MalformedReplyError)
        self._settle(node, reply)
        self._fresh.add(party)

    def take_binding(self, node: int, reply: KeyReply) -> None:
        """Store a SuperNode's statement, if its party signed it."""
        self.check_keys(node, reply)
        self._settle(node, reply)

    def forget(self, node: int) -> None:
        self._fresh.discard(self.nodes.get(node, -1))
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
        self.registry, self._unbound, self.epoch = registry, set(self.nodes), None
        self._give_up_rounds()
        for node in self._unbound:
            self.forget(node)

    def _give_up_rounds(self) -> None:
        for one in self.rounds:
            one.skip(self._too_few)

    @property
    def _too_few(self) -> str:
        return f"{len(self.parties)} parties, a sum needs {self.fewest_nodes}"

    # Epochs

    def begin(self, server_round: int, send: Send, nodes: Collection[int], limit: float) -> bool:
        """Begin an epoch if a party has joined; return whether one has begun."""
        self._fresh |= self._bind(server_round, send, self._unbound.intersection(nodes))
        self._unbound.clear()
        present = {party for node, party in self.nodes.items() if node in nodes} - self._cheating
        if present <= self._taking_part - self._fresh:
            return False
        for _ in range(TRIES):
            if self.lists >= MOST_LISTS:
                return False
            old = {node for node, party in self.nodes.items() if party in present - self._fresh}
            present &= self._bind(server_round, send, old) | self._fresh
            if not (lists := self.reveal_requests(limit, present)):
                return False
            self._fresh -= present  # whatever comes of it, these seeds are shown
            send(server_round, "sum_reveal", lists, RevealReply, self.take_seed)
            if epochs := self.epoch_requests():
                send(server_round, "sum_epoch", epochs, EpochReply, self.take_epoch)
                return True
            present &= set(self.nodes.values())
        return False

    def _bind(self, server_round: int, send: Send, nodes: Collection[int]) -> set[int]:
        """Have the parties of some SuperNodes commit to another seed; return those that did."""
        requests = dict.fromkeys(sorted(nodes), self.question())
        replies = send(server_round, "sum_enroll", requests, KeyReply, self.take_binding)
        for entry in replies.rejected:  # with a version of the registry that is old, for one
            self.forget(entry.node_id)
        return {party for node, party in self.nodes.items() if node in replies.values}

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
        # Each that is in a sum has as many partners there as the threshold, which may be as high as
        # the registry's minimum, or above it, where fewer may vanish than that minimum allows.
        shares = self.dropout, self.corrupt
        minimum = max(self.fewest_nodes, plan_of(len(parties), *shares)[1] + 1)
        terms = *shares, minimum, self._differ_by, limit, np.array(parties, np.int64)
        promised = np.stack([one.commitment for one in bindings])
        points = declared[np.argsort(declared[:, 0])]
        self._request = RevealRequest(self.run_id, self.lists, *terms, promised, points)
        self.lists, self._seeds = self.lists + 1, {}
        return {node: self._request for node, party in self.nodes.items() if party in parties}

    def take_seed(self, node: int, reply: RevealReply) -> None:
        party, seed, request = self._party(node), reply.seed.tobytes(), self._request
        assert request is not None
        is_other = (reply.run_id, reply.number) != (self.run_id, request.number)
        why = f"list {reply.number}: not the one that is open"
        refuse_if(is_other, why, MalformedReplyError)
        if commit(self.run_id, party, seed) != self.bindings[party].commitment.tobytes():
            text = "it has committed to another seed of the graph"
            self.blame(Reason(Cause.PROVEN, text, party), node)
            raise MalformedReplyError(f"party {party}: {text}")
        self._seeds[party] = seed

    def epoch_requests(self) -> dict[int, EpochRequest]:
        """Show all seeds; none if one is missing: the next list is without that party."""
        request = self._request
        assert request is not None
        parties = request.parties.tolist()
        if missing := [party for party in parties if party not in self._seeds]:
            for node in [node for node, party in self.nodes.items() if party in missing]:
                self.forget(node)
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
        requests = {}
        for node, party in self.nodes.items():
            if party not in self._seeds:
                continue
            row = epoch.parties[epoch.partners[epoch.index(party)]].tolist()
            signed = [self.bindings[partner] for partner in row]
            keys = np.stack([one.channel_key for one in signed])
            signatures = np.stack([one.signature for one in signed])
            clients = [one.clients for one in signed]
            sizes = np.array([one.size for one in clients], np.int64)
            rows = seeds, keys, signatures, sizes, np.concatenate(clients)
            requests[node] = EpochRequest(self.run_id, *rows)
        return requests

    def take_epoch(self, node: int, reply: EpochReply) -> None:
        assert self.epoch is not None
        why = f"party {self._party(node)} has another epoch"
        refuse_if(reply.digest.tobytes() != self.epoch.digest, why, MalformedReplyError)

    # A round, as ``SumServer`` has it

    def _begin(self, number: int, clients: set[int]) -> SumRound:
        """Begin a round of the epoch; parties without any of the clients are absent."""
        if (epoch := self.epoch) is None:
            return self._none(number, self._too_few)
        hosted = self.epoch_clients().items()
        local = {party: own for party, own in hosted if not clients.isdisjoint(own)}
        return SumRound(self, epoch, number, local)

    def blame(self, reason: Reason, node: int | None) -> None:
        """Record a party's fault for all its clients; if it is proven, exclude them."""
        party = reason.client
        if party is None or reason.kind is Cause.LEFT_OUT:  # of a client, not of its party
            self.blamed.append(reason)
            return
        text = f"{reason.text} (party {party})"
        self.blamed += [replace(reason, client=c, text=text) for c in self.hosted([party])]
        if node is not None:
            self._cheating.add(party)
