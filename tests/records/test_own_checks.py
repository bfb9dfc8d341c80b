"""What single messages check besides their declared fields: parts that depend on one another."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.align.blinded import BlindReply, EvaluateReply
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum import messages as sums
from flower_graph.secure.sum.messages import MaskedReply, UnmaskReply
from flower_graph.strategies.fed_sage.modules import LATENT
from flower_graph.strategies.fed_sage.strategy import Generators
from flower_graph.strategies.fedscem.messages import EgoReply, Layout
from flower_graph.strategies.nfedgnn.client import EnrolmentReply, RelayReply
from flower_graph.wire import keys
from flower_graph.wire.arrays import encode_array, pack_integers
from flower_graph.wire.codec import fields_of
from flower_graph.wire.fields import read_handled, read_not_saved

RUN = bytes(range(16))


def test_what_a_client_says_of_its_own_state() -> None:
    assert read_handled({}) is None
    assert [read_handled({"handled-messages": count}) for count in (0, 7)] == [0, 7]
    said = {"config": ConfigRecord({"not-saved": "no\nroom"})}
    assert read_not_saved(RecordDict(said)) == "no room"
    assert read_not_saved(RecordDict({"config": ConfigRecord({})})) == ""
    assert read_not_saved(RecordDict()) == ""


# FedSCem ------------------------------------------------------------------------------------------


def test_layout_by_hand() -> None:
    layout = Layout(2, 3, 4)
    parts = [layout.embeddings, layout.counts, layout.metrics, layout.model]
    assert [(part.start, part.stop) for part in parts] == [(0, 6), (6, 8), (8, 18), (18, 22)]
    assert (layout.length, Layout(0, 3).length) == (22, 10)


def test_times_that_are_missing_or_none_are_no_reason_to_refuse() -> None:
    numbers = {"num-examples": 1, "server-round": 3, "mask-seconds": [1.0]}
    total = ArrayRecord({"total": encode_array("total", np.arange(4.0))})
    config = ConfigRecord({"present": np.array([2], "<i8").tobytes()})
    content = RecordDict({"sums": total, "metrics": MetricRecord(numbers), "config": config})
    read = EgoReply.read(content, server_round=3, L=4)
    assert (read.train_seconds, read.mask_seconds) == (0.0, 0.0)


def test_who_is_in_a_plain_sum_was_asked() -> None:
    for present, says in (([4, 2], "client 4"), ([], "no client")):
        reply = EgoReply(1, np.zeros(1), 0.0, 0.0, clients=np.array(present, np.int64))
        with pytest.raises(MalformedReplyError, match=says):
            reply.check({"asked": np.array([2])})


# FedSage+ -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("epoch", 2),
        ("clients", np.array([3, 6])),
        ("rows", np.array([1, 2])),
        ("rows", np.array([-1, 3])),
        ("missing", np.array([0, 5])),
        ("missing", np.array([1, 6])),
    ],
)
def test_bad_generators_are_refused(key: str, bad: Any) -> None:
    clients = np.array([3, 5])
    entries = {"epoch": 1, "clients": clients, "rows": np.array([0, 2])}
    entries |= {"missing": np.array([1, 5]), "encoded": np.ones((2, LATENT), dtype=np.float32)}
    entries["weights"] = np.ones((2, 9), dtype=np.float32)
    message = Generators(**(entries | {key: bad}))
    content = message.to_record()
    content["metrics"] = MetricRecord({keys.EPOCH: message.epoch})
    with pytest.raises(MalformedReplyError, match=key):
        Generators.read(content, epoch=1, clients=clients, w=9)


# nFedGNN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "bad", "reason"),
    [
        ("users", b"", "hosts"),
        ("users", pack_integers(np.array([0, 5])), "user 5.*nodes 0"),
        ("users", pack_integers(np.array([-1, 9])), "-1.*nodes 0"),
        ("users", pack_integers(np.array([3, 1, 3])), "hosts"),
        ("weight-shape", [3], r"weight-shape.*2.*\[3\]"),
        ("weight-shape", [3, 0], r"\[3, 0\]"),
        ("weight-shape", [True, True], "weight-shape"),
        ("weight-shape", [2**20, 2**20], "268435456 numbers"),
    ],
)
def test_an_enrolment_that_cannot_be_is_refused(key: str, bad: Any, reason: str) -> None:
    entries: dict[str, Any] = {"users": pack_integers(np.array([0, 1])), "weight-shape": [3, 2]}
    content = RecordDict({"config": ConfigRecord(entries | {key: bad})})
    with pytest.raises(MalformedReplyError, match=reason):
        EnrolmentReply.read(content, num_nodes=5)


def relayed(holders: np.ndarray, *, asked: bool = True) -> RelayReply:
    latent = np.array([[1, 2], [3, 4]], np.float32)
    content = RecordDict({"arrays": ArrayRecord({"relay": encode_array("", latent)})})
    average = {"weights": np.arange(6.0).reshape(3, 2), "holders": holders}
    content["average"] = ArrayRecord({n: encode_array("", value) for n, value in average.items()})
    content["metrics"] = MetricRecord({"server-round": 4})
    return RelayReply.read(content, p=2, h=2, f=3, w=2, server_round=4, send_weights=asked)


def test_holders_are_as_many_as_can_be_and_were_asked_for() -> None:
    for wrong in (-1, 3, 1.0, np.uint64(2**63)):
        with pytest.raises(MalformedReplyError, match=r"holders.*0"):
            relayed(np.array([wrong] * 3))
    reply = relayed(np.array([0, 1, 2]), asked=False)
    assert reply.weight_sum is None and reply.holders is None
    reply = relayed(np.array([0, 1, 2]))
    assert reply.holders is not None and reply.holders.tolist() == [0, 1, 2]


# Alignments, and the secure sum -------------------------------------------------------------------


def test_stages_of_the_sum_share_no_key() -> None:
    def keys_of(kind: Any) -> set[str]:
        return {*(field.key for field in fields_of(kind).values()), *kind.fixed}

    stages = sums.PrepareRequest, sums.MaskRequest, sums.UnmaskRequest
    prepare, mask, unmask = map(keys_of, stages)
    assert not (prepare & mask or mask & unmask or prepare & unmask)
    assert not keys_of(sums.PrepareReply) & keys_of(UnmaskReply)


def test_epochs_are_positive_numbers() -> None:
    config = EvaluateReply(1, np.zeros((48, 32), np.uint8)).to_config()
    for epoch in (None, 0, -1, True, 1.0, 2**32):
        with pytest.raises(MalformedReplyError, match="align-epoch"):
            EvaluateReply.from_config(config | {"align-epoch": epoch})


def test_a_block_shows_only_a_power_of_two() -> None:
    for sizes, why in (([16, 24], "24 points"), ([8, 32], "8 points")):
        points = np.zeros((sum(sizes), 32), np.uint8)
        reply = BlindReply(1, np.array([7, 2**40]), np.array(sizes), points)
        with pytest.raises(MalformedReplyError, match=why):
            BlindReply.from_config(reply.to_config())


def test_numbers_that_do_not_agree() -> None:
    shares, clients = np.zeros((3, 33), np.uint8), np.array([7, 2**40])
    kinds = np.array([[0, 1, 2], [1, 0, 0]], np.uint8)
    reply = UnmaskReply(RUN, 7, clients, kinds, shares)
    with pytest.raises(MalformedReplyError, match=r"unmask-shares.*99"):
        UnmaskReply.from_config(replace(reply, shares=shares[:2]).to_config())
    with pytest.raises(MalformedReplyError, match="client"):
        UnmaskReply.from_config(reply.to_config() | {"unmask-clients": b""})
    masked = MaskedReply(RUN, 7, clients, np.zeros(1, "<u8"), np.array([[3, 5]]))
    config = masked.to_config()
    with pytest.raises(MalformedReplyError, match="mask-refused"):
        MaskedReply.from_config(config | {"mask-refused": bytes(24)}, total=masked.total)
    for bad in (["x:why"], ["why"], 5):
        with pytest.raises(MalformedReplyError, match="number"):
            MaskedReply.from_config(config | {"mask-left-out": bad}, total=masked.total)


def test_ring() -> None:
    ring = Ring.fit(100, 64, 2.0**-16, guard=True)
    config = sums.RING.to_config(ring)
    assert sums.RING.from_config(config) == ring
    with pytest.raises(MalformedReplyError, match="16 bits"):
        sums.RING.from_config(config | {keys.RING_WORD: 16})
