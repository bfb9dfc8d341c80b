import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from flower_graph.errors import MalformedReplyError, NoClientsError
from flower_graph.flower_compat import SUPERLINK_NODE_ID, stamp
from flower_graph.wire.arrays import decode_array, encode_array
from flower_graph.wire.exchange import Exchange, Rejected, Replies

pytestmark = pytest.mark.usefixtures("identity")
MESSAGE_BYTES = 1 + 128 + 3 * 4  # key "x", NumPy's header, three float32
STRANGER = 99


def vector(*values: float) -> RecordDict:
    record = ArrayRecord()
    record["x"] = encode_array("x", np.array(values, np.float32))
    return RecordDict({"arrays": record})


def read(node_id: int, content: RecordDict) -> list[float]:
    values = decode_array("x", content["arrays"]["x"])  # type: ignore[arg-type]
    if values.shape != (3,):
        raise MalformedReplyError(f"x has shape {values.shape}, expected (3,)")
    if not np.isfinite(values).all():
        raise MalformedReplyError("x has a NaN or Inf")
    return [float(value) for value in values]


class ScriptedGrid(Grid):
    """Answers each node's messages by a word; replies held back come with `release`."""

    def __init__(self, script: Mapping[int, str], *, keeps_places: bool = False) -> None:
        self.script = script
        self.keeps_places = keeps_places
        self.open: dict[str, Message] = {}
        self.extra: list[Message] = []
        self.pulled: list[set[str]] = []
        self.sent = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids: list[str] = []
        for message in messages:
            self.sent += 1
            stamp(message, message_id=f"m{self.sent}")
            if self.script.get(message.metadata.dst_node_id) != "refused":
                ids.append(f"m{self.sent}")
                self.open[f"m{self.sent}"] = message
            elif self.keeps_places:
                ids.append("")
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = list(reversed(list(message_ids)))
        self.pulled.append(set(asked))
        assert len(asked) == len(self.pulled[-1])
        replies, self.extra = self.extra, []
        for message_id in asked:
            if message_id not in self.open:  # was answered already
                continue
            word = self.script.get(self.open[message_id].metadata.dst_node_id, "good")
            if word not in ("late", "never"):
                replies += answers(word, self.open.pop(message_id))
        return replies

    def release(self) -> None:
        self.script = {
            node: "good" if word == "late" else word for node, word in self.script.items()
        }

    def get_node_ids(self) -> list[int]:
        return [5, 3, 4][: len(self.pulled) + 1]

    set_run = run = create_message = send_and_receive = None  # type: ignore[assignment]


def answers(word: str, message: Message) -> list[Message]:
    """Return the messages that a node answers with."""
    good = Message(vector(1, 2, 3), reply_to=message)
    if word == "twice":
        return [good, Message(vector(7, 7, 7), reply_to=message)]
    if word == "error":
        return [Message(Error(2, "boom\n\x1b[31mred"), reply_to=message)]
    if word == "traceback":
        lines = ["Traceback:", *["  File x"] * 100, "ValueError: bad weather" + "!" * 400]
        return [Message(Error(2, "\n".join(lines)), reply_to=message)]
    if word == "lost":  # as SuperLink reports a node that is gone
        good = Message(Error(5, "Node Unavailable"), reply_to=message)
        stamp(good, src_node_id=SUPERLINK_NODE_ID)
        good.metadata.group_id = ""
    if word == "shape":
        good.content = vector(1, 2)
    if word == "nan":
        good.content = vector(1, float("nan"), 3)
    if word == "empty":
        good.content = RecordDict()
    if word == "large":
        good.content["more"] = ConfigRecord({"pad": b"0" * 1000})
    if word == "other round":
        good.metadata.group_id = "3"
    if word == "stranger":
        stamp(good, src_node_id=STRANGER)
    return [good]


