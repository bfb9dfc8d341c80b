"""One exchange with the clients: send, wait with a deadline, check every reply, count bytes.

``Grid.send_and_receive`` polls every 3 s in a deployment, checks nothing and counts nothing. An
``Exchange`` uses a reply if it answers an open message, comes from the node that was asked, is not
too large, carries the right round, and the caller's ``read`` accepts it. Every other reply is left
out and reported. Ids of unanswered messages are kept for a while, so that a late reply is drained.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from flower_graph.errors import MAX_REASON, MalformedReplyError, NoClientsError, one_line, words_of
from flower_graph.flower_compat import SUPERLINK_NODE_ID, ErrorCode, pull
from flower_graph.wire.client_errors import Failures, Kind, kind_of, no_content
from flower_graph.wire.ledger import ByteLedger, too_large

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# Seconds by which a message outlives the deadline: clocks may differ, and a reply that comes just
# too late must still be removed from the grid.
TTL_MARGIN = 10.0
# Seconds until the first log line about waiting, and between two such lines.
FIRST_WORD, NEXT_WORD = 2.0, 10.0
MAX_LATE = 10_000  # unanswered messages remembered; the oldest are forgotten first
MAX_NAMED = 50  # entries of one node in a round's log and report
FIRST_WAIT, SOON_WAIT, LAST_WAIT = 0.001, 0.05, 0.5  # seconds between two pulls
LOOK_WAIT = 2.0  # seconds between two looks at which nodes are connected
NO_ANSWER = "a second reply to one message, or to none of this exchange"
LOST = "its answer is gone from the SuperLink before it was fetched"
GONE = "the SuperNode is no longer connected"
NOT_SENT = "not sent: the grid refused the message; node gone?"


@dataclass(frozen=True)
class Rejected:
    """A node that is left out of the round, or a message that is ignored."""

    node_id: int  # Flower's
    reason: str  # in one line
    kind: Kind = Kind.OTHER  # of its error, if it answered with one


@dataclass
class Replies(Generic[T]):
    """The result of one exchange: a node that was asked has a value or a reason, never both."""

    values: dict[int, T] = field(default_factory=dict)  # what ``read`` returned, by node
    rejected: list[Rejected] = field(default_factory=list)  # nodes without a usable answer


def read_replies(
    asked: Mapping[int, str],
    replies: Iterable[tuple[int, Message]],
    read: Callable[[int, Message], T],
) -> Replies[T]:
    """Read the replies of nodes, each with the reason if it is silent; errors leave it out."""
    values, faults = dict[int, T](), dict[int, Rejected]()
    for node, reply in replies:
        try:
            values[node] = read(node, reply)
        except Exception as error:  # whatever a reply's content causes
            faults[node] = Rejected(node, one_line(unreadable(error)), kind_of(reply))
    result = Replies[T]()
    for node, silent in asked.items():
        if node in values:
            result.values[node] = values[node]
        else:
            result.rejected.append(faults.get(node) or Rejected(node, silent))
    return result


def require_content(reply: Message, most: int | None, server_round: int | None = None) -> None:
    """Refuse a reply that is too large, an error, empty or of another round."""
    if (problem := too_large(reply, most) or no_content(reply)) is not None:
        raise MalformedReplyError(problem)
    came = reply.metadata.group_id[:MAX_REASON] or "?"
    if server_round is not None and came != str(server_round):
        raise MalformedReplyError(f"round {came}, expected {server_round}")


class Exchange:
    """Sends messages over a grid of any kind and gathers checked replies."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.ledger = ByteLedger()
        self.failures = Failures(grid)
        # Of earlier exchanges: message id to round, and when it is forgotten (time.monotonic())
        self._unanswered: dict[str, tuple[int, float]] = {}

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the bytes of what is sent in the block out of the ledger."""
        before = self.ledger.state_dict()
        yield
        self.ledger.load_state_dict(before)

    def nodes(self, min_nodes: int, timeout: float) -> list[int]:
        """Wait until enough nodes are connected, else ``NoClientsError``; return all sorted ids."""
        word = time.monotonic() + FIRST_WORD
        for _ in _pauses(timeout):
            if len(nodes := sorted(self.grid.get_node_ids())) >= min_nodes:
                return nodes
            if time.monotonic() >= word:
                LOG.warning("waiting for %d SuperNodes, %d connected", min_nodes, len(nodes))
                word = time.monotonic() + NEXT_WORD
        words = f"{len(nodes)} of at least {min_nodes} nodes connected within {timeout:g} s"
        raise NoClientsError(f"{words} (strategy.min_nodes, strategy.timeout)")

    def send(
        self,
        requests: Mapping[int, RecordDict],
        *,
        message_type: str = "train",
        server_round: int,
        timeout: float,
        read: Callable[[int, RecordDict], T],
        max_reply_bytes: int | None = None,
    ) -> Replies[T]:
        """Send one message to each node and gather the replies until all came or time is up.

        They are in the order of `requests`. ``ClientBugError`` if all nodes fail alike.

        Parameters
        ----------
        requests : Mapping[int, RecordDict]
            Node id to content. Nodes may share one content.
        message_type : str
            ``train``, ``evaluate``, ``query``, or one of them and an action, as ``train.finish``.
        server_round : int
            The round; travels as the message's group id, and a reply must carry it too.
        timeout : float
            Seconds to wait for replies after sending.
        read : Callable[[int, RecordDict], T]
            Turns a node's reply into a value. Any exception leaves the node out, with its reason.
        max_reply_bytes : int or None
            Larger replies are refused unread.
        """
        _check(timeout)  # before anything is sent
        ttl, group = timeout + TTL_MARGIN, str(server_round)
        messages = [
            Message(content, node_id, message_type, ttl=ttl, group_id=group)
            for node_id, content in requests.items()
        ]
        waiting = self._sent(messages)
        late = f"no reply within {timeout:g} s"
        asked = dict.fromkeys(requests, NOT_SENT) | dict.fromkeys(waiting.values(), late)

        def checked(node: int, reply: Message) -> T:
            require_content(reply, max_reply_bytes, server_round)
            return read(node, reply.content)

        replies = read_replies(asked, self._pull(waiting, server_round, timeout), checked)
        log_rejected(LOG, server_round, f"{message_type}: left out", replies.rejected)
        return replies

    def relay(
        self, messages: Iterable[Message], *, server_round: int, timeout: float
    ) -> dict[int, Message]:
        """Send messages made elsewhere; return each node's first answer, unread."""
        return dict(self._pull(self._sent(list(messages)), server_round, timeout))

    def _pull(
        self, waiting: dict[str, int], server_round: int, timeout: float
    ) -> Iterator[tuple[int, Message]]:
        """Take nodes out of ``waiting`` with their answers, until none is left or time is up."""
        # A node whose answer cannot come any more gets an error instead, as Flower up to 1.42 gives
        # it: later versions report neither lost answers nor lost SuperNodes.
        # Forget messages that the grid has dropped, and the oldest beyond a limit.
        messages, now = self._unanswered.items(), time.monotonic()
        self._unanswered = dict([one for one in messages if one[1][1] > now][-MAX_LATE:])
        # Messages that answered no open request: late, duplicates, and those of other nodes
        look, asked, ignored = now + LOOK_WAIT, {*waiting.values()}, list[Rejected]()
        for _ in _pauses(timeout):
            gone: set[int] = set()
            if time.monotonic() >= look:  # before the pull: a node that left may have answered
                gone = {*waiting.values()} - {*self.grid.get_node_ids()}
                look = time.monotonic() + LOOK_WAIT
            replies, lost = pull(self.grid, [*waiting, *self._unanswered])
            self.ledger.count_messages("up", replies)
            answers = dict[str, Message]()
            for reply in replies:
                answered, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
                node, late = waiting.get(answered), self._unanswered.pop(answered, None)
                is_superlinks = reply.has_error() and sender == SUPERLINK_NODE_ID
                if late is not None:
                    ignored.append(Rejected(sender, f"late: round {late[0]}"))
                elif node is None or answered in answers:
                    ignored.append(Rejected(sender, NO_ANSWER))
                elif sender == node or is_superlinks:
                    answers[answered] = reply
                else:
                    ignored.append(Rejected(sender, f"reply in the name of node {node}"))
            for message_id, node in waiting.items():
                is_lost = node in gone or lost.get(message_id) == node
                if is_lost and message_id not in answers:
                    # The error in the place of an answer that cannot come
                    why = GONE if node in gone else LOST
                    error = Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, why)
                    request = Message(RecordDict(), node, "train")
                    answers[message_id] = Message(error, reply_to=request)
            for message_id, reply in answers.items():
                node = waiting.pop(message_id)
                self.failures.note(node, reply)
                yield node, reply
            if not waiting:
                break
        forget_at = time.monotonic() + TTL_MARGIN
        self._unanswered |= dict.fromkeys(waiting, (server_round, forget_at))
        log_rejected(LOG, server_round, "ignored", ignored)
        self.failures.check(asked)

    def _sent(self, messages: list[Message]) -> dict[str, int]:
        # Ray's grid leaves out messages that it refuses: ids alone say which
        taken = {*self.grid.push_messages(messages)} if messages else set[str]()
        ids = {one.metadata.message_id: one for one in messages}
        sent = {number: one for number, one in ids.items() if number in taken}
        self.ledger.count_messages("down", sent.values())
        return {number: message.metadata.dst_node_id for number, message in sent.items()}


