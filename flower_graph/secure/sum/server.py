"""The server's side of the secure sum: the enrolled clients, and the open rounds.

The server is trusted to follow the protocol, not to look away. It draws the partners and carries
the packets that SuperNodes seal for each other. From a round it learns the contributors and the
sum, and nothing about a SuperNode's sum as long as fewer than ``corrupt`` of them tell it what they
hold. ``partners.py`` has the graph of shared secrets.

The parties of the protocol are the SuperNodes; the interface is in clients. A party has the lowest
number of its clients.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.channel import is_low_order, rows_of
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    KeyReply,
    KeyRequest,
    ListReply,
    ListRequest,
    MaskRequest,
    PrepareRequest,
    SumTerms,
    UnmaskRequest,
)
from flower_graph.secure.sum.partners import check_shares, partners, plan
from flower_graph.secure.sum.round import (
    Cause,
    Circle,
    Reason,
    Skipped,
    StageReply,
    SumResult,
    SumRound,
)
from flower_graph.wire.codec import Message
from flower_graph.wire.exchange import Replies
from flower_graph.wire.fields import RUN_BYTES
from flower_graph.wire.ledger import setup_bytes

LOG = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)


# Sends a message to each of some SuperNodes and reads their replies, as ``Session.send``. Any: what
# is read of a reply
Send = Callable[..., Replies[Any]]
MOST_BEGINNINGS = 8  # times that a client enrols with keys of its own in a run
MOST_CHEATS = 3  # SuperNodes that are proven to cheat before nobody new is taken any more
ALONE = 0, 0, 0  # the plan of a SuperNode whose clients are all in the sum


@dataclass
class Member:
    """A SuperNode, as a party of the sums."""

    node: int | None  # None while it is not connected
    clients: list[int]  # ascending
    channel_key: bytes


class SumServer:
    """Carries out secure sums over clients that SuperNodes host.

    Parameters
    ----------
    dropout : float
        Share of the clients, and of the SuperNodes, that may vanish during a sum.
    corrupt : float
        Share of them that may tell the server all they hold.
    """

    # A round is ``open_round``, ``mask_requests``, ``unmask_requests``, after each of them ``take``
    # for every reply, and ``result``. Two rounds may be open at once, so the next can be prepared
    # while this one is unmasked. ``take`` raises ``MalformedReplyError`` for a reply that is late,
    # second, of another run, round or length, or about clients of other SuperNodes, and then has
    # taken nothing of it.

    def __init__(self, *, dropout: float = 0.3, corrupt: float = 0.1) -> None:
        check_shares(dropout, corrupt)
        self.dropout, self.corrupt = dropout, corrupt
        self.run_id = os.urandom(RUN_BYTES)
        self._members: dict[int, Member] = {}  # by their numbers as parties
        self._at: dict[int, int] = {}  # SuperNode: party
        self._party_of: dict[int, int] = {}  # client: party
        self.blamed: list[Reason] = []  # clients at fault and what they did, oldest first
        self._excluded: set[int] = set()
        self._barred: set[int] = set()  # those SuperNodes
        self._beginnings = Counter[int]()  # of each client, with new keys
        self._cheats = 0  # SuperNodes that were proven to cheat
        self._rounds: dict[int, SumRound] = {}
        self._last = -1
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

    @property
    def homes(self) -> dict[int, int]:
        there = [(m.node, m.clients) for m in self._members.values() if m.node is not None]
        return {client: node for node, clients in there for client in clients}

    def node_of(self, client: int) -> int | None:
        return self.node_of_party(self._party_of.get(client, -1))

    def node_of_party(self, party: int) -> int | None:
        return self._members[party].node if party in self._members else None

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
        return KeyRequest(self.run_id)

    def check_keys(self, node: int, reply: KeyReply) -> None:
        """Refuse keys of another run, keys of low order, and clients that may not begin anew."""
        if reply.run_id != self.run_id:
            raise MalformedReplyError(f"run {reply.run_id.hex()}, expected {self.run_id.hex()}")
        clients = reply.clients.tolist()
        if reply.party is not None:
            raise MalformedReplyError("it signs for a party, and there are none in this sum")
        if is_low_order(reply.channel_key.tobytes()):
            raise MalformedReplyError(f"the channel key of client {clients[0]} is of low order")
        home = self.node_of(clients[0])
        if home is not None and self.knows(home, reply):
            return  # it goes on
        times = [self._beginnings[client] for client in clients]
        # Whoever cheated before this run went on is let in once, and has no part in any sum.
        if node in self._barred or (any(times) and self.excluded.issuperset(clients)):
            raise MalformedReplyError(
                f"client {clients[0]} is of a SuperNode that has cheated: it does not begin anew"
            )
        if not all(times) and self._cheats >= MOST_CHEATS:
            raise MalformedReplyError(f"it is new, and {self._cheats} SuperNodes have cheated")
        if max(times) >= MOST_BEGINNINGS:
            raise MalformedReplyError(f"client {clients[0]} has begun anew too often")

    def enroll(self, node: int, reply: KeyReply, gone: Collection[int] = ()) -> None:
        """Enrol a SuperNode's clients; if it enrols again, its new keys replace the old."""
        self.check_keys(node, reply)
        clients = reply.clients.tolist()
        for client in clients:
            if (owner := self.node_of(client)) not in (None, node, *gone):
                raise MalformedReplyError(f"client {client} belongs to node {owner}")
        for old in (node, *gone):
            self.forget(old)
        self._settle(node, reply)
        self._beginnings.update(clients)

    def exclude(self, clients: Iterable[int]) -> None:
        """Exclude clients whose fault was proven before the run was resumed."""
        self._excluded |= set(clients)

    def forget(self, node: int) -> None:
        """Remove a SuperNode; another SuperNode may host its clients."""
        self._leave(node)

    def _leave(self, node: int) -> None:
        if (party := self._at.pop(node, None)) is not None:
            self._members[party].node = None

    def knows(self, old: int, reply: KeyReply) -> bool:
        """Tell whether a SuperNode enrolled with exactly these clients and this key."""
        member = self._members.get(reply.number)
        return member is not None and member == self._member(old, reply)

    def move(self, old: int, node: int) -> None:
        """Register a SuperNode under another id: it was restarted and has kept its keys."""
        party = self._party(old)
        self._barred |= {node} if old in self._barred else set()
        del self._at[old]
        self._members[party].node, self._at[node] = node, party
        for one in self._rounds.values():
            one.move(old, node)

    def _member(self, node: int, reply: KeyReply) -> Member:
        return Member(node, sorted(reply.clients.tolist()), reply.channel_key.tobytes())

    def _settle(self, node: int, reply: KeyReply) -> None:
        party, member = reply.number, self._member(node, reply)
        if (before := self._members.get(party)) is not None:
            for client in before.clients:
                if self._party_of.get(client) == party:
                    del self._party_of[client]
            if before.node is not None:
                self._leave(before.node)
        self._leave(node)
        self._members[party], self._at[node] = member, party
        self._party_of |= dict.fromkeys(member.clients, party)

    def _party(self, node: int) -> int:
        if node not in self._at:
            raise MalformedReplyError(f"node {node} is no party")
        return self._at[node]

    def open_round(self, number: int, clients: Iterable[int]) -> dict[int, PrepareRequest]:
        if number <= self._last:
            raise ValueError(f"round {number} is not after {self._last}, the last one")
        opened = self._rounds[number] = self._begin(number, set(clients))
        self._last = number
        for old in sorted(self._rounds)[:-KEPT_ROUNDS]:  # that nobody ended
            del self._rounds[old]
        return {} if opened.skipped else opened.prepare_requests()

    def _honest(self, count: int) -> int:
        return count - math.floor(self.corrupt * count)

    def take(self, node: int, reply: StageReply) -> None:
        self._round(reply.server_round).take(node, reply)

    def mask_requests(
        self, number: int, length: int, word: int, terms: SumTerms
    ) -> dict[int, MaskRequest]:
        """Ask every SuperNode that prepared for its masked sum of ``length`` words."""
        return self._there(self._round(number).mask_requests(length, word, terms, self.excluded))

    def sign(self, number: int, server_round: int, send: Send) -> None:
        """Settle the members of a sum; parties that do not trust the server sign them."""
        requests = self.list_requests(number)
        self._exchange(send, server_round, "sum_list", requests, ListReply, self.take_list)

    def list_requests(self, number: int) -> dict[int, ListRequest]:
        return self._there(self._round(number).list_requests())

    def take_list(self, node: int, reply: ListReply) -> None:
        self._round(reply.server_round).take_list(node, reply)

    def unmask_requests(self, number: int) -> dict[int, UnmaskRequest]:
        """Write the requests for shares; none if too few clients are in the sum."""
        return self._there(self._round(number).unmask_requests())

    def _there(self, requests: dict[int, M]) -> dict[int, M]:
        """Leave out SuperNodes that have gone since they prepared."""
        return {node: request for node, request in requests.items() if node in self._at}

    def result(self, number: int) -> SumResult | Skipped:
        """End a round and return its sum; replies that come later are refused."""
        result, one = self._round(number).result(), self._rounds.pop(number)
        nodes = {self.node_of(client) for client in one.suspects.tolist()}
        for client, node in sorted(self.homes.items()):
            if node in nodes and client not in self.excluded:
                text = "most others and its SuperNode cannot open what they seal for each other"
                self._blame(Reason(Cause.AT_ODDS, text, client, number), None)
                self._excluded.add(client)
        return result

    def _begin(self, number: int, clients: set[int]) -> SumRound:
        chosen = sorted(clients - self.excluded)
        local: dict[int, list[int]] = {}  # by party
        for client in chosen:
            if self.node_of(client) is None:
                raise ValueError(f"client {client} is not enrolled")
            local.setdefault(self._party_of[client], []).append(client)
        if not self._warned:
            self._warned = True
            LOG.warning(
                "the server is trusted (semi-honest): it could subtract the sums of two rounds, "
                "and so read what those sent together who are in one of them alone, even a single "
                "client (`flower-graph docs security#what-sums-over-time-tell`)"
            )
        m, dropped = len(local), math.floor(self.dropout * len(chosen))
        if self._honest(len(chosen)) < 2 or self._honest(m) < min(m, 2):
            few = f"{len(chosen)} clients, a sum needs at least 2 that do not collude"
            return self._none(
                number, f"{few}, of {min(m, 2)} SuperNodes (corrupt {self.corrupt:g})"
            )
        k, threshold, vanished = ALONE if m == 1 else plan(m, self.dropout, self.corrupt)
        seed = int.from_bytes(self.run_id, "little")
        graph = partners(np.arange(m), k, seed, number) if k else np.zeros((1, 0), np.int64)
        parties = sorted(local)
        members = [self._members[party] for party in parties]
        minimum = max(2, threshold + 1, m - vanished, len(chosen) - dropped)
        return SumRound(
            Circle(self.run_id, np.array(parties, np.int64), graph, threshold, minimum),
            number,
            [member.node for member in members],
            [local[party] for party in parties],
            rows_of((member.channel_key for member in members), m, -1),
            self._blame,
        )

    def _none(self, number: int, why: str) -> SumRound:
        """Return a round that is skipped from its beginning."""
        nobody = np.zeros(0, np.int64)
        circle = Circle(self.run_id, nobody, nobody.reshape(0, 0), 0, 0)
        one = SumRound(circle, number, [], [], np.zeros((0, 0), np.uint8), self._blame)
        one.skip(why)
        return one

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

    def _round(self, server_round: int) -> SumRound:
        if server_round not in self._rounds:
            raise MalformedReplyError(
                f"round {server_round} is not open; open: {sorted(self._rounds)}"
            )
        return self._rounds[server_round]

    def _blame(self, reason: Reason, node: int | None) -> None:
        client = reason.client
        if node is None or client is None:
            self.blamed.append(reason)
            return
        hosted = {other for other, at in self.homes.items() if at == node} - {client}
        if node not in self._barred:
            self._cheats += 1
        self._barred.add(node)
        if client not in self.excluded:
            self.blamed.append(reason)
        text = f"{reason.text} (client {client}, same SuperNode)"
        self.blamed += [
            replace(reason, client=other, text=text) for other in sorted(hosted - self.excluded)
        ]
        self._excluded |= {client, *hosted}
