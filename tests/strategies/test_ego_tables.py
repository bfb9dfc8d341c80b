"""What FedSCem's tables have besides runs: the reference on the whole graph, costs of clients."""

from dataclasses import replace

import pytest
import torch

from flower_graph.client.learner import NODES
from flower_graph.data.partition.client_graphs import split_global
from flower_graph.data.sources.datasets import cached_data
from flower_graph.strategies.fedscem import tables
from flower_graph.strategies.fedscem.config import (
    FedSCemConfig,
    ModelConfig,
    PartitionConfig,
    StrategyConfig,
)
from flower_graph.strategies.fedscem.method import METHOD, ego_settings
from flower_graph.strategies.fedscem.modules import EgoCohort

CONFIG = FedSCemConfig(
    rounds=30,
    device="cpu",
    partition=PartitionConfig(clients=9, min_nodes=20, split="global"),
    model=ModelConfig(hidden=16),
    strategy=StrategyConfig(learning_rate=0.01),
)
EGOS, SETTINGS = METHOD.graphs(CONFIG), ego_settings(CONFIG)


def test_one_client_with_the_whole_graph_is_judged_like_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the one ego-network is the whole graph, the mean over clients is its own accuracy."""
    data = cached_data(CONFIG)
    graph = {"edge_index": data.edge_index, "x": data.x, "y": data.y}
    everything = replace(EGOS[0], nodes=torch.arange(data.y.numel()), **graph)
    (whole,) = split_global([everything], data.y, CONFIG.partition.ratios, 0)
    monkeypatch.setattr(METHOD, "graphs", lambda config: [whole])
    epochs = tables.train(replace(CONFIG, rounds=3))
    with EgoCohort([whole], SETTINGS).part() as group:
        for epoch in epochs:
            group.train(1)
            judged = group.judged(group.logits())
            assert epoch.test_accuracy == pytest.approx(float(NODES.shares(judged)[2]))
            assert epoch.cross_entropy == pytest.approx(float(NODES.training_loss(judged)))


def test_costs_of_groups_by_size() -> None:
    """PyTorch's count goes on from profile to profile; a group's must not depend on the others."""
    costs, again = (tables.costs_by_size(EGOS, SETTINGS, groups=3) for _ in range(2))
    assert [keys for keys, _ in costs] == [{"group": n, "clients": 3} for n in (1, 2, 3)]
    ordered = sorted(EGOS, key=lambda ego: ego.nodes.numel())
    for place, ((_, one), (_, two)) in enumerate(zip(costs, again, strict=True)):
        egos = ordered[3 * place : 3 * place + 3]
        assert one["nodes"] == pytest.approx(sum(ego.nodes.numel() for ego in egos) / 3)
        assert one["edges"] == pytest.approx(sum(ego.edge_index.shape[1] for ego in egos) / 6)
        assert one["seconds-per-round"] > 0
        assert one["peak-mib"] == pytest.approx(two["peak-mib"], rel=0.01)
        state = EgoCohort(egos, SETTINGS).tensors.values()
        held = sum(tensor.numel() * tensor.element_size() for tensor in state) / 3 / 2**20
        assert held < one["peak-mib"] < 20 * held
    few = tables.costs_by_size(EGOS[:2], SETTINGS)
    assert [keys["clients"] for keys, _ in few] == [1, 1]
