"""Which SuperNodes are enrolled, and which clients each may speak for.

A ``query`` asks each new SuperNode which clients it hosts. The server's list, or else the first
enrolment, ties a client number to a SuperNode; node ids and the order of answers play no part. A
method with further questions to newcomers subclasses `Membership`.
"""

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from flower_graph import __version__
from flower_graph.data.folders.party import MEMBERS, Member
from flower_graph.errors import MalformedReplyError, MembershipError, one_line
from flower_graph.records.participation import ranges
from flower_graph.wire import keys
from flower_graph.wire.arrays import each_once, record_of
from flower_graph.wire.averaging import Enrolment
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.codec import Resume, as_record
from flower_graph.wire.exchange import Exchange, Rejected
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


class Membership:
    """The clients of every SuperNode, and which SuperNode may speak for a client.

    With ``named``, as personal models need it, each client must have a number.
    """

    needs_query: ClassVar = False  # whether SuperNodes without ``query`` are left out
    message_type: ClassVar = "query"  # of the question to new SuperNodes
    # Rules of enrolment: the SuperNodes that may speak for clients (``members.csv``), by default
    # the first to enrol; and the most SuperNodes
    listed: Collection[Member] | None = None
    most: int | None = None
    # A name of the run that no other has, and the checkpoint that it goes on from
    resume: Resume
    saved: Resume | None = None  # the last checkpoint that this start of the run has made
    # gives the entries about the run for newcomers
    greet: Callable[[list[int]], object] | None = None

    def __init__(self, *, named: bool = False) -> None:
        self.clients: dict[int, list[int]] = {}  # of every SuperNode that is enrolled
        self.examples: dict[int, int] = {}  # the weight of those that send one
        self.absent = set[int]()  # clients that no SuperNode hosts any more
        self.resume = Resume(run=uuid.uuid4().hex)
        self.bound: dict[int, int] = {}  # the last SuperNode of each client of the run
        self.strangers = set[int]()  # those asked last that may speak for no client of the run
        self.form: Any = None  # of the arrays that all SuperNodes send
        self._arrays: dict[int, NDArray[np.int64]] = {}  # the same as ``clients``
        # SuperNodes that have lost their state: the last checkpoint that each is in
        self._lost: dict[int, Resume | None] = {}
        self._named = named

    # What a method's own membership may override

    def question(self, resume: Resume) -> RecordDict:
        """Write the request to new SuperNodes, with the checkpoint to resume from, if any."""
        return as_record(resume if resume.server_round else {})

    def read(self, node: int, content: RecordDict) -> object:
        """Read and check a reply; it has ``clients``, and ``handled`` as `Enrolment` has."""
        return Enrolment.read(content)

    def most_bytes(self) -> int:
        return ENROLMENT

    def form_of(self, answer: Answered) -> Any:
        """Return the form of the arrays that a SuperNode will send; all have the commonest."""

    def refusal(self, answer: Answered) -> str:
        """Return why a newcomer does not fit this run, or an empty string."""
        if self.form is not None and (form := self.form_of(answer)) != self.form:
            return f"its arrays are of {form} numbers, the others' of {self.form}"
        is_unnamed = self._named and not answer.clients
        return "it does not say which clients it hosts" if is_unnamed else ""

    def is_back(self, olds: Collection[int], answer: Answered) -> bool:
        """Whether a newcomer proves to be the SuperNode that has gone with its clients."""
        return False

    def replaced(self, old: int, node: int, answer: Answered) -> None:
        """Forget a SuperNode that is gone and whose clients came back under another id."""
        self.forget(old)

    def enrolled(self, node: int, answer: Answered) -> None:
        """Record what is known of a newcomer: here its weight."""
        if not answer.clients:
            LOG.warning("node %d names no clients: it takes part as one unknown client", node)
        if answer.most_examples is not None:
            self.examples[node] = answer.most_examples

    # Enrolment

    def ask(
        self, exchange: Exchange, connected: list[int], server_round: int, timeout: float
    ) -> list[Rejected]:
        """Ask new SuperNodes and enrol them; return those that take no part, and why."""
        for node in self._lost.keys() & self.clients.keys():
            self.forget(node)
        new = [node for node in connected if node not in self.clients]
        if not new:
            return []
        usual, lost = self.question(self.resume), self._lost
        questions = {n: self.question(saved) if (saved := lost.get(n)) else usual for n in new}
        replies = exchange.send(
            questions,
            message_type=self.message_type,
            server_round=server_round,
            timeout=timeout,
            read=self._read,
            max_reply_bytes=self.most_bytes(),
        )
        answers: dict[int, Answered] = dict(replies.values)
        if not self.needs_query:
            silent = [entry for entry in replies.rejected if entry.kind is Kind.NO_QUERY]
            answers |= {entry.node_id: Enrolment() for entry in silent}
        refused = [entry for entry in replies.rejected if entry.node_id not in answers]
        order = sorted(answers.items())
        own = {node: np.asarray(answer.clients, np.int64).tolist() for node, answer in order}
        if self.form is None:  # neither the first SuperNode nor strangers decide for all
            good = [a for n, a in order if not (self._unlisted(n, own[n]) or self.refusal(a))]
            forms = [self.form_of(answer) for answer in good]
            # Of two as common the smaller: what is made for all has this size
            self.form = min(forms, key=lambda form: (-forms.count(form), form), default=None)
        reasons = self._refused(order, own, set(connected))
        self.strangers = set(reasons)
        for node, answer in order:
            if reason := reasons.get(node) or self._enrol(node, answer, own[node]):
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
        if (version := check_format(content)) != __version__:
            LOG.warning("node %d has flower-graph %s, the server %s", node, version, __version__)
        return self.read(node, content)

    def note(self, rejected: Iterable[Rejected]) -> None:
        """Record SuperNodes whose clients have lost their state; they are enrolled again."""
        for entry in rejected:
            if entry.kind is Kind.STATE_LOST:
                self._lost.setdefault(entry.node_id, self.saved)

    def _refused(
        self,
        order: Sequence[tuple[int, Answered]],
        own: Mapping[int, list[int]],
        connected: Collection[int],
    ) -> dict[int, str]:
        """Return the newcomers that take no part: by the list, as duplicates, or as too many.

        If two claim one client at the first enrolment, ``MembershipError`` names both.
        """
        claims, refused = dict[int, list[int]](), dict[int, str]()
        for node, answer in order:
            if reason := self._unlisted(node, own[node]):
                refused[node] = reason
            elif not self.refusal(answer):  # else it claims no clients: its enrolment says why
                claims[node] = own[node]
        bound, holders = self.bound, dict[int, int]()  # clients of whose SuperNode there is proof
        here, known = self.clients.keys() & connected, self.clients.keys()
        for node, answer in order if bound else ():
            before = {c: bound[c] for c in claims.get(node, ()) if c in bound}
            if self.is_back(known & set(before.values()) - here, answer):
                holders |= dict.fromkeys(claims[node], node)
            holders |= {client: at for client, at in before.items() if at == node or at in here}
        for node, local in claims.items() if holders else ():
            if taken := [client for client in local if holders.get(client, node) != node]:
                other = holders[taken[0]]
                refused[node] = f"client {taken[0]} is hosted by node {other} already: {OWN}"
        claims = {node: local for node, local in claims.items() if node not in refused}
        if not each_once(np.fromiter(chain.from_iterable(claims.values()), np.int64)):
            first = dict[int, int]()
            for client, node in ((c, at) for at in sorted(claims) for c in claims[at]):
                if (other := first.setdefault(client, node)) != node:
                    words = f"client {client} is claimed by nodes {other} and {node}: {REMEDY}"
                    if not self.clients:
                        raise MembershipError(words)
                    refused |= {other: words, node: words}
        left = {node: local for node, local in claims.items() if node not in refused}
        return refused | self._too_many(left, here)

    def _unlisted(self, node: int, clients: Collection[int]) -> str:
        """Return why the list forbids a SuperNode to speak for clients; "" if it does not."""
        if self.listed is None:
            return ""
        if not clients:
            return f"it does not say which clients it hosts, and {MEMBERS} has others"
        one = min(clients)
        rows = [r for r in self.listed if one in r.clients and r.clients.issuperset(clients)]
        has_other_row = any(row.node == node for row in self.listed if row not in rows)
        if rows and not has_other_row and rows[0].node in (None, node):
            return ""
        # Clients that one SuperNode had before newcomers may be hosted together still
        before = {self.bound.get(client) for client in clients}
        together = {client for client, at in self.bound.items() if at in before}
        if len(before) == 1 and together == set(clients):
            return ""
        if not rows:
            return f"no SuperNode hosts clients {ranges(clients)} together by {MEMBERS}"
        return f"clients {ranges(clients)} are another SuperNode's by {MEMBERS}"

    def _too_many(self, claims: Mapping[int, list[int]], here: Collection[int]) -> dict[int, str]:
        """Refuse newcomers beyond `most`; SuperNodes that return with their clients go before."""
        if (most := self.most) is None:
            return {}
        replaced = {self.bound.get(c) for local in claims.values() for c in local}
        # A SuperNode without client numbers is known by its id alone
        enrolled = {node for node, local in self.clients.items() if local or node in here}
        back = {n for n, local in claims.items() if local and self.bound.keys() >= set(local)}
        others, refused = len(enrolled - replaced), dict[int, str]()
        for group, count in ((claims.keys() - back, len(claims)), (back, len(back))):
            if group and count + others > most:
                why = f"{count + others} SuperNodes, strategy.most_supernodes is {most}"
                refused |= dict.fromkeys(group, why)
        if refused and not self.clients and len(refused) == len(claims):
            raise MembershipError(f"{next(iter(refused.values()))}: nothing says who may enrol")
        return refused

    def _enrol(self, node: int, answer: Answered, clients: list[int]) -> str:
        if reason := self.refusal(answer):
            return reason
        for other in {self.bound[c] for c in clients if c in self.bound} & self.clients.keys():
            self.replaced(other, node, answer)
        try:
            self.enrolled(node, answer)
        except MalformedReplyError as error:
            return str(error)
        if answer.handled == 0 and not self.absent.isdisjoint(clients):
            LOG.warning("node %d has lost its state: its clients begin anew", node)
        self.clients[node] = clients
        self._lost.pop(node, None)
        self.bound.update(zip(clients, repeat(node)))  # no set or dict of its own: clients are many
        self.absent.difference_update(clients)
        return ""

    def move(self, old: int, node: int) -> None:
        self.clients = renamed(self.clients, old, node)
        self.bound.update(zip(self.clients.get(node, ()), repeat(node)))
        self._arrays.pop(old, None)

    def forget(self, node: int) -> None:
        """Forget a SuperNode; its clients count as absent."""
        local = self.clients.pop(node)
        self._arrays.pop(node, None)
        self.examples.pop(node, None)
        self.absent |= set(local)

    # Who is enrolled

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

    def numbers(self) -> dict[int, NDArray[np.int64]]:
        for node, local in self.clients.items():
            if node not in self._arrays:
                self._arrays[node] = np.array(local, np.int64)
        return self._arrays


def renamed(by_node: Mapping[int, T], old: int, node: int) -> dict[int, T]:
    """Return the mapping with a SuperNode's new id, in the same order."""
    return {node if at == old else at: one for at, one in by_node.items()}


def check_format(content: RecordDict) -> str:
    """Refuse an answer to ``query`` in another format; return its version of this library."""
    # A plain ClientApp's names neither
    answer = record_of(content, keys.CONFIG, ConfigRecord) or ConfigRecord()
    version = one_line(answer.get(keys.VERSION, __version__), 40)
    if answer.get(keys.MESSAGE_FORMAT, keys.FORMAT) != keys.FORMAT:
        theirs = f"{one_line(answer[keys.MESSAGE_FORMAT], 20)} of {version}"
        ours = f"{keys.FORMAT} of {__version__}"
        raise MalformedReplyError(f"message format {theirs}, expected {ours}")
    return version
