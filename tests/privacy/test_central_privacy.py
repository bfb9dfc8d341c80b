"""Noise that the server adds to the mean: clipping, equal weights, how much, who is left out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.client import NumPyClient

from flower_graph.client.adaptor import make_client_app
from flower_graph.config.common import PrivacyConfig
from flower_graph.privacy.accountant import noise_multiplier
from flower_graph.privacy.central import CentralNoise, central_noise
from flower_graph.report.rounds import RoundReport
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.simulation import InProcessGrid

SIZE = 4000
QUIET = 1e-9


class Mover(NumPyClient):
    """Adds a number to the model's first entry, and has as many nodes as it likes."""

    def __init__(self, change: float, nodes: int, clients: int) -> None:
        self.change, self.nodes, self.clients = change, nodes, clients

    def fit(self, parameters, config):
        values = parameters[0].copy()
        values[0] += self.change
        return [values], self.nodes, {"clients": self.clients}

    def evaluate(self, parameters, config):
        return 0.0, 1, {}


class Simple(ReportedFedAvg):
    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, Any]:
        names = ("loss", "cross_entropy", "regulariser")
        names += ("train_accuracy", "val_accuracy", "test_accuracy")
        return dict.fromkeys(names, math.nan)


def averaged(
    noise: CentralNoise | None, changes: list[float], nodes: list[int], clients: list[int]
) -> tuple[np.ndarray, list[RoundReport]]:
    def client_fn(context: Context) -> Mover:
        place = int(context.node_config["partition-id"])
        return Mover(changes[place], nodes[place], clients[place])

    strategy, reports = Simple(), list[RoundReport]()
    strategy.central_noise = noise
    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=len(changes))
    start = ArrayRecord({"w": Array(np.ones(SIZE, np.float32))})
    strategy.start(grid, start, 1, timeout=5.0, on_round=reports.append)
    return strategy.weights()["w"], reports


def test_each_client_is_clipped_and_counts_once() -> None:
    """Nobody's nodes give it more weight: the sensitivity would grow with them."""
    found, _ = averaged(CentralNoise(2.0, QUIET), [100.0, 1.0, -1.0], [1000, 1, 1], [1, 1, 1])
    assert found[0] == pytest.approx(1 + (2.0 + 1.0 - 1.0) / 3, abs=1e-5)
    assert np.allclose(found[1:], 1.0, atol=1e-5)
    without, _ = averaged(None, [100.0, 1.0, -1.0], [1000, 1, 1], [1, 1, 1])
    assert without[0] > 90


@pytest.mark.parametrize(
    ("changes", "in_mean"), [([0.0] * 2, 2), ([0.0] * 5, 5), ([math.nan, 0.0, 0.0], 2)]
)
def test_the_noise_is_for_the_clients_in_the_mean(changes: list[float], in_mean: int) -> None:
    """Where one is missing, Flower's wrapper by itself would add noise for all that were asked."""
    ones = [1] * len(changes)
    found, reports = averaged(CentralNoise(2.0, 0.5), changes, ones, ones)
    wanted = 0.5 * 2 * 2.0 / in_mean  # the multiplier, of a sensitivity of 2 C / n
    assert abs((found - 1).std() / wanted - 1) < 0.06  # 4,000 draws: a deviation is 1.1 %
    reasons = [one["reason"] for one in reports[0].rejected]
    assert len(reasons) == len(changes) - in_mean and all("NaN" in each for each in reasons)


def test_a_client_that_changes_nothing_takes_part_and_a_supernode_of_several_does_not() -> None:
    found, reports = averaged(CentralNoise(1.0, QUIET), [0.0, 1.0], [1, 1], [1, 1])
    assert found[0] == pytest.approx(1.5, abs=1e-5)
    assert reports[0].rejected == []
    found, reports = averaged(CentralNoise(1.0, QUIET), [1.0, 0.5], [1, 1], [3, 1])
    assert found[0] == pytest.approx(1.5, abs=1e-5)
    assert "speaks for 3 clients" in reports[0].rejected[0]["reason"]


def test_the_servers_noise_is_not_fixed_by_a_seed() -> None:
    found = []
    for _ in range(2):
        np.random.seed(3)
        found.append(averaged(CentralNoise(1.0, 1.0), [0.0, 0.0], [1, 1], [1, 1])[0])
    assert not np.array_equal(*found)


def test_it_is_built_from_the_budget() -> None:
    privacy = PrivacyConfig(epsilon=3.0, clipping_norm=0.5, form="central")
    found = central_noise(privacy, 7)
    assert found is not None
    assert found.clipping_norm == 0.5
    assert found.noise_multiplier == noise_multiplier(3.0, 1e-5, 7)
    assert central_noise(PrivacyConfig(epsilon=3.0), 7) is None
    assert central_noise(PrivacyConfig(form="central"), 7) is None
