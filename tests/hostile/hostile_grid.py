"""A grid on which one SuperNode answers as an attacker would, and what came of it."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from federation import round_of
from flwr.app import Error, Message, RecordDict
from mutations import Mutation

from flower_graph.flower_compat import stamp
from flower_graph.simulation import InProcessGrid
from flower_graph.simulation import _own_records as copied

NASTY = "\x1b[31mround 1: all is well\r\nround 2: \u202eall is well\x00" + "x" * 5000
# By name: what is done around the content of a reply
ENVELOPES = (
    *("an error", "the round before", "the round after", "no round", "another's name"),
    *("to another's message", "to no message", "no content", "a replay", "another's content"),
    "twice",
)


@dataclass(frozen=True)
class Around:
    """An attack on what is around a reply's content."""

    way: str
    where: str = "envelope"

    @property
    def name(self) -> str:
        return f"{self.where}: {self.way}"


Attack = Mutation | Around
Key = tuple[str, int]  # type of a message, and the how-manieth of this type it is


class HostileGrid(InProcessGrid):
    """Spoils replies of the SuperNode in place 1.

    ``plan`` says which: by type of message, and the how-manieth of its type. ``None`` stands for
    a reply that never comes; an error is sent instead, so that nobody waits.
    """

    def __init__(
        self, app: Any, *, num_supernodes: int, plan: Mapping[Key, Attack | None], **more: Any
    ) -> None:
        super().__init__(app, num_supernodes=num_supernodes, **more)
        self.plan, self.counts = plan, Counter[str]()
        self.hostile = list(self.contexts)[1]
        self.examples: dict[Key, RecordDict] = {}  # what it would have answered
        self.rounds: dict[Key, int] = {}  # the round of each message to it
        self.failed: list[Key] = []  # there was nothing to spoil
        self._last: dict[tuple[str, int], RecordDict] = {}
        self._before: dict[str, RecordDict] = {}
        self._again: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = list(messages)
        ids = super().push_messages(pushed)
        sent = dict(zip(ids, pushed, strict=True))
        for number, message in sent.items():
            reply, kind = self._replies[number], message.metadata.message_type
            node = message.metadata.dst_node_id
            if reply.has_content():
                if node == self.hostile and (kind, node) in self._last:
                    self._before[kind] = self._last[kind, node]
                self._last[kind, node] = copied(reply.content)
        for number, message in sent.items():
            if message.metadata.dst_node_id == self.hostile:
                self._strike(number, message, ids)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        if replies:
            replies, self._again = replies + self._again, []
        return replies

    def _strike(self, number: str, message: Message, ids: list[str]) -> None:
        kind = message.metadata.message_type
        self.counts[kind] += 1
        key = kind, self.counts[kind]
        self.rounds[key] = round_of(message)
        reply = self._replies[number]
        if key not in self.plan:
            if reply.has_content():
                self.examples[key] = copied(reply.content)
            return
        attack = self.plan[key]
        if attack is None:
            self._replies[number] = Message(Error(0, "lost"), reply_to=message)
            self._number(self._replies[number])
        elif not reply.has_content():
            self.failed.append(key)
        elif isinstance(attack, Mutation):
            spoilt = copied(reply.content)
            try:
                attack.apply(spoilt)
            except KeyError:  # this reply has no such entry
                self.failed.append(key)
            else:
                reply.content = spoilt
        else:
            self._around(attack.way, number, message, ids)

    def _around(self, way: str, number: str, message: Message, ids: list[str]) -> None:
        reply, kind = self._replies[number], message.metadata.message_type
        group = int(message.metadata.group_id or 0)
        others = [node for node in self.contexts if node != self.hostile]
        if way == "an error":
            self._replies[number] = Message(Error(7, NASTY), reply_to=message)
            self._number(self._replies[number])
        elif way in ("the round before", "the round after", "no round"):
            step = {"the round before": -1, "the round after": 1}.get(way)
            reply.metadata.group_id = "" if step is None else str(group + step)
        elif way == "another's name":
            stamp(reply, src_node_id=others[0])
        elif way == "to another's message":
            stamp(reply, reply_to_message_id=next(one for one in ids if one != number))
        elif way == "to no message":
            stamp(reply, reply_to_message_id="nobody-asked")
        elif way == "no content":
            reply.__dict__["_content"] = None
        elif way == "a replay":
            reply.content = copied(self._before.get(kind, RecordDict()))
        elif way == "another's content":
            reply.content = copied(self._last.get((kind, others[0]), RecordDict()))
        else:
            assert way == "twice"
            self._again.append(reply)


class Listener(logging.Handler):
    """Notes every warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listening(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Run something and return what it logged as warnings too; nothing is printed."""
    log, listener = logging.getLogger("flower_graph"), Listener()
    before = log.propagate
    log.addHandler(listener)
    log.propagate = False
    try:
        return run(), listener.lines
    finally:
        log.removeHandler(listener)
        log.propagate = before


def fit_for_a_log(line: str) -> bool:
    """Whether a line can do a log no harm."""
    return line.isprintable() and len(line) < 1000 and not re.search(r"[\r\n\x1b]", line)
