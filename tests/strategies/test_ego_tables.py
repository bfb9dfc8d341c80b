"""What FedSCem's tables have besides runs: the reference on the whole graph, costs of clients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flower_graph.data import load_data
from flower_graph.data.partition.ego_networks import partition_egos, split_global
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoCohort, EgoSettings
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig, PartitionConfig
from flower_graph.strategies.masked_embedding_averaging.tables import costs_by_size, train_whole

PARTITION = PartitionConfig(clients=9, min_nodes=20, split="global")
CONFIG = FedSCemConfig(rounds=30, device="cpu", partition=PARTITION)
DATA = load_data(CONFIG.data, seed=0)
EGOS = partition_egos(DATA, CONFIG.partition, 0)
SETTINGS = EgoSettings(int(DATA.x.shape[1]), int(DATA.num_classes), hidden=16, learning_rate=0.01)


def test_it_learns_and_is_repeatable() -> None:
    epochs = train_whole(CONFIG, DATA, EGOS, SETTINGS)
    assert len(epochs) == 30
    assert epochs[-1].cross_entropy < epochs[0].cross_entropy
    assert epochs[-1].test_accuracy > epochs[0].test_accuracy + 0.2
    assert train_whole(CONFIG, DATA, EGOS, SETTINGS)[-1] == epochs[-1]


def test_one_client_with_the_whole_graph_is_judged_like_itself() -> None:
    """If the one ego-network is the whole graph, the mean over clients is its own accuracy."""
    count = int(DATA.y.numel())
    graph = {"edge_index": DATA.edge_index, "x": DATA.x, "y": DATA.y}
    everything = replace(EGOS[0], nodes=torch.arange(count), **graph)
    (whole,) = split_global([everything], DATA.y, CONFIG.partition.ratios, 0)
    config = replace(CONFIG, rounds=3)
    epochs = train_whole(config, DATA, [whole], SETTINGS)
    cohort = EgoCohort([whole], SETTINGS)
    chosen = cohort.choose([whole.client])
    for epoch in epochs:
        chosen.train()
        judged = chosen.evaluate(chosen.embed())
        assert epoch.test_accuracy == pytest.approx(float(judged.accuracy[0, 2]))
        assert epoch.cross_entropy == pytest.approx(float(judged.loss[0]), rel=1e-5)


def test_another_split_is_refused() -> None:
    config = replace(CONFIG, partition=replace(CONFIG.partition, split="per-client"))
    with pytest.raises(ValueError, match="'per-client'; only 'global'"):
        train_whole(config, DATA, EGOS, SETTINGS)


def test_costs_of_groups_by_size() -> None:
    """PyTorch's count goes on from profile to profile; a group's must not depend on the others."""
    costs, again = (costs_by_size(EGOS, SETTINGS, groups=3) for _ in range(2))
    assert [keys for keys, _ in costs] == [{"group": n, "clients": 3} for n in (1, 2, 3)]
    ordered = sorted(EGOS, key=lambda ego: ego.nodes.numel())
    for place, ((_, one), (_, two)) in enumerate(zip(costs, again, strict=True)):
        egos = ordered[3 * place : 3 * place + 3]
        assert one["nodes"] == pytest.approx(sum(ego.nodes.numel() for ego in egos) / 3)
        assert one["edges"] == pytest.approx(sum(ego.edge_index.shape[1] for ego in egos) / 6)
        assert one["seconds-per-round"] > 0
        assert one["peak-mib"] == pytest.approx(two["peak-mib"], rel=0.01)
        state = EgoCohort(egos, SETTINGS).tensors().values()
        held = sum(tensor.numel() * tensor.element_size() for tensor in state) / 3 / 2**20
        assert held < one["peak-mib"] < 20 * held
    few = costs_by_size(EGOS[:2], SETTINGS)
    assert [keys["clients"] for keys, _ in few] == [1, 1]
