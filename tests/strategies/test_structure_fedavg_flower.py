"""Flower's own strategies in the place of ``StructureFedAvg``: nothing of ours is at the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    Strategy,
)
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


@pytest.mark.parametrize(
    ("strategy", "kept"),
    # Of six numbers the median is the mean of the middle two; a third off leaves four.
    [(FedMedian(), slice(2, 4)), (FedTrimmedAvg(beta=0.2), slice(1, 5))],
)
def test_robust_means_of_the_clients_models(strategy: Strategy, kept: slice) -> None:
    found, each = flower(strategy, rounds=1), answers()
    for key in each[0]:
        stack = torch.stack([answer[key] for answer in each])
        close(found[key], stack.sort(0).values[kept].mean(0))


def test_krum_takes_one_clients_models() -> None:
    found = flower(Krum(num_malicious_nodes=1), rounds=1)
    apart = [max(float((found[k] - a[k]).abs().max()) for k in a) for a in answers()]
    assert min(apart) < 1e-5
    assert sorted(apart)[1] > 1e-3


def test_fedadam_steps_towards_the_mean() -> None:
    start, found = as_tensors(initial_arrays(SETTINGS)), flower(FedAdam(eta=0.01), rounds=1)
    mean = run(rounds=1, supernodes=6).arrays
    for key, values in start.items():
        wanted, moved = mean[key] - values, found[key] - values
        clear = wanted.abs() > 1e-5
        assert clear.any()
        assert torch.equal(wanted[clear].sign(), moved[clear].sign())


def clipped(norm: float, noise: float) -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=noise, clipping_norm=norm, num_sampled_clients=6
    )


def moved_by(found: dict[str, Any]) -> float:
    start = as_tensors(initial_arrays(SETTINGS))
    return float(sum(((found[k] - v) ** 2).sum() for k, v in start.items()) ** 0.5)


def test_differential_privacy_clips_and_adds_noise() -> None:
    wide, plain = flower(clipped(1e6, 0.0), rounds=1), flower(FedAvg(), rounds=1)
    for key in as_tensors(initial_arrays(SETTINGS)):
        close(wide[key], plain[key])
    assert moved_by(flower(clipped(0.01, 0.0), rounds=1)) <= 0.01 * (1 + 1e-4)
    np.random.seed(0)
    noisy = moved_by(flower(clipped(0.01, 1.0), rounds=1))
    # 118 numbers with a deviation of norm / 6 each
    assert 0.01 < noisy < 0.03
