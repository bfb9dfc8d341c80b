"""What a sum says, and what it cost."""

import math

import numpy as np
import pytest
from ego_helpers import HIDDEN, SETTINGS

from flower_graph.secure.ring import Ring
from flower_graph.strategies.fedscem.client import Layout, contrast_scale
from flower_graph.strategies.fedscem.strategy import (
    MaskedEmbeddingAveraging,
    RoundSum,
    mean_metrics,
)

METRICS = np.array([1.5, 2, 0.25, 1, 0, 0, 6.0, 0.5, 2, 0])


def server_of(ring: Ring | None = None) -> MaskedEmbeddingAveraging:
    """A server in a round with two slots, for which three clients were asked."""
    server = MaskedEmbeddingAveraging(SETTINGS)
    server.layout, server.ring = Layout(2, HIDDEN), ring
    server.session.asked = {1: [4, 5], 2: [6]}
    return server


def total_of(server: MaskedEmbeddingAveraging) -> np.ndarray:
    layout, total = server.layout, np.zeros(server.layout.length)
    total[layout.embeddings] = np.arange(layout.slots * layout.hidden)
    total[layout.counts] = [1, 2]
    total[layout.metrics] = METRICS
    return total


def test_a_sum_says_means_over_those_that_have_something() -> None:
    server = server_of()
    found = RoundSum(2, total_of(server), [4, 5])
    means = mean_metrics(server._take(2, found), SETTINGS.tau)
    assert (means["train"], means["val"]) == (0.75, 0.25)
    assert math.isnan(means["test"])
    assert means["cross-entropy"] == 3.0
    assert means["contrast"] == 0.25 * contrast_scale(SETTINGS.tau)
    # What one client alone holds is not handed on.
    sums = server.sums
    assert sums is not None
    assert sums.counts.tolist() == [0, 2]
    assert sums.embeddings.tolist() == [0.0] * HIDDEN + list(range(HIDDEN, 2 * HIDDEN))
    assert (sums.server_round, sums.origin) == (2, [2, 2])
    # A skipped round leaves nothing.
    assert math.isnan(server._take(3, RoundSum(3, skipped="too few"))["cross-entropy"])
    assert server.sums is None


@pytest.mark.parametrize("word", [None, 32])
def test_payload_by_hand(word: int | None) -> None:
    ring = None if word is None else Ring.fit(3, 4.0, 2.0**-8, guard=True)
    server = server_of(ring)
    total = total_of(server)
    if ring is not None:
        assert ring.word == word
        total = (total * 2**ring.fraction_bits).astype(ring.dtype) << ring.guard_bits
    size = 8 if word is None else 4
    for number in (1, 2):
        found = RoundSum(number, total, [4, 5])
        server._count(found)
        server._take(number, found)
    up, down = server.payload["up"], server.payload["down"]
    assert up["embeddings"] == 2 * 2 * (2 * HIDDEN) * size  # rounds, clients, numbers
    assert up["activations"] == 2 * 2 * 2 * size
    assert up["metrics"] == 2 * 2 * 10 * size
    # The second round brought the sums of the first to the three clients that were asked.
    assert down["embeddings"] == 3 * (2 * HIDDEN + 2) * size
