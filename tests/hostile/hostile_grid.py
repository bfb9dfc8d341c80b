"""A grid on which one SuperNode answers as an attacker would, and what came of it."""

from __future__ import annotations

import logging
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
from federation import ALL, METHODS, Federation, round_of
from flwr.app import Error, Message, RecordDict
from mutations import Mutation, Named

from flower_graph.apps.run import client_app
from flower_graph.client.state import IN_PROCESS
from flower_graph.flower_compat import stamp
from flower_graph.method.registry import method_of
from flower_graph.records.participation import Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.wire.arrays import own_records as copied
from flower_graph.wire.exchange import Exchange

NASTY = "\x1b[31mround 1: all is well\r\nround 2: \u202eall is well\x00" + "x" * 5000
# By name: what is done around the content of a reply
ENVELOPES = (
    *("the round before", "the round after", "no round", "another's name"),
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
class Around(Named):
    """An attack on what is around a reply's content."""

    what: str
    where: str = "envelope"


@dataclass(frozen=True)
class Told(Named):
    """An error in place of the reply."""

    what: str
    code: int
    reason: str = field(repr=False)
    where: str = "error"


LOST = Told("lost", 0, "lost")  # stands for a reply that never comes, so that nobody waits
Attack = Mutation | Around | Told
Key = tuple[str, int]  # type of a message, and the how-manieth of this type it is


class HostileGrid(Federation):
    """Spoils replies of the SuperNode in place 1.

    ``plan`` says which: by type of message, and the how-manieth of its type. ``None`` stands for
    a reply that never comes. With ``new_id`` it comes back under another id, without what it kept,
    whenever it has attacked.

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
        attack, self._has_struck = self.plan[key] or LOST, True
        if isinstance(attack, Told):
            reply = Message(Error(attack.code, attack.reason), reply_to=message)
            self._replies[number] = reply
            self._number(reply)
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
            self._around(attack.what, number, message, ids)

    def _around(self, way: str, number: str, message: Message, ids: list[str]) -> None:
        reply, kind = self._replies[number], message.metadata.message_type
        group = int(message.metadata.group_id or 0)
        others = [node for node in self.contexts if node != self.hostile]
        if way in ("the round before", "the round after", "no round"):
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


def listening(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Run something and return what it logged as warnings too; nothing is printed."""
    log, lines, listener = logging.getLogger("flower_graph"), [], logging.Handler(logging.WARNING)
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = log.propagate
    log.addHandler(listener)
    log.propagate = False
    try:
        return run(), lines
    finally:
        log.removeHandler(listener)
        log.propagate = before


def fit_for_a_log(line: str) -> bool:
    return line.isprintable() and len(line) < 1000 and not re.search(r"[\r\n\x1b]", line)


Plan = Mapping[Key, Attack | None]
FIGURES = (
    *("loss", "cross_entropy", "regulariser", "train_accuracy", "val_accuracy", "test_accuracy"),
    *("asked", "answered"),
)
SHORT = 3  # rounds of a run with one attack
CAMPAIGN = 5  # and of one in which a SuperNode attacks all the time
TIMEOUT = 0.05


@dataclass
class Attacked:
    """What a run with a hostile SuperNode left.

    ``named`` has for each round what its report says of that SuperNode or its clients;
    ``excluded`` are clients whose fault in a secure sum is proven: they take part no more.
    """

    grid: HostileGrid
    reports: list[RoundReport]
    weights: dict[str, Any]
    log: list[str]
    clients: Sequence[int]
    error: BaseException | None = None
    excluded: frozenset[int] = frozenset()
    members: frozenset[int] = frozenset()  # clients that the server knows at the end

    @property
    def answered(self) -> set[int]:
        """Clients whose answer was used in one of the last two rounds: one may be skipped."""
        last = [Participation.from_record(one.participation) for one in self.reports[-2:]]
        return set[int]().union(*(one.answered for one in last))

    @property
    def figures(self) -> np.ndarray:
        return np.array([[getattr(r, name) for name in FIGURES] for r in self.reports], float)

    @property
    def named(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for report in self.reports:
            for entry in report.rejected:
                is_node = entry.get("node") in self.grid.names
                if is_node or entry.get("client") in self.clients:
                    found.setdefault(report.round, []).append(entry["reason"])
        return found

    @property
    def logged(self) -> list[str]:
        """Lines of the log that say why the SuperNode was left out."""
        names = [str(name) for name in self.grid.names]
        own = [line for line in self.log if any(name in line for name in names)]
        return [line for line in own if "left out" in line or "takes no part" in line]

    def same(self, other: Attacked, atol: float) -> bool:
        if self.figures.shape != other.figures.shape or self.weights.keys() != other.weights.keys():
            return False
        pairs = [(np.asarray(w), np.asarray(other.weights[k])) for k, w in self.weights.items()]
        pairs.append((self.figures, other.figures))
        return all(
            one.shape == two.shape and np.allclose(one, two, rtol=0, atol=atol, equal_nan=True)
            for one, two in pairs
        )


@dataclass(frozen=True, eq=False)
class Method:
    """A method under attack; the clients at the SuperNode in place 1 are hostile.

    ``late`` rounds pass before a report tells of an exchange. ``atol`` is by how much numbers of
    two runs may differ: 0, but where masks are drawn by chance.
    """

    name: str
    build: Callable[[], tuple[Any, Any]]  # makes app and strategy
    supernodes: int
    late: int = 0
    atol: float = 0.0

    def run(self, plan: Plan, rounds: int = SHORT, *, new_id: bool = False) -> Attacked:
        """Run it; an exception that ends the run is in ``error``."""
        return self._run(plan, rounds, self.clean.clients, new_id=new_id)

    @cached_property
    def clean(self) -> Attacked:
        found = self._run({}, SHORT)
        assert found.error is None, found.error
        return found

    @cached_property
    def honest(self) -> frozenset[int]:
        return self.clean.members - set(self.clean.clients)

    @cached_property
    def reference(self) -> Attacked:
        """A run without attacks whose costs count: what is done once per process is done."""
        return self.run({}, CAMPAIGN)

    def _run(
        self, plan: Plan, rounds: int, clients: Sequence[int] = (), *, new_id: bool = False
    ) -> Attacked:
        app, strategy = self.build()
        grid = HostileGrid(app, num_supernodes=self.supernodes, plan=plan, new_id=new_id)
        reports: list[RoundReport] = []
        send = Exchange.send

        def noting(exchange: Exchange, requests: Any, **how: Any) -> Any:
            """Tell the grid how large replies may be."""
            kind = how.get("message_type", "train")
            grid.limits[kind] = max(grid.limits.get(kind, 0), how.get("max_reply_bytes") or 0)
            return send(exchange, requests, **how)

        def go() -> BaseException | None:
            try:
                with patch.object(Exchange, "send", noting):
                    strategy.start(
                        grid, num_rounds=rounds, timeout=TIMEOUT, on_round=reports.append
                    )
            except Exception as error:
                return error
            finally:
                grid.weigh()
            return None

        logging.getLogger("flwr").setLevel(logging.ERROR)
        error, log = listening(go)
        weights = {k: np.asarray(v) for k, v in strategy.weights().items()} if not error else {}
        sums = getattr(strategy, "sums", None) or getattr(strategy.session, "sums", None)
        excluded = frozenset[int](sums.server.excluded) if sums and not error else frozenset[int]()
        hosted = strategy.session.members.clients
        clients = clients or hosted.get(grid.hostile, ())
        members = frozenset(client for local in hosted.values() for client in local)
        return Attacked(grid, reports, weights, log, clients, error, excluded, members)

    def in_round(self, kind: str, number: int) -> list[int]:
        """Which messages of a type a round without attacks has."""
        sent = self.clean.grid.rounds
        return [place for (k, place), at in sent.items() if (k, at) == (kind, number)]

    @cached_property
    def rounds(self) -> list[str]:
        kinds = dict.fromkeys(kind for kind, _ in self.clean.grid.rounds)
        return [k for k in kinds if all(self.in_round(k, n) for n in range(1, SHORT + 1))]

    @cached_property
    def setup(self) -> list[str]:
        """Types of those that come before the first."""
        kinds = [kind for (kind, number), at in self.clean.grid.rounds.items() if number == 1 >= at]
        before = [k for k in kinds if sum(len(self.in_round(k, n)) for n in (0, 1)) > 1]
        return [kind for kind in kinds if kind not in self.rounds or kind in before]

    def first(self, kind: str) -> int:
        """Number of the message whose attack the first round's report tells of."""
        return self.in_round(kind, 1 + self.late)[-1]

    def round_of(self, key: Key) -> int:
        """The round whose report tells of a message."""
        kind, number = key
        return max(1, number - self.first(kind) + 1) if kind in self.rounds else 1


def registered(name: str, *words: str, atol: float = 0.0) -> Method:
    """Give a method of the federation, under some settings."""
    setup = ALL[name].with_(*words)
    config = setup.load()

    def build() -> tuple[Any, Any]:
        return client_app(config, None), method_of(config).build_strategy(config, None)

    return Method(name, build, setup.supernodes, setup.late, atol)


FINE = "strategy.resolution=1e-6"
ONCE = "judge.every=99"  # nothing of what clients send is evaluated in between
NFEDGNN = registered("nfedgnn")
# One of six may vanish, and one of the five that an attacker leaves
BORNE = "strategy.dropout=0.3"
FEDSCEM = registered("fedscem", FINE, BORNE, "strategy.alignment=plain", atol=1e-4)
PSI = registered("fedscem", FINE, BORNE, atol=1e-4)
PLAIN = registered("fedscem, plain")
FEDGLS = registered("fedgls")
PPFL = registered("gat", ONCE)
SECURE = registered("deepwalk, secure", ONCE, atol=1e-3)
# All that are registered, and what of a method is a path of its own through the server
CORPUS = {name: registered(name) for name in METHODS if name not in ("fedscem", "deepwalk", "gat")}
CORPUS |= {"fedscem": PSI, "deepwalk": registered("deepwalk", ONCE), "gat": PPFL}
CORPUS |= {
    "nfedgnn, averaged": registered("nfedgnn, averaged"),
    "fedscem, plain alignment": FEDSCEM,
    "fedscem, plain": PLAIN,
    "deepwalk, secure": SECURE,
}
