"""Malformed replies: what hypothesis makes of a real reply's records, keys, types and shapes.

A mutation says where it strikes and what it does there, and is applied to the reply of a run; a
real reply of the same kind is all that is needed to draw mutations from.
"""

from __future__ import annotations

import logging
import pickle
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from federation import ALL, METHODS, Federation, round_of, who_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flower_graph.apps.run import client_app
from flower_graph.client.state import IN_PROCESS
from flower_graph.config.common import RunConfig
from flower_graph.errors import StateLostError
from flower_graph.flower_compat import stamp
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport
from flower_graph.wire.arrays import own_records as copied
from flower_graph.wire.client_errors import STATE_LOST
from flower_graph.wire.exchange import Exchange

Change = Callable[[RecordDict], Any]
STYPE = "numpy.ndarray"
DTYPES = (
    *(">f4", ">f8", "<f2", "<f8", "<f16", "<c16", "?"),
    *("<U8", "|S4", "<M8[s]", "<i8", "<u8", "|V8"),
)
SHAPES = ("empty", "one less", "twice", "0-d", "one axis more", "flat")
ODD_NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e9, -1e9, 1e30, 1e300)
NAMES = st.text(st.characters(codec="utf-8"), max_size=12)
INTEGERS = st.sampled_from((-1, 0, -(2**63), 2**63 - 1, 10**9, 7))
FLOATS = st.sampled_from((*ODD_NUMBERS, -1.0, 0.5))
SCALARS = st.one_of(INTEGERS, FLOATS)
VALUES = {
    MetricRecord: st.one_of(SCALARS, st.lists(INTEGERS, max_size=3), st.lists(FLOATS, max_size=3)),
    ConfigRecord: st.one_of(
        *(SCALARS, st.booleans(), NAMES, st.binary(max_size=40)),
        *(st.lists(INTEGERS, max_size=3), st.lists(NAMES, max_size=3), st.lists(st.booleans())),
    ),
}


@dataclass(frozen=True)
class Mutation:
    """One way to spoil a reply.

    ``apply`` changes its content in place. An error, of a code and a reason, comes in its place.
    With neither, ``what`` is one of ``ENVELOPES``.
    """

    where: str
    what: str
    apply: Change | None = field(default=None, compare=False, repr=False)
    claims: int = 0  # clients that it says are here besides those that are
    error: tuple[int, str] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.where}: {self.what}"


def around(way: str) -> Mutation:
    return Mutation("envelope", way)


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


# Arrays ------------------------------------------------------------------------------------------


def raw(array: Array, **changes: Any) -> Array:
    parts = {name: getattr(array, name) for name in ("dtype", "shape", "stype", "data")} | changes
    return Array(**parts)


def with_value(array: Array, value: float) -> Array:
    values = array.numpy().copy()
    if values.dtype.kind != "f":  # words of a ring, or counts
        values = values.astype(np.float64)
    values.reshape(-1)[0:1] = value
    with np.errstate(over="ignore"):
        return Array(values)


