"""The GAT client: PyG's two layers, a loss worked out by hand, and a state that goes on."""

import dataclasses
from typing import Any

import numpy as np
import torch

from flower_graph.data.graph import ClientGraph as Client
from flower_graph.strategies.ppfl.config import GATConfig, ModelConfig, PPFLConfig
from flower_graph.strategies.ppfl.modules import PublicGAT

N, F, D, C = 12, 9, 6, 3
ROWS = np.array([1, 4, 5, 11])
SETTINGS = PPFLConfig(
    seed=7,
    model=ModelConfig("gat", D),
    gat=GATConfig(heads=2, epochs=3, learning_rate=0.01, dropout=0.5, beta=10),
)


def make_client(seed: int = 0, client: int = 2, nodes: int = N) -> Client:
    """Draw a graph in which the last two nodes are isolated, and every second node trains."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(nodes, F, generator=draw)
    x *= torch.rand(nodes, F, generator=draw) < 0.5
    upper = (torch.rand(nodes, nodes, generator=draw) < 0.3).triu(1)
    upper[:, -2:] = False
    y = torch.randint(C, (nodes,), generator=draw)
    train = torch.arange(nodes) % 2 == 0
    nobody = torch.zeros_like(train)
    edges, ids = (upper | upper.T).nonzero().T, torch.arange(nodes)
    held = client, ids, x, y, edges, None, train, ~train, nobody
    return Client(*held, public=train, train_y=y)


def make_targets(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(ROWS), D)).astype(np.float32)


def model_of(graph: Client, classes: int = C, seed: int = 7, **changes: Any) -> PublicGAT:
    gat = dataclasses.replace(SETTINGS.gat, **changes)
    return PublicGAT(graph, dataclasses.replace(SETTINGS, seed=seed, gat=gat), classes)  # type: ignore[arg-type]


def trained(graph: Client, server_round: int = 1, **changes: Any) -> np.ndarray:
    """Embed after a round with targets."""
    model = model_of(graph, **changes)
    model.learn(ROWS, make_targets(), server_round)
    return model.embed()


def test_beta_zero_or_no_public_row_is_training_without_targets():
    graph, none = make_client(), np.empty(0, np.int64)
    local, alone, empty = (model_of(graph, beta=beta) for beta in (0.0, 2.0, 2.0))
    losses = {
        local.learn(ROWS, make_targets(), 1),
        alone.learn(ROWS, None, 1),
        empty.learn(none, np.empty((0, D), np.float32), 1),
    }
    assert len(losses) == 1
    np.testing.assert_array_equal(local.embed(), alone.embed())
    np.testing.assert_array_equal(empty.embed(), alone.embed())
    assert np.abs(local.embed() - trained(graph, beta=2.0)).max() > 1e-4


def test_same_seed_same_bits_and_others_differ():
    graph, one = make_client(), trained(make_client())
    torch.rand(3)  # moves PyTorch's own generator on, which must not show
    # Neither the layout of features nor a judged label matters
    sparse = dataclasses.replace(graph, x=graph.x.to_sparse_csr())
    hidden = dataclasses.replace(graph, train_y=torch.where(graph.train_mask, graph.y, -1))
    for same in (graph, sparse, hidden):
        np.testing.assert_array_equal(trained(same), one)
    other_client = dataclasses.replace(graph, client=3)
    for other in (trained(graph, seed=8), trained(graph, server_round=2), trained(other_client)):
        assert np.abs(other - one).max() > 1e-4
