"""What only the messages of LocalSage+ and FedSage+ check; all else is generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.messages.arrays import encode_array, pack_integers
from flower_graph.messages.keys import (
    ARRAYS,
    CONFIG,
    COUNTS,
    EPOCH,
    LOSSES,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
)
from flower_graph.strategies.fed_sage.cohort import CLASSIFIER_NAMES, FEATURE_NAMES, SageSettings
from flower_graph.strategies.fed_sage.messages import (
    Generators,
    SageEnrolment,
    SageScores,
    read_mean,
)
from flower_graph.strategies.fed_sage.neighbour_generation import LATENT, initial_weights

SETTINGS = SageSettings(4, 0.1, 0.2, 2, 3, 9)
CLIENTS = np.array([3, 5], dtype=np.int64)
START = initial_weights(6, 4, 3, 0)
SHAPES = {name: tuple(weight.shape) for name, weight in START.items()}


def stacked() -> dict[str, Any]:
    return {name: np.stack([START[name].numpy()] * 2) for name in FEATURE_NAMES}


def shown(**changes: Any) -> Generators:
    entries = {
        "epoch": 1,
        "clients": CLIENTS,
        "rows": np.array([0, 2]),
        "missing": np.array([1, 5]),
        "encoded": np.ones((2, LATENT), dtype=np.float32),
        "weights": stacked(),
    }
    return Generators(**{**entries, **changes})


def as_reply(message: Generators) -> RecordDict:
    """What the adaptor makes of the client's reply."""
    reply = message.to_record(SETTINGS)
    reply[METRICS] = MetricRecord({EPOCH: message.epoch})
    return reply


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": 2}, "epoch 2, expected 1"),
        ({"clients": np.array([3, 6])}, "clients"),
        ({"rows": np.array([1, 2])}, "rows"),
        ({"rows": np.array([-1, 3])}, "rows"),
        ({"missing": np.array([0, 5])}, "missing"),
        ({"missing": np.array([1, 6])}, "missing"),
    ],
)
def test_bad_generators_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedReplyError, match=reason):
        Generators.read(as_reply(shown(**changes)), epoch=1, clients=CLIENTS, shapes=SHAPES)


@pytest.mark.parametrize("clients", [[3, 3], [-1], []])
def test_numbers_of_clients_are_different_and_not_negative(clients: list[int]) -> None:
    wrong = SageEnrolment(np.array(clients, np.int64), 6, 3).to_config()
    with pytest.raises(MalformedReplyError):
        SageEnrolment.read(RecordDict({CONFIG: ConfigRecord(wrong)}))


def scores(server_round: int = 2, losses: Any = (0.5, 0.25), counts: Any = None) -> RecordDict:
    counts = np.array([1, 0, 0, 2, 1, 0] * 2) if counts is None else np.array(counts)
    metrics = {SERVER_ROUND: server_round, LOSSES: list(losses)}
    config = {COUNTS: pack_integers(counts)}
    return RecordDict({METRICS: MetricRecord(metrics), CONFIG: ConfigRecord(config)})


def test_scores() -> None:
    for reply, reason in (
        (scores(3), "round 3, expected 2"),
        (scores(losses=[0.5]), "expected 2 numbers"),
        (scores(losses=[0.5, float("nan")]), "losses"),
        (scores(counts=[1, 0, 0, 2, 1, 0]), "6 numbers for 2 clients"),
        (scores(counts=[3, 0, 0, 2, 1, 0] * 2), "more correct"),
        (scores(counts=[-1, 0, 0, 2, 1, 0] * 2), "below 0"),
    ):
        with pytest.raises(MalformedReplyError, match=reason):
            SageScores.read(reply, server_round=2, p=2)


def mean(weight: Any = 4, server_round: int = 2, without: str = "") -> RecordDict:
    arrays = {n: encode_array(n, START[n].numpy()) for n in CLASSIFIER_NAMES if n != without}
    metrics = MetricRecord({SERVER_ROUND: server_round, NUM_EXAMPLES: weight})
    return RecordDict({ARRAYS: ArrayRecord(arrays), METRICS: metrics})


def test_mean_classifier() -> None:
    reply, weight = read_mean(mean(), 2, SHAPES)
    assert weight == reply.metric_records[METRICS][NUM_EXAMPLES] == 4
    assert list(reply.array_records[ARRAYS]) == list(CLASSIFIER_NAMES)
    for bad, reason in (
        (mean(server_round=1), "round 1"),
        (mean(-1), "num-examples"),
        (mean(0.5), "num-examples"),
        (mean(without="classifier-2.bias"), "classifier-2.bias is missing"),
    ):
        with pytest.raises(MalformedReplyError, match=reason):
            read_mean(bad, 2, SHAPES)
