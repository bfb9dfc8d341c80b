"""Malformed replies of one SuperNode: what is made of honest ones, and what a run makes of it."""

from __future__ import annotations

import logging
import math
import pickle
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from io import BytesIO
from itertools import product
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from federation import ALL, METHODS, Federation, round_of, who_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_graph.apps.run import client_app
from flower_graph.config.common import RunConfig
from flower_graph.errors import AlignmentError, MembershipError, StateLostError
from flower_graph.flower_compat import stamp
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport
from flower_graph.storage.files import IN_PROCESS
from flower_graph.wire.arrays import own_records as copied
from flower_graph.wire.arrays import read_array
from flower_graph.wire.client_errors import STATE_LOST
from flower_graph.wire.exchange import Exchange
from flower_graph.wire.ledger import count_bytes, reply_bytes

Change = Callable[[RecordDict], Any]
Changes = dict[str, Callable[[Any], Any]]  # of a value, by what is done to it
STYPE = "numpy.ndarray"
NASTY = "\x1b[31mround 1: all is well\r\nround 2: \u202eall is well\x00" + "x" * 5000


@dataclass(frozen=True)
class Mutation:
    """One way to spoil a reply.

    ``apply`` changes its content in place. An error, of a code and a reason, comes in its place.
    With neither, the name is one of ``ELSEWHERE``.
    """

    name: str
    apply: Change | None = field(default=None, compare=False, repr=False)
    claims: int = 0  # clients that it says are here besides those that are
    error: tuple[int, str] | None = field(default=None, repr=False)


class Called:
    """Is pickled as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def evil(path: str) -> Called:
    """Would make a file if it were unpickled."""
    return Called(open, path, "w")


def objects(path: str = "unpickled") -> Array:
    """Write objects as ``numpy.save`` does: a header, then a pickle."""
    stream = BytesIO()
    np.save(stream, np.array([evil(path)], dtype=object), allow_pickle=True)
    return Array("object", (1,), STYPE, stream.getvalue())


# Values ------------------------------------------------------------------------------------------


def with_header(array: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Claim a shape and a type in the header and beside it, with the bytes as they were."""
    header = BytesIO()
    descr = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, descr)
    return Array(str(np.dtype(dtype)), shape, STYPE, header.getvalue() + array.data[128:])


def raw(**changes: Any) -> Callable[[Array], Array]:
    """Change what stands beside the numbers, or their bytes, given those that are there."""

    def change(array: Array) -> Array:
        parts = {name: getattr(array, name) for name in ("dtype", "shape", "stype", "data")}
        return Array(**{n: made(v) if callable(made := changes.get(n, v)) else made
                        for n, v in parts.items()})  # fmt: skip

    return change


def numbers(change: Callable[[np.ndarray], Any]) -> Callable[[Array], Array]:
    def changed(array: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return Array(np.array(change(array.numpy().copy())))

    return changed


def first_is(value: float, values: np.ndarray) -> np.ndarray:
    values = values if values.dtype.kind == "f" else values.astype(np.float64)  # words, or counts
    values.reshape(-1)[0:1] = value
    return values


def all_large(values: np.ndarray) -> np.ndarray:
    return np.full(values.shape, 10**9, values.dtype if values.dtype.kind == "f" else np.int64)


ODD_NUMBERS = (math.nan, math.inf, -math.inf, 1e9, -1e9, 1e30, 1e300)
DTYPES = (
    *(">f4", ">f8", "<f2", "<f8", "<f16", "<c16", "?"),
    *("<U8", "|S4", "<M8[s]", "<i8", "<u8", "|V8"),
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1000,), (2**31,), (2**40, 2**31), (-1, -4))
OF_ARRAYS: Changes = {
    **{f"type {d}": numbers(lambda v, d=d: v.astype(d)) for d in DTYPES},  # type: ignore[misc]
    **{f"first is {n:g}": numbers(partial(first_is, n)) for n in ODD_NUMBERS},
    "empty": numbers(lambda v: np.atleast_1d(v)[:0]),
    "one less": numbers(lambda v: np.atleast_1d(v)[:-1]),
    "twice": numbers(lambda v: np.concatenate([np.atleast_1d(v)] * 2)),
    "0-d": numbers(lambda v: np.zeros((), v.dtype)),
    "one axis more": numbers(lambda v: v[None]),
    "flat, or not": numbers(lambda v: v.reshape(-1) if v.ndim > 1 else v.reshape(-1, 1)),
    "all 1e9": numbers(all_large),
    # Well-formed, and wrong: the same type and shape
    "other words": numbers(lambda v: np.flip(v) if v.dtype.kind == "f" else ~v),
    **{
        f"claims {shape} of {kind}": lambda a, s=shape, k=kind: with_header(a, s, k)  # type: ignore[misc]
        for shape, kind in product((*SHAPES, (1 << 28,)), ("<f4", "|V0", "|O"))
    },
    **{f"says {shape}": raw(shape=shape) for shape in SHAPES},
    **{f"says type {t[:9]!r}": raw(dtype=t) for t in ("", "x", "object", NASTY)},
    **{f"serialised as {t[:9]!r}": raw(stype=t) for t in ("", "pickle", NASTY)},
    **{f"cut to {n} bytes": raw(data=lambda d, n=n: d[:n]) for n in (0, 7, 127, 129)},
    **{f"{n} bytes more": raw(data=lambda d, n=n: d + bytes(n)) for n in (1, 300)},
    "other bytes": raw(data=bytes(range(64))),
    "a pickle": raw(data=pickle.dumps(evil("unpickled"))),
    "objects": lambda _: objects(),
}  # fmt: skip


