"""FED-PUB: the random graph, masks, and averages by what models do, by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import METHODS
from torch import Tensor, nn

from flower_graph.strategies.fed_pub import Masked, random_graph, softmax_weights

SMALL, ENTRIES = METHODS["fedpub"], ("weight", "bias")


class Linear(nn.Module):
    """A module that takes a graph and does not look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.bias = nn.Parameter(torch.tensor([10.0, 20.0]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def test_the_random_graph_has_dense_blocks_and_nothing_between_them() -> None:
    x, edges = random_graph(6, 3, 40, 0.25, seed=0)
    full = random_graph(2, 1, 3, 1.0, 0)[1]
    assert sorted(map(tuple, full.t().tolist())) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    assert x.shape == (120, 6)
    assert float(x.mean()) == pytest.approx(0, abs=0.15)
    assert float(x.std()) == pytest.approx(1, abs=0.1)
    source, target = edges
    assert torch.equal(source // 40, target // 40) and not bool((source == target).any())
    pairs = set(map(tuple, edges.t().tolist()))
    assert len(pairs) == edges.shape[1]
    assert pairs == {(b, a) for a, b in pairs}
    assert len(pairs) / (3 * 40 * 39) == pytest.approx(0.25, abs=0.03)
    one, same, other = (random_graph(4, 5, 20, 0.1, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])


def test_weights_are_a_softmax_of_scaled_cosines_by_hand() -> None:
    found = softmax_weights(np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), 3.0)
    high, low = math.exp(3) / (2 * math.exp(3) + 1), 1 / (2 * math.exp(3) + 1)
    assert found[0] == pytest.approx([high, low, high])
    assert found[1] == pytest.approx(np.array([1, math.exp(3), 1]) / (2 + math.exp(3)))
    assert softmax_weights(np.eye(2), 0.0).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert softmax_weights(np.eye(2), 5000.0).tolist() == [[1, 0], [0, 1]]


def test_a_mask_is_multiplied_in_and_a_small_one_is_nothing_in_evaluation() -> None:
    masked = Masked(Linear(), threshold=0.1)
    x, nothing = torch.tensor([[1.0, 1.0]]), torch.zeros(2, 0, dtype=torch.long)
    assert masked(x, nothing).tolist() == [[13, 27]]
    with torch.no_grad():
        masked.masks["weight"].copy_(torch.tensor([[0.5, -0.05], [1.0, 2.0]]))
    assert masked(x, nothing).tolist()[0] == pytest.approx([10.4, 31])
    assert masked.eval()(x, nothing).tolist()[0] == pytest.approx([10.5, 31])
    assert float(masked.size().detach()) == pytest.approx(3.55)
    masked.size().backward()
    assert masked.masks["weight"].grad.tolist() == [[1, -1], [1, 1]]
    assert masked.train().merged().weight.tolist() == [[0.5, 0], [3, 8]]


def test_masks_never_leave_a_client_and_each_client_has_its_own_model(tmp_path: Path) -> None:
    done = SMALL.run(tmp_path)
    assert not any(report.rejected or report.skipped for report in done.reports)
    layers = [f"module.{layer}.{part}" for layer in ("first", "second") for part in ENTRIES]
    assert {name.partition(".")[2] for name in done.kept} == set(layers)
    one, other = (done.kept[f"client-{client}.module.first.weight"] for client in (0, 1))
    assert not torch.equal(one, other)


def test_without_a_scale_all_clients_have_one_mean(tmp_path: Path) -> None:
    kept = SMALL.run(tmp_path, "strategy.masks=false", "strategy.norm_scale=0").kept
    assert {name.partition(".")[2] for name in kept} >= {"first.weight", "second.bias"}
    for name in ("first.weight", "second.weight"):
        for client in (1, 2, 3):
            assert torch.equal(kept[f"client-0.{name}"], kept[f"client-{client}.{name}"])
