"""A grid on which one SuperNode answers as an attacker would, and what came of it."""

from __future__ import annotations

import logging
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from federation import Federation, round_of
from flwr.app import Error, Message, RecordDict
from mutations import Mutation

from flower_graph.client.state import IN_PROCESS
from flower_graph.flower_compat import stamp
from flower_graph.wire.arrays import own_records as copied

NASTY = "\x1b[31mround 1: all is well\r\nround 2: \u202eall is well\x00" + "x" * 5000
# By name: what is done around the content of a reply
ENVELOPES = (
    *("an error", "the round before", "the round after", "no round", "another's name"),
    *("to another's message", "to no message", "no content", "a replay", "another's content"),
    *("twice", "500 times"),
)
# Errors by name: code and reason. Those that look like lost state are in campaigns.
ERRORS = {
    "no reason": (7, ""),
    "code 0": (0, "lost"),
    "an odd code": (-(2**31), "odd"),
    "a large code": (2**31 - 1, "odd"),
    "the SuperLink's code": (4, "the node is gone"),
    "2 MB": (7, "x" * (2 << 20)),
    "7 MB of lines": (7, "a line\n" * (1 << 20)),
    "2 M signs": (7, "\u202e\x1b[2J" * (2 << 17)),
    "a line of blanks": (7, " " * (2 << 20)),
    "a refusal": (7, "RefusedError: round 1 is masked already: no mask is used twice"),
    "a traceback": (7, "Traceback (most recent call last):\n" * 300 + "KeyError: 'prepare-run'"),
}
TIMES = {"twice": 1, "500 times": 499}


@dataclass(frozen=True)
class Around:
    """An attack on what is around a reply's content."""

    way: str
    where: str = "envelope"

    @property
    def name(self) -> str:
        return f"{self.where}: {self.way}"


@dataclass(frozen=True)
class Told:
    """An error in place of the reply."""

    what: str
    code: int
    reason: str = field(repr=False)
    where: str = "error"

    @property
    def name(self) -> str:
        return f"{self.where}: {self.what}"


Attack = Mutation | Around | Told
Key = tuple[str, int]  # type of a message, and the how-manieth of this type it is


class HostileGrid(Federation):
    """Spoils replies of the SuperNode in place 1.

    ``plan`` says which: by type of message, and the how-manieth of its type. ``None`` stands for
    a reply that never comes; an error is sent instead, so that nobody waits. With ``new_id`` it
    comes back under another id, without what it kept, whenever it has attacked.

    What the server does between two exchanges is weighed: its processor time, and the memory that
    it takes at most, beyond the replies themselves.
    """

    def __init__(
        self,
        app: Any,
        *,
        num_supernodes: int,
        plan: Mapping[Key, Attack | None],
        new_id: bool = False,
        **more: Any,
    ) -> None:
        where = {"state_dir": IN_PROCESS, "new_id": new_id}
        super().__init__(app, num_supernodes=num_supernodes, **where, **more)
        self.plan, self.counts = plan, Counter[str]()
        self.hostile = list(self.contexts)[1]
        self.names = {self.hostile}  # it may have had others
        self.limits: dict[str, int] = {}  # by type of message: the most bytes of a reply
        self.seconds: dict[str, float] = {}  # the server's, after messages of a type, at most
        self.peaks: dict[str, int] = {}  # and its bytes
        self._has_struck, self._begun = False, ("", 0.0)
        self.examples: dict[Key, RecordDict] = {}  # what it would have answered
        self.rounds: dict[Key, int] = {}  # the round of each message to it
        self.failed: list[Key] = []  # there was nothing to spoil
        self._last: dict[tuple[str, int], RecordDict] = {}
        self._before: dict[str, RecordDict] = {}

    def get_node_ids(self) -> list[int]:
        if self.new_id and self._has_struck:
            self._restart(1)
            self.hostile, self._has_struck = list(self.contexts)[-1], False
            self.names.add(self.hostile)
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = list(messages)
        self.weigh()
        ids = self._push(pushed)
        if pushed:
            self._begun = pushed[0].metadata.message_type, time.process_time()
        tracemalloc.start()
        return ids

    def weigh(self) -> None:
        """Note what the server took since the last messages."""
        kind, begun = self._begun
        if not tracemalloc.is_tracing():
            return
        spent, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if kind:
            self.seconds[kind] = max(spent, self.seconds.get(kind, 0))
            self.peaks[kind] = max(peak, self.peaks.get(kind, 0))

    def _push(self, pushed: list[Message]) -> list[str]:
        ids = super().push_messages(pushed)
        known = [one for one in pushed if one.metadata.dst_node_id in self.contexts]
        sent = dict(zip(ids, known, strict=True))
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
        attack, self._has_struck = self.plan[key], True
        if attack is None:
            self._replies[number] = Message(Error(0, "lost"), reply_to=message)
            self._number(self._replies[number])
        elif isinstance(attack, Told):
            self._replies[number] = Message(Error(attack.code, attack.reason), reply_to=message)
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
            self._again += [reply] * TIMES[way]


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