def with_header(array: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Claim a shape and a type in the header and beside it, with the bytes as they were."""
    header = BytesIO()
    descr = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, descr)
    return Array(str(np.dtype(dtype)), shape, STYPE, header.getvalue() + array.data[128:])


def reshaped(array: Array, way: str) -> Array:
    values = array.numpy()
    rows = values.reshape(-1) if values.ndim == 0 else values
    flat = values.reshape(-1) if values.ndim > 1 else values.reshape(-1, 1)
    zero, twice = np.zeros((), values.dtype), np.concatenate([rows, rows])
    made = (rows[:0], rows[:-1], twice, zero, values[None], flat)
    return Array(made[SHAPES.index(way)])


def array_changes() -> st.SearchStrategy[tuple[str, Callable[[Array], Array]]]:
    sizes = st.lists(st.sampled_from((0, 1, 5, 1000, 2**31, 2**40, -1, -4)), max_size=3)
    draws = (
        st.sampled_from(DTYPES).map(lambda d: (f"type {d}", lambda a: Array(a.numpy().astype(d)))),
        st.sampled_from(ODD_NUMBERS).map(lambda v: (f"value {v:g}", lambda a: with_value(a, v))),
        st.sampled_from(SHAPES).map(lambda w: (f"shape {w}", lambda a: reshaped(a, w))),
        st.tuples(sizes.map(tuple), st.sampled_from(("<f4", "|V0", "|O", "<f8"))).map(
            lambda s: (f"claims {s[0]} of {s[1]}", lambda a: with_header(a, *s))
        ),
        sizes.map(tuple).map(lambda s: (f"says {s}", lambda a: raw(a, shape=s))),
        NAMES.map(lambda t: (f"says type {t!r}", lambda a: raw(a, dtype=t))),
        NAMES.map(lambda t: (f"serialised as {t!r}", lambda a: raw(a, stype=t))),
        st.integers(0, 140).map(lambda n: (f"cut to {n} bytes", lambda a: raw(a, data=a.data[:n]))),
        st.integers(1, 300).map(
            lambda n: (f"{n} bytes more", lambda a: raw(a, data=a.data + bytes(n)))
        ),
        st.binary(max_size=64).map(lambda b: (f"bytes {b.hex()}", lambda a: raw(a, data=b))),
        st.just(("a pickle", lambda a: raw(a, data=pickle.dumps(evil("unpickled"))))),
        st.just(("objects", lambda _: objects())),
    )
    return st.one_of(*draws)


# Entries, records --------------------------------------------------------------------------------


def replaced(record: str, key: str, change: Callable[[Any], Any]) -> Change:
    def apply(content: RecordDict) -> None:
        content[record][key] = change(content[record][key])

    return apply


def moved(key: str, name: str, record: str = "") -> Change:
    def apply(content: RecordDict) -> None:
        holder: Any = content[record] if record else content
        holder[name] = holder.pop(key)

    return apply


def byte_changes() -> st.SearchStrategy[tuple[str, Callable[[bytes], bytes]]]:
    """Draw what is done to bytes that hold numbers, keys or shares."""

    def flip(place: int) -> Callable[[bytes], bytes]:
        def change(data: bytes) -> bytes:
            at = place % max(1, len(data))
            return data[:at] + bytes(b ^ 0x80 for b in data[at : at + 1]) + data[at + 1 :]

        return change

    return st.one_of(
        st.integers(0, 40).map(lambda n: (f"cut to {n} bytes", lambda d: d[:n])),
        st.integers(1, 40).map(lambda n: (f"{n} bytes more", lambda d: d + bytes(n))),
        st.integers(0, 400).map(lambda n: (f"bit flipped in byte {n}", flip(n))),
        st.just(("twice", lambda d: d + d)),
        st.just(("zeros", lambda d: bytes(len(d)))),
        st.just(("ones", lambda d: b"\xff" * len(d))),
        st.just(("first eight again", lambda d: d[:8] * (len(d) // 8))),
    )


@st.composite
def mutations(draw: Any, example: RecordDict) -> Mutation:
    record = draw(st.sampled_from(sorted(example)))
    keys = sorted(example[record])
    if not keys or draw(st.integers(0, 9)) == 0:
        return _of_record(draw, record)
    key = draw(st.sampled_from(keys))
    where, value = f"{record}/{key}", example[record][key]
    way = draw(st.integers(0, 9))
    if way == 0:
        return Mutation(where, "gone", lambda content: content[record].pop(key))
    if way == 1:
        name = draw(NAMES)
        return Mutation(where, f"named {name!r}", moved(key, name, record))
    if isinstance(value, Array):
        what, change = draw(array_changes())
    elif isinstance(value, bytes) and way < 7:
        what, change = draw(byte_changes())
    else:
        found = draw(VALUES[type(example[record])])
        what, change = f"is {found!r}", lambda _: found
    return Mutation(where, what, replaced(record, key, change))


def _of_record(draw: Any, record: str) -> Mutation:
    kinds = (ArrayRecord, MetricRecord, ConfigRecord)
    other = dict(zip(("empty arrays", "empty metrics", "empty"), kinds, strict=True))
    way = draw(st.sampled_from(["gone", "named", *other]))
    if way == "gone":
        return Mutation(record, "gone", lambda content: content.pop(record))
    if way == "named":
        name = draw(NAMES.filter(lambda name: name != record))
        return Mutation(record, f"named {name!r}", moved(record, name))

    def swap(content: RecordDict) -> None:
        content.pop(record, None)
        content[record] = other[way]()

    return Mutation(record, f"is {way}", swap)


def drawn(example: RecordDict, count: int) -> list[Mutation]:
    """Let hypothesis draw different mutations, the same each time."""
    found: dict[str, Mutation] = {}

    @settings(
        max_examples=4 * count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(mutations(example))
    def collect(mutation: Mutation) -> None:
        found.setdefault(mutation.name, mutation)

    collect()
    return list(found.values())[:count]


# By hand -----------------------------------------------------------------------------------------


def added(where: str, what: str, name: str, make: Callable[[], Any]) -> Mutation:
    """Send one record more."""
    return Mutation(where, what, lambda content: content.update({name: make()}))


def by_hand(example: RecordDict) -> list[Mutation]:
    """What nobody draws by chance."""

    found = [
        added("crowd", "40,000 keys", "crowd",
              lambda: ConfigRecord({f"key-{n}": "x" * 30 for n in range(40_000)})),
        Mutation("all", "nothing", lambda content: content.clear()),
        added("arrays", "3 MB", "arrays", lambda: ArrayRecord({"x": Array(np.zeros(3 << 17))})),
        added("config", "3 MB", "more", lambda: ConfigRecord({"x": "x" * (3 << 20)})),
        added("metrics", "3 MB", "more", lambda: MetricRecord({"x": [0.0] * (3 << 17)})),
    ]  # fmt: skip
    if any(who(record) for record in example.values()):
        found += [invented(how, count) for how, count in (("few", 4), ("many", 1000))]
    found += [often(record, key) for record in sorted(example) for key in _lists(example[record])]
    for record in sorted(example):
        for key, value in sorted(example[record].items()):
            where = f"{record}/{key}"
            changes: dict[str, Callable[[Any], Any]] = {}
            if isinstance(value, Array):
                changes = {"objects": lambda _: objects(), "1 GB claimed": claimed}
                changes |= {"all 1e9": _all_large, "other words": _other_words}
            elif isinstance(value, bytes):
                changes = {"words": lambda _: "\x1b[2J\u202e"}
            elif isinstance(value, int):
                changes = {"one more": lambda n: n + 1}
            for what, change in changes.items():
                found.append(Mutation(where, what, replaced(record, key, change)))
    return found


def claimed(array: Array) -> Array:
    return with_header(array, (1 << 28,), "<f4")


def _other_words(array: Array) -> Array:
    """Well-formed, and wrong: the same type and shape."""
    values = array.numpy()
    return Array(np.array(np.flip(values)) if values.dtype.kind == "f" else ~values)


def _all_large(array: Array) -> Array:
    values = array.numpy()
    if values.dtype.kind == "f":
        return Array(np.full_like(values, 1e9))
    return Array(np.full(values.shape, 10**9, np.int64))


# Client numbers, accusations, proofs -------------------------------------------------------------

WHO = ("users", "clients", "sum-clients", "align-clients", "mask-clients", "present")
FIXED = ("-run", "flower-graph", "weight-shape", "sum-channel-key")  # not one for each client
OFTEN = 900_000  # bytes: fewer than any reply may have


def _lists(record: Any) -> list[str]:
    return [key for key in sorted(record) if isinstance(record[key], (bytes, list)) and record[key]]


def often(record: str, key: str) -> Mutation:
    """Say the same again as often as a reply has room."""

    def again(value: Any) -> Any:
        size = len(value) * (1 if isinstance(value, bytes) else 8)
        return value * max(2, OFTEN // size)

    return Mutation(f"{record}/{key}", "as often as there is room", replaced(record, key, again))


def who(record: Any) -> str | None:
    found = [key for key in WHO if isinstance(record.get(key), (bytes, list)) and record[key]]
    return found[0] if found else None


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

    return Mutation("clients", f"{what}, in their own place" if instead else what, apply, count)


def accusing(others: list[int], times: int = 1) -> Mutation:
    """Say of others that their packets do not open."""
    named = np.array(others * times, "<i8").tobytes()

    def apply(content: RecordDict) -> None:
        config = content["config"]
        config["mask-refused"] = config["mask-clients"][:0] + named  # KeyError where there is none

    return Mutation("config/mask-refused", f"{len(others)} of them, {times} times", apply)


def leaving_out(others: list[int]) -> Mutation:
    def apply(content: RecordDict) -> None:
        config = content["config"]
        key = "mask-left-out" if "mask-clients" in config else "left-out"
        if not {"mask-clients", "present"} & config.keys():
            raise KeyError("mask-clients")
        config[key] = [f"{other}:a number is too large" for other in others]

    return Mutation("config/left-out", "others", apply)


NASTY = "\x1b[31mround 1: all is well\r\nround 2: \u202eall is well\x00" + "x" * 5000
# By name: what is done around the content of a reply
ENVELOPES = (
    *("the round before", "the round after", "no round", "another's name"),
    *("to another's message", "to no message", "no content", "a replay", "another's content"),
    *("twice", "500 times"),
)
# Errors, by code and reason. Those that look like lost state are in campaigns.
ERRORS = [
    Mutation("error", what, error=(code, reason))
    for what, code, reason in (
        ("no reason", 7, ""),
        ("code 0", 0, "lost"),
        ("an odd code", -(2**31), "odd"),
        ("a large code", 2**31 - 1, "odd"),
        ("the SuperLink's code", 4, "the node is gone"),
        ("2 MB", 7, "x" * (2 << 20)),
        ("7 MB of lines", 7, "a line\n" * (1 << 20)),
        ("2 M signs", 7, "\u202e\x1b[2J" * (2 << 17)),
        ("a line of blanks", 7, " " * (2 << 20)),
        ("a refusal", 7, "RefusedError: round 1 is masked already: no mask is used twice"),
        (
            "a traceback",
            7,
            "Traceback (most recent call last):\n" * 300 + "KeyError: 'prepare-run'",
        ),
    )
]
LOST = Mutation("error", "lost", error=(0, "lost"))  # of what never comes, so that nobody waits
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

    def __init__(self, app: Any, supernodes: int, plan: Plan, new_id: bool) -> None:
        where = {"state_dir": IN_PROCESS, "new_id": new_id}
        super().__init__(app, num_supernodes=supernodes, **where)
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
        if attack.error is not None:
            reply = Message(Error(*attack.error), reply_to=message)
            self._replies[number] = reply
            self._number(reply)
        elif not reply.has_content():
            self.failed.append(key)
        elif attack.apply is not None:
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
        other = next(node for node in self.contexts if node != self.hostile)
        if way.startswith("the round"):
            reply.metadata.group_id = str(group + (-1 if way.endswith("before") else 1))
        elif way == "no round":
            reply.metadata.group_id = ""
        elif way == "another's name":
            stamp(reply, src_node_id=other)
        elif way == "to another's message":
            stamp(reply, reply_to_message_id=next(one for one in ids if one != number))
        elif way == "to no message":
            stamp(reply, reply_to_message_id="nobody-asked")
        elif way == "no content":
            reply.__dict__["_content"] = None
        elif way == "a replay":
            reply.content = copied(self._before.get(kind, RecordDict()))
        elif way == "another's content":
            reply.content = copied(self._last.get((kind, other), RecordDict()))
        else:
            self._again += [reply] * {"twice": 1, "500 times": 499}[way]


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
        last = [who_of(one.participation) for one in self.reports[-2:]]
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

    name: str
    config: RunConfig
    supernodes: int
    late: int = 0
    atol: float = 0.0

    def run(self, plan: Plan, rounds: int = SHORT, *, new_id: bool = False) -> Attacked:
        """Run it; an exception that ends the run is in ``error``. Nothing is printed."""
        strategy: Any = method_of(self.config).build_strategy(self.config, None)
        grid = HostileGrid(client_app(self.config, None), self.supernodes, plan, new_id)
        reports, error, said = list[RoundReport](), None, list[str]()
        send = Exchange.send

        def noting(exchange: Exchange, requests: Any, **how: Any) -> Any:
            """Tell the grid how large replies may be."""
            kind = how.get("message_type", "train")
            grid.limits[kind] = max(grid.limits.get(kind, 0), how.get("max_reply_bytes") or 0)
            return send(exchange, requests, **how)

        log, listener = logging.getLogger("flower_graph"), logging.Handler(logging.WARNING)
        listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
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
        clients = self.clean.clients if plan else hosted.get(grid.hostile, ())
        members = frozenset(client for local in hosted.values() for client in local)
        return Attacked(grid, reports, weights, said, clients, error, excluded, members)

    @cached_property
    def clean(self) -> Attacked:
        found = self.run({})
        assert found.error is None, found.error
        return found

    @cached_property
    def honest(self) -> frozenset[int]:
        return self.clean.members - set(self.clean.clients)

    @cached_property
    def reference(self) -> Attacked:
        """A run without attacks whose costs count: what is done once per process is done."""
        return self.run({}, CAMPAIGN)

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


def registered(name: str, *words: str, atol: float = 0.0) -> Method:
    """Give a method of the federation, under some settings."""
    setup = ALL[name].with_(*words)
    return Method(name, setup.load(), setup.supernodes, setup.late, atol)


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
CORPUS |= {"fedscem, plain alignment": FEDSCEM, "fedscem, plain": PLAIN}
CORPUS |= {"nfedgnn, averaged": registered("nfedgnn, averaged"), "deepwalk, secure": SECURE}

# All that is tried --------------------------------------------------------------------------------

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


class Campaign(NamedTuple):
    """What a SuperNode does in a whole run."""

    where: str
    what: str
    plan: Mapping[Key, Mutation]
    new_id: bool = False  # it comes back under another id whenever it has attacked

    @property
    def name(self) -> str:
        return f"{self.where}: {self.what}" + ", and back under another id" * self.new_id


def always(kind: str, what: str, *attacks: Mutation, new_id: bool = False) -> Campaign:
    """Attack each message of a type, in turn."""
    plan = {(kind, n + 1): attacks[n % len(attacks)] for n in range(AGAIN)}
    return Campaign(kind, what, plan, new_id)


def told(code: int, reason: str) -> Mutation:
    return Mutation("error", reason[:20], error=(code, reason))


def campaigns(method: Method) -> list[Campaign]:
    kinds: dict[str, list[Key]] = {}
    for key in method.clean.grid.examples:
        kinds.setdefault(key[0], []).append(key)
    found: list[Campaign] = []
    for kind, keys in kinds.items():
        lost = {what: told(STATE_LOST, reason) for what, reason in NO_STATE.items()}
        found += [always(kind, f"{what}, each time", one) for what, one in lost.items()]
        error = told(7, "KeyError: 'x'")
        found.append(always(kind, "an error each time", error, new_id=True))
        found.append(always(kind, "lost, each time", lost["lost"], new_id=True))
        huge = told(7, "\u202e" * (4 << 20))
        found.append(Campaign(kind, "an error of 4 M signs", {(kind, 1): huge}))
        for way in ("500 times", "a replay", "another's content", "another's name", "no content"):
            found.append(always(kind, f"{way}, each time", around(way)))
        for key in keys:
            found += _claims(method, key)
    return [*{one.name: one for one in found}.values()]


def _claims(method: Method, key: Key) -> Iterator[Campaign]:
    kind, example = key[0], method.clean.grid.examples[key]
    others, own = sorted(method.honest), method.clean.clients[0]
    changes: list[Mutation] = [invented(*how) for how in NUMBERS]
    changes += [invented("another's", 1, others[0])]
    changes += [invented("another's", 1, others[0], instead=True)]
    changes += [invented("17,000", 17_000, instead=True)]
    changes += [accusing(others), accusing(others[:1]), accusing(others, 9000)]
    changes += [accusing([own, *others]), leaving_out(others)]

    def withhold(content: RecordDict) -> None:
        config: Any = content["config"]
        config["unmask-kinds"] = bytes(len(config["unmask-kinds"]))
        config["unmask-shares"] = b""

    changes += [Mutation("config/unmask-shares", "withheld", withhold)]
    held = [(record, name) for record in example for name in example[record]]
    cheats = [
        Mutation("/".join(place), "wrong", replaced(*place, lambda d: bytes(b ^ 1 for b in d)))
        for place in held
        if place[1] in CHEATS
    ]
    for change in [*changes, *cheats]:
        with suppress(KeyError):  # it has no such entry
            change.apply(copied(example))  # type: ignore[misc]
            yield always(kind, f"{change.name}, each time", change)
    lost = told(STATE_LOST, NO_STATE["lost"])
    for change, new_id in product(cheats, (False, True)):
        yield always(kind, f"{change.name}, then lost", change, lost, new_id=new_id)


def attacks_on(method: Method, kind: str, count: int, *, setup: bool = False) -> list[Mutation]:
    """Draw attacks on a type of message: those made by hand, around it, and by hypothesis."""
    place = 1 if setup else method.first(kind) + 1
    example = method.clean.grid.examples[kind, place]
    found: list[Mutation] = []
    # What is around a reply is looked at before it is known what the reply is for.
    if not setup or kind == method.setup[0]:
        found.append(Mutation("envelope", "an error", error=(7, NASTY)))
        found += [*map(around, ENVELOPES), *ERRORS]
    found += by_hand(example)
    names = {attack.name for attack in found}
    return found + [one for one in drawn(example, count) if one.name not in names]
