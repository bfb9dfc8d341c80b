"""What refusing a reply costs: errors count, no text is built whole, nobody fills a log."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from attack_helpers import peak
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError, brief, one_line
from flower_graph.server.averaging_replies import check_replies
from flower_graph.server.membership import Membership
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.ppfl.messages import EmbeddingEnrolment
from flower_graph.wire.averaging import Enrolment, Trained
from flower_graph.wire.exchange import MAX_NAMED, Gathering, Rejected, few, log_rejected
from flower_graph.wire.ledger import ENROLMENT, ROOM, reply_bytes, size_of

MB = 1 << 20


def exchange(answer: Any) -> tuple[Message, Message]:
    """Make a message and a reply to it; ``answer`` makes its content or error."""
    app: Any = lambda message, context: Message(answer, reply_to=message)  # noqa: E731
    grid = InProcessGrid(app, num_supernodes=1)
    (node,) = grid.get_node_ids()
    message = Message(RecordDict(), node, "train", group_id="1")
    (reply,) = grid.send_and_receive([message])
    return message, reply


def refused(answer: Any, most: int = ROOM) -> tuple[str, int]:
    """Give the reason why a reply is refused, and what that cost."""
    message, reply = exchange(answer)
    gathering = Gathering[Any](1, lambda node, content: pytest.fail("it was read"), most)
    gathering.open[message.metadata.message_id] = message.metadata.dst_node_id
    _, used = peak(lambda: gathering.take(reply, size_of(reply), {}))
    (entry,) = gathering.replies.rejected
    return entry.reason, used


@pytest.mark.parametrize("letter", ["x", "é", "\n", "\U0001d54f", " "])
def test_an_errors_text_is_part_of_the_reply(letter: str) -> None:
    text = letter * (50 * MB)
    said, used = refused(Error(0, text))
    assert said == f"error reply of {50 * MB} characters, at most {ROOM} bytes allowed"
    assert used < MB
    message, reply = exchange(Error(0, text))
    checked, used = peak(lambda: check_replies([message], [reply], None, 1.0))
    assert checked.rejected[0].reason.startswith("error reply of ")
    assert used < MB


@pytest.mark.parametrize("size", [MB, 50 * MB])
def test_a_line_is_made_of_a_texts_end(size: int) -> None:
    text = "Traceback\n" * (size // 10) + "ValueError: why"
    line, used = peak(lambda: one_line(text))
    assert line == "ValueError: why"
    assert used < MB


def names_of_records(size: int) -> RecordDict:
    return RecordDict({"x" * size: ConfigRecord({"a": 1})})


def array_with_a_shape(size: int) -> RecordDict:
    array = Array("float32", tuple([1] * (size // 8)), "numpy.ndarray", b"")
    return RecordDict({"arrays": ArrayRecord({"x": array})})


def array_with_a_type(size: int) -> RecordDict:
    array = Array("f" * size, (1,), "numpy.ndarray", b"")
    return RecordDict({"arrays": ArrayRecord({"x": array})})


@pytest.mark.parametrize("make", [names_of_records, array_with_a_shape, array_with_a_type])
def test_names_and_descriptions_count(make: Any) -> None:
    said, used = refused(make(20 * MB))
    assert "bytes, at most" in said
    assert used < MB


LARGE: dict[str, Any] = {
    "text": "x" * (60 * MB),
    "bytes": bytes(60 * MB),
    "list": [0] * (8 * MB),
    "list of texts": ["x" * MB] * 60,
    "mapping": {n: "x" for n in range(100_000)},
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_value_is_quoted_without_writing_all_of_it(kind: str) -> None:
    value = LARGE[kind]
    said, used = peak(lambda: brief(value))
    assert 0 < len(said) <= 60
    assert used < MB // 10
    if kind in ("text", "list"):
        assert said == repr(value[:100])[:60]


@pytest.mark.parametrize("value", ["a", b"b", 3, 2.5, None, [1, "a"], (1, 2), {"a": [1]}, [], True])
def test_a_small_value_is_quoted_as_it_is(value: object) -> None:
    assert brief(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * (60 * MB), ["x"] * (5 * MB), b"x" * (60 * MB + 1)])
def test_messages_quote_briefly(value: Any) -> None:
    content = RecordDict({"config": ConfigRecord({"clients": value})})

    def read() -> None:
        with pytest.raises(ValueError, match="clients"):
            Enrolment.read(content)

    _, used = peak(read)
    assert used < MB


def test_who_is_there_has_a_limit() -> None:
    """61 MiB of ids are refused unread; what is allowed costs a few times its size."""
    said, used = refused(claim(61 * MB), ENROLMENT)
    assert "at most" in said
    assert used < MB
    allowed = claim(8 * MB)
    answer, used = peak(lambda: EmbeddingEnrolment.read(allowed))
    assert answer.nodes[0].size == MB
    assert used < 6 * 8 * MB


def claim(size: int) -> RecordDict:
    ids = np.arange(size // 8, dtype="<i8").tobytes()
    entries: Any = {"clients": [0], "rows": [size // 8], "dimensions": [4], "nodes": ids}
    return RecordDict({"config": ConfigRecord(entries)})


def test_membership_asks_with_that_limit() -> None:
    class Asked(Exception):  # noqa: N818
        pass

    class Probe:
        def send(self, *_: Any, max_reply_bytes: int, **__: Any) -> None:
            raise Asked(max_reply_bytes)

    probe: Any = Probe()
    with pytest.raises(Asked) as caught:
        Membership().ask(probe, [1], 1, 1.0)
    assert caught.value.args == (ENROLMENT,)


def test_one_supernode_fills_neither_log_nor_report(caplog: pytest.LogCaptureFixture) -> None:
    entries = [Rejected(1, f"client {n}: no") for n in range(60_000)] + [Rejected(2, "silent")]
    with caplog.at_level(logging.WARNING):
        log_rejected(logging.getLogger("flower_graph"), 1, "left out", entries)
    assert MAX_NAMED == 50  # as docs/security.md says
    assert len(caplog.records) == MAX_NAMED + 2
    kept = few(entries)
    assert len(kept) == MAX_NAMED + 2
    assert kept[-2:] == [Rejected(2, "silent"), Rejected(1, f"and {60_000 - MAX_NAMED} more")]
    assert few(kept[:MAX_NAMED]) == kept[:MAX_NAMED]


def test_lines_of_a_reply_are_bounded() -> None:
    lines = [f"{n}:" + "x" * 50 for n in range(60_000)]
    metrics = MetricRecord({"num-examples": 1, "clients": 1})
    content = RecordDict({"metrics": metrics, "config": ConfigRecord({"left-out": lines})})
    with pytest.raises(MalformedReplyError, match="left-out"):
        Trained.read(content)
    assert reply_bytes() == ROOM
