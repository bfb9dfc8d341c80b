"""PPFL-GNN from a config, in process and under ``flwr run``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from flower_graph.apps.run import simulate
from flower_graph.errors import DataError, NoClientsError
from flower_graph.method.load import load_config
from flower_graph.strategies.ppfl import evaluation
from flower_graph.strategies.ppfl.config import PPFLConfig

MakePPFL = Callable[..., PPFLConfig]
QUICK = ["rounds=2", "device=cpu"]
# A small graph's clients hold few nodes of a class.
SMALL = [
    "judge.folds=2",
    "rounds=2",
    "deepwalk.walks=2",
    "deepwalk.length=6",
    "gat.epochs=2",
]


def ring_graph(nodes: int = 120, **changes: object) -> Data:
    """Three rings, a class each."""
    place = torch.arange(nodes)
    y = place % 3
    x = torch.rand(nodes, 6, generator=torch.Generator().manual_seed(0)).round()
    x[place, y] = 1.0
    edges = torch.cat([torch.stack([place, (place + step) % nodes]) for step in (3, 6)], 1)
    return Data(**{"x": x, "edge_index": edges, "y": y, **changes})


@pytest.fixture
def small(tmp_path: Path) -> MakePPFL:
    """Save a graph, and load a config that names it."""

    def make(*overrides: str, data: Data | None = None, model: str = "deepwalk") -> PPFLConfig:
        torch.save(data or ring_graph(), tmp_path / "graph.pt")
        name = f"data.name={tmp_path / 'graph.pt'}"
        ratios = "partition.ratios=[0.4,0.2,0.4]"
        config = load_config(f"ppfl/cora-{model}", [name, ratios, *SMALL, *overrides])
        assert isinstance(config, PPFLConfig)
        return config

    return make


# When runs end ---------------------------------------------------------------------------------


def test_a_run_ends_after_a_round_that_was_judged(small: MakePPFL) -> None:
    """Rounds between evaluations are no rounds without improvement: the last one has its figure."""
    settings = ("judge.every=4", "patience=2", "rounds=30", "judge.mlp=false", "gat.epochs=1")
    reports = simulate(small("strategy.name=local", *settings, model="gat"))
    val = np.array([report.val_accuracy for report in reports])
    judged = np.isfinite(val)
    # Until a figure is there, and after the best one, the second round is judged as it may be last
    assert judged.nonzero()[0][0] == 1 and judged[-1] and len(val) < 30
    best = int(np.nanargmax(val))
    assert len(val) == best + 3 and not val[-1] > val[best]


def test_the_mlp_judges_no_round_that_cannot_be_the_last(
    small: MakePPFL, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def score(*args: Any) -> evaluation.Folds:
        asked.append(args[-1])
        return evaluation.Folds(args[1].copy(), np.zeros(len(args[1]), np.int64))

    monkeypatch.setattr(evaluation, "cross_validated", score)
    reports = simulate(small("patience=2", "rounds=9", "gat.epochs=1", model="gat"))
    # Nothing is better than the first, so that the third is the last: both roles of four clients
    assert len(reports) == 3 and (asked.count("svc"), asked.count("mlp")) == (24, 8)
    assert asked[-2 * 8 :].count("mlp") == 8


# Runs --------------------------------------------------------------------------------------------


def test_judging_seldom_and_without_validation_nodes(small: MakePPFL) -> None:
    config = small("judge.every=2", "rounds=3", "partition.ratios=[0.5,0,0.5]")
    reports = simulate(config)
    measured = [report.test_accuracy == report.test_accuracy for report in reports]
    assert measured == [False, True, True]
    assert all(report.val_accuracy != report.val_accuracy for report in reports)


# Privacy -----------------------------------------------------------------------------------------


def test_noise_for_several_clients_at_one_supernode_is_refused(small: MakePPFL) -> None:
    with pytest.raises(NoClientsError, match=r"privacy\.epsilon: 5"):
        simulate(small("privacy.epsilon=5"), supernodes=2)


# Bad input ---------------------------------------------------------------------------------------


def test_a_class_with_too_few_nodes_for_the_folds(small: MakePPFL) -> None:
    with pytest.raises(DataError, match=r"client \d.*5") as caught:
        simulate(small("judge.folds=15"))
    assert "judge.folds" in str(caught.value)
