"""Every message that is declared: what is written is read, and what does not fit is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.ops.counts import Counts
from flower_graph.secure.align.blinded import (
    BlindReply,
    EvaluateReply,
    PlainReply,
    Sizes,
    UnionRequest,
)
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum import messages
from flower_graph.strategies import fedgcn, lpgnn
from flower_graph.strategies.fed_sage import strategy as sage
from flower_graph.strategies.fedgls import strategy as structure
from flower_graph.strategies.fedscem import client as ego
from flower_graph.strategies.nfedgnn import client as relay
from flower_graph.strategies.ppfl import client as public
from flower_graph.strategies.ppfl.client import Claims
from flower_graph.wire import codec, keys
from flower_graph.wire.arrays import decode_array, encode_array, pack_integers
from flower_graph.wire.averaging import ClientMean, Measured
from flower_graph.wire.codec import Message, fields_of
from flower_graph.wire.counts import CountsField
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, CONFIG, METRICS, NUM_EXAMPLES

SIZES = {"p": 2, "c": 3, "k": 2, "f": 4, "h": 2, "w": 2, "n": 5, "m": 5, "q": 2, "o": 2, "d": 4}
# What only these can have; the rest is drawn
VALUES: dict[type, dict[str, Any]] = {
    Ring: {"word": 64, "fraction_bits": 16, "guard_bits": 4},
    messages.UnmaskReply: {"kinds": np.array([0, 2], np.uint8), "n": 1},
    BlindReply: {"sizes": np.array([16, 16, 32]), "n": 64},
    PlainReply: {"sizes": np.array([2, 0, 3])},
    sage.PeerGradients: {"a": 2},
    sage.Generators: {"rows": np.array([0, 2, 3]), "missing": np.array([1, 5, 2, 2, 1])},
    relay.EnrolmentReply: {"users": np.array([4, 0, 2]), "weight_shape": [3, 2]},
    relay.RelayReply: {"holders": np.array([0, 1, 2, 2])},
    fedgcn.Touched: {"own": np.array([1, 0, 2]), "others": np.array([1, 1, 0])},
    **{
        kind: {"rows": [2, 1, 1], "nodes": np.array([7, 5, 5, 2**40])}
        for kind in (public.HeldNodes, Claims, public.EmbeddingEnrolment)
    },
    ego.EgoRequest: {
        "sums": ego.Sums(3, [5, 4], np.arange(8, dtype=np.uint32)),
        "shares_model": True,
        "first": np.ones((7, 5), np.float32),
        "rest": np.zeros(9, np.float32),
        # Without the secure sum's part a client would write words that nobody masks
        **dict.fromkeys(("ring", "mask", "ready")),
    },
}
# What their reader knows
KNOWN: dict[type, dict[str, Any]] = {
    messages.MaskedReply: {"total": np.arange(3, dtype="<u8")},
    **{one: {"k": 2} for one in (messages.UnmaskRequest, messages.UnmaskReply)},
    relay.EnrolmentReply: {"num_nodes": 100},
    relay.RelayReply: {"p": 2, "h": 2, "f": 4, "w": 2, "send_weights": True},
    relay.LatentReply: {"p": 2, "m": 5, "h": 2, "trains": True, "measures": True},
    relay.SumReply: {"p": 2, "f": 4, "w": 2},
    lpgnn.FeatureReply: {"p": 2, "d": 4, "q": 2},
    sage.Generators: {"w": 2},
    sage.PeerGradients: {"a": 2, "w": 2},
    ego.EgoReply: {"L": 3, "asked": np.arange(100), "is_plain": True},
    Measured: {"classes": 2, "counting": "confusion"},
    structure.StructureMeasured: {"classes": 2, "counting": "confusion"},
}
# With fields that depend on one another: their own tests have them
BY_HAND = (
    *(public.PublicRequest, public.PublicReply),
    *(relay.LatentRequest, relay.Advance, relay.HiddenSum, fedgcn.SumsRequest),
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
        case codec.Whole():
            return int(rng.integers(max(field.least, 0), min(field.most, 99)))
        case codec.Real():
            return float(rng.random())
        case codec.Flag():
            return bool(rng.integers(2))
        case codec.RunToken():
            return rng.bytes(16).hex()
        case codec.Word():
            return f"word {rng.integers(99)}"
        case codec.Raw():
            return rng.bytes(codec.RUN_BYTES)
        case codec.Reasons():
            return {3: "value: nan", -1: ""}
        case codec.Numbers():
            numbers = rng.integers(1, 99, shape).tolist()
            return numbers if field.whole else [number / 2 for number in numbers]
        case codec.Clients():
            return rng.choice(100, shape, replace=False)
        case Sizes():
            return np.array([0, sizes["n"] - 2, 2])
        case messages.Flags():
            return rng.random(shape) < 0.5
        case CountsField():
            return Counts(torch.from_numpy(rng.integers(0, 9, (3, 2, 2))))
        case codec.Exact():
            return rng.integers(1, 2**31, shape)
        case codec.Block():
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
    assert {messages.MaskedReply, EvaluateReply, relay.RelayReply, ego.EgoReply} <= set(MESSAGES)
    assert {UnionRequest, messages.KeyReply} <= set(MESSAGES)
    assert fields_of(messages.SumTerms) == {}, "a class without declared fields"


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_there_and_back(kind: Any, seed: int) -> None:
    message = instance(kind, seed)
    found = read(kind, written(message))
    for name, field in fields_of(kind).items():
        sent, came = getattr(message, name), getattr(found, name)
        if not getattr(field, "when", "") or came is not None:
            assert same(sent, came), name


ENTRIES = [
    (kind, field)
    for kind in MESSAGES
    for name, field in fields_of(kind).items()
    if not isinstance(field, (codec.Tensor, codec.Part, ClientMean))
    and not isinstance(field, (codec.Word, codec.Reasons))
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


# What single messages check besides: parts that depend on one another ----------------------------

RUN, POINTS = bytes(range(16)), np.zeros((48, 32), np.uint8)
HELLO = public.EmbeddingEnrolment.of_clients({3: np.array([7, 5]), 1: np.array([5])}, 2)
ENROLLED = {"users": pack_integers(np.array([0, 1])), "weight-shape": [3, 2]}
PAIR, KINDS = np.array([7, 2**40]), np.array([0, 1, 2, 1, 0, 0], np.uint8)
UNMASKED = messages.UnmaskReply(RUN, 7, KINDS, np.zeros((3, 33), np.uint8))
MASKED = messages.MaskedReply(RUN, 7, PAIR, np.zeros(1, "<u8"), np.array([3, 5]))
RING = Ring.fit(100, 64, 2.0**-16, guard=True)


def blocks(*sizes: int) -> dict[str, Any]:
    return BlindReply(1, PAIR, np.array(sizes), np.zeros((sum(sizes), 32), np.uint8)).to_config()


# A message's reader: good entries, what is known of it, and changes with the words of the refusal
REFUSED: dict[Any, tuple[dict[str, Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    public.EmbeddingEnrolment.from_config: (HELLO.to_config(), {}, [
        ({keys.CLIENTS: [], keys.ROWS: [], "nodes": b""}, "clients"),
        ({keys.CLIENTS: [3, 3]}, r"\[3, 3\]"),
        ({keys.CLIENTS: [3, -1]}, "numbers.*0"),
        ({keys.CLIENTS: [1]}, "rows.*1"),
        ({keys.ROWS: [3, 0], "nodes": pack_integers(np.array([7, 5, 4]))}, "client 1"),
        ({keys.ROWS: [2, 2]}, "nodes"),
        ({"dimension": 0}, "dimension.*0"),
        ({"nodes": pack_integers(np.array([7, 7, 5]))}, "client 3"),
    ]),
    relay.EnrolmentReply.from_config: (ENROLLED, {"num_nodes": 5}, [
        ({"users": b""}, "users"),
        ({"users": pack_integers(np.array([0, 5]))}, "user 5.*nodes 0"),
        ({"users": pack_integers(np.array([-1, 9]))}, "^users: "),
        ({"users": pack_integers(np.array([3, 1, 3]))}, "users"),
        ({"weight-shape": [3]}, r"weight-shape.*2.*\[3\]"),
        ({"weight-shape": [3, 0]}, r"\[3, 0\]"),
        ({"weight-shape": [True, True]}, "weight-shape"),
        ({"weight-shape": [2**20, 2**20]}, "268435456 numbers"),
    ]),
    EvaluateReply.from_config: (EvaluateReply(1, POINTS).to_config(), {}, [
        ({"align-epoch": epoch}, "align-epoch") for epoch in (None, 0, -1, True, 1.0, 2**32)
    ]),
    BlindReply.from_config: (blocks(16, 32), {}, [
        (blocks(16, 24), "24 points"), (blocks(8, 32), "8 points"),
    ]),
    messages.UnmaskReply.from_config: (UNMASKED.to_config(), {}, [
        ({"unmask-shares": bytes(2 * 33)}, "unmask-shares.*3"),
    ]),
    messages.MaskedReply.from_config: (MASKED.to_config(), {"total": MASKED.total}, [
        ({"mask-refused": bytes(20)}, "mask-refused"),
        *(({"mask-left-out": bad}, "number") for bad in (["x:why"], ["why"], 5)),
    ]),
    Ring.from_config: (RING.to_config(), {}, [
        ({keys.RING_WORD: 16}, "16 bits"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("reader", "changes", "why"),
    [(reader, *case) for reader, (_, _, cases) in REFUSED.items() for case in cases],
)
def test_parts_that_do_not_agree_are_refused(reader: Any, changes: Any, why: str) -> None:
    good, known, _ = REFUSED[reader]
    reader(good, **known)
    with pytest.raises(MalformedReplyError, match=why):
        reader(good | changes, **known)


def test_who_is_in_a_plain_sum_was_asked() -> None:
    for present, says in (([4, 2], "client 4"), ([], "no client")):
        answer = ego.EgoReply(1, np.zeros(1), clients=np.array(present, np.int64))
        with pytest.raises(MalformedReplyError, match=says):
            answer.check({"asked": np.array([2]), "is_plain": True})


def relayed(holders: np.ndarray, *, asked: bool = True) -> relay.RelayReply:
    latent = np.array([[1, 2], [3, 4]], np.float32)
    content = RecordDict({"arrays": ArrayRecord({"relay": encode_array("", latent)})})
    average = {"weights": np.arange(6.0).reshape(3, 2), "holders": holders}
    content["average"] = ArrayRecord({n: encode_array("", value) for n, value in average.items()})
    content["metrics"] = MetricRecord({"server-round": 4})
    return relay.RelayReply.read(content, p=2, h=2, f=3, w=2, server_round=4, send_weights=asked)


def test_holders_are_as_many_as_can_be_and_were_asked_for() -> None:
    for wrong in (-1, 3, 1.0, np.uint64(2**63)):
        with pytest.raises(MalformedReplyError, match=r"holders.*0"):
            relayed(np.array([wrong] * 3))
    found = relayed(np.array([0, 1, 2]), asked=False)
    assert found.weight_sum is None and found.holders is None
    found = relayed(np.array([0, 1, 2]))
    assert found.holders is not None and found.holders.tolist() == [0, 1, 2]


# PPFL-GNN's messages, whose rows are of clients --------------------------------------------------

NODES = [*HELLO.held.values()]
MEANS = public.joined([np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), None], NODES, 2)
REQUEST = public.PublicRequest(4, [3, 1], NODES, 2, *MEANS, is_last=True)


def test_who_is_left_out_is_named_and_never_read_as_zeros() -> None:
    rows = [np.full((2, 2), 0.5, np.float32), None]
    figures = [1.0, 2.0], [0.1, float("nan")], {"val": [0.6, 0.7]}
    marks, every = public.joined(rows, NODES, 2)
    answer = public.PublicReply(
        REQUEST, marks, *figures[:2], every, figures[2], {1: public.UNUSABLE}
    )
    found = public.PublicReply.answering(REQUEST, reply(answer))
    assert [rows is None for rows in found.embeddings] == [False, True]
    assert found.left_out == {1: public.UNUSABLE}
    every[2] = np.inf, 7.0
    with pytest.raises(MalformedReplyError, match="infinite"):
        public.PublicReply.answering(REQUEST, reply(answer))
