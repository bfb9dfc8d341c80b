"""Self-training, and Flower's FedAvg and FedProx over ego-networks, against dense clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, PlainClient, average
from ego_strategy_helpers import client_app, run, seven_egos

from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem.baselines import (
    EgoFedAvg,
    EgoFedProx,
    EgoModelClient,
    SelfTraining,
)
from flower_graph.strategies.fedscem.cohort import initial_weights

PROXIMAL = SETTINGS._replace(proximal=0.5, local_epochs=2)


@dataclass
class Outcome:
    """What a run of FedAvg or FedProx left."""

    strategy: EgoFedAvg
    reports: list[RoundReport] = field(default_factory=list)

    @property
    def model(self) -> ModelWeights:
        parts = (torch.from_numpy(part.copy()) for part in self.strategy.weights().values())
        return ModelWeights(*parts)


def run_average(strategy: EgoFedAvg, supernodes: int = 3, **mods: Any) -> Outcome:
    outcome = Outcome(strategy)
    app = client_app(seven_egos(), client=EgoModelClient, settings=strategy.settings, **mods)
    grid = InProcessGrid(app, num_supernodes=supernodes)
    strategy.start(grid, num_rounds=3, timeout=5, on_round=outcome.reports.append)
    return outcome


def slow_average(settings: Any, rounds: int = 3) -> tuple[ModelWeights, list[float]]:
    """FedAvg or FedProx with dense PyG models: the model, and the mean loss after each round."""
    model, losses = initial_weights(settings), []
    clients = [PlainClient(network, model, settings) for network in seven_egos()]
    for _ in range(rounds):
        for client in clients:
            client.load(model)
            for _ in range(settings.local_epochs):
                client.step()
        model = average(clients)
        found = []
        for client in clients:
            client.load(model)
            if client.ego.train_mask.any():
                found.append(float(client.losses(None)[0].detach()))
        losses.append(sum(found) / len(found))
    return model, losses


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (EgoFedAvg(SETTINGS), SETTINGS),
        (EgoFedAvg(PROXIMAL), PROXIMAL._replace(proximal=0.0)),
        (EgoFedProx(PROXIMAL), PROXIMAL),
    ],
)
def test_equals_dense_models(strategy: EgoFedAvg, settings: Any) -> None:
    outcome = run_average(strategy)
    model, losses = slow_average(settings)
    torch.testing.assert_close(outcome.model.first, model.first, atol=1e-5, rtol=0)
    torch.testing.assert_close(outcome.model.rest, model.rest, atol=1e-5, rtol=0)
    assert [report.loss for report in outcome.reports] == pytest.approx(losses, abs=1e-5)
    assert [report.answered for report in outcome.reports] == [7, 7, 7]


# Self-training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SETTINGS, PROXIMAL])
def test_self_training_is_every_client_alone_without_a_proximal_term(settings: Any) -> None:
    egos, own = seven_egos(), settings._replace(proximal=0.0)
    outcome = run(egos, strategy=SelfTraining(settings), rounds=4, supernodes=3)
    for network in egos:
        client = PlainClient(network, initial_weights(own), own)
        for _ in range(4 * own.local_epochs):
            client.step()
        found = outcome.last[network.client]
        torch.testing.assert_close(found, client.active(), atol=1e-5, rtol=0)
    assert outcome.figures[:, 2].isnan().all()
    assert outcome.answered == [7] * 4
    assert "embeddings" not in {k for k, v in outcome.strategy.payload["up"].items() if v}
    assert not outcome.strategy.payload["down"]