def send(
    sender: Exchange | ScriptedGrid, nodes: Iterable[int], **options: Any
) -> Replies[list[float]]:
    sender = Exchange(sender) if isinstance(sender, ScriptedGrid) else sender
    defaults: dict[str, Any] = {"server_round": 4, "timeout": 0.2, "read": read}
    return sender.send({node: vector(0, 0, 0) for node in nodes}, **(defaults | options))


FAULTS = {
    "shape": "x has shape (2,), expected (3,)",
    "nan": "x has a NaN or Inf",
    "empty": "unreadable reply: KeyError: 'arrays'",
    "error": "error reply: boom ?[31mred",
    "traceback": "error reply: ValueError: bad weather" + "!" * (300 - 13 - 23 - 3) + "...",
    "lost": "error reply: Node Unavailable",
    "other round": "round 3, expected 4",
    "large": f"reply of {MESSAGE_BYTES + 1047} bytes, at most 500 allowed",
    "refused": "not sent: the grid refused the message; node gone?",
    "never": "no reply within 0.2 s",
    "late": "no reply within 0.2 s",
    "stranger": "no reply within 0.2 s",
}


@pytest.mark.parametrize(
    ("fault", "keeps_places"), [("refused", True), *((fault, False) for fault in FAULTS)]
)
def test_a_bad_reply_costs_only_its_own_node(
    fault: str, keeps_places: bool, caplog: pytest.LogCaptureFixture
) -> None:
    grid = ScriptedGrid({2: fault}, keeps_places=keeps_places)
    replies = send(grid, [1, 2, 3], max_reply_bytes=500)
    assert replies.values == {1: [1, 2, 3], 3: [1, 2, 3]}
    assert replies.rejected == [Rejected(2, FAULTS[fault])]
    assert caplog.messages[-1].endswith(FAULTS[fault])


def test_what_comes_is_in_the_order_of_the_requests_and_the_first_of_two_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = ScriptedGrid({5: "nan", 2: "refused", 8: "error", 1: "twice"})
    replies = send(grid, [9, 5, 1, 8, 4, 2])
    assert list(replies.values) == [9, 1, 4] and replies.values[1] == [1, 2, 3]
    assert [entry.node_id for entry in replies.rejected] == [5, 8, 2]
    assert "ignored 1 (node 1): a second reply" in caplog.text


def test_nobody_can_answer_for_another_node(caplog: pytest.LogCaptureFixture) -> None:
    grid = ScriptedGrid({})
    stray = Message(vector(1, 2, 3), reply_to=Message(vector(0), STRANGER, "train", group_id="4"))
    stamp(stray, reply_to_message_id="m77")
    grid.extra = [stray]
    replies = send(grid, [1])
    assert replies.values == {1: [1, 2, 3]}
    assert f"ignored 1 (node {STRANGER})" in caplog.text


def test_a_late_reply_is_drained_and_not_mixed_in(caplog: pytest.LogCaptureFixture) -> None:
    grid = ScriptedGrid({1: "good", 2: "late"})
    sender = Exchange(grid)
    assert send(sender, [1, 2], server_round=3).rejected == [Rejected(2, "no reply within 0.2 s")]
    grid.release()
    replies = send(sender, [1, 2], server_round=4)
    assert sorted(replies.values) == [1, 2]
    assert replies.rejected == []
    assert sender.ledger.wire["up"] == 4 * MESSAGE_BYTES
    assert grid.open == {}
    assert "ignored 1 (node 2): late: round 3" in caplog.text
    send(sender, [1], server_round=5)
    assert grid.pulled[-1] == {"m5"}  # what came late is not asked for again


def test_all_missing_end_at_the_deadline_and_are_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []  # a clock that goes while the server sleeps, whatever the machine does
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("flower_graph.wire.exchange.time", clock)
    grid = ScriptedGrid(dict.fromkeys(range(1000), "never"))
    replies = send(grid, range(1000))
    assert sum(slept) == pytest.approx(0.2) and len(grid.pulled) == len(slept) + 1
    assert slept[:8] == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.055])
    assert replies.values == {}
    assert [entry.node_id for entry in replies.rejected] == list(range(1000))
    (line,) = (one.getMessage() for one in caplog.records if one.name.startswith("flower_graph"))
    assert line.endswith(f"left out 1000 (node 0, 1, 2, ...): {FAULTS['never']}")


