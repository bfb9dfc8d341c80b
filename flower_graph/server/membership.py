"""Records which clients each SuperNode hosts; decides which SuperNode may speak for a client.

A ``query`` asks each new SuperNode. The server's list, or else the first enrolment, ties a client
number to a SuperNode; node ids and the order of answers play no part. A method with further
questions to newcomers subclasses `Membership`.
"""

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, repeat
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from flower_graph import __version__
from flower_graph.config.rules import at_least
from flower_graph.data.folders.party import MEMBERS, Member
from flower_graph.errors import MalformedReplyError, MembershipError, one_line
from flower_graph.records.participation import ranges
from flower_graph.wire.arrays import each_once, record_of
from flower_graph.wire.averaging import Enrolment
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.codec import Resume
from flower_graph.wire.exchange import Exchange, Rejected
from flower_graph.wire.keys import CONFIG, FORMAT, MESSAGE_FORMAT, VERSION
from flower_graph.wire.ledger import ENROLMENT

# What ``read`` returned. Any: each method's is another; all have ``clients`` and ``handled``.
Answered = Any
LOG = logging.getLogger(__name__)
T = TypeVar("T")
OWN = "give each SuperNode a partition-id or a data-folder of its own"
REMEDY = (
    f"{OWN}; if they have, one of them lies: write the node-id of each authenticated SuperNode "
    f"beside its clients in {MEMBERS} of the server-folder, or use a registry"
)
MOSTLY = 0.9  # share of all examples above which a SuperNode is named in the log


class Admission:
    """The rules that the server applies to enrolments.

    ``listed`` says which SuperNode may speak for which clients (``members.csv``); by default the
    first to enrol. ``most`` is the most SuperNodes that may be enrolled; by default any number.
    """

    def __init__(self, listed: Collection[Member] | None = None, most: int | None = None) -> None:
        if most is not None:
            at_least(1).check("most", most)
        self.listed, self.most = listed, most
        self._by_node = {one.node: one for one in listed or () if one.node is not None}
        self._by_client = {client: one for one in listed or () for client in one.clients}

    def refusal(self, node: int, clients: Collection[int]) -> str:
        """Return why the list forbids a SuperNode to speak for clients; "" if it does not."""
        if self.listed is None:
            return ""
        if not clients:
            return f"it does not say which clients it hosts, and {MEMBERS} has others"
        owner = self._by_client.get(min(clients))
        if owner is None or not owner.clients.issuperset(clients):
            return f"no SuperNode hosts clients {ranges(clients)} together by {MEMBERS}"
        if self._by_node.get(node, owner) is not owner or owner.node not in (None, node):
            return f"clients {ranges(clients)} are another SuperNode's by {MEMBERS}"
        return ""


