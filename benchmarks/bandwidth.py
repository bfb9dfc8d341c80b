"""How near a device's memory bandwidth nFedGNN's users come; needs PyTorch alone."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import summary
from flower_graph.strategies.split_gradient_relay.users import LinearCohort

# Of Adam and the forward: read w, m, v, write w, m, v, and read w once more.
PASSES = 7
STEP_TARGET = 2.0  # times what the memory bandwidth needs


def settle(device: torch.device) -> None:
    """Wait until a device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_beside_triad(
    cohort: LinearCohort, gradient: Tensor, rate: float, repeats: int
) -> dict[str, Any]:
    """Time the users' Adam step and forward in turn with a triad over as many bytes."""
    weight, device = cohort.tensors()["weight"], gradient.device
    weights = weight.numel()
    left, right, out = torch.ones(3, weights, device=device).unbind()
    steps, triads = [], []
    for _ in range(repeats + 1):
        settle(device)
        started = time.perf_counter()
        cohort.step(None, gradient, rate)
        cohort.forward(None)
        settle(device)
        between = time.perf_counter()
        torch.add(left, right, alpha=2.0, out=out)
        settle(device)
        steps.append(between - started)
        triads.append(time.perf_counter() - between)
    step, triad = summary(steps[1:]), summary(triads[1:])
    moved, bandwidth = weights * 4 * PASSES, weights * 4 * 3 / triad["median"]
    return {
        "weights": weights,
        "bytes": moved,
        "seconds": step,
        "bytes-per-second": moved / step["median"],
        "bandwidth": bandwidth,
        "times-bound": step["median"] / (moved / bandwidth),
        "target": STEP_TARGET,
    }


def transfer_seconds(values: Tensor, repeats: int = 5) -> float:
    """Time the way of a round's result to the host's memory and back, the fastest of several."""
    host = torch.empty(values.shape, dtype=values.dtype)
    back, seconds = torch.empty_like(values), []
    for _ in range(repeats):
        settle(values.device)
        started = time.perf_counter()
        host.copy_(values)
        back.copy_(host)
        settle(values.device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
