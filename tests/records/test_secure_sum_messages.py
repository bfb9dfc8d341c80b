"""Messages of the secure sum: what is written is read, and what is wrong is named."""

from dataclasses import fields, replace

import numpy as np
import pytest

from flower_graph.errors import MalformedReplyError
from flower_graph.messages import keys
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import (
    RING,
    KeyReply,
    KeyRequest,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    UnmaskReply,
    UnmaskRequest,
)

RUN = bytes(range(16))
CLIENTS = np.array([3, 2**40])


def some(*shape):
    return np.random.default_rng(len(shape)).integers(256, size=shape, dtype=np.uint8)


KINDS = np.array([[0, 1, 2], [1, 0, 0]], np.uint8)
MESSAGES = [
    KeyRequest(RUN),
    KeyReply(RUN, CLIENTS, some(2, 32)),
    PrepareRequest(RUN, 7, 2, 5, CLIENTS, np.arange(6).reshape(2, 3), some(4, 32)),
    PrepareRequest(RUN, 7, 2, 5, CLIENTS, np.arange(6).reshape(2, 3), some(0, 32)),
    PrepareReply(RUN, 7, CLIENTS, some(2, 32), some(2, 16), some(2, 3, 2, 16), some(4, 82)),
    MaskRequest(RUN, 7, 9, 64, CLIENTS, KINDS > 0, some(2, 32), some(2, 2, 16), some(2, 82)),
    MaskRequest(RUN, 7, 9, 32, CLIENTS, KINDS > 0, some(0, 32), some(0, 2, 16), some(0, 82)),
    UnmaskRequest(RUN, 7, 11, CLIENTS, KINDS),
    UnmaskReply(RUN, 7, CLIENTS, KINDS, some(3, 33)),
    UnmaskReply(RUN, 7, CLIENTS, np.zeros_like(KINDS), some(0, 33)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    found = type(message).from_config(message.to_config())
    for field in fields(message):
        sent, came = getattr(message, field.name), getattr(found, field.name)
        assert np.array_equal(sent, came) and np.shape(sent) == np.shape(came), field.name


def test_stages_share_no_key():
    stages = [set(MESSAGES[i].to_config()) for i in (2, 5, 7)]
    assert not (stages[0] & stages[1] or stages[1] & stages[2] or stages[0] & stages[2])
    replies = [set(MESSAGES[i].to_config()) for i in (4, 8)]
    assert not replies[0] & replies[1]


def test_numbers_that_do_not_agree():
    reply = MESSAGES[8]
    with pytest.raises(MalformedReplyError, match="unmask-shares: expected 99 bytes, got 66"):
        UnmaskReply.from_config(replace(reply, shares=some(2, 33)).to_config())
    with pytest.raises(MalformedReplyError, match="no client"):
        UnmaskReply.from_config(reply.to_config() | {keys.UNMASK_CLIENTS: b""})
    with pytest.raises(MalformedReplyError, match="5 numbers for 2 clients"):
        PrepareRequest.from_config(replace(MESSAGES[2], partners=np.arange(5)).to_config())
    masked = MaskedReply(RUN, 7, CLIENTS, np.zeros(1, "<u8"), np.array([[3, 5]]))
    config = masked.to_config()
    with pytest.raises(MalformedReplyError, match="3 numbers are no pairs"):
        MaskedReply.from_config(config | {keys.MASK_REFUSED: bytes(24)}, total=masked.total)
    for bad in (["x:why"], ["why"], 5):
        with pytest.raises(MalformedReplyError, match="number:reason"):
            MaskedReply.from_config(config | {keys.MASK_LEFT_OUT: bad}, total=masked.total)


def test_ring():
    ring = Ring.fit(100, 64, 2.0**-16, guard=True)
    assert RING.from_config(RING.to_config(ring)) == ring
    with pytest.raises(MalformedReplyError, match="16 bits"):
        RING.from_config(RING.to_config(ring) | {keys.RING_WORD: 16})
