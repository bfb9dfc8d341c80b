"""Messages of the alignments there and back through Flower's own record of settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from flower_graph.errors import MalformedReplyError
from flower_graph.messages import keys
from flower_graph.messages.arrays import pack_integers
from flower_graph.messages.codec import Reading
from flower_graph.messages.fields import Block
from flower_graph.secure.align.messages import (
    BlindReply,
    BlindRequest,
    EvaluateReply,
    EvaluateRequest,
    PublishedTokens,
    UnionRequest,
)
from flower_graph.secure.align.plaintext_messages import (
    PairRequest,
    PatternReply,
    PlainOrder,
    PlainReply,
    PlainRequest,
    PolynomialReply,
    PolynomialRequest,
    SectionOrder,
)

CLIENTS, SIZES = np.array([7, 2**40]), np.array([16, 32])
POINTS = np.arange(48 * 32, dtype=np.int64).astype(np.uint8).reshape(48, 32)
TOKENS = np.arange(24, dtype=np.uint8).reshape(2, 12)
RESIDUES = np.array([0, 2**31 - 2, 5, 1], np.uint64)
PRIME = 2**31 - 1

MESSAGES: list[tuple[Any, dict[str, Any]]] = [
    (BlindRequest(1, CLIENTS), {}),
    (BlindReply(3, CLIENTS, SIZES, POINTS), {}),
    (EvaluateRequest(2, CLIENTS, POINTS), {}),
    (EvaluateReply(2, POINTS), {}),
    (UnionRequest(1, CLIENTS, SIZES, POINTS, 444), {}),
    (UnionRequest(1, CLIENTS[:0], SIZES[:0], POINTS[:0], 888), {}),
    (PublishedTokens(1, TOKENS), {}),
    (PublishedTokens(1, TOKENS[:0]), {}),
    (PolynomialRequest(PRIME, CLIENTS), {}),
    (PolynomialReply(CLIENTS, np.array([1, 3]), RESIDUES), {"prime": PRIME}),
    (PairRequest(PRIME, CLIENTS, np.array([1, 0]), RESIDUES.reshape(2, 1, 2)), {}),
    (PairRequest(PRIME, CLIENTS[:1], np.array([0]), RESIDUES[:0].reshape(1, 0, 5)), {}),
    (PatternReply(CLIENTS, np.array([0, 2]), TOKENS, np.array([4, 9])), {"w": 12}),
    (SectionOrder(5, TOKENS, np.array([0, 3])), {}),
    (PlainRequest(CLIENTS), {}),
    (PlainReply(CLIENTS, [["i:1"], ["s:é\n\0", "s:"]]), {}),
    (PlainOrder(2, CLIENTS, np.array([1, 2]), np.array([-1, 0, 1])), {}),
]


@pytest.mark.parametrize(("message", "expected"), MESSAGES)
def test_there_and_back(message: Any, expected: dict[str, Any]) -> None:
    config = dict(ConfigRecord(message.to_config()))
    found = type(message).from_config(config, **expected)
    for field in fields(message):
        sent, got = getattr(message, field.name), getattr(found, field.name)
        if isinstance(sent, np.ndarray):
            assert got.shape == sent.shape
            assert np.array_equal(got, sent)
        else:
            assert got == sent


def test_all_keys_are_the_alignments_own_and_kebab_case() -> None:
    used = {key for message, _ in MESSAGES for key in message.to_config()}
    known = {value for name, value in vars(keys).items() if name.startswith("ALIGN_")}
    assert used == known
    others = {
        value
        for name, value in vars(keys).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("ALIGN_")
    }
    assert len(others) > 10
    assert not used & others


@pytest.mark.parametrize("data", [None, "text", b"12345", 7])
def test_rows_must_be_whole(data: object) -> None:
    with pytest.raises(MalformedReplyError, match="points: expected rows of 2 bytes"):
        Block("points", shape="n 2").decode(data, "points", Reading({}, {}, []))


@pytest.mark.parametrize("epoch", [None, 0, -1, True, 1.0, 2**32])
def test_epochs_are_positive_numbers(epoch: object) -> None:
    config = EvaluateReply(1, POINTS).to_config() | {"align-epoch": epoch}
    with pytest.raises(MalformedReplyError, match="align-epoch"):
        EvaluateReply.from_config(config)


def test_counts_must_fit_their_patterns() -> None:
    config = PatternReply(CLIENTS, np.array([1, 1]), TOKENS, np.array([4, 9])).to_config()
    for counts in ([4], [4, 0]):
        wrong = config | {"align-counts": pack_integers(np.array(counts))}
        with pytest.raises(MalformedReplyError, match="patterns"):
            PatternReply.from_config(wrong, w=12)
