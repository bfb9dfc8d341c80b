"""Self-training, FedAvg and FedProx over ego-networks, against dense clients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, start_of
from ego_strategy_helpers import client_app, seven_egos
from graph_helpers import Outcome
from plain.fedscem import run_baseline

from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem import EgoFedAvg, EgoFedProx, EgoModelClient, SelfTraining

PROXIMAL = replace(SETTINGS, proximal=0.5, local_epochs=2)
ALONE = replace(PROXIMAL, proximal=0.0)


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
    how = {"client": EgoModelClient, "settings": strategy.ego, "averages": strategy.averages}
    grid = InProcessGrid(client_app(seven_egos(), **how), num_supernodes=3)
    outcome = Outcome(strategy, grid).run()
    assert outcome.answered == [7] * 3
    averages = strategy.averages
    model, wanted = run_baseline(seven_egos(), 3, start_of(), settings, averages=averages)
    assert outcome.losses == pytest.approx(wanted, abs=1e-5)
    found = [torch.from_numpy(value.ravel()) for value in outcome.weights.values()]
    if averages:
        torch.testing.assert_close(torch.cat(found), model, atol=1e-5, rtol=0)
    assert bool(found) == bool(strategy.payload["up"].get("weights")) == averages
