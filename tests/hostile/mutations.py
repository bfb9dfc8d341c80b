"""Malformed replies: what hypothesis makes of a real reply's records, keys, types and shapes.

A mutation says where it strikes and what it does there, and is applied to the reply of a run; a
real reply of the same kind is all that is needed to draw mutations from.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

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


class Named:
    """Something that is done to a reply: where it strikes, and what it does there."""

    where: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Mutation(Named):
    """One way to spoil a reply; ``apply`` changes its content in place."""

    where: str
    what: str
    apply: Change = field(compare=False, repr=False)
    claims: int = 0  # clients that it says are here besides those that are


class Called:
    """Is pickled as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def evil(path: str) -> Called:
    """Would make a file if it were unpickled."""
    return Called(open, path, "w")


def pickled_array(path: str = "unpickled") -> bytes:
    """The bytes that ``numpy.save`` writes for objects: a header, then a pickle."""
    stream = BytesIO()
    np.save(stream, np.array([evil(path)], dtype=object), allow_pickle=True)
    return stream.getvalue()


def objects(path: str = "unpickled") -> Array:
    return Array("object", (1,), STYPE, pickled_array(path))


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

    def apply(content: RecordDict) -> None:
        named = [(record, key) for record in content.values() if (key := who(record))]
        if not named:
            raise KeyError("clients")
        for record, key in named:
            _speak_for(record, key, np.arange(first, first + count), instead)

    named = f"{what}, in their own place" if instead else what
    return Mutation("clients", named, apply, count)


def _speak_for(record: Any, key: str, numbers: Any, instead: bool) -> None:
    own = record[key]
    size = len(own) // 8 if isinstance(own, bytes) else len(own)
    more = numbers.astype("<i8").tobytes() if isinstance(own, bytes) else numbers.tolist()
    for other in [one for one in _lists(record) if not one.endswith(FIXED) and one != key]:
        each = max(1, len(record[other]) // size)
        rows = record[other][-each:] * len(numbers)
        record[other] = rows if instead else record[other] + rows
    record[key] = more if instead else own + more


def accusing(own: int, others: list[int], times: int = 1) -> Mutation:
    """Say of others that their packets do not open."""
    pairs = np.array([(own, other) for other in others] * times, "<i8").tobytes()

    def apply(content: RecordDict) -> None:
        config = content["config"]
        config["mask-refused"] = config["mask-clients"][:0] + pairs  # KeyError where there is none

    return Mutation("config/mask-refused", f"{len(others)} of them, {times} times", apply)


def leaving_out(others: list[int]) -> Mutation:
    def apply(content: RecordDict) -> None:
        config = content["config"]
        key = "mask-left-out" if "mask-clients" in config else "left-out"
        if not {"mask-clients", "present"} & config.keys():
            raise KeyError("mask-clients")
        config[key] = [f"{other}:a number is too large" for other in others]

    return Mutation("config/left-out", "others", apply)


def withholding(content: RecordDict) -> None:
    content["config"]["unmask-kinds"] = bytes(len(content["config"]["unmask-kinds"]))
    content["config"]["unmask-shares"] = b""
