"""What only the messages of LocalSage+ and FedSage+ check; all else is generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.fed_sage.cohort import CLASSIFIER_NAMES, FEATURE_NAMES
from flower_graph.strategies.fed_sage.messages import (
    Generators,
    SageEnrolment,
    SageScores,
    read_mean,
)
from flower_graph.strategies.fed_sage.neighbour_generation import LATENT, initial_weights
from flower_graph.wire.arrays import encode_array, pack_integers
from flower_graph.wire.keys import EPOCH, NUM_EXAMPLES, SERVER_ROUND

CLIENTS = np.array([3, 5], dtype=np.int64)
START = {name: weight.numpy() for name, weight in initial_weights(6, 4, 3, 0).items()}
SHAPES = {name: weight.shape for name, weight in START.items()}


def reply(arrays: dict[str, Any], config: dict[str, Any], **metrics: Any) -> RecordDict:
    """What the adaptor makes of a client's answer."""
    encoded = ArrayRecord({name: encode_array(name, value) for name, value in arrays.items()})
    numbers = MetricRecord({key.replace("_", "-"): value for key, value in metrics.items()})
    return RecordDict({"arrays": encoded, "metrics": numbers, "config": ConfigRecord(config)})


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
    entries: dict[str, Any] = {"clients": CLIENTS, "rows": np.array([0, 2])}
    entries |= {"missing": np.array([1, 5]), "encoded": np.ones((2, LATENT), dtype=np.float32)}
    entries |= {"weights": {name: np.stack([START[name]] * 2) for name in FEATURE_NAMES}}
    message = Generators(**({"epoch": 1} | entries | changes))
    content = message.to_record()
    content["metrics"] = MetricRecord({EPOCH: message.epoch})
    with pytest.raises(MalformedReplyError, match=reason):
        Generators.read(content, epoch=1, clients=CLIENTS, shapes=SHAPES)


@pytest.mark.parametrize("clients", [[3, 3], [-1], []])
def test_numbers_of_clients_are_different_and_not_negative(clients: list[int]) -> None:
    wrong = SageEnrolment(np.array(clients, np.int64), 6, 3).to_config()
    with pytest.raises(MalformedReplyError):
        SageEnrolment.read(RecordDict({"config": ConfigRecord(wrong)}))


@pytest.mark.parametrize(
    ("server_round", "losses", "counts", "reason"),
    [
        (3, [0.5, 0.25], [1, 0, 0, 2, 1, 0] * 2, "round 3, expected 2"),
        (2, [0.5, float("nan")], [1, 0, 0, 2, 1, 0] * 2, "losses"),
        (2, [0.5, 0.25], [1, 0, 0, 2, 1, 0], r"counts: 6 numbers, expected \[2, "),
        (2, [0.5, 0.25], [3, 0, 0, 2, 1, 0] * 2, "more correct"),
        (2, [0.5, 0.25], [-1, 0, 0, 2, 1, 0] * 2, "below 0"),
    ],
)
def test_scores_that_cannot_be(server_round: int, losses: Any, counts: Any, reason: str) -> None:
    config = {"counts": pack_integers(np.array(counts))}
    content = reply({}, config, **{SERVER_ROUND: server_round, "losses": losses})
    with pytest.raises(MalformedReplyError, match=reason):
        SageScores.read(content, server_round=2, p=2)


def test_mean_classifier() -> None:
    weights = {name: START[name] for name in CLASSIFIER_NAMES}
    content, weight = read_mean(reply(weights, {}, server_round=2, num_examples=4), 2, SHAPES)
    assert weight == content.metric_records["metrics"][NUM_EXAMPLES] == 4
    assert list(content.array_records["arrays"]) == list(CLASSIFIER_NAMES)
    for bad in (-1, 0.5):
        with pytest.raises(MalformedReplyError, match="num-examples"):
            read_mean(reply(weights, {}, server_round=2, num_examples=bad), 2, SHAPES)
