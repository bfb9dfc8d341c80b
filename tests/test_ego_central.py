"""The reference trained on the whole graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flower_graph.data import load_data
from flower_graph.data.partition.ego_networks import partition_egos
from flower_graph.strategies.masked_embedding_averaging.central import train_whole
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoCohort, EgoSettings
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig, PartitionConfig

CONFIG = FedSCemConfig(
    rounds=30, device="cpu", partition=PartitionConfig(clients=6, min_nodes=20, split="global")
)
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
    everything = replace(
        EGOS[0],
        nodes=torch.arange(count),
        edge_index=DATA.edge_index,
        x=DATA.x,
        y=DATA.y,
    )
    from flower_graph.data.partition.ego_networks import split_global

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