def test_a_server_that_waits_says_so_and_stops(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_graph.wire.exchange.FIRST_WORD", 0.0)
    monkeypatch.setattr("flower_graph.wire.exchange.NEXT_WORD", 0.1)
    with pytest.raises(NoClientsError, match=r"1.*3.*strategy\.min_nodes.*strategy\.timeout"):
        Exchange(ScriptedGrid({})).nodes(3, 0.25)
    words = [record.getMessage() for record in caplog.records]
    # Not each time that it looks, but every tenth of a second.
    assert 1 <= len(words) <= 3
    assert all(word == "waiting for 3 SuperNodes, 1 connected" for word in words)
    grid = ScriptedGrid({})
    grid.pulled = [set(), set()]
    assert Exchange(grid).nodes(2, 0.05) == [3, 4, 5]
    for timeout in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            send(grid, [1], timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            Exchange(grid).nodes(1, timeout)
    assert grid.sent == 0


# Messages made elsewhere -------------------------------------------------------------------------


def relayed(
    sender: Exchange, nodes: Iterable[int], number: int, timeout: float = 0.1
) -> dict[int, bool]:
    """Send Flower's kind of messages, which share a content; return who answered, and how."""
    content = vector(0, 0, 0)
    messages = [Message(content, node, "train") for node in nodes]
    replies = sender.relay(messages, server_round=number, timeout=timeout)
    return {node: reply.has_content() for node, reply in replies.items()}


class LossyGrid(ScriptedGrid):
    """As Flower's from 1.43 on: it says nothing of lost replies, nor of SuperNodes that left."""

    def __init__(self, script: Mapping[int, str], lost: set[int], left: set[int]) -> None:
        super().__init__(script)
        self.lost, self.left, self.replies = lost, left, list[Message]()
        told = lambda link, request: SimpleNamespace(messages_list=self.replies)  # noqa: E731
        self._runtime_client = type("SuperLink", (), {"PullMessages": told})()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.replies = super().pull_messages(message_ids)
        told = self._runtime_client.PullMessages(None).messages_list
        return [one for one in told if one.metadata.src_node_id not in self.lost]

    def get_node_ids(self) -> list[int]:
        return sorted({*range(10)} - self.left)


def lossy(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    """Make an exchange where 4's answer is lost, a stranger's in 5's name is, and 6 has left."""
    monkeypatch.setattr("flower_graph.wire.exchange.LOOK_WAIT", 0.05)
    script = {5: "stranger", 6: "never"}
    return Exchange(LossyGrid(script, lost={4, STRANGER}, left={6}))


def test_a_node_whose_answer_cannot_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    began = time.monotonic()
    replies = send(lossy(monkeypatch), [3, 4, 6], timeout=30)
    assert replies.values == {3: [1, 2, 3]}
    assert [one.node_id for one in replies.rejected] == [4, 6]
    assert len({one.reason for one in replies.rejected}) == 2
    assert relayed(lossy(monkeypatch), [3, 4, 6], 1, 30) == {3: True, 4: False, 6: False}
    assert time.monotonic() - began < 10
    strange = send(lossy(monkeypatch), [3, 5])  # a stranger's lost answer is not 5's
    assert strange.rejected == [Rejected(5, FAULTS["never"])]


def test_relayed_messages_come_back_unread():
    words = {4: "error", 5: "refused", 6: "never", 7: "stranger", 8: "nan"}
    sender = Exchange(ScriptedGrid(words))
    assert relayed(sender, range(3, 9), 1) == {3: True, 4: False, 8: True}
    # 3's, 8's and the stranger's answers; to all but 5
    assert sender.ledger.wire == {"up": 3 * MESSAGE_BYTES, "down": 5 * MESSAGE_BYTES}
    assert relayed(sender, [], 2) == {}