def unreadable(error: Exception) -> str:
    """Return why a reply could not be read, whatever error its content caused."""
    if isinstance(error, ValueError):  # MalformedReplyError is one
        return words_of(error)
    return f"unreadable reply: {type(error).__name__}: {words_of(error)}"


def few(entries: Iterable[Rejected]) -> list[Rejected]:
    """Keep a few entries of each node, and add one with the number of the others."""
    by_node: dict[int, list[Rejected]] = {}
    for entry in entries:
        by_node.setdefault(entry.node_id, []).append(entry)
    result = [entry for own in by_node.values() for entry in own[:MAX_NAMED]]
    over = {node: len(own) - MAX_NAMED for node, own in by_node.items() if len(own) > MAX_NAMED}
    return result + [Rejected(node, f"and {more} more") for node, more in over.items()]


def reasons_of(entries: Iterable[Rejected]) -> str:
    """Return the first few reasons in one line."""
    return "; ".join(sorted({entry.reason for entry in entries})[:3])


def log_rejected(
    log: logging.Logger, server_round: int, what: str, entries: Iterable[Rejected]
) -> None:
    """Log one line for each reason: a thousand silent nodes are one event."""
    by_reason: dict[str, list[int]] = {}
    for entry in few(entries):
        by_reason.setdefault(entry.reason, []).append(entry.node_id)
    for reason, nodes in by_reason.items():
        named = ", ".join(map(str, nodes[:3])) + (", ..." if len(nodes) > 3 else "")
        log.warning("round %d: %s %d (node %s): %s", server_round, what, len(nodes), named, reason)


def _check(timeout: float) -> None:
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout is {timeout}, must be a positive number of seconds")


def _pauses(timeout: float) -> Iterator[None]:
    """Let the caller look, sleep, and look again until time is up."""
    _check(timeout)
    deadline, wait = time.monotonic() + timeout, FIRST_WAIT
    while True:
        yield
        if (left := deadline - time.monotonic()) <= 0:
            return
        time.sleep(min(wait, left))
        # Doubled up to 50 ms; then it grows with the time that has passed, to 0.5 s
        wait = min(wait * 2, SOON_WAIT) if wait < SOON_WAIT else min(wait * 1.1, LAST_WAIT)
