"""Messages of FedGLS: what is written is what is read, and sums that average to means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.engine.graph_batch import ROLES
from flower_graph.engine.metrics import Metrics
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.messages.client_means import mean_of
from flower_graph.messages.keys import ARRAY_NAMES, CLIENTS, LEFT_OUT
from flower_graph.strategies.structure_fedavg.messages import (
    CONTRAST,
    DISTILLATION,
    LOSS,
    MODEL_KEYS,
    SHARE_KEYS,
    STRUCTURE_NAMES,
    SharedModels,
    SharedPrototypes,
    measurements,
    training_metrics,
)


def model(value: float) -> ModelWeights:
    return ModelWeights(torch.full((3, 2), value), torch.full((7,), value))


@pytest.mark.parametrize("shares", [None, [0.25, 0.75]])
def test_two_models(shares: list[float] | None) -> None:
    arrays = SharedModels([model(1.0), model(2.0)], shares).to_arrays()
    order = ["gnn-first", "gnn-rest", "encoder-first", "encoder-rest"]
    if shares is not None:
        order = [*order[:2], "gnn-share", *order[2:], "encoder-share"]
    assert list(arrays) == order
    assert all(values.dtype == np.float32 for values in arrays.values())
    read = SharedModels.from_arrays(list(arrays.values()), 2)
    assert read.shares == shares
    for ours, value in zip(read.models, (1.0, 2.0), strict=True):
        assert torch.equal(ours.first, model(value).first)
        assert torch.equal(ours.rest, model(value).rest)


def test_one_model_has_the_gnns_keys() -> None:
    arrays = SharedModels([model(1.0)]).to_arrays()
    assert tuple(arrays) == MODEL_KEYS[0]
    assert len(SharedModels.from_arrays(list(arrays.values()), 1).models) == 1
    assert SHARE_KEYS == ("gnn-share", "encoder-share")


@pytest.mark.parametrize(("count", "models"), [(3, 2), (5, 2), (8, 2), (1, 1), (4, 1), (0, 1)])
def test_too_few_or_too_many_arrays(count: int, models: int) -> None:
    with pytest.raises(ValueError, match=f"{count} arrays came for {models} models: must be 2"):
        SharedModels.from_arrays([np.zeros(2, np.float32)] * count, models)


def test_prototypes() -> None:
    vectors, share = torch.arange(6.0).view(3, 2), torch.tensor([0.5, 0.0, 0.5])
    arrays = SharedPrototypes(vectors, share).to_arrays()
    assert list(arrays) == ["prototypes", "prototypes-share"]
    read = SharedPrototypes.from_arrays(list(arrays.values()))
    assert torch.equal(read.vectors, vectors) and torch.equal(read.share, share)
    with pytest.raises(ValueError, match="1 arrays came: must be prototypes and their shares"):
        SharedPrototypes.from_arrays([np.zeros(2)])


def test_what_training_says_by_hand() -> None:
    losses = {CONTRAST: torch.tensor([3.0, math.nan]), DISTILLATION: torch.tensor([1.0, 2.0])}
    said = training_metrics(losses, 10, 3, ["a", "b"], ["client 3: no"])
    assert said == {
        ARRAY_NAMES: ["a", "b"],
        CLIENTS: 3,
        CONTRAST: 0.3,
        f"has-{CONTRAST}": 0.1,
        DISTILLATION: 0.3,
        f"has-{DISTILLATION}": 0.2,
        LEFT_OUT: ["client 3: no"],
    }
    nothing = training_metrics({}, 10, 3, [], [])
    assert LEFT_OUT not in nothing
    # Flower wants the same names from all: a SuperNode without graphless clients has zeros.
    assert nothing.keys() | {LEFT_OUT} == said.keys()
    assert nothing[CONTRAST] == nothing[f"has-{CONTRAST}"] == 0


def judged(rows: list[list[float]], losses: list[float]) -> Metrics:
    return Metrics(torch.tensor(rows).double(), torch.tensor(losses).double())


def test_measurements_by_hand() -> None:
    found = judged([[1.0, 0.5, 0.0], [0.5, math.nan, 0.5]], [0.25, 0.75])
    figures = {name: torch.tensor([0.5]) for name in STRUCTURE_NAMES}
    said = measurements(found, figures)
    assert [mean_of(said, name) for name in ROLES] == [0.75, 0.5, 0.25]
    assert (mean_of(said, LOSS), said["val"], said["has-val"]) == (0.5, 0.25, 0.5)
    assert all(mean_of(said, name) == 0.5 for name in STRUCTURE_NAMES)
    without = measurements(found, None)
    assert without.keys() == said.keys()
    assert all(math.isnan(mean_of(without, name)) for name in STRUCTURE_NAMES)
    assert math.isnan(mean_of({}, "train"))


CLIENT = st.one_of(st.floats(0, 1), st.just(math.nan))


@given(
    values=st.lists(CLIENT, min_size=1, max_size=6),
    split=st.integers(0, 6),
)
def test_flowers_mean_of_the_sums_is_the_mean_over_clients(values: list[float], split: int) -> None:
    hosts = [part for part in (values[:split], values[split:]) if part]
    replies = [measurements(judged([[v] * 3 for v in part], part), None) for part in hosts]
    weights = [len(part) for part in hosts]
    mean: dict[str, Any] = {
        name: sum(w * reply[name] for w, reply in zip(weights, replies, strict=True)) / len(values)
        for name in replies[0]
    }
    known = [value for value in values if value == value]
    wanted = sum(known) / len(known) if known else math.nan
    for name in (*ROLES, LOSS):
        assert mean_of(mean, name) == pytest.approx(wanted, nan_ok=True)
