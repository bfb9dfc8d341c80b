"""One exchange with the clients: send, wait with a deadline, check every reply, count bytes.

``Grid.send_and_receive`` polls every 3 s in a deployment, hands over whatever comes and counts
nothing. ``Exchange`` works on any Flower grid (Ray, deployment, in-process) through
``push_messages`` and ``pull_messages`` only, waits in short growing steps, and leaves out and
reports every bad reply (``server.gathering`` decides which) instead of stopping the run.
Ids of messages that went unanswered are kept for a while, so that a late reply is recognised,
drained from the grid and refused.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_graph import __version__
from flower_graph.errors import MalformedReplyError, NoClientsError, one_line
from flower_graph.messages.keys import CONFIG, FORMAT, MESSAGE_FORMAT, VERSION
from flower_graph.server.gathering import Gathering, Rejected, Replies, Unanswered, log_rejected
from flower_graph.server.ledger import ByteLedger, count_bytes

__all__ = ["ByteLedger", "Exchange", "Rejected", "Replies", "count_bytes"]

T = TypeVar("T")

# A message outlives the deadline by this much: the two machines' clocks may differ, and a reply
# that comes just too late shall still be drained rather than rot in the grid.
TTL_MARGIN = 10.0
# Seconds until the first line that says for whom the server waits, and from one to the next.
FIRST_WORD, NEXT_WORD = 2.0, 10.0
MAX_LATE = 10_000  # unanswered messages remembered; the oldest are forgotten first
FIRST_WAIT, SOON_WAIT, LAST_WAIT = 0.001, 0.05, 0.5  # seconds between two pulls


class Exchange:
    """Sends messages over a grid and gathers checked replies.

    Parameters
    ----------
    grid : Grid
        Flower's grid, of any kind.
    log : logging.Logger or None
        Where bad replies are reported, one line per reason; this module's logger by default.
    """

    def __init__(self, grid: Grid, *, log: logging.Logger | None = None) -> None:
        self.grid = grid
        self.ledger = ByteLedger()
        self._log = log or logging.getLogger(__name__)
        self._unanswered: dict[str, Unanswered] = {}
        self._told: set[str] = set()  # other versions that the log names already

    def nodes(self, min_nodes: int, timeout: float) -> list[int]:
        """Wait until enough nodes are connected.

        Parameters
        ----------
        min_nodes : int
            How many are needed, at least 1.
        timeout : float
            Seconds to wait for them.

        Returns
        -------
        list[int]
            Ids of all connected nodes, sorted.

        Raises
        ------
        NoClientsError
            If fewer came in time; says how many, and which settings decide.
        ValueError
            If an argument is impossible.
        """
        if min_nodes < 1:
            raise ValueError(f"min_nodes is {min_nodes}, must be at least 1")
        deadline = _deadline(timeout)
        wait, word = FIRST_WAIT, deadline - timeout + FIRST_WORD
        while len(nodes := sorted(self.grid.get_node_ids())) < min_nodes:
            now = time.monotonic()
            if (left := deadline - now) <= 0:
                raise NoClientsError(
                    f"{len(nodes)} of at least {min_nodes} nodes connected within {timeout:g} s: "
                    "start more SuperNodes, set strategy.min_nodes lower, or strategy.timeout "
                    "higher"
                )
            if now >= word:
                self._log.warning(
                    "waiting for %d SuperNodes, %d connected; %.0f s left",
                    min_nodes,
                    len(nodes),
                    left,
                )
                word = now + NEXT_WORD
            time.sleep(min(wait, left))
            wait = _longer(wait)
        return nodes

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

        Parameters
        ----------
        requests : Mapping[int, RecordDict]
            Node id to content. Nodes may share one content.
        message_type : str
            ``train``, ``evaluate``, ``query`` or ``train.<action>``.
        server_round : int
            The round; travels as the message's group id, and a reply must carry it too.
        timeout : float
            Seconds to wait for replies once the messages are out.
        read : Callable[[int, RecordDict], T]
            Turns a node's reply into a value; raises ``MalformedReplyError`` with the reason
            when the reply cannot be used. Any other exception leaves the node out as well.
        max_reply_bytes : int or None
            Replies larger than this (as `count_bytes` counts) are refused unread.

        Returns
        -------
        Replies[T]
            Values of good replies, and every other node with its reason, in the order of
            `requests`: what the server computes cannot depend on who was first.

        Raises
        ------
        ValueError
            If an argument is impossible.
        """
        _deadline(timeout)  # refuse a bad one before anything is sent
        reader = self._stamped(read) if message_type == "query" else read
        gathering = Gathering[T](server_round, reader, max_reply_bytes)
        self._push(requests, message_type, timeout + TTL_MARGIN, gathering)
        self._gather(gathering, timeout)
        self._give_up(gathering, timeout)
        replies = gathering.replies.in_order(requests)
        log_rejected(self._log, server_round, "left out", replies.rejected)
        log_rejected(self._log, server_round, "ignored", replies.strays)
        return replies

    def _stamped(self, read: Callable[[int, RecordDict], T]) -> Callable[[int, RecordDict], T]:
        """Have a ``query``'s answer say that the server understands its node before it is read."""

        def checked(node_id: int, content: RecordDict) -> T:
            if (version := other_version(content)) and version not in self._told:
                self._told.add(version)
                self._log.warning(
                    "node %d has flower-graph %s, the server %s: with the same version everywhere "
                    "results can be repeated",
                    node_id,
                    version,
                    __version__,
                )
            return read(node_id, content)

        return checked

    def relay(
        self, messages: Iterable[Message], *, server_round: int, timeout: float
    ) -> list[Message]:
        """Send messages made elsewhere and gather what answers them, unread and uncounted.

        What Flower's ``Grid.send_and_receive`` does, without its sleep of 3 s between two looks.

        Parameters
        ----------
        messages : iterable of Message
            One for each node.
        server_round : int
            For the log.
        timeout : float
            Seconds to wait for replies once the messages are out.

        Returns
        -------
        list of Message
            Whatever came, but for replies to messages of earlier exchanges.
        """
        waiting, replies = self._sent(list(messages)), []
        for reply in self._pull(waiting, timeout):
            answers, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            if (late := self._unanswered.pop(answers, None)) is not None:
                self.ledger.count_wire("up", _size(reply))
                why = f"late: round {late.server_round}, expected {server_round}"
                log_rejected(self._log, server_round, "ignored", [Rejected(sender, why)])
                continue
            if reply.has_error() or waiting.get(answers) == sender:
                waiting.pop(answers, None)
            replies.append(reply)
        self._remember(waiting, server_round)
        return replies

    def _gather(self, gathering: Gathering[T], timeout: float) -> None:
        """Pull until every message is answered or time is up."""
        for reply in self._pull(gathering.open, timeout):
            size = _size(reply)
            self.ledger.count_wire("up", size)
            gathering.take(reply, size, self._unanswered)

    def _pull(self, waiting: Mapping[str, int], timeout: float) -> Iterator[Message]:
        """Give what comes until nobody is waited for, as the caller says, or time is up."""
        self._forget_expired()
        deadline, wait = _deadline(timeout), FIRST_WAIT
        while waiting:
            yield from list(self.grid.pull_messages([*waiting, *self._unanswered]))
            left = deadline - time.monotonic()
            if left <= 0 or not waiting:
                break
            time.sleep(min(wait, left))
            wait = _longer(wait)

    def _push(
        self,
        requests: Mapping[int, RecordDict],
        message_type: str,
        ttl: float,
        gathering: Gathering[T],
    ) -> None:
        """Send the messages; note the ids of those that the grid took."""
        group = str(gathering.server_round)
        messages = [
            Message(content, node_id, message_type, ttl=ttl, group_id=group)
            for node_id, content in requests.items()
        ]
        gathering.open |= self._sent(messages)
        taken = set(gathering.open.values())
        for message in messages:
            node_id = message.metadata.dst_node_id
            if node_id in taken:
                self.ledger.count_wire("down", count_bytes(message.content))
            else:
                gathering.reject(node_id, "not sent: the grid refused the message; node gone?")

    def _sent(self, messages: list[Message]) -> dict[str, int]:
        """Send messages; return the node of each that the grid took, by the message's id."""
        if not messages:
            return {}
        accepted = list(self.grid.push_messages(messages))
        if len(accepted) != len(messages):
            # Ray's grid leaves out what it refuses, so places say nothing; ids on messages do.
            taken = set(accepted)
            local = (message.metadata.message_id for message in messages)
            accepted = [message_id if message_id in taken else "" for message_id in local]
        pairs = zip(accepted, messages, strict=True)
        return {number: message.metadata.dst_node_id for number, message in pairs if number}

    def _forget_expired(self) -> None:
        """Drop unanswered messages that the grid has dropped too, and the oldest beyond a limit."""
        now = time.monotonic()
        kept = [(key, entry) for key, entry in self._unanswered.items() if entry.forget_at > now]
        self._unanswered = dict(kept[-MAX_LATE:])

    def _give_up(self, gathering: Gathering[T], timeout: float) -> None:
        """Reject the nodes that have not answered, and remember their messages."""
        for node_id in gathering.open.values():
            gathering.reject(node_id, f"no reply within {timeout:g} s")
        self._remember(gathering.open, gathering.server_round)

    def _remember(self, waiting: Mapping[str, int], server_round: int) -> None:
        """Note who has not answered, so that a late reply is recognised."""
        forget_at = time.monotonic() + TTL_MARGIN
        for message_id, node_id in waiting.items():
            self._unanswered[message_id] = Unanswered(node_id, server_round, forget_at)


def other_version(content: RecordDict) -> str:
    """Return the version of the node that answered a ``query``; empty if it is the server's."""
    # A plain ClientApp says nothing of it, which is fine.
    said = content.config_records.get(CONFIG, ConfigRecord())
    if MESSAGE_FORMAT not in said:
        return ""
    version = one_line(str(said.get(VERSION, "?")), 40)
    if said[MESSAGE_FORMAT] != FORMAT:
        theirs = one_line(str(said[MESSAGE_FORMAT]), 20)
        raise MalformedReplyError(
            f"speaks message format {theirs} (flower-graph {version}), the server {FORMAT} "
            f"({__version__}): install the same version"
        )
    return "" if version == __version__ else version


def _size(reply: Message) -> int:
    return count_bytes(reply.content) if reply.has_content() else 0


def _deadline(timeout: float) -> float:
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout is {timeout}, must be a positive number of seconds")
    return time.monotonic() + timeout


def _longer(wait: float) -> float:
    """Double the wait up to 50 ms, then let it grow with the time that has passed, to 0.5 s."""
    return min(wait * 2, SOON_WAIT) if wait < SOON_WAIT else min(wait * 1.1, LAST_WAIT)