class Membership:
    """The clients of every SuperNode, and their state.

    With ``named``, as personal models need it, each client must have a number.
    """

    needs_query: ClassVar = False  # whether SuperNodes without ``query`` are left out
    message_type: ClassVar = "query"  # of the question to new SuperNodes

    def __init__(self, *, named: bool = False) -> None:
        self.clients: dict[int, list[int]] = {}  # of every SuperNode that is enrolled
        self.examples: dict[int, int] = {}  # the weight of those that send one
        self.absent = set[int]()  # clients that no SuperNode hosts any more
        # gives the entries about the run for newcomers
        self.greet: Callable[[list[int]], None] | None = None
        # A name of the run that no other has, and the checkpoint that it goes on from
        self.resume = Resume(run=uuid.uuid4().hex)
        self.saved: Resume | None = None  # the last checkpoint that this start of the run has made
        self.admission = Admission()  # rules of enrolment
        self.bound: dict[int, int] = {}  # the last SuperNode of each client
        self.strangers = set[int]()  # those asked last that may speak for no client of the run
        self._arrays: dict[int, NDArray[np.int64]] = {}  # the same as ``clients``
        self._lost = set[int]()
        # Of the lost, those that are not enrolled again yet: the last checkpoint that each is in
        self._returning: dict[int, Resume | None] = {}
        self._told: set[str] = set()  # other versions that the log has named already
        self._named = named

    # What a method's own membership may override

    def question(self, resume: Resume) -> RecordDict:
        """Write the request to new SuperNodes, with the checkpoint to resume from, if any."""
        entries = resume.to_config() if resume.server_round else {}
        return RecordDict({CONFIG: ConfigRecord(entries)})

    def enrolment_round(self, server_round: int) -> int:
        """Return the round of the messages to newcomers: the current one."""
        return server_round

    def read(self, node: int, content: RecordDict) -> object:
        """Read and check a reply; it has ``clients``, and ``handled`` as `Enrolment` has."""
        return Enrolment.read(content)

    def most_bytes(self) -> int:
        return ENROLMENT

    def in_order(self, answers: Mapping[int, Answered]) -> list[tuple[int, Answered]]:
        """Return the answers in the order in which SuperNodes are to be enrolled."""
        return sorted(answers.items())

    def refusal(self, answer: Answered) -> str:
        """Return why a newcomer does not fit this run, or an empty string."""
        is_unnamed = self._named and not answer.clients
        return "it does not say which clients it hosts" if is_unnamed else ""

    def is_back(self, olds: Collection[int], answer: Answered) -> bool:
        """Whether a newcomer proves to be the SuperNode that has gone with its clients."""
        return False

    def replaced(self, old: int, node: int, answer: Answered) -> None:
        """Forget a SuperNode that is gone and whose clients came back under another id."""
        self.forget(old)

    def enrolled(self, node: int, answer: Answered) -> None:
        """Record a newcomer's weight, and warn if its clients begin anew."""
        if not answer.clients:
            LOG.warning("node %d names no clients: it takes part as one unknown client", node)
        elif answer.handled == 0 and not self.absent.isdisjoint(answer.clients):
            LOG.warning("node %d has no state of this run: its clients begin anew", node)
        if answer.most_examples is not None:
            self.examples[node] = answer.most_examples

    # Enrolment

    def ask(
        self, exchange: Exchange, connected: list[int], server_round: int, timeout: float
    ) -> list[Rejected]:
        lost, self._lost = self._lost, set()
        for node in lost:
            self._returning.setdefault(node, self.saved)
        for node in lost & self.clients.keys():
            self.forget(node)
        new = [node for node in connected if node not in self.clients]
        if not new:
            return []
        usual, returning = self.question(self.resume), self._returning
        questions = {n: self.question(saved) if (saved := returning.get(n)) else usual for n in new}
        replies = exchange.send(
            questions,
            message_type=self.message_type,
            server_round=self.enrolment_round(server_round),
            timeout=timeout,
            read=self._read,
            max_reply_bytes=self.most_bytes(),
        )
        answers = dict(replies.values)
        if not self.needs_query:
            silent = [entry for entry in replies.rejected if entry.kind is Kind.NO_QUERY]
            answers |= {entry.node_id: Enrolment() for entry in silent}
        refused = [entry for entry in replies.rejected if entry.node_id not in answers]
        order = self.in_order(answers)
        own = {node: np.asarray(answer.clients, np.int64).tolist() for node, answer in order}
        homes = dict[int, int]()
        if self.clients:  # there may be ten million: no second mapping of all of them is kept
            claimed = set(chain.from_iterable(own.values()))
            homes = {c: n for n, local in self.clients.items() for c in local if c in claimed}
        reasons = self._refused(order, own, set(connected), homes)
        self.strangers = set(reasons)
        for node, answer in order:
            if reason := reasons.get(node) or self._enrol(node, answer, own[node], homes):
                LOG.warning("node %d takes no part: %s", node, reason)
                refused.append(Rejected(node, reason))
        total = sum(self.examples.values())
        for node, local in self.examples.items():
            if len(self.examples) > 1 and local > MOSTLY * total:
                LOG.warning("node %d says that it has %d of %d examples", node, local, total)
        if self.greet is not None:
            self.greet([node for node in new if node in self.clients])
        return refused

    def _read(self, node: int, content: RecordDict) -> object:
        if (version := other_version(content)) and version not in self._told:
            self._told.add(version)
            LOG.warning("node %d: flower-graph %s, the server %s", node, version, __version__)
        return self.read(node, content)

    def note(self, rejected: Iterable[Rejected]) -> None:
        """Record SuperNodes whose clients have lost their state; they are enrolled again."""
        self._lost |= {entry.node_id for entry in rejected if entry.kind is Kind.STATE_LOST}

    def present(self, connected: Iterable[int]) -> dict[int, list[int]]:
        """Return the clients of the connected SuperNodes, in the order of the clients."""
        # Their node ids are new at every start: in the order of ids, each run would draw other
        # clients and add up in another order.
        nodes = sorted((node for node in connected if node in self.clients), key=self.place)
        return {node: self.clients[node] for node in nodes}

    def place(self, node: int) -> tuple[bool, int, int]:
        """Return the sort key of a SuperNode: its first client, else its number."""
        local = self.clients.get(node)
        return (not local, local[0] if local else 0, node)

    def most_examples(self, node: int, *, training: bool) -> int | None:
        most = self.examples.get(node)
        # What a SuperNode measures counts its clients; one that names none is one
        return most if most is None or training else len(self.clients.get(node, ())) or 1

    def everyone(self) -> list[int]:
        """Return the numbers of all known clients, including absent ones."""
        return sorted({c for local in self.clients.values() for c in local} | self.absent)

    def numbers(self) -> dict[int, NDArray[np.int64]]:
        for node, local in self.clients.items():
            if node not in self._arrays:
                self._arrays[node] = np.array(local, np.int64)
        return self._arrays

    def move(self, old: int, node: int) -> None:
        self.clients = renamed(self.clients, old, node)
        self._arrays.pop(old, None)

    def forget(self, node: int) -> None:
        """Forget a SuperNode; its clients count as absent."""
        local = self.clients.pop(node)
        self._arrays.pop(node, None)
        self.examples.pop(node, None)
        self.absent |= set(local)

    def _refused(
        self,
        answers: list[tuple[int, Answered]],
        own: Mapping[int, list[int]],
        connected: Collection[int],
        homes: Mapping[int, int],
    ) -> dict[int, str]:
        """Return the newcomers that take no part: by the list, as duplicates, or as too many."""
        claims, refused = dict[int, list[int]](), dict[int, str]()
        together = dict[int, set[int]]()  # the clients that a SuperNode has had
        for client, node in self.bound.items() if self.admission.listed is not None else ():
            together.setdefault(node, set()).add(client)
        for node, answer in answers:
            reason = self.admission.refusal(node, own[node])
            if reason and set(own[node]) not in together.values():
                refused[node] = reason
            elif not self.refusal(answer):  # else it claims no clients: its enrolment says why
                claims[node] = own[node]
        bound = self.bound
        holders = {c: node for node, local in claims.items() for c in local if bound.get(c) == node}
        gone = {client: at for client, at in homes.items() if at not in connected}
        for node, answer in answers if gone else ():
            local = claims.get(node, [])
            if self.is_back({gone[client] for client in local if client in gone}, answer):
                holders |= dict.fromkeys(local, node)
        holders |= {client: at for client, at in homes.items() if at in connected}
        refused |= self._doubles(claims, holders)
        left = {node: local for node, local in claims.items() if node not in refused}
        return refused | self._too_many(left, connected, homes)

    def _doubles(
        self, claims: Mapping[int, list[int]], holders: Mapping[int, int]
    ) -> dict[int, str]:
        """Return the newcomers that claim clients of ``holders``, or of one another.

        If two claim one client at the first enrolment, ``MembershipError`` names both.
        """
        if not holders and each_once(np.fromiter(chain.from_iterable(claims.values()), np.int64)):
            return {}
        refused, first = dict[int, str](), dict[int, int]()
        for node, clients in claims.items():
            taken = [client for client in clients if holders.get(client, node) != node]
            if taken:
                other = holders[taken[0]]
                refused[node] = f"client {taken[0]} is hosted by node {other} already: {OWN}"
        for node in sorted(claims.keys() - refused.keys()):
            for client in claims[node]:
                if (other := first.setdefault(client, node)) != node:
                    words = f"client {client} is claimed by nodes {other} and {node}: {REMEDY}"
                    if not self.clients:
                        raise MembershipError(words)
                    refused |= {other: words, node: words}
        return refused

    def _too_many(
        self, claims: Mapping[int, list[int]], connected: Collection[int], homes: Mapping[int, int]
    ) -> dict[int, str]:
        if (most := self.admission.most) is None:
            return {}
        replaced = {homes.get(c) for local in claims.values() for c in local}
        # A SuperNode without client numbers is known by its id alone
        enrolled = {node for node, local in self.clients.items() if local or node in connected}
        strangers = {n for n, c in claims.items() if not c or not self.bound.keys() >= set(c)}
        refused, new, others = dict[int, str](), set(claims), len(enrolled - replaced)
        # SuperNodes that return with their clients go before new SuperNodes
        for group in (new & strangers, new):
            if len(new) + others > most:
                why = f"{len(new) + others} SuperNodes, strategy.most_supernodes is {most}"
                refused |= dict.fromkeys(group, why)
                new -= group
        if refused and not self.clients and len(refused) == len(claims):
            raise MembershipError(f"{next(iter(refused.values()))}: nothing says who may enrol")
        return refused

    def _enrol(
        self, node: int, answer: Answered, clients: list[int], homes: Mapping[int, int]
    ) -> str:
        if reason := self.refusal(answer):
            return reason
        for other in {homes[client] for client in clients if client in homes}:
            if other in self.clients:  # not replaced by another newcomer
                self.replaced(other, node, answer)
        try:
            self.enrolled(node, answer)
        except MalformedReplyError as error:
            return str(error)
        self.clients[node] = clients
        self._returning.pop(node, None)
        self.bound.update(zip(clients, repeat(node)))  # no set or dict of its own: clients are many
        self.absent.difference_update(clients)
        return ""


def renamed(by_node: Mapping[int, T], old: int, node: int) -> dict[int, T]:
    """Return the mapping with a SuperNode's new id, in the same order."""
    return {node if at == old else at: one for at, one in by_node.items()}


def other_version(content: RecordDict) -> str:
    """Return the version of the node that answered a ``query``; "" if it is the server's."""
    # A plain ClientApp sends no version, which is fine.
    answer = record_of(content, CONFIG, ConfigRecord) or ConfigRecord()
    if MESSAGE_FORMAT not in answer:
        return ""
    version = one_line(answer.get(VERSION, "?"), 40)
    if answer[MESSAGE_FORMAT] != FORMAT:
        theirs = f"{one_line(answer[MESSAGE_FORMAT], 20)} (flower-graph {version})"
        raise MalformedReplyError(f"message format {theirs}, expected {FORMAT} ({__version__})")
    return "" if version == __version__ else version
