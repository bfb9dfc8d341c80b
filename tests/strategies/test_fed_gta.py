"""FedGTA: what clients say of their neighbourhoods and what the server makes of it, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flower_graph.apps.run import simulate_whole
from flower_graph.config.load import load_config
from flower_graph.errors import ConfigError
from flower_graph.strategies.fed_gta import (
    METHOD,
    FedGTAConfig,
    FedGTASection,
    peer_weights,
    spread_predictions,
)

SMALL = (
    *("data.name=csbm", "data.nodes=90", "data.classes=3", "data.degree=5", "data.features=24"),
    *("data.active=6", "device=cpu", "partition.clients=4", "partition.ratios=[0.3,0.3,0.4]"),
    *("model.hidden=6", "rounds=3"),
)


def small(*settings: str) -> Any:
    return load_config("fedgta/cora-linqs", [*SMALL, *settings])


# Two nodes with an edge between them; the first one's class, 0, is known.
EDGE = torch.tensor([[0, 1], [1, 0]])
Y, TRAIN = torch.tensor([0, 1]), torch.tensor([True, False])


def softmax(*values: float) -> list[float]:
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


# --- formulas


def test_predictions_of_two_nodes_are_spread_by_hand() -> None:
    how = FedGTASection(steps=1, restart=0.5, temperature=2.0)
    logits = torch.tensor([[-9.0, 9.0], [0.0, math.log(3)]])  # the second node: 1/4 and 3/4
    shares, smooth = spread_predictions(logits, Y, TRAIN, EDGE, how)
    # A' has 1/2 everywhere: the mean of (1, 0) and (1/4, 3/4) is (5/8, 3/8).
    spread = [0.5 * 0.25 + 0.5 * 5 / 8, 0.5 * 0.75 + 0.5 * 3 / 8]
    assert shares[0].tolist() == smooth[0].tolist() == [1, 0]
    assert shares[1].tolist() == pytest.approx(softmax(*spread))
    assert smooth[1].tolist() == pytest.approx(softmax(spread[0] / 2, spread[1] / 2))


def test_the_server_weighs_those_that_are_alike_by_their_confidence() -> None:
    vectors = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])  # cosines 0.71, 0, 0.71
    weights = peer_weights(vectors, np.array([1.0, 2.0, 5.0]), 0.5)
    assert weights.tolist() == [[1, 2, 0], [1, 2, 5], [0, 2, 5]]
    assert peer_weights(vectors, np.ones(3), 0.8).tolist() == np.eye(3).tolist()
    assert peer_weights(vectors, np.ones(3), -1.0).tolist() == np.ones((3, 3)).tolist()
    assert peer_weights(vectors, np.ones(3), 1.0).tolist() == np.eye(3).tolist()


# --- both halves


def test_the_server_averages_for_each_client_by_hand() -> None:
    server = METHOD.build_strategy(small("strategy.moments=raw", "strategy.order=1"), None)
    assert server.extras() == {"moments": (3,), "confidence": ()}
    replies = [
        SimpleNamespace(
            client=client,
            arrays={"w": np.float32([value])},
            extras={"moments": np.array(moments), "confidence": np.float32(sure)},
        )
        for client, value, moments, sure in (
            (4, 0.0, [1.0, 0.0, 0.0], 1.0),
            (7, 8.0, [1.0, 0.1, 0.0], 3.0),
            (9, 5.0, [0.0, 0.0, 1.0], -2.0),  # impossible; alone all the same
        )
    ]
    found = server.combine(replies)
    assert {client: arrays["w"].tolist() for client, arrays in found.items()} == {
        4: [6.0],
        7: [6.0],
        9: [5.0],
    }


def test_it_runs_with_some_of_the_clients_each_round() -> None:
    reports, half = simulate_whole(small("strategy.participation=0.5"))
    assert all(report.asked == 4 and not report.rejected for report in reports)  # to measure
    _, whole = simulate_whole(small())
    assert 2 * half["bytes"]["up"]["extras"] == whole["bytes"]["up"]["extras"]
    assert 2 * half["bytes"]["up"]["weights"] == whole["bytes"]["up"]["weights"]


def test_a_server_has_a_supernode_for_each_client_and_refuses_a_budget() -> None:
    assert METHOD.default_supernodes(small()) == 4
    with pytest.raises(ConfigError, match="not allowed with app=fedgta: noise is for weights"):
        small("privacy.epsilon=1")
    assert FedGTAConfig().strategy.local_epochs == 3
