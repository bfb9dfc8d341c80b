"""Cost of a client against the size of its ego-network."""

from __future__ import annotations

import pytest

from flower_graph.config.common import DataConfig
from flower_graph.data import load_data
from flower_graph.data.partition.ego_networks import partition_egos
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoCohort, EgoSettings
from flower_graph.strategies.masked_embedding_averaging.config import PartitionConfig
from flower_graph.strategies.masked_embedding_averaging.cost import costs_by_size

DATA = load_data(DataConfig(), seed=0)
EGOS = partition_egos(DATA, PartitionConfig(clients=9, min_nodes=20), 0)
SETTINGS = EgoSettings(int(DATA.x.shape[1]), int(DATA.num_classes), hidden=16)


def test_groups_by_size() -> None:
    costs = costs_by_size(EGOS, SETTINGS, groups=3)
    assert [cost.clients for cost in costs] == [3, 3, 3]
    sizes = sorted(ego.nodes.numel() for ego in EGOS)
    assert [cost.nodes for cost in costs] == [sum(sizes[i : i + 3]) / 3 for i in (0, 3, 6)]
    edges = sum(ego.edge_index.shape[1] for ego in EGOS) / 2
    assert sum(cost.edges * 3 for cost in costs) == pytest.approx(edges)
    assert all(cost.seconds > 0 for cost in costs)


def test_memory_is_at_least_the_state_and_the_same_again() -> None:
    """PyTorch's count goes on from profile to profile; a group's must not depend on the others."""
    first, again = (costs_by_size(EGOS, SETTINGS, groups=3) for _ in range(2))
    ordered = sorted(EGOS, key=lambda ego: ego.nodes.numel())
    for place, (one, two) in enumerate(zip(first, again, strict=True)):
        assert one.peak_bytes == pytest.approx(two.peak_bytes, rel=0.01)
        state = EgoCohort(ordered[3 * place : 3 * place + 3], SETTINGS).tensors().values()
        held = sum(tensor.numel() * tensor.element_size() for tensor in state) / 3
        assert held < one.peak_bytes < 20 * held


def test_fewer_clients_than_groups() -> None:
    assert [cost.clients for cost in costs_by_size(EGOS[:2], SETTINGS)] == [1, 1]