def flip(data: bytes, place: int) -> bytes:
    at = place % max(1, len(data))
    return data[:at] + bytes(b ^ 0x80 for b in data[at : at + 1]) + data[at + 1 :]


OF_BYTES: Changes = {
    **{f"cut to {n} bytes": lambda d, n=n: d[:n] for n in (0, 1, 8, 40)},  # type: ignore[misc]
    **{f"{n} bytes more": lambda d, n=n: d + bytes(n) for n in (1, 8, 40)},  # type: ignore[misc]
    **{f"bit flipped in byte {n}": lambda d, n=n: flip(d, n) for n in (0, 7, 31, 100)},  # type: ignore[misc]
    "twice": lambda d: d + d,
    "zeros": lambda d: bytes(len(d)),
    "ones": lambda d: b"\xff" * len(d),
    "first eight again": lambda d: d[:8] * (len(d) // 8),
    "words": lambda _: "\x1b[2J\u202e",
}
PLAIN = (-1, 0, -(2**63), 2**63 - 1, 10**9, 7, -1.0, 0.5, *ODD_NUMBERS, [], [-1, 0, 7], [math.nan])
OTHERS: dict[type, tuple[Any, ...]] = {
    MetricRecord: PLAIN,
    ConfigRecord: (*PLAIN, True, "", "x", NASTY, b"", b"\xff" * 40, ["x"], [True], [b"x"]),
}
OFTEN = 900_000  # bytes: fewer than any reply may have


def changes_of(record: Any, value: Any) -> Changes:
    """Give all that is done to a value of a record."""
    if isinstance(value, Array):
        return OF_ARRAYS
    kind = type(record)
    found: Changes = {f"is {o!r:.20}": lambda _, o=o: o for o in OTHERS[kind]}  # type: ignore[misc]
    if isinstance(value, bytes):
        found |= OF_BYTES
    if isinstance(value, int):
        found["one more"] = lambda n: n + 1
    if isinstance(value, bytes | list) and value:
        size = len(value) * (1 if isinstance(value, bytes) else 8)
        found["as often as there is room"] = lambda v: v * max(2, OFTEN // size)
    return found


# Records, clients, accusations, what is around ---------------------------------------------------


def replaced(record: str, key: str, change: Callable[[Any], Any]) -> Change:
    def apply(content: RecordDict) -> None:
        content[record][key] = change(content[record][key])

    return apply


def moved(key: str, name: str, record: str = "") -> Change:
    def apply(content: RecordDict) -> None:
        holder: Any = content[record] if record else content
        holder[name] = holder.pop(key)

    return apply


WHO = ("users", "clients", "sum-clients", "align-clients", "mask-clients", "present")
# not one for each client
FIXED = ("-run", "flower-graph", "weight-shape", "sum-channel-key", "key-public", "key-check")


def _lists(record: Any) -> list[str]:
    return [key for key in sorted(record) if isinstance(record[key], (bytes, list)) and record[key]]


def who(record: Any) -> str | None:
    return next((key for key in _lists(record) if key in WHO), None)


def invented(what: str, count: int, first: int = 10**6, *, instead: bool = False) -> Mutation:
    """Speak for clients that nobody has, or that are another's; all else is repeated for them."""
    numbers = np.arange(first, first + count)

    def apply(content: RecordDict) -> None:
        named: list[tuple[Any, str]] = [(r, key) for r in content.values() if (key := who(r))]
        if not named:
            raise KeyError("clients")
        for record, key in named:
            own = record[key]
            is_packed = isinstance(own, bytes)
            more = numbers.astype("<i8").tobytes() if is_packed else numbers.tolist()
            size = len(own) // 8 if is_packed else len(own)
            for other in [one for one in _lists(record) if not one.endswith(FIXED) and one != key]:
                rows = record[other][-max(1, len(record[other]) // size) :] * count
                record[other] = rows if instead else record[other] + rows
            record[key] = more if instead else own + more

    return Mutation(f"{INVENTED}{what}" + ", in their own place" * instead, apply, count)


INVENTED = "clients: "


# What comes in the place of the content. tests/server/test_exchange.py has what is around it.
ELSEWHERE = ("to no message", "no content", "a replay", "another's content", "500 times")
# Errors, by code and reason. Those that look like lost state are in campaigns.
ERRORS = [
    Mutation(f"error: {what}", error=(code, reason))
    for what, code, reason in (
        ("lines", 7, NASTY),
        ("no reason", 7, ""),
        ("code 0", 0, "lost"),
        ("an odd code", -(2**31), "odd"),
        ("a large code", 2**31 - 1, "odd"),
        ("the SuperLink's code", 4, "the node is gone"),
        ("7 MB of lines", 7, "a line\n" * (1 << 20)),
        ("2 M signs", 7, "\u202e\x1b[2J" * (2 << 17)),
        ("a line of blanks", 7, " " * (2 << 20)),
        ("a refusal", 7, "RefusedError: round 1 is masked already: no mask is used twice"),
        ("a traceback", 7, "Traceback (most recent call last):\n" * 300 + "KeyError: 'prepare'"),
    )
]
LOST = Mutation("lost", error=(0, "lost"))  # of what never comes, so that nobody waits


def attacks_on(example: RecordDict) -> list[Mutation]:
    """Give all attacks on a message that was answered like this."""

    def added(what: str, make: Callable[[], Any]) -> Mutation:
        return Mutation(what, lambda content: content.update({"more": make()}))

    found = [*ERRORS, *map(Mutation, ELSEWHERE)]
    found += [
        added("40,000 keys", lambda: ConfigRecord({f"key-{n}": "x" * 30 for n in range(40_000)})),
        added("3 MB of arrays", lambda: ArrayRecord({"x": Array(np.zeros(3 << 17))})),
        added("3 MB of words", lambda: ConfigRecord({"x": "x" * (3 << 20)})),
        added("3 MB of metrics", lambda: MetricRecord({"x": [0.0] * (3 << 17)})),
        Mutation("nothing", lambda content: content.clear()),
    ]
    if any(map(who, example.values())):
        found += [invented("few", 4), invented("many", 1000)]
    for record in sorted(example):
        found.append(Mutation(f"{record}: gone", lambda content, r=record: content.pop(r)))  # type: ignore[misc]
        found += [Mutation(f"{record}: named {n[:9]!r}", moved(record, n)) for n in ("", NASTY)]
        for kind in (ArrayRecord, MetricRecord, ConfigRecord):
            change = lambda content, r=record, k=kind: content.update({r: k()})  # noqa: E731
            found.append(Mutation(f"{record}: an empty {kind.__name__}", change))
        for key, value in sorted(example[record].items()):
            where = f"{record}/{key}"
            found += [
                Mutation(f"{where}: gone", lambda content, r=record, k=key: content[r].pop(k)),  # type: ignore[misc]
                *(
                    Mutation(f"{where}: named {n[:9]!r}", moved(key, n, record))
                    for n in ("", NASTY)
                ),
                *(
                    Mutation(f"{where}: {what}", replaced(record, key, change))
                    for what, change in changes_of(example[record], value).items()
                ),
            ]
    return found


# A run under attack ------------------------------------------------------------------------------


Key = tuple[str, int]  # type of a message, and the how-manieth of this type it is
Plan = Mapping[Key, Mutation | None]


class HostileGrid(Federation):
    """Spoils replies of the SuperNode in place 1.

    ``plan`` says which: by type of message, and the how-manieth of its type. ``None`` stands for
    a reply that never comes. With ``new_id`` it comes back under another id, without what it kept,
    whenever it has attacked.

    What the server does between two exchanges is weighed: its processor time, and the memory that
    it takes at most, beyond the replies themselves.
    """

    def __init__(self, app: Any, *, plan: Plan, new_id: bool, **grid: Any) -> None:
        super().__init__(app, state_dir=IN_PROCESS, new_id=new_id, **grid)
        self.plan, self.counts = plan, Counter[str]()
        self.hostile = list(self.contexts)[1]
        self.names = {self.hostile}  # it may have had others
        self.limits = Counter[str]()  # by type of message: the most bytes of a reply
        self.seconds = Counter[str]()  # the server's, after messages of a type, at most
        self.peaks = Counter[str]()  # and its bytes
        self._has_struck, self._begun = False, ("", 0.0)
        self.examples: dict[Key, RecordDict] = {}  # what it would have answered
        self.rounds: dict[Key, int] = {}  # the round of each message to it
        self.failed: list[Key] = []  # there was nothing to spoil
        # By type and SuperNode: the last honest reply, and the one before
        self._last: dict[tuple[str, int], list[RecordDict]] = {}

    def get_node_ids(self) -> list[int]:
        if self.new_id and self._has_struck:
            self._restart(1)
            self.hostile, self._has_struck = list(self.contexts)[-1], False
            self.names.add(self.hostile)
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = list(messages)
        self.weigh()
        ids = super().push_messages(pushed)
        if pushed:
            self._begun = pushed[0].metadata.message_type, time.process_time()
        tracemalloc.start()
        return ids

    def weigh(self) -> None:
        """Note what the server took since the last messages."""
        kind, begun = self._begun
        if tracemalloc.is_tracing():
            spent, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.seconds[kind] = max(spent, self.seconds[kind])
            self.peaks[kind] = max(peak, self.peaks[kind])

    def _deliver(self, message: Message, word: Any) -> str:
        number = super()._deliver(message, word)
        if number:
            kind, node = message.metadata.message_type, message.metadata.dst_node_id
            if self._replies[number].has_content():
                known = self._last.get((kind, node), [])[:1]
                self._last[kind, node] = [copied(self._replies[number].content), *known]
            if node == self.hostile:
                self._strike(number, message)
        return number

    def _strike(self, number: str, message: Message) -> None:
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
        if attack.error is not None:
            reply = Message(Error(*attack.error), reply_to=message)
            self._replies[number] = reply
            self._number(reply)
        elif not reply.has_content():
            self.failed.append(key)
        elif attack.apply is None:
            self._around(attack.name, reply, kind)
        else:
            reply.content = copied(reply.content)
            try:
                attack.apply(reply.content)
            except KeyError:  # this reply has no such entry
                self.failed.append(key)

    def _around(self, way: str, reply: Message, kind: str) -> None:
        other = next(node for node in self.contexts if node != self.hostile)
        if way == "to no message":
            stamp(reply, reply_to_message_id="nobody-asked")
        elif way == "no content":
            reply.__dict__["_content"] = None
        elif way == "500 times":
            self._again += [reply] * 499
        else:
            place, node = (1, self.hostile) if way == "a replay" else (0, other)
            found = self._last.get((kind, node), [])[place:]
            reply.content = copied(found[0]) if found else RecordDict()


FIGURES = (
    *("loss", "cross_entropy", "regulariser", "train_accuracy", "val_accuracy", "test_accuracy"),
    *("asked", "answered"),
)
SHORT = 3  # rounds of a run with one attack
CAMPAIGN = 5  # and of one in which a SuperNode attacks all the time, or whose lie comes out later
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
    def refused(self) -> list[str]:
        """Why it was left out: as reports say, or else lines of the log."""
        names = [str(name) for name in self.grid.names]
        own = [line for line in self.log if any(name in line for name in names)]
        said = [why for found in self.named.values() for why in found]
        return said or [line for line in own if "left out" in line or "takes no part" in line]

    def same(self, other: Attacked, atol: float) -> bool:
        mine, its = ({**one.weights, "figures": one.figures} for one in (self, other))
        return mine.keys() == its.keys() and all(
            mine[name].shape == its[name].shape
            and np.allclose(mine[name], its[name], rtol=0, atol=atol, equal_nan=True)
            for name in mine
        )


@dataclass(frozen=True, eq=False)
class Method:
    """A method under attack; the clients at the SuperNode in place 1 are hostile.

    ``late`` rounds pass before a report tells of an exchange. ``atol`` is by how much numbers of
    two runs may differ: 0, but where masks are drawn by chance.
    """

    config: RunConfig
    supernodes: int
    late: int = 0
    atol: float = 0.0

    def run(self, plan: Plan, rounds: int = SHORT, *, new_id: bool = False) -> Attacked:
        """Run it; an exception that ends the run is in ``error``. Nothing is printed."""
        strategy: Any = method_of(self.config).build_strategy(self.config, None)
        how = {"num_supernodes": self.supernodes, "plan": plan, "new_id": new_id}
        grid = HostileGrid(client_app(self.config, None), **how)
        reports, error, said = list[RoundReport](), None, list[str]()
        send = Exchange.send

        def noting(exchange: Exchange, requests: Any, **how: Any) -> Any:
            """Tell the grid how large replies may be."""
            kind = how.get("message_type", "train")
            grid.limits[kind] = max(grid.limits[kind], how.get("max_reply_bytes") or 0)
            return send(exchange, requests, **how)

        log, listener = logging.getLogger("flower_graph"), logging.Handler(logging.WARNING)
        listener.emit = lambda record: said.append(record.getMessage())
        log.addHandler(listener)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        with patch.object(log, "propagate", False), patch.object(Exchange, "send", noting):
            try:
                strategy.start(grid, num_rounds=rounds, timeout=TIMEOUT, on_round=reports.append)
            except Exception as caught:
                error = caught
        grid.weigh()
        log.removeHandler(listener)
        weights = {k: np.asarray(v) for k, v in strategy.weights().items()} if not error else {}
        sums = getattr(strategy, "sums", None) or getattr(strategy.session, "sums", None)
        excluded = frozenset[int](sums.server.excluded) if sums and not error else frozenset[int]()
        hosted = strategy.session.members.clients
        clients = clean(self).clients if plan else hosted.get(grid.hostile, ())
        members = frozenset(client for local in hosted.values() for client in local)
        return Attacked(grid, reports, weights, said, clients, error, excluded, members)

    @property
    def honest(self) -> frozenset[int]:
        return clean(self).members - set(clean(self).clients)

    @property
    def places(self) -> list[Key]:
        """Each type's first message, and that after those of which the first report tells."""
        rounds = clean(self).grid.rounds
        later = [key for key, number in rounds.items() if number == 2 + self.late]
        found = {key[0]: key for key in reversed(later)}.values()
        keys = {*found, *((kind, 1) for kind, _ in rounds)}
        return [key for key in clean(self).grid.examples if key in keys]


@cache
def clean(method: Method, rounds: int = SHORT) -> Attacked:
    """Run it without attacks; the costs of a longer run count, as what is done once is done."""
    found = method.run({}, rounds)
    assert found.error is None, found.error
    return found


@cache
def without(method: Method, key: Key, rounds: int = SHORT) -> Attacked:
    """Run it with one reply that never comes."""
    return method.run({key: None}, rounds)


def registered(name: str, *words: str, atol: float = 0.0) -> Method:
    """Give a method of the federation, under some settings."""
    setup = ALL[name].with_(*words)
    return Method(setup.load(), setup.supernodes, setup.late, atol)


FINE = "strategy.resolution=1e-6"
ONCE = "judge.every=99"  # nothing of what clients send is evaluated in between
# One of six may vanish, and one of the five that an attacker leaves
BORNE = "strategy.dropout=0.3"
NFEDGNN, FEDGLS, PLAIN_SUMS = map(registered, ("nfedgnn", "fedgls", "fedscem, plain"))
FEDSCEM = registered("fedscem", FINE, BORNE, "strategy.alignment=plain", atol=1e-4)
PSI = registered("fedscem", FINE, BORNE, atol=1e-4)
PPFL = registered("gat", ONCE)
SECURE = registered("deepwalk, secure", ONCE, atol=1e-3)
# All that are registered, and what of a method is a path of its own through the server
CORPUS = {name: registered(name) for name in METHODS if name not in ("fedscem", "deepwalk", "gat")}
CORPUS |= {"nfedgnn": NFEDGNN, "fedgls": FEDGLS, "fedscem": PSI, "gat": PPFL}
CORPUS |= {
    "deepwalk": registered("deepwalk", ONCE),
    "nfedgnn, averaged": registered("nfedgnn, averaged"),
}
CORPUS |= {
    "fedscem, plain alignment": FEDSCEM,
    "fedscem, plain": PLAIN_SUMS,
    "deepwalk, secure": SECURE,
}

# Attacks on a method ------------------------------------------------------------------------------

AGAIN = 60  # messages of a type that are attacked
NO_STATE = {
    "lost": f"{StateLostError.__name__}: there are no keys for the secure sum: enrol first",
    "lost, in 2 MB": f"{StateLostError.__name__} " + "x" * (2 << 20),
    "lost, after 2 MB": "x\n" * (1 << 20) + StateLostError.__name__,
}
# Claims that are well-formed and whose proof comes later
CHEATS = (
    *("prepare-seed-commitment", "prepare-share-commitments", "prepare-packets"),
    *("prepare-round-key", "unmask-shares", "align-points"),
)
NUMBERS = (("few", 4, 10**6), ("many", 1000, 10**6), ("17,000", 17_000, 10**6), ("huge", 3, 2**62))


class Attack(NamedTuple):
    """What a SuperNode does in a run; with ``new_id`` it is back under another id each time."""

    name: str
    plan: Plan
    rounds: int
    new_id: bool = False


def singles(method: Method, key: Key) -> list[Attack]:
    """Give the attacks on one message. That a lie in a sum is proven comes out later."""
    honest = clean(method).grid
    rounds = CAMPAIGN if honest.rounds[key] > 1 else SHORT
    return [
        Attack(f"{key}: {one.name}", {key: one}, rounds) for one in attacks_on(honest.examples[key])
    ]


def campaign(kind: str, *attacks: Mutation, new_id: bool = False) -> Attack:
    """Attack each message of a type, in turn."""
    said = ", then ".join(one.name for one in attacks)
    plan = {(kind, n + 1): attacks[n % len(attacks)] for n in range(AGAIN)}
    name = f"{kind}: {said}" + ", and back under another id" * new_id
    return Attack(name, plan, CAMPAIGN, new_id)


def campaigns(method: Method) -> list[Attack]:
    """Give the campaigns against a method, of different names."""
    lost = [Mutation(w, error=(STATE_LOST, reason)) for w, reason in NO_STATE.items()]
    error, huge = (Mutation(f"error {r[:5]!r}", error=(7, r)) for r in ("x", "\u202e" * (4 << 20)))
    found: list[Attack] = []
    for (kind, _), example in clean(method).grid.examples.items():
        claims = _claims(method, example)
        found += [campaign(kind, o) for o in (*lost, huge, *map(Mutation, ELSEWHERE), *claims)]
        found += [campaign(kind, one, new_id=True) for one in (error, lost[0])]
        for cheat in _cheats(example):
            found += [campaign(kind, cheat), campaign(kind, cheat, lost[0])]
            found += [campaign(kind, cheat, lost[0], new_id=True)]
    return [*{one.name: one for one in found}.values()]


def _claims(method: Method, example: RecordDict) -> Iterator[Mutation]:
    """Give what can be claimed of clients in a reply like this one."""
    first = min(method.honest)
    for change in (
        *(invented(*how) for how in NUMBERS),
        *(invented("another's", 1, first, instead=instead) for instead in (False, True)),
        invented("17,000", 17_000, instead=True),
    ):
        with suppress(KeyError):  # it has no such entry
            change.apply(copied(example))
            yield change


def _cheats(example: RecordDict) -> list[Mutation]:
    held = [(record, name) for record in example for name in example[record] if name in CHEATS]
    wrong = lambda data: bytes(b ^ 1 for b in data)  # noqa: E731
    return [Mutation(f"{'/'.join(place)}: wrong", replaced(*place, wrong)) for place in held]


# Verdicts ----------------------------------------------------------------------------------------

FACTOR = 2  # times what an honest reply of the allowed size costs
SLACK = 0.05  # seconds: a timer's and a collector's share
# Seconds and bytes: a client that a SuperNode may host stands in some ten tables. An honest one
# with 800 public nodes costs 1.7 ms.
EACH = 1e-4, 512


@cache
def reading(size: int) -> tuple[float, int]:
    """Return seconds and bytes that an array of so many bytes costs a server that reads it."""
    array = Array(np.zeros(max(1, size // 4), np.float32))
    content = RecordDict({"arrays": ArrayRecord({"x": array})})
    tracemalloc.start()
    begun = time.process_time()
    count_bytes(content)
    np.array(read_array(content, "arrays", "x", tuple(array.shape)))
    spent, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return spent, peak


def costly(method: Method, outcome: Attacked) -> str:
    """Say what cost the server more than it may; empty if nothing did.

    Between two exchanges it may take twice the time and memory that it takes where nobody attacks
    and for an array of the most bytes that one of the replies that were attacked may have; and for
    as many clients as a reply says are here, as honest ones might be.
    """
    honest, found = clean(method, CAMPAIGN).grid, outcome.grid
    seconds, size = reading(max(reply_bytes(), *(honest.limits[kind] for kind, _ in found.plan)))
    claims = max((one.claims for one in found.plan.values() if one), default=0)
    for kind, peak in found.peaks.items():
        memory = FACTOR * (honest.peaks[kind] + size + claims * EACH[1])
        allowed = FACTOR * (honest.seconds[kind] + seconds + claims * EACH[0]) + SLACK
        if peak > memory or found.seconds[kind] > allowed:
            spent = f"{peak >> 10} KiB of {memory >> 10}, {found.seconds[kind]:.2f} s"
            return f"{kind}: {spent} of {allowed:.2f}"
    return ""


def harm(method: Method, outcome: Attacked) -> str:
    """Say which harm an attack did that none may do, empty if it did none."""
    if isinstance(outcome.error, MembershipError | AlignmentError) and not outcome.reports:
        return ""  # before round 1 nothing says whose a client is, or who spoils the union
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {outcome.error}"[:300]
    last = [who_of(one.participation).answered for one in outcome.reports[-2:]]  # one is skipped
    if gone := method.honest - outcome.members | method.honest & outcome.excluded:
        return f"{sorted(gone)} are gone"
    if idle := method.honest - set[int]().union(*last):
        return f"{sorted(idle)} had no part in the last two rounds"
    if unfit := [line for line in outcome.refused if not line.isprintable() or len(line) >= 1000]:
        return f"a line is not fit for a log: {unfit[0]!r:.99}"
    return ""


def is_alike(method: Method, attack: Attack, outcome: Attacked) -> bool:
    """Whether one refused reply left the run as it is without the reply.

    Where only an entry is refused that nothing else needs, it is as if nobody had attacked.
    """
    ((key, one),) = attack.plan.items()
    absent, undisturbed = without(method, key, attack.rounds), clean(method, attack.rounds)
    # Who makes clients up is in the run with its own, and they are named as silent; who enrols
    # with what it has not is named in each round.
    is_lasting = undisturbed.grid.rounds[key] < 2 and len(outcome.named) > 1
    is_own = is_lasting or outcome.excluded or one.name.startswith(INVENTED) or absent.error
    return bool(is_own) or any(outcome.same(other, method.atol) for other in (absent, undisturbed))


def check(method: Method, most: int, seed: int = 0) -> None:
    """Try so many drawn attacks on each message of a method, and so many campaigns, or all."""
    draw, bad, refused = Random(seed), dict[str, str](), 0
    for group in (campaigns(method), *(singles(method, key) for key in method.places)):
        for attack in draw.sample(group, min(len(group), most)):
            run = partial(method.run, attack.plan, attack.rounds, new_id=attack.new_id)
            outcome = run()
            is_single = len(attack.plan) == 1
            assert not (is_single and outcome.grid.failed), attack.name
            found = harm(method, outcome)
            # Other work on the machine takes time, too
            if not found and costly(method, outcome):
                found = min(costly(method, run()) for _ in range(4))
            if is_single and outcome.refused and not outcome.error:
                found += "" if is_alike(method, attack, outcome) else "another result than without"
            bad |= {attack.name: found} if found else {}
            refused += bool(outcome.refused)
    assert bad == {}, bad
    assert refused
