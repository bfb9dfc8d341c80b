"""Which clients each SuperNode hosts: it is asked by ``query`` before it first takes part."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from flower_graph.errors import MalformedReplyError, says_lost
from flower_graph.exchange import Exchange, Rejected
from flower_graph.gathering import hosted_twice
from flower_graph.records.keys import (
    CLIENTS,
    CONFIG,
    HANDLED,
    MAX_WEIGHT,
    NUM_EXAMPLES,
    pack_integers,
    unpack_integers,
)
from flower_graph.records.resume import read_handled
from flower_graph.reply_limits import setup_bytes

LOG = logging.getLogger(__name__)
MAX_CLIENTS = 10**7  # that one SuperNode may speak for
MOSTLY = 0.9  # share of all examples from which on a SuperNode is named
# What Flower says of a ClientApp without a function for ``query``. Nothing else tells it from one
# whose function failed.
NO_QUERY = "No query function registered"


class Presence(NamedTuple):
    """What a SuperNode says of itself.

    Attributes
    ----------
    clients : list of int
        Numbers of its clients, ascending; none if it does not say.
    handled : int or None
        Messages of this run that they have behind them, if it says so.
    examples : int or None
        What its ``train`` replies weigh at most, if it says so; then an ``evaluate`` reply weighs
        at most the number of its clients.
    """

    clients: list[int]
    handled: int | None = None
    examples: int | None = None

    def to_properties(self) -> dict[str, Any]:
        """Return what a client's ``get_properties`` says."""
        found = {CLIENTS: pack_integers(np.array(sorted(self.clients), dtype=np.int64))}
        more = {HANDLED: self.handled, NUM_EXAMPLES: self.examples}
        return found | {key: value for key, value in more.items() if value is not None}

    @classmethod
    def from_record(cls, content: RecordDict) -> Presence:
        """Read and check a reply; ``MalformedReplyError`` if it cannot be used."""
        config = content.config_records.get(CONFIG)
        if config is None or CLIENTS not in config:
            return cls([])
        found = unpack_integers(config[CLIENTS], CLIENTS)
        if not 0 < found.size <= MAX_CLIENTS:
            raise MalformedReplyError(f"{CLIENTS}: {found.size} numbers, expected 1 or more")
        if found.min() < 0 or np.unique(found).size != found.size:
            raise MalformedReplyError(f"{CLIENTS}: expected different numbers, got {found!s:.60}")
        return cls(sorted(found.tolist()), read_handled(config), _read_examples(config))


def _read_examples(config: Mapping[str, Any]) -> int | None:
    value = config.get(NUM_EXAMPLES)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_WEIGHT:
        raise MalformedReplyError(f"{NUM_EXAMPLES} is {value!s:.40}, must be a positive number")
    return value


