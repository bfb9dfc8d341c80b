"""PPFL-GNN from a config, in process and under ``flwr run``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from app_helpers import context_of
from federation import one_fast
from safetensors.numpy import load_file
from torch_geometric.data import Data

from flower_graph.apps.run import run, simulate
from flower_graph.errors import DataError, NoClientsError
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.strategies.ppfl import evaluation
from flower_graph.strategies.ppfl import method as ppfl
from flower_graph.strategies.ppfl.config import PPFLConfig
from flower_graph.strategies.ppfl.secure_consensus import SecureConsensus
from flower_graph.strategies.ppfl.strategy import (
    LocalEmbedding,
    ProcrustesAlignment,
)

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


# What is built -----------------------------------------------------------------------------------


def test_the_config_chooses_app_and_strategy(small: MakePPFL) -> None:
    config = small("strategy.absent=last", "strategy.rotations_only=true")
    assert method_of(config) is ppfl.METHOD
    strategy = ppfl.METHOD.build_strategy(config, None)
    assert type(strategy) is ProcrustesAlignment
    assert (strategy.absent, strategy.rotations_only, strategy.alignment) == ("last", True, "pairs")
    local = ppfl.METHOD.build_strategy(small("strategy.name=local"), None)
    assert type(local) is LocalEmbedding
    secure = ppfl.METHOD.build_strategy(small("strategy.alignment=secure"), None)
    assert type(secure) is SecureConsensus


def test_members_are_dealt_with_their_ids_and_public_nodes(small: MakePPFL) -> None:
    config = small()
    everyone = ppfl.METHOD.graphs(config)
    context = context_of({"partition-id": 1, "num-partitions": 2, "state-dir": ":memory:"})
    here = ppfl.METHOD.build_client(config, context, None).members
    assert list(here) == [2, 3]
    for number, member in here.items():
        graph = everyone[number]
        assert member.nodes.tolist() == graph.nodes.tolist()
        assert member.public.tolist() == graph.nodes[graph.public].tolist()
        assert len(member.public) == 48


# Runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", one_fast(["deepwalk", "gat"], "deepwalk"))
def test_local_is_the_same_model_without_means(small: MakePPFL, model: str) -> None:
    local = simulate(small("strategy.name=local", model=model))
    aligned = simulate(small(model=model))
    # In the first round nobody has means yet.
    assert local[0].loss == aligned[0].loss
    assert local[0].test_accuracy == aligned[0].test_accuracy
    assert local[1].loss != aligned[1].loss
    assert local[1].bytes["up"] == {"embeddings": 0}


def test_the_whole_graph_as_one_client(small: MakePPFL) -> None:
    whole = ["partition.clients=1", "partition.public_share=1", "partition.private_share=0"]
    config = small("strategy.name=local", *whole)
    (graph,) = ppfl.METHOD.graphs(config)
    assert graph.nodes.tolist() == list(range(120))
    assert simulate(config)[-1].answered == 1


def test_judging_seldom_and_without_validation_nodes(small: MakePPFL) -> None:
    config = small("judge.every=2", "rounds=3", "partition.ratios=[0.5,0,0.5]")
    reports = simulate(config)
    measured = [report.test_accuracy == report.test_accuracy for report in reports]
    assert measured == [False, True, True]
    assert all(report.val_accuracy != report.val_accuracy for report in reports)


# Privacy -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_noise_by_a_setting_and_its_budget(small: MakePPFL, tmp_path: Path) -> None:
    config = small("privacy.epsilon=5", "privacy.clipping_norm=2")
    result = run(config, tmp_path / "out", supernodes=4)
    assert result["rejected"] == 0
    assert 4.9 < result["privacy"]["epsilon"] <= 5
    assert result["privacy"]["delta"] == 1e-5
    weights = load_file(tmp_path / "out" / "weights.safetensors")
    clear = run(small(), tmp_path / "clear", supernodes=4)
    assert "privacy" not in clear
    # Noise of 48 x 16 numbers is far longer than what it hides.
    assert np.linalg.norm(weights["means-0"]) > 10 * result["privacy"]["noise"]


def test_noise_for_several_clients_at_one_supernode_is_refused(small: MakePPFL) -> None:
    with pytest.raises(NoClientsError, match=r"privacy\.epsilon: 5"):
        simulate(small("privacy.epsilon=5"), supernodes=2)


# Bad input ---------------------------------------------------------------------------------------


def test_a_class_with_too_few_nodes_for_the_folds(small: MakePPFL) -> None:
    with pytest.raises(DataError, match=r"client \d.*5") as caught:
        simulate(small("judge.folds=15"))
    assert "judge.folds" in str(caught.value)


# The bundled Cora --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepwalk", "gat"])
def test_the_bundled_cora(model: str, tmp_path: Path) -> None:
    fewer = ["deepwalk.walks=2", "gat.epochs=3", "judge.mlp=false"]
    result = run(load_config(f"ppfl/cora-linqs-{model}", [*QUICK, *fewer]), tmp_path / "out")
    sizes = [len(np.load(file)["nodes"]) for file in (tmp_path / "out" / "embeddings").iterdir()]
    assert sizes == [1489] * 4
    assert result["test-accuracy"] > 0.3  # the largest class has 30 %
