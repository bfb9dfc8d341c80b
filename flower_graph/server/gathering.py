"""What comes of one exchange: values of good replies, and a reason for everything else.

A reply is used when it answers an open message of this exchange, comes from the node that was
asked, carries the right round, is not too large, and the caller's ``read`` accepts it. It is all
decided here, one message at a time and without a grid, because this is where a faulty or hostile
client meets the server: nothing that a client sends may raise, count twice or speak for another
node. The rule that the tests hold: every node asked is in `values` or, once, in `rejected`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID

from flower_graph.errors import MAX_REASON, one_line

T = TypeVar("T")


@dataclass(frozen=True)
class Rejected:
    """A node that is left out of the round, or a message that is not used."""

    node_id: int  # The node, as Flower numbers it
    reason: str  # One line for a person


@dataclass(frozen=True)
class Replies(Generic[T]):
    """What came of one exchange."""

    # Every node that was asked is in `values` or, once, in `rejected`, never in both.

    # What read returned for each node that answered well
    values: dict[int, T] = field(default_factory=dict)
    # The nodes that gave no usable answer, with the reason
    rejected: list[Rejected] = field(default_factory=list)
    # Messages that answered no open request: duplicates, late ones, ones from strangers
    strays: list[Rejected] = field(default_factory=list)

    def in_order(self, nodes: Iterable[int]) -> Replies[T]:
        """Return the same with `values` and `rejected` in the order of `nodes`."""
        place = {node_id: index for index, node_id in enumerate(nodes)}
        values = dict(sorted(self.values.items(), key=lambda item: place[item[0]]))
        rejected = sorted(self.rejected, key=lambda entry: place[entry.node_id])
        return Replies(values, rejected, self.strays)


@dataclass(frozen=True)
class Unanswered:
    """A message of an earlier exchange that has no reply yet."""

    node_id: int
    server_round: int
    forget_at: float  # on the clock of time.monotonic()


@dataclass
class Gathering(Generic[T]):
    """One exchange while it runs: who is still to answer, and what has come."""

    server_round: int
    read: Callable[[int, RecordDict], T]
    max_reply_bytes: int | None
    open: dict[str, int] = field(default_factory=dict)  # message id -> node id
    answered: dict[str, int] = field(default_factory=dict)
    replies: Replies[T] = field(default_factory=Replies)

    def reject(self, node_id: int, reason: str) -> None:
        """Leave a node out of the round."""
        self.replies.rejected.append(Rejected(node_id, one_line(reason)))

    def take(self, reply: Message, size: int, unanswered: dict[str, Unanswered]) -> None:
        """Sort one incoming message: a value, a rejected node or a stray."""
        answers, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        # An error that the grid writes for a lost node comes from the grid's own id.
        is_from_grid = reply.has_error() and sender == SUPERLINK_NODE_ID
        if answers not in self.open or not (is_from_grid or sender == self.open[answers]):
            reason = self._stray(reply, unanswered)
            self.replies.strays.append(Rejected(sender, one_line(reason)))
            return
        node_id = self.open.pop(answers)
        self.answered[answers] = node_id
        if (problem := self._problem(reply, size)) is not None:
            self.reject(node_id, problem)
            return
        try:
            self.replies.values[node_id] = self.read(node_id, reply.content)
        except ValueError as error:  # MalformedReplyError is one
            self.reject(node_id, str(error))
        except Exception as error:  # a hostile reply must not end the run, whatever it provokes
            self.reject(node_id, f"unreadable reply: {type(error).__name__}: {error}")

    def _problem(self, reply: Message, size: int) -> str | None:
        """Say why a node's answer is refused unread, or None."""
        if (said := no_content(reply)) is not None:
            return said
        if reply.metadata.group_id != str(self.server_round):
            return f"round {reply.metadata.group_id or '?'}, expected {self.server_round}"
        if self.max_reply_bytes is not None and size > self.max_reply_bytes:
            return f"reply of {size} bytes, at most {self.max_reply_bytes} allowed"
        return None

    def _stray(self, reply: Message, unanswered: dict[str, Unanswered]) -> str:
        """Say what a message is that answers no open request."""
        answers = reply.metadata.reply_to_message_id
        if answers in self.open:
            return f"reply in the name of node {self.open[answers]}"
        if answers in self.answered:
            return "duplicate: a second reply to one message"
        if (late := unanswered.pop(answers, None)) is not None:
            return f"late: round {late.server_round}, expected {self.server_round}"
        if reply.metadata.group_id != str(self.server_round):
            return f"late: round {reply.metadata.group_id or '?'}, expected {self.server_round}"
        return "answers no message of this exchange"


def hosted_twice(client: int, other: int) -> str:
    """Say that a client of a SuperNode that is new is another's too, and what to do."""
    return (
        f"client {client} is hosted by node {other} already: give each SuperNode a partition-id or "
        "a data-folder of its own"
    )


def no_content(reply: Message) -> str | None:
    """Say why there is nothing to read in a reply, or None."""
    if reply.has_error():
        what, said = "error reply: ", reply.error.reason or f"code {reply.error.code}"
        return what + one_line(said, MAX_REASON - len(what))
    return None if reply.has_content() else "empty reply"


def log_rejected(
    log: logging.Logger, server_round: int, what: str, entries: Iterable[Rejected]
) -> None:
    """Log one line for each reason: a thousand silent nodes are one event."""
    by_reason: dict[str, list[int]] = {}
    for entry in entries:
        by_reason.setdefault(entry.reason, []).append(entry.node_id)
    for reason, nodes in by_reason.items():
        named = ", ".join(map(str, nodes[:3])) + (", ..." if len(nodes) > 3 else "")
        log.warning("round %d: %s %d (node %s): %s", server_round, what, len(nodes), named, reason)
