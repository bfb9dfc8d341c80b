"""Flower's own strategies in the place of ``StructureFedAvg``: nothing of ours is at the server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from plain_structure import FEDGLS, PlainFederation
from structure_helpers import MODEL_KEYS, client_app, close, run, settings_of, toy_clients
from torch import Tensor

from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls.strategy import initial_arrays

SETTINGS = settings_of(FEDGLS)


def flower(strategy: Strategy, rounds: int = 3, supernodes: int = 6) -> dict[str, Any]:
    """Run it: the models after the last round, and the mean loss after each."""
    grid = InProcessGrid(client_app(FEDGLS), num_supernodes=supernodes)
    result = strategy.start(grid, initial_arrays(SETTINGS), num_rounds=rounds)
    assert result.arrays is not None
    losses = [metrics["loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    return {**as_tensors(result.arrays), "losses": losses}


def as_tensors(arrays: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


def answers() -> list[dict[str, Tensor]]:
    """What each client answers in round 1."""
    federation = PlainFederation(toy_clients(), FEDGLS, SETTINGS)
    federation.train(1)
    return [
        {
            key: part
            for number, model in client.models().items()
            for key, part in zip(MODEL_KEYS[number], (model.first, model.rest), strict=True)
        }
        for client in federation.clients
    ]


def test_fedavg_is_structure_fedavg() -> None:
    found = flower(FedAvg(), supernodes=2)  # of two numbers the sum has no order
    ours = run(rounds=3, supernodes=2)
    for name, values in ours.arrays.items():
        assert torch.equal(found[name], values)
    assert found["losses"] == pytest.approx([report.loss for report in ours.reports], abs=1e-7)


def test_the_median_of_the_clients_models() -> None:
    found, each = flower(FedMedian(), rounds=1), answers()
    for key in each[0]:  # of six numbers it is the mean of the middle two
        stack = torch.stack([answer[key] for answer in each])
        close(found[key], stack.sort(0).values[2:4].mean(0))
