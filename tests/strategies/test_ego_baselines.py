"""Self-training, FedAvg and FedProx over ego-networks, against dense clients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, PlainClient, average
from ego_strategy_helpers import client_app, seven_egos

from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem.baselines import (
    EgoFedAvg,
    EgoFedProx,
    EgoModelClient,
    SelfTraining,
)
from flower_graph.strategies.fedscem.cohort import initial_weights, state_of

PROXIMAL = replace(SETTINGS, proximal=0.5, local_epochs=2)
ALONE = replace(PROXIMAL, proximal=0.0)


def run_baseline(strategy: EgoFedAvg) -> list[float]:
    """Return the mean loss after each of three rounds."""
    how = {"client": EgoModelClient, "settings": strategy.ego, "averages": strategy.averages}
    losses: list[float] = []
    grid = InProcessGrid(client_app(seven_egos(), **how), num_supernodes=3)

    def note(report: Any) -> None:
        assert report.answered == 7
        losses.append(report.loss)

    strategy.start(grid, num_rounds=3, timeout=5, on_round=note)
    return losses


def slow_run(settings: Any, *, averages: bool) -> tuple[ModelWeights, list[float]]:
    """Train dense PyG models: the mean model, and the mean loss after each round."""
    model, losses = initial_weights(settings), []
    clients = [PlainClient(network, model, settings) for network in seven_egos()]
    for _ in range(3):
        for client in clients:
            for _ in range(settings.local_epochs):
                client.step()
        model, found = average(clients), []
        for client in clients:
            if averages:
                client.load(model)
            if client.ego.train_mask.any():
                found.append(float(client.losses(None)[0].detach()))
        losses.append(sum(found) / len(found))
    return model, losses


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (EgoFedAvg(SETTINGS), SETTINGS),
        (EgoFedAvg(PROXIMAL), ALONE),
        (EgoFedProx(PROXIMAL), PROXIMAL),
        (SelfTraining(SETTINGS), SETTINGS),
        (SelfTraining(PROXIMAL), ALONE),
    ],
)
def test_equals_dense_models(strategy: EgoFedAvg, settings: Any) -> None:
    losses = run_baseline(strategy)
    model, expected = slow_run(settings, averages=strategy.averages)
    assert losses == pytest.approx(expected, abs=1e-5)
    found = {name: torch.from_numpy(value.copy()) for name, value in strategy.weights().items()}
    wanted = state_of(model, settings) if strategy.averages else {}
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert bool(strategy.payload["up"].get("weights")) is strategy.averages
