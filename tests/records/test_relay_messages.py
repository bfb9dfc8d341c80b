"""Messages there and back through the real adaptor; everything malformed is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import MalformedReplyError
from flower_graph.messages.arrays import encode_array, pack_integers, unpack_integers
from flower_graph.messages.fields import Resume
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.split_gradient_relay.messages import (
    EnrolmentReply,
    EnrolmentRequest,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.split_gradient_relay.users import UserSettings

SETTINGS = UserSettings(2, True, 0.1, 5e-4, 2**40 + 1, "all")
SHAPE = (3, 2)
LATENT = np.array([[1, 2], [3, 4]], np.float32)
SUM, HOLDERS = np.arange(6.0).reshape(SHAPE), np.array([0, 1, 2])


def request(**changes: Any) -> RelayRequest:
    values: dict[str, Any] = {
        "server_round": 4,
        "users": np.array([5, 2**33]),
        "gradient": np.array([[0.5, -1], [0, 2]], np.float32),
        "gradient_round": np.array([3, 0]),
        "settings": SETTINGS,
    }
    return RelayRequest(**{**values, **changes})


class Answers(NumPyClient):
    """Reads what comes with the typed messages and gives fixed typed answers."""

    def __init__(self, reply: RelayReply) -> None:
        self.reply, self.seen = reply, None

    def fit(self, parameters: Any, config: Any) -> Any:
        self.seen = RelayRequest.from_numpy(parameters, config)
        return self.reply.to_numpy()

    def get_properties(self, config: Any) -> Any:
        self.seen = EnrolmentRequest.from_config(config)
        return EnrolmentReply(np.array([4, 0, 2]), SHAPE).to_config()


def exchange(client: Answers, kind: str, content: RecordDict) -> RecordDict:
    grid = InProcessGrid(make_client_app(lambda _: client), num_supernodes=1)
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(content, node, kind)])
    assert not reply.has_error(), reply.error
    return reply.content


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"average": np.array([[1, np.nan]] * 3, np.float32), "average_round": 2},
        {"send_weights": True, "checkpoint": True},
    ],
)
def test_request_arrives_as_it_was_sent(changes: dict[str, Any]):
    client, sent = Answers(RelayReply(4, LATENT)), request(**changes)
    exchange(client, "train", sent.to_record())
    assert client.seen is not None
    for name, value in vars(sent).items():
        got = getattr(client.seen, name)
        np.testing.assert_array_equal(got, value, err_msg=name)
        assert isinstance(value, np.ndarray) == isinstance(got, np.ndarray)
    assert client.seen.settings == SETTINGS
    assert client.seen.gradient.dtype == np.float32


@pytest.mark.parametrize("send_weights", [False, True])
def test_reply_arrives_as_it_was_sent(send_weights: bool):
    sent = RelayReply(4, LATENT, SUM, HOLDERS) if send_weights else RelayReply(4, LATENT)
    asked = request(send_weights=send_weights)
    content = exchange(Answers(sent), "train", asked.to_record())
    got = RelayReply.from_record(content, asked, SHAPE)
    assert got.server_round == 4
    for name in ("latent", "weight_sum", "holders"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
    assert content.metric_records["metrics"]["num-examples"] == 2


@pytest.mark.parametrize("resume", [Resume("ab" * 16), Resume("cd" * 16, 10, "0f")])
def test_hello_there_and_back(resume: Resume):
    client = Answers(RelayReply(1, LATENT))
    content = exchange(client, "query", EnrolmentRequest(SETTINGS, resume).to_record())
    assert client.seen == EnrolmentRequest(SETTINGS, resume)
    reply = EnrolmentReply.from_record(content, num_nodes=5)
    assert reply.users.tolist() == [4, 0, 2]
    assert reply.weight_shape == SHAPE


def test_latent_and_gradient_share_keys():
    """``LocalDpMod`` subtracts what came from what goes back, key by key."""
    content = exchange(Answers(RelayReply(4, LATENT)), "train", request().to_record())
    sent = request().to_record()
    assert {k: list(v) for k, v in content.array_records.items()} == {
        k: list(v) for k, v in sent.array_records.items()
    }


@pytest.mark.parametrize("values", [[], [0], [-1, 2**63 - 1, -(2**63)]])
def test_integers_there_and_back(values: list[int]):
    data = pack_integers(np.array(values, np.int64))
    assert len(data) == 8 * len(values)
    assert unpack_integers(data, "users").tolist() == values


def test_integers_are_little_endian():
    assert pack_integers(np.array([1, 258], np.int32)) == bytes([1, *[0] * 7, 2, 1, *[0] * 6])


@pytest.mark.parametrize("data", [b"1234567", b"123456789", None, "12345678", 8, [1]])
def test_other_bytes_are_no_integers(data: Any):
    with pytest.raises(MalformedReplyError, match="users: expected 64-bit integers as bytes"):
        unpack_integers(data, "users")


def hello_record(**changes: Any) -> RecordDict:
    entries = {"users": pack_integers(np.array([0, 1])), "weight-shape": [3, 2], **changes}
    kept = {key: value for key, value in entries.items() if value is not None}
    return RecordDict({"config": ConfigRecord(kept)})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"users": None}, "users: expected 64-bit integers as bytes, got None"),
        ({"users": b"123"}, "users: expected 64-bit integers as bytes, got b'123'"),
        ({"users": b""}, "it hosts no users"),
        ({"users": pack_integers(np.array([0, 5]))}, "hosts user 5, .* has nodes 0 to 4"),
        ({"users": pack_integers(np.array([-1, 9]))}, "hosts user -1, .* has nodes 0 to 4"),
        ({"users": pack_integers(np.array([3, 1, 3]))}, "it hosts a user twice"),
        ({"weight-shape": None}, "weight-shape: expected two sizes, got None"),
        ({"weight-shape": [3]}, r"two sizes, got \[3\]"),
        ({"weight-shape": [3, 2, 1]}, r"two sizes, got \[3, 2, 1\]"),
        ({"weight-shape": [3, 0]}, r"two sizes, got \[3, 0\]"),
        ({"weight-shape": [-3, -2]}, r"two sizes, got \[-3, -2\]"),
        ({"weight-shape": [3.0, 2.0]}, r"two sizes, got \[3.0, 2.0\]"),
        ({"weight-shape": [True, True]}, r"two sizes, got \[True, True\]"),
        ({"weight-shape": "3x2"}, "two sizes, got '3x2'"),
    ],
)
def test_malformed_hello_is_refused(changes: dict[str, Any], reason: str):
    with pytest.raises(MalformedReplyError, match=reason):
        EnrolmentReply.from_record(hello_record(**changes), num_nodes=5)


def test_empty_hello_is_refused():
    with pytest.raises(MalformedReplyError, match="users: expected"):
        EnrolmentReply.from_record(RecordDict(), num_nodes=5)


def reply_record(**changes: Any) -> RecordDict:
    """Write a good reply by hand, some of its parts replaced; ``None`` leaves one out."""
    parts = {"round": 4, "relay": LATENT, "weights": SUM, "holders": HOLDERS, **changes}

    def arrays(*names: str) -> ArrayRecord:
        return ArrayRecord(
            {
                name: value if isinstance(value, Array) else encode_array(name, value)
                for name in names
                if (value := parts[name]) is not None
            }
        )

    metrics = {} if parts["round"] is None else {"server-round": parts["round"]}
    return RecordDict(
        {
            "arrays": arrays("relay"),
            "average": arrays("weights", "holders"),
            "metrics": MetricRecord(metrics),
        }
    )


def refused(content: RecordDict, reason: str) -> None:
    with pytest.raises(MalformedReplyError, match=reason):
        RelayReply.from_record(content, request(send_weights=True), SHAPE)


def test_the_reply_written_by_hand_is_good():
    reply = RelayReply.from_record(reply_record(), request(send_weights=True), SHAPE)
    assert reply.latent.tolist() == LATENT.tolist()
    assert reply.holders is not None and reply.holders.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "reason"), [(3, "round 3, expected 4"), (5, "round 5"), (None, "round None")]
)
def test_another_round_is_refused(value: int | None, reason: str):
    refused(reply_record(round=value), reason)


def test_an_empty_reply_is_refused():
    refused(RecordDict(), "round None, expected 4")
    refused(
        RecordDict({"metrics": MetricRecord({"server-round": 4})}), "array arrays/relay is missing"
    )


@pytest.mark.parametrize(
    ("holders", "reason"),
    [
        (None, "average/holders is missing"),
        (np.array([0, -1, 2]), "holders: expected counts from 0 to 2"),
        (np.array([0, 3, 2]), "holders: expected counts from 0 to 2"),
        (np.array([0.0, 1.0, 2.0]), "holders: expected counts from 0 to 2"),
        (np.array([0, 2**63, 2], np.uint64), "holders: expected counts from 0 to 2"),
        (np.array([[0, 1, 2]]), r"holders has shape \(1, 3\), expected \(3,\)"),
    ],
)
def test_malformed_counts_are_refused(holders: np.ndarray | None, reason: str):
    refused(reply_record(holders=holders), reason)


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (2, 2), "numpy.ndarray", b"no array"),
        Array("float32", (2, 2), "other", encode_array("a", LATENT).data),
        Array("float32", (2, 2), "numpy.ndarray", encode_array("a", LATENT).data[:-4]),
        Array("float64", (2, 2), "numpy.ndarray", encode_array("a", LATENT).data),
        Array("float32", (4, 1), "numpy.ndarray", encode_array("a", LATENT).data),
    ],
    ids=["bytes", "serialisation", "truncated", "type", "shape"],
)
def test_an_unreadable_array_is_refused(array: Array):
    refused(reply_record(relay=array), "arrays/relay cannot be read")


def test_weights_that_were_not_asked_for_are_not_read():
    reply = RelayReply.from_record(reply_record(weights=None), request(), SHAPE)
    assert reply.weight_sum is None and reply.holders is None