class Hosted:
    """Who is where.

    Parameters
    ----------
    question : mapping, optional
        What the ``query`` says besides, such as which checkpoint to go on from.
    known : iterable of int
        Clients that were in the run before it was resumed.

    Attributes
    ----------
    clients : dict
        SuperNode to the numbers of its clients, ascending. A plain ClientApp, which does not say,
        has none here; it takes part as one client without a number.
    absent : set of int
        Clients that were in the run and are not there now.
    """

    def __init__(
        self, question: Mapping[str, Any] | None = None, known: Iterable[int] = ()
    ) -> None:
        self.clients: dict[int, list[int]] = {}
        self.examples: dict[int, int] = {}  # what those that say so weigh
        self.absent = set(known)
        self._homes: dict[int, int] = {}  # SuperNode of each client
        self._lost: set[int] = set()
        self._question = dict(question or {})

    def ask(
        self, exchange: Exchange, connected: list[int], server_round: int, timeout: float
    ) -> list[Rejected]:
        """Ask SuperNodes that are new.

        Parameters
        ----------
        exchange : Exchange
            To ask with.
        connected : list of int
            SuperNodes that are there.
        server_round : int
            The round.
        timeout : float
            Seconds that they have.

        Returns
        -------
        list of Rejected
            Those that take no part in this round, with the reason; they are asked again in the
            next one.
        """
        for node in self._lost & self.clients.keys():
            self._forget(node)
        self._lost.clear()
        new = [node for node in connected if node not in self.clients]
        if not new:
            return []
        question = RecordDict({CONFIG: ConfigRecord(self._question)})
        replies = exchange.send(
            dict.fromkeys(new, question),
            message_type="query",
            server_round=server_round,
            timeout=timeout,
            read=lambda _, content: Presence.from_record(content),
            max_reply_bytes=setup_bytes(),
        )
        answers = replies.values | {
            entry.node_id: Presence([]) for entry in replies.rejected if NO_QUERY in entry.reason
        }
        refused = [entry for entry in replies.rejected if entry.node_id not in answers]
        there = set(connected)
        for node, presence in sorted(answers.items()):
            if reason := self._enrol(node, presence, there):
                LOG.warning("node %d takes no part: %s", node, reason)
                refused.append(Rejected(node, reason))
        self._warn_of_weight()
        return refused

    def note(self, rejected: Iterable[Rejected]) -> None:
        """Ask SuperNodes again whose clients have lost what they kept: then they begin anew."""
        self._lost |= {entry.node_id for entry in rejected if says_lost(entry.reason)}

    def present(self, connected: Iterable[int]) -> list[int]:
        """Return the SuperNodes that can take part, in the order of their clients.

        Their own numbers are drawn anew whenever they are started: in the order of those, a run
        would draw others, and add up in another order, each time.
        """
        found = [node for node in connected if node in self.clients]
        return sorted(found, key=self.place)

    def place(self, node: int) -> tuple[bool, int, int]:
        """Return what SuperNodes are put in order by: their first client, else their number."""
        own = self.clients.get(node)
        return (not own, own[0] if own else 0, node)

    def count(self, node: int) -> int:
        """Return how many clients a SuperNode has; 1 if it does not say."""
        return len(self.clients.get(node, ())) or 1

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the largest weight that a SuperNode's reply can have, if it has said so."""
        said = self.examples.get(node)
        return said if said is None or training else self.count(node)

    def everyone(self) -> list[int]:
        """Return the numbers of all clients that are known, also of those that are gone."""
        return sorted({c for own in self.clients.values() for c in own} | self.absent)

    def _enrol(self, node: int, presence: Presence, connected: Collection[int]) -> str:
        """Note a SuperNode's clients; return why it takes no part, or nothing."""
        clients = presence.clients
        doubled = {client: self._homes[client] for client in clients if client in self._homes}
        for client, other in doubled.items():
            if other in connected:
                return hosted_twice(client, other)
        for other in set(doubled.values()):  # the same clients came back under another id
            self._forget(other)
        if not clients:
            LOG.warning(
                "node %d does not say which clients it hosts: it takes part as one unknown client",
                node,
            )
        elif presence.handled == 0 and self.absent & set(clients):
            LOG.warning("node %d has no state of this run: its clients begin anew", node)
        self.clients[node] = clients
        if presence.examples is not None:
            self.examples[node] = presence.examples
        self._homes |= dict.fromkeys(clients, node)
        self.absent -= set(clients)
        return ""

    def _forget(self, node: int) -> None:
        """Know a SuperNode's clients no more as its own."""
        own = self.clients.pop(node)
        self.examples.pop(node, None)
        self.absent |= set(own)
        for client in own:
            del self._homes[client]

    def _warn_of_weight(self) -> None:
        """Name a SuperNode that says that nearly all examples are its own."""
        total = sum(self.examples.values())
        for node, own in self.examples.items():
            if len(self.examples) > 1 and own > MOSTLY * total:
                LOG.warning(
                    "node %d says that it has %d of %d examples: the mean is its own",
                    node,
                    own,
                    total,
                )
