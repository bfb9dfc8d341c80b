"""Every message that is declared: what is written is read, and what does not fit is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.ops.counts import Counts
from flower_graph.secure.align import plaintext
from flower_graph.secure.align.blinded import BlindReply, EvaluateReply, UnionRequest
from flower_graph.secure.sum.messages import KeyReply, MaskedReply, SumTerms, UnmaskReply
from flower_graph.strategies.fed_sage import strategy as sage
from flower_graph.strategies.fedgls import strategy as structure
from flower_graph.strategies.fedscem import messages as ego
from flower_graph.strategies.nfedgnn import client as relay
from flower_graph.strategies.ppfl import messages as public
from flower_graph.strategies.ppfl.messages import Claims
from flower_graph.wire import codec, fields
from flower_graph.wire.arrays import decode_array, encode_array
from flower_graph.wire.averaging import ClientMean, Measured
from flower_graph.wire.codec import Message, fields_of
from flower_graph.wire.counts import CountReply, CountsField
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, CONFIG, METRICS, NUM_EXAMPLES

SIZES = {"p": 2, "c": 3, "k": 2, "f": 4, "h": 2, "w": 2, "n": 5, "m": 5, "q": 2, "o": 2, "d": 4}
# What only these can have; the rest is drawn
VALUES: dict[type, dict[str, Any]] = {
    UnmaskReply: {"kinds": np.array([[0, 1], [2, 1]], np.uint8), "n": 3},
    BlindReply: {"sizes": np.array([16, 16, 32]), "n": 64},
    plaintext.PlainReply: {"identities": [["i:1"], ["s:é\n\0", "s:"], []]},
    sage.PeerGradients: {"a": 2},
    sage.Generators: {"rows": np.array([0, 2, 3]), "missing": np.array([1, 5, 2, 2, 1])},
    relay.EnrolmentReply: {"users": np.array([4, 0, 2]), "weight_shape": [3, 2]},
    relay.RelayReply: {"holders": np.array([0, 1, 2, 2])},
    Claims: {"nodes": [np.array([7, 5]), np.array([5]), np.array([2**40])]},
    public.EmbeddingEnrolment: {"nodes": [np.array([7, 5]), np.array([5]), np.array([2**40])]},
    ego.EgoRequest: {
        "sums": ego.Sums(3, [5, 4], np.arange(6, dtype=np.uint32), np.arange(2, dtype=np.uint32)),
        "shares_model": True,
        "first": np.ones((7, 5), np.float32),
        "rest": np.zeros(9, np.float32),
        "slots": {"align-stage": "publish"},
        # Without the secure sum's part a client would write words that nobody masks
        **dict.fromkeys(("ring", "mask", "ready")),
    },
    ego.EgoReply: {"masked": {"mask-run": b"x"}, "train_seconds": 0.5, "mask_seconds": 0.25},
}
# What their reader knows
KNOWN: dict[type, dict[str, Any]] = {
    MaskedReply: {"total": np.arange(3, dtype="<u8")},
    public.SumOrder: {"sizes": [2, 1]},
    relay.EnrolmentReply: {"num_nodes": 100},
    relay.RelayReply: {"p": 2, "h": 2, "f": 4, "w": 2, "send_weights": True},
    relay.LatentReply: {"p": 2, "m": 5, "h": 2, "trains": True, "measures": True},
    relay.SumReply: {"p": 2, "f": 4, "w": 2},
    sage.Generators: {"w": 2},
    sage.PeerGradients: {"a": 2, "w": 2},
    ego.EgoReply: {"L": 3, "asked": np.arange(100)},
    Measured: {"classes": 2, "counting": "confusion"},
    structure.StructureMeasured: {"classes": 2, "counting": "confusion"},
    CountReply: {"classes": 2, "counting": "confusion"},
}
# With fields that depend on one another: their own tests have them
BY_HAND = (
    *(public.PublicRequest, public.PublicReply),
    *(relay.LatentRequest, relay.Advance, relay.HiddenSum),
)


def declared(base: type = Message) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from declared(kind)


MESSAGES = sorted(
    {
        kind
        for kind in declared()
        if kind.__module__.startswith("flower_graph.") and kind not in BY_HAND
    },
    key=lambda kind: (kind.__module__, kind.__qualname__),
)


def draw(field: Any, rng: np.random.Generator, sizes: dict[str, int]) -> Any:
    """Draw what a field may be."""
    shape = [
        int(s) if s.isdecimal() else sizes.get(s, 3) for s in getattr(field, "shape", "").split()
    ]
    match field:
        case ClientMean():
            return torch.tensor([rng.random()], dtype=torch.float64)
        case fields.Whole():
            return int(rng.integers(max(field.least, 0), min(field.most, 99)))
        case fields.Real():
            return float(rng.random())
        case fields.Flag():
            return bool(rng.integers(2))
        case fields.Word():
            return f"word {rng.integers(99)}"
        case fields.Raw():
            return rng.bytes(fields.RUN_BYTES)
        case fields.Reasons():
            return {3: "value: nan", -1: ""}
        case fields.Numbers():
            numbers = rng.integers(1, 99, shape).tolist()
            return numbers if field.whole else [number / 2 for number in numbers]
        case fields.Clients():
            return rng.choice(100, shape, replace=False)
        case fields.Sizes():
            return np.array([0, sizes["n"] - 2, 2])
        case fields.Ragged():
            return [rng.integers(-9, 9, size) for size in (2, 1)]
        case fields.Flags():
            return rng.random(shape) < 0.5
        case CountsField():
            return Counts(torch.from_numpy(rng.integers(0, 9, (3, 2, 2))))
        case fields.Exact():
            return rng.integers(1, 2**31, shape)
        case fields.Block():
            return rng.integers(256, size=shape, dtype=np.uint8)
        case codec.Tensor():
            return rng.random(shape).astype(np.float32)
        case codec.Part():
            return field.make(**{n: draw(part, rng, sizes) for n, part in field.parts.items()})
    raise AssertionError(field)


def instance(kind: Any, seed: int = 0) -> Any:
    rng, given = np.random.default_rng(seed), dict(VALUES.get(kind, {}))
    sizes = SIZES | {letter: given.pop(letter) for letter in list(given) if len(letter) == 1}
    others = {n: v for n, v in KNOWN.get(kind, {}).items() if n == "total"}
    return kind(
        **{
            name: given[name] if name in given else draw(field, rng, sizes)
            for name, field in fields_of(kind).items()
        },
        **others,
    )


def reply(message: Any) -> RecordDict:
    """What the server gets: numbers in one record, arrays in theirs, all else in another."""
    arrays, examples, entries = message.to_numpy()
    names = entries.pop(ARRAY_NAMES, [])
    if "query" in type(message).up:
        return RecordDict({CONFIG: ConfigRecord(entries)})
    numbers = {NUM_EXAMPLES: examples} | {
        key: value for key, value in entries.items() if is_number(value)
    }
    others = {key: value for key, value in entries.items() if key not in numbers}
    content = RecordDict({METRICS: MetricRecord(numbers), CONFIG: ConfigRecord(others)})
    for name, values in zip(names, arrays, strict=True):
        record, slash, key = name.partition("/")
        record, key = (record, key) if slash else (ARRAYS, record)
        content.setdefault(record, ArrayRecord())[key] = encode_array(key, values)
    return content


def is_number(value: Any) -> bool:
    probe = value[0] if isinstance(value, list) else value
    return isinstance(probe, (int, float)) and not isinstance(probe, bool)


def is_read_alone(kind: Any) -> bool:
    """Whether it is a whole answer; the others are entries among those of other messages."""
    has_arrays = any(isinstance(field, codec.Tensor) for field in fields_of(kind).values())
    is_methods = kind.__module__.split(".")[1] == "strategies"
    return bool(kind.up) and (has_arrays or is_methods)


def read(kind: Any, content: RecordDict) -> Any:
    known = KNOWN.get(kind, {})
    if is_read_alone(kind):
        return kind.read(content, **known)
    arrays = [
        decode_array(key, array)
        for record in content.array_records.values()
        for key, array in record.items()
    ]
    config = {
        k: v for r in content.values() if not isinstance(r, ArrayRecord) for k, v in r.items()
    }
    return kind.from_numpy(arrays, config, **known) if arrays else kind.from_config(config, **known)


def written(message: Any) -> RecordDict:
    return reply(message) if is_read_alone(type(message)) else message.to_record()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Message):
        return same(vars(one), vars(other))
    if isinstance(one, Counts):
        return torch.equal(one.flat(), other.flat())
    if isinstance(one, np.ndarray):
        return np.shape(one) == np.shape(other) and np.array_equal(one, other)
    return bool(one == other)


def test_all_are_here() -> None:
    assert len(MESSAGES) >= 35
    assert {MaskedReply, EvaluateReply, relay.RelayReply, ego.EgoReply} <= set(MESSAGES)
    assert {UnionRequest, KeyReply} <= set(MESSAGES)
    assert fields_of(SumTerms) == {}, "a class without declared fields"


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_there_and_back(kind: Any, seed: int) -> None:
    message = instance(kind, seed)
    found = read(kind, written(message))
    for name, field in fields_of(kind).items():
        sent, came = getattr(message, name), getattr(found, name)
        if isinstance(field, ego.Rest):  # whatever else came is in it too
            assert sent.items() <= came.items(), name
        elif not getattr(field, "when", "") or came is not None:
            assert same(sent, came), name


ENTRIES = [
    (kind, field)
    for kind in MESSAGES
    for name, field in fields_of(kind).items()
    if not isinstance(field, (codec.Tensor, codec.Part, ego.Seconds, ego.Rest, ClientMean))
    and not isinstance(field, (fields.Word, fields.Reasons))
]


def each(pairs: list[Any]) -> Any:
    """Give a test each pair of a message and a field of it."""
    name = lambda value: getattr(value, "key", getattr(value, "__name__", ""))  # noqa: E731
    return pytest.mark.parametrize(("kind", "field"), pairs, ids=name)


@each(ENTRIES)
def test_every_entry_is_checked(kind: Any, field: Any) -> None:
    for bad in (None, "text", b"odd"):
        content = written(instance(kind))
        if bad is None and (field.optional or field.empty is not None):
            continue
        for record in (CONFIG, METRICS):
            if field.key in content.get(record, {}):
                del content[record][field.key]
        if bad is not None:
            content[CONFIG][field.key] = bad
        with pytest.raises(MalformedReplyError, match=field.key.split("*")[0]):
            read(kind, content)


@each([one for one in ENTRIES if one[1].empty is not None and not one[1].optional])
def test_a_missing_entry_is_an_empty_one_where_there_are_such(kind: Any, field: Any) -> None:
    def outcome(is_there: bool) -> Any:
        content = written(instance(kind))
        for record in content.values():
            if field.key in record:
                record.pop(field.key)
                if is_there:
                    record[field.key] = field.empty
        try:
            return read(kind, content)
        except MalformedReplyError as error:
            return str(error)

    missing, empty = outcome(False), outcome(True)
    assert type(missing) is type(empty)
    if isinstance(missing, str):
        assert missing == empty
    else:
        names = fields_of(kind)
        assert all(same(getattr(missing, name), getattr(empty, name)) for name in names)


TENSORS = [
    (kind, field)
    for kind in MESSAGES
    if is_read_alone(kind)
    for field in fields_of(kind).values()
    if isinstance(field, codec.Tensor)
]


def spoil(values: np.ndarray, value: float) -> np.ndarray:
    wrong = values.astype(np.float64)
    wrong.flat[-1] = value
    return wrong


@each(TENSORS)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda a: None, "missing"),
        (lambda a: a[:-1], "has shape"),
        (lambda a: a[None], "has shape"),
        (lambda a: spoil(a, np.nan), "NaN or infinite"),
        (lambda a: spoil(a, -np.inf), "NaN or infinite"),
        (lambda a: spoil(a, 1e300), "float32"),
        (lambda a: spoil(a, 1e30), "at most"),
        (lambda a: a.astype(np.complex64), "expected numbers"),
        (lambda a: a > 0, "expected numbers"),
        (lambda a: a.astype("U3"), "expected numbers"),
        (lambda a: a.astype(">f8"), "expected numbers"),
    ],
)
def test_every_array_of_a_reply_is_checked(kind: Any, field: Any, change: Any, why: str) -> None:
    if why == "at most" and getattr(field, "limit", 1) is None:
        return
    content = reply(instance(kind))
    record, _, key = field.key.partition("/")
    wrong = change(content[record][key].numpy())
    if wrong is None:
        del content[record][key]
    else:
        content[record][key] = Array(wrong)
    with pytest.raises(MalformedReplyError, match=f"{key}.*{why}"):
        read(kind, content)
