"""What only nFedGNN's messages can check; all else is generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.nfedgnn.messages import (
    EnrolmentReply,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.arrays import encode_array, pack_integers

LATENT = np.array([[1, 2], [3, 4]], np.float32)
SUM, HOLDERS = np.arange(6.0).reshape(3, 2), np.array([0, 1, 2])


def said(**changes: Any) -> RecordDict:
    entries = {"users": pack_integers(np.array([0, 1])), "weight-shape": [3, 2], **changes}
    return RecordDict({"config": ConfigRecord(entries)})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"users": b""}, "hosts"),
        ({"users": pack_integers(np.array([0, 5]))}, "user 5.*nodes 0"),
        ({"users": pack_integers(np.array([-1, 9]))}, "-1.*nodes 0"),
        ({"users": pack_integers(np.array([3, 1, 3]))}, "hosts"),
        ({"weight-shape": [3]}, r"weight-shape.*2.*\[3\]"),
        ({"weight-shape": [3, 0]}, r"\[3, 0\]"),
        ({"weight-shape": [True, True]}, "weight-shape"),
        ({"weight-shape": [2**20, 2**20]}, "268435456 numbers"),
    ],
)
def test_an_enrolment_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedReplyError, match=reason):
        EnrolmentReply.read(said(**changes), num_nodes=5)


def read(holders: np.ndarray, *, asked: bool = True) -> RelayReply:
    average = {"weights": encode_array("", SUM), "holders": encode_array("", holders)}
    content = RecordDict({"arrays": ArrayRecord({"relay": encode_array("", LATENT)})})
    content["average"] = ArrayRecord(average)
    content["metrics"] = MetricRecord({"server-round": 4})
    settings = UserSettings(2, True, 5e-4, 1, "all")
    users = np.array([5, 7])
    request = RelayRequest(4, users, LATENT, users, 0.1, settings, send_weights=asked)
    return RelayReply.from_record(content, request, (3, 2))


@pytest.mark.parametrize("wrong", [-1, 3, 1.0, np.uint64(2**63)])
def test_counts_that_so_many_users_cannot_have_are_refused(wrong: Any) -> None:
    with pytest.raises(MalformedReplyError, match=r"holders.*0"):
        read(np.array([wrong] * 3))


def test_weights_that_were_not_asked_for_are_not_read() -> None:
    reply = read(HOLDERS, asked=False)
    assert reply.weight_sum is None and reply.holders is None
    reply = read(HOLDERS)
    assert reply.holders is not None and reply.holders.tolist() == [0, 1, 2]
