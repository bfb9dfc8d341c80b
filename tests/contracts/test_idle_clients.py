"""Clients without training nodes: they receive, are measured and predict, and weigh nothing."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import COMPARED, METHODS, PERSONAL, assert_close, tried
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower_graph.apps.run import client_app
from flower_graph.client.module_client import NO_EXAMPLE
from flower_graph.data.partition import client_graphs
from flower_graph.errors import DataError
from flower_graph.method.registry import method_of
from flower_graph.simulation import InProcessGrid

AVERAGING = tried((*PERSONAL, *COMPARED), fast=["fedavg", "fedgta"])
SEEDS = ["seed=19", "seed=20", "seed=21"]  # of no other test: clients are in a cache


def idle(monkeypatch: pytest.MonkeyPatch, *clients: int) -> None:
    """Let none of some clients' nodes train."""
    split = client_graphs.split_nodes

    def without(graph, *how):
        graph = split(graph, *how)
        nobody = torch.zeros_like(graph.train_mask)
        return replace(graph, train_mask=nobody) if graph.client in clients else graph

    monkeypatch.setattr(client_graphs, "split_nodes", without)


@pytest.mark.parametrize("name", AVERAGING)
def test_a_client_without_training_nodes_takes_part(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(monkeypatch, 1)
    setup = METHODS[name]
    one, each = (setup.run(tmp_path / str(n), SEEDS[0], supernodes=n) for n in (1, 4))
    assert_close(one, each, 1e-4, setup.atol)
    for done in (one, each):
        assert not any(report.skipped for report in done.reports)
        for who in done.who:
            assert who.answered == {0, 2, 3} and NO_EXAMPLE in who.failed[1]
    config = setup.load(SEEDS[0])
    method, context = method_of(config), Context(1, 2, {"partition-id": 1}, RecordDict(), {})
    context.node_config["num-partitions"] = 4
    client = method.build_client(config, context, None)
    first = [array.numpy() for array in method.build_strategy(config, None).first_arrays().values()]
    loss, count, said = client.evaluate(first, {"server-round": 1})
    assert (loss, count, said["has-test"], said["has-train"]) == (0.0, 1, 1.0, 0.0)
    found = client.snapshot().predictions
    assert set(found.client) == {1} and not np.isnan(found.probability).any()


@pytest.mark.parametrize("name", AVERAGING)
def test_a_round_of_clients_that_weigh_nothing_is_skipped_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(monkeypatch, 0, 1, 2)
    done = METHODS[name].run(tmp_path, SEEDS[1], "strategy.participation=0.25", "rounds=6")
    trains = [report for report in done.reports if not report.skipped]
    assert 0 < len(trains) < len(done.reports)
    for report, who in zip(done.reports, done.who, strict=True):
        assert bool(report.skipped) == (3 not in who.answered)


def test_flowers_own_fedavg_goes_on_after_a_round_that_weighs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle(monkeypatch, 0, 1, 2)
    config = METHODS["fedavg"].load(SEEDS[1])
    method = method_of(config)
    first = method.build_strategy(config, None).first_arrays()
    grid = InProcessGrid(client_app(config, None), num_supernodes=4)
    strategy = FedAvg(fraction_train=0.25, fraction_evaluate=1.0, min_train_nodes=1)
    random.seed(4)  # Flower draws the SuperNodes by Python's own stream
    result = strategy.start(grid, first, 12)
    assert 0 < len(result.train_metrics_clientapp) < 12 == len(result.evaluate_metrics_clientapp)
    assert any((result.arrays[name].numpy() != a.numpy()).any() for name, a in first.items())


def test_without_any_training_node_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    idle(monkeypatch, 0, 1, 2, 3)
    config = METHODS["fedavg"].load(SEEDS[2])
    with pytest.raises(DataError, match="none of the 4 clients"):
        method_of(config).graphs(config)
