"""Replies that cannot be averaged are left out, each with its reason, and end nothing."""

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_graph.flower_compat import stamp
from flower_graph.server.averaging import Wanted, check_replies
from flower_graph.wire.exchange import MAX_NAMED, few

pytestmark = pytest.mark.usefixtures("identity")
MODEL = ArrayRecord({"a": Array(np.zeros((2, 3), np.float32)), "b": Array(np.zeros(4, np.float32))})


def content(
    metrics: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **changed: Any
) -> RecordDict:
    """Make a good answer, some of its arrays replaced, or left out where None is given."""
    named = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32), **changed}
    arrays = ArrayRecord(
        {key: Array(values) for key, values in named.items() if values is not None}
    )
    record = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics or {"num-examples": 3})})
    if config:
        record["config"] = ConfigRecord(config)
    return record


def asked(*nodes: int) -> list[Message]:
    messages = [Message(RecordDict(), node, "train") for node in nodes]
    for message in messages:
        stamp(message, message_id=f"id-{message.metadata.dst_node_id}")
    return messages


def check(*answers: RecordDict | Error | None, model: ArrayRecord | None = MODEL) -> Any:
    """Let nodes 1, 2, ... answer so; None is silence. Return usable nodes, and the reasons."""
    sent = asked(*range(1, len(answers) + 1))
    replies = [
        Message(answer, reply_to=message)
        for message, answer in zip(sent, answers, strict=True)
        if answer is not None
    ]
    found = check_replies(sent, replies[::-1], Wanted(model), 2.5)
    nodes = [reply.message.metadata.src_node_id for reply in found.usable]
    return nodes, {entry.node_id: entry.reason for entry in found.rejected}


def test_good_replies_come_in_the_order_of_the_requests():
    wide = content(b=np.ones(4, np.float64))
    assert check(content(), wide, content()) == ([1, 2, 3], {})
    empty = content(a=None, b=None)
    assert check(empty, content(), model=ArrayRecord())[0] == [1], "none travel"


GOOD, ONE = content(), MetricRecord({"num-examples": 3})
TORN = Array("float32", (4,), "numpy.ndarray", b"no array")
TURNED = ArrayRecord(dict(reversed(GOOD["arrays"].items())))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (content(b=None), "arrays ['a'], expected ['a', 'b']"),
        (content(a=None, b=None), "arrays [], expected ['a', 'b']"),
        (content(c=np.ones(1)), "arrays ['a', 'b', 'c'], expected ['a', 'b']"),
        (RecordDict({**GOOD, "arrays": TURNED}), "arrays ['b', 'a']"),
        (content(a=np.ones((3, 2), np.float32)), "arrays/a has shape (3, 2), expected (2, 3)"),
        (content(b=np.ones(4, np.float16)), "b has type float16, expected float32"),
        (content(b=np.ones(4, np.int64)), "b has type int64, expected float32"),
        (content(b=np.array(["x"] * 4)), "arrays/b has type <U1, expected numbers"),
        (content(b=np.array([1, math.nan, 1, 1], np.float32)), "arrays/b has NaN or infinite"),
        (content(a=np.full((2, 3), -math.inf, np.float32)), "arrays/a has NaN or infinite"),
        (content(a=np.full((2, 3), 1e300)), "arrays/a has NaN or infinite values in float32"),
        (
            RecordDict({**GOOD, "arrays": ArrayRecord({"a": GOOD["arrays"]["a"], "b": TORN})}),
            "arrays/b",
        ),
        (RecordDict({**GOOD, "more": ArrayRecord()}), "array records ['arrays', 'more']"),
        (RecordDict({"weights": GOOD["arrays"], "metrics": ONE}), "array records ['weights']"),
        (RecordDict({**GOOD, "more": ONE}), "2 metric records, expected 1"),
        (RecordDict({"arrays": GOOD["arrays"]}), "0 metric records, expected 1"),
    ],
)
def test_malformed_answers_are_left_out(answer: RecordDict, reason: str):
    nodes, reasons = check(content(), answer)
    assert nodes == [1]
    assert reasons.keys() == {2} and reason in reasons[2]


@pytest.mark.parametrize("weight", [0, -1, 0.0, math.nan, math.inf, 2**60, [3], None])
def test_a_weight_that_is_no_positive_number(weight: Any):
    metrics = {"other": 1.0} if weight is None else {"num-examples": weight}
    for model in (MODEL, None):
        nodes, reasons = check(content(), content(metrics=metrics), model=model)
        assert nodes == [1]
        assert reasons[2].startswith(f"num-examples is {weight}")


def test_silence_and_errors():
    error = Error(0, "ValueError: no\nweights\x07 here")
    nodes, reasons = check(content(), None, error)
    assert nodes == [1]
    said = "error reply: ValueError: no weights? here"
    assert reasons == {2: "no reply within 2.5 s", 3: said}
    sent = asked(7)  # an error in the name of the grid is the node's
    reply = Message(Error(3, "node is gone"), reply_to=sent[0])
    stamp(reply, src_node_id=1)
    found = check_replies(sent, [reply], Wanted(MODEL), 1)
    assert [(entry.node_id, entry.reason) for entry in found.rejected] == [
        (7, "error reply: node is gone")
    ]


def test_metrics_as_most_have_them():
    common = {"num-examples": 3, "loss": 1.0, "by-role": [1.0, 2.0]}
    short = common | {"by-role": [1.0]}
    fewer = {"num-examples": 3, "loss": 1.0}
    answers = [content(metrics=metrics) for metrics in (fewer, common, short, common)]
    nodes, reasons = check(*answers)
    assert nodes == [2, 4]
    assert reasons == dict.fromkeys((1, 3), "metrics are not as in the other replies: ['by-role']")


@pytest.mark.parametrize("loss", [math.nan, math.inf, [1.0, math.nan]])
def test_measurements_are_finite(loss: Any):
    good = 1.0 if isinstance(loss, float) else [1.0, 1.0]
    one, other = (content(metrics={"num-examples": 3, "loss": v}) for v in (good, loss))
    assert check(one, other, model=None) == ([1], {2: f"loss is {loss}"})
    # In training a diagnostic that is no number costs no weights.
    assert check(one, other) == ([1, 2], {})


def test_clients_that_their_node_left_out_are_named_as_far_as_the_report_has_room():
    why = ["3:weights are not finite", "5:lost"]
    nodes, reasons = check(*(content(config={"left-out": said}) for said in (why[:1], why[1])))
    assert nodes == [1, 2]
    assert reasons == {1: "client 3: weights are not finite", 2: "client 5: lost"}

    sent = asked(1)
    long = content(config={"left-out": [f"{n}:" + "x" * 10_000 for n in range(MAX_NAMED + 7)]})
    found = few(check_replies(sent, [Message(long, reply_to=sent[0])], Wanted(MODEL), 1).rejected)
    assert len(found) == MAX_NAMED + 1 and found[-1].reason == "and 7 more"
    assert max(len(entry.reason) for entry in found) <= 300
    assert "number:reason" in check(content(config={"left-out": ["why"]}))[1][1]
