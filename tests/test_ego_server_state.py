"""What a sum says: means over clients, the mean model, sums that are handed on, bytes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ego_helpers import HIDDEN, SETTINGS

from flower_graph.secure.ring import Ring
from flower_graph.server.ledger import ByteLedger
from flower_graph.strategies.masked_embedding_averaging.cohort import initial_weights
from flower_graph.strategies.masked_embedding_averaging.messages import (
    EgoReply,
    EgoRequest,
    Layout,
    RoundSum,
)
from flower_graph.strategies.masked_embedding_averaging.server_state import EgoServerState
from flower_graph.strategies.masked_embedding_averaging.vector import contrast_scale

METRICS = np.array([1.5, 2, 0.25, 1, 0, 0, 6.0, 0.5, 2, 0])
REPLIES = [EgoReply(2, {}, np.zeros(0), seconds, 0.5) for seconds in (0.25, 1.0)]


def session_of(rounds: int = 4, slots: int = 2, ring: Ring | None = None) -> Any:
    """What the book asks a session for."""
    ledger = ByteLedger()
    return SimpleNamespace(
        rounds=rounds,
        num_slots=slots,
        ring=lambda: ring,
        exchange=SimpleNamespace(ledger=ledger),
        is_due=lambda server_round: False,
        checkpoints=SimpleNamespace(run=""),
    )


def book_of(*, shares_model: bool = False) -> EgoServerState:
    return EgoServerState(SETTINGS, variant="full", shares_model=shares_model)


def plain_total(layout: Layout) -> np.ndarray:
    total = np.zeros(layout.length)
    total[layout.embeddings] = np.arange(layout.slots * layout.hidden)
    total[layout.counts] = [1, 2]
    total[layout.metrics] = METRICS
    return total


def test_a_sum_says_means_over_those_that_have_something() -> None:
    layout = Layout(2, HIDDEN)
    found = RoundSum(2, 2, plain_total(layout), 2)
    means = book_of().take(layout, found, None, REPLIES, 3)
    assert (means.train, means.val) == (0.75, 0.25)
    assert math.isnan(means.test)
    assert means.cross_entropy == 3.0
    assert means.contrast == 0.25 * contrast_scale(SETTINGS.tau)
    assert (found.parts["train"], found.parts["mask"]) == (1.0, 0.5)


def test_plain_sums_of_one_holder_are_not_handed_on() -> None:
    layout, book = Layout(2, HIDDEN), book_of()
    book.take(layout, RoundSum(2, 2, plain_total(layout), 2), None, REPLIES, 2)
    sums = book.request(3, session_of()).sums
    assert sums is not None
    assert sums.counts.tolist() == [0, 2]
    assert sums.embeddings.tolist() == [0.0] * HIDDEN + list(range(HIDDEN, 2 * HIDDEN))
    assert (sums.server_round, sums.contributors) == (2, 2)


def test_sums_are_forgotten_when_slots_change() -> None:
    layout, book = Layout(2, HIDDEN), book_of()
    book.take(layout, RoundSum(2, 2, plain_total(layout), 2), None, REPLIES, 2)
    book.forget_sums()
    assert book.request(3, session_of()).sums is None


def test_a_skipped_round_leaves_nothing() -> None:
    layout, book = Layout(2, HIDDEN), book_of(shares_model=True)
    start = book.model
    means = book.take(layout, RoundSum(2, 2, skipped="too few"), None, [], 0)
    assert math.isnan(means.cross_entropy)
    request: EgoRequest = book.request(3, session_of())
    assert request.sums is None
    assert book.model is start


def test_the_mean_model_comes_from_the_ring() -> None:
    book = book_of(shares_model=True)
    layout, session = book.layout(1, session_of()), session_of()
    ring = Ring.fit(3, 32.0, 2.0**-16, guard=True)
    start = initial_weights(SETTINGS)
    flat = np.concatenate([start.first.numpy().ravel(), start.rest.numpy()])
    total = np.zeros(layout.length, ring.dtype)
    total[layout.metrics] = ring.encode(METRICS)
    total[layout.model] = ring.encode(flat + 1) + ring.encode(flat + 3)
    means = book.take(layout, RoundSum(1, 1, total, 2), ring, REPLIES, 2)
    assert means.cross_entropy == 3.0
    request = book.request(2, session)
    assert request.model is not None
    np.testing.assert_allclose(request.model[0], start.first.numpy() + 2, atol=2.0**-16)
    np.testing.assert_allclose(request.model[1], start.rest.numpy() + 2, atol=2.0**-16)
    arrays = book.model_arrays()
    assert arrays["weight-2"].shape == (HIDDEN, HIDDEN)
    assert sum(a.size for a in arrays.values()) == flat.size


def test_after_the_last_round_only_measurements_travel() -> None:
    book = book_of(shares_model=True)
    assert book.layout(5, session_of(rounds=4)).length == 10
    assert book.request(5, session_of(rounds=4)).is_last
    assert not book.request(4, session_of(rounds=4)).is_last


@pytest.mark.parametrize("word", [None, 32])
def test_payload_by_hand(word: int | None) -> None:
    ring = None if word is None else Ring.fit(3, 4.0, 2.0**-8, guard=True)
    layout, book = Layout(2, HIDDEN), book_of()
    total: np.ndarray = plain_total(layout)
    if ring is not None:
        assert ring.word == word
        total = (total * 2**ring.fraction_bits).astype(ring.dtype) << ring.guard_bits
    size = 8 if word is None else 4
    for number in (1, 2):
        book.take(layout, RoundSum(number, number, total, 2), ring, REPLIES, 3)
    up, down = book.payload["up"], book.payload["down"]
    assert up["embeddings"] == 2 * 2 * (2 * HIDDEN) * size  # rounds, clients, numbers
    assert up["activations"] == 2 * 2 * 2 * size
    assert up["metrics"] == 2 * 2 * 10 * size
    # The second round brought the sums of the first to the three clients that were asked.
    assert down["embeddings"] == 3 * (2 * HIDDEN + 2) * size


def test_the_model_is_the_settings_own() -> None:
    book = book_of(shares_model=True)
    assert book.model is not None
    assert torch.equal(book.model.rest, initial_weights(SETTINGS).rest)
    assert book_of().model_arrays() == {}
