"""What only the messages of the alignments and of the secure sum check; all else is generated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.align.blinded import BlindReply, EvaluateReply
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import (
    RING,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.wire import keys
from flower_graph.wire.codec import fields_of

RUN = bytes(range(16))
CLIENTS = np.array([7, 2**40])
POINTS = np.zeros((48, 32), np.uint8)
KINDS = np.array([[0, 1, 2], [1, 0, 0]], np.uint8)


def keys_of(*kinds: type) -> set[str]:
    """The entries of some messages."""
    return {
        key
        for kind in kinds
        for key in (*(field.key for field in fields_of(kind).values()), *kind.fixed)  # type: ignore[attr-defined]
    }


def test_stages_of_the_sum_share_no_key() -> None:
    prepare, mask, unmask = map(keys_of, (PrepareRequest, MaskRequest, UnmaskRequest))
    assert not (prepare & mask or mask & unmask or prepare & unmask)
    assert not keys_of(PrepareReply) & keys_of(UnmaskReply)


@pytest.mark.parametrize("epoch", [None, 0, -1, True, 1.0, 2**32])
def test_epochs_are_positive_numbers(epoch: object) -> None:
    config = EvaluateReply(1, POINTS).to_config() | {"align-epoch": epoch}
    with pytest.raises(MalformedReplyError, match="align-epoch"):
        EvaluateReply.from_config(config)


def test_a_block_shows_only_a_power_of_two() -> None:
    for sizes, why in (([16, 24], "24 points"), ([8, 32], "8 points")):
        reply = BlindReply(1, CLIENTS, np.array(sizes), POINTS[: sum(sizes)])
        with pytest.raises(MalformedReplyError, match=why):
            BlindReply.from_config(reply.to_config())


def test_numbers_that_do_not_agree() -> None:
    shares = np.zeros((3, 33), np.uint8)
    reply = UnmaskReply(RUN, 7, CLIENTS, KINDS, shares)
    with pytest.raises(MalformedReplyError, match=r"unmask-shares.*99"):
        UnmaskReply.from_config(replace(reply, shares=shares[:2]).to_config())
    with pytest.raises(MalformedReplyError, match="client"):
        UnmaskReply.from_config(reply.to_config() | {"unmask-clients": b""})
    masked = MaskedReply(RUN, 7, CLIENTS, np.zeros(1, "<u8"), np.array([[3, 5]]))
    config = masked.to_config()
    with pytest.raises(MalformedReplyError, match=r"3.*\[n, 2\]"):
        MaskedReply.from_config(config | {"mask-refused": bytes(24)}, total=masked.total)
    for bad in (["x:why"], ["why"], 5):
        with pytest.raises(MalformedReplyError, match="number"):
            MaskedReply.from_config(config | {"mask-left-out": bad}, total=masked.total)


def test_ring() -> None:
    ring = Ring.fit(100, 64, 2.0**-16, guard=True)
    assert RING.from_config(RING.to_config(ring)) == ring
    with pytest.raises(MalformedReplyError, match="16 bits"):
        RING.from_config(RING.to_config(ring) | {keys.RING_WORD: 16})
