"""What only nFedGNN's messages can check, and that mods find the same arrays in both directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.messages.arrays import encode_array, pack_integers
from flower_graph.strategies.split_gradient_relay.messages import (
    EnrolmentReply,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.split_gradient_relay.users import UserSettings

SETTINGS = UserSettings(2, True, 0.1, 5e-4, 2**40 + 1, "all")
LATENT = np.array([[1, 2], [3, 4]], np.float32)
SUM, HOLDERS = np.arange(6.0).reshape(3, 2), np.array([0, 1, 2])


def request(**changes: Any) -> RelayRequest:
    users, rounds = np.array([5, 2**33]), np.array([3, 0])
    return RelayRequest(4, users, LATENT, rounds, SETTINGS, **changes)


def test_latent_and_gradient_share_keys() -> None:
    """``LocalDpMod`` subtracts what came from what goes back, key by key."""
    _, count, metrics = RelayReply(4, LATENT).to_numpy()
    sent = request().to_record().array_records
    assert {k: list(v) for k, v in sent.items()} == {"arrays": metrics["array-names"]}
    assert count == 2


def test_huge_numbers_of_users_arrive_exactly() -> None:
    config = dict(request().to_record().config_records["config"])
    found = RelayRequest.from_numpy([LATENT], config)
    assert (found.users.tolist(), found.settings) == ([5, 2**33], SETTINGS)
    assert found.average is None


def said(**changes: Any) -> RecordDict:
    entries = {"users": pack_integers(np.array([0, 1])), "weight-shape": [3, 2], **changes}
    return RecordDict({"config": ConfigRecord(entries)})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"users": b""}, "it hosts no users"),
        ({"users": pack_integers(np.array([0, 5]))}, "hosts user 5, .* has nodes 0 to 4"),
        ({"users": pack_integers(np.array([-1, 9]))}, "hosts user -1, .* has nodes 0 to 4"),
        ({"users": pack_integers(np.array([3, 1, 3]))}, "it hosts a user twice"),
        ({"weight-shape": [3]}, r"weight-shape: expected two sizes, got \[3\]"),
        ({"weight-shape": [3, 0]}, r"two sizes, got \[3, 0\]"),
        ({"weight-shape": [True, True]}, r"two sizes, got \[True, True\]"),
        ({"weight-shape": [2**20, 2**20]}, "is more than 268435456 numbers"),
    ],
)
def test_an_enrolment_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedReplyError, match=reason):
        EnrolmentReply.from_record(said(**changes), num_nodes=5)


def answer(holders: np.ndarray) -> RecordDict:
    average = {"weights": encode_array("", SUM), "holders": encode_array("", holders)}
    return RecordDict(
        {
            "arrays": ArrayRecord({"relay": encode_array("", LATENT)}),
            "average": ArrayRecord(average),
            "metrics": MetricRecord({"server-round": 4}),
        }
    )


@pytest.mark.parametrize("wrong", [-1, 3, 1.0, np.uint64(2**63)])
def test_counts_that_so_many_users_cannot_have_are_refused(wrong: Any) -> None:
    with pytest.raises(MalformedReplyError, match="holders: expected counts from 0 to 2"):
        RelayReply.from_record(answer(np.array([wrong] * 3)), request(send_weights=True), (3, 2))


def test_weights_that_were_not_asked_for_are_not_read() -> None:
    reply = RelayReply.from_record(answer(HOLDERS), request(), (3, 2))
    assert reply.weight_sum is None and reply.holders is None
    reply = RelayReply.from_record(answer(HOLDERS), request(send_weights=True), (3, 2))
    assert reply.holders is not None and reply.holders.tolist() == [0, 1, 2]
