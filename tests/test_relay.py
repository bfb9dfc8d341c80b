"""Relayed training against one autograd graph over everybody's dense matrices."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.engine.device import resolve_device
from flower_graph.errors import DataError, DivergedError
from flower_graph.models import SplitModel, build_server_model
from flower_graph.strategies.split_gradient_relay.server_model import RelayServer

N, F, C, SEED = 14, 8, 3, 7
CPU = torch.device("cpu")
RATE, DECAY = 0.05, 0.01


def graph() -> SimpleNamespace:
    """Make a ring of 12 with chords; node 12 is alone and labelled, node 13 alone and not."""
    ring = torch.arange(12)
    pairs = torch.cat([torch.stack([ring, (ring + 1) % 12]), torch.tensor([[0, 2], [5, 9]])], 1)
    train = torch.tensor([0, 3, 4, 7, 8, 12])
    mask = torch.zeros(N, dtype=torch.bool).index_fill(0, train, True)
    val = torch.zeros(N, dtype=torch.bool).index_fill(0, torch.tensor([1, 2, 13]), True)
    return SimpleNamespace(
        edge_index=torch.cat([pairs, pairs.flip(0)], dim=1),
        y=torch.arange(N) % C,
        train_mask=mask,
        val_mask=val,
        test_mask=~mask & ~val,
    )


def features() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(N, F, generator=draw) * (torch.rand(N, F, generator=draw) < 0.6)


def server_model(name: str, dropout: float) -> SplitModel:
    return build_server_model(name, hidden=4, heads=2, classes=C, dropout=dropout, seed=SEED)


def relay(
    model: nn.Module, reg_weight: float = 3.0, data: Any = None, size: int = 4
) -> RelayServer:
    return RelayServer(
        data or graph(),
        model,
        latent_size=getattr(model, "latent_size", size),
        reg_weight=reg_weight,
        learning_rate=RATE,
        weight_decay=DECAY,
        seed=SEED,
        device=CPU,
    )


def test_another_dropout_mask_every_round():
    server = relay(server_model("gcn", 0.5))
    server.receive(torch.arange(N), torch.ones(N, 4))
    start = copy.deepcopy(server.state_dict())
    losses = []
    for number in (1, 2, 1):
        server.load_state_dict(copy.deepcopy(start))
        losses.append(server.step(number)[0].total)
    assert losses[0] == losses[2] != losses[1]


def test_no_trace_in_the_global_generator():
    server = relay(server_model("gat", 0.5))
    server.receive(torch.arange(N), torch.ones(N, 8))
    state = torch.random.get_rng_state()
    server.step(1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_unlabelled_isolated_node_gets_no_gradient():
    server = relay(server_model("gcn", 0.0))
    server.receive(torch.arange(N), torch.randn(N, 4, generator=torch.Generator().manual_seed(0)))
    gradient = server.step(1)[1]
    assert gradient[13].tolist() == [0.0] * 4
    assert gradient[12].abs().sum() > 0, "it has a label"


def test_known_users_have_edges_among_themselves_alone():
    server = relay(server_model("gcn", 0.0))
    assert server.edges.shape == (2, 0)
    server.receive(torch.tensor([0, 1, 5]), torch.ones(3, 4))
    assert sorted(map(tuple, server.edges.T.tolist())) == [(0, 1), (0, 5), (1, 0), (5, 0)]
    server.receive(torch.arange(N), torch.ones(N, 4))
    assert torch.equal(server.edges, graph().edge_index)


class Echo(nn.Module):
    """The latent vectors are the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x * self.scale


def test_accuracy_by_hand():
    data = graph()
    server = relay(Echo(), data=data, size=C)
    logits = functional.one_hot(data.y, C).float()
    logits[[1, 3, 4]] = logits[[1, 3, 4]].roll(1, dims=1)  # wrong: one to validate, two to train
    server.receive(torch.arange(N), logits)
    accuracy = server.accuracy()
    assert accuracy["train"] == pytest.approx(4 / 6)
    assert accuracy["val"] == pytest.approx(2 / 3)
    assert accuracy["test"] == 1.0


def test_accuracy_is_nan_without_a_mask():
    data = graph()
    data.val_mask = torch.zeros(N, dtype=torch.bool)
    del data.test_mask
    accuracy = relay(Echo(), data=data, size=C).accuracy()
    assert math.isnan(accuracy["val"])
    assert math.isnan(accuracy["test"])


def test_an_empty_training_mask_is_refused():
    data = graph()
    data.train_mask = torch.zeros(N, dtype=torch.bool)
    with pytest.raises(DataError, match="train_mask: no node is marked"):
        relay(Echo(), data=data, size=C)


def test_a_mask_of_another_length_is_refused():
    data = graph()
    data.val_mask = torch.ones(N + 1, dtype=torch.bool)
    with pytest.raises(DataError, match=r"val_mask: shape \(15,\), expected \(14,\)"):
        relay(Echo(), data=data, size=C)


def test_nobody_with_a_label_has_answered():
    server = relay(server_model("gcn", 0.0))
    assert not server.masks["train"][[1, 2]].any()
    server.receive(torch.tensor([1, 2]), torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]]))
    losses, gradient = server.step(1)
    assert losses.cross_entropy == 0
    assert losses.total == pytest.approx(server.reg_weight * losses.regulariser)
    assert bool(gradient.any()) == (losses.regulariser > 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_before_the_step(value: float):
    server = relay(Echo(), size=C)
    server.receive(torch.arange(N), torch.full((N, C), value))
    with pytest.raises(DivergedError, match=r"round 4: the loss is nan; lower the learning rate"):
        server.step(4)
    assert server.model.scale.item() == 1.0


def test_goes_on_from_its_state_bit_by_bit():
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn(4, N, 4, generator=draw)
    one, other = (relay(server_model("gcn", 0.5)) for _ in range(2))
    for number in (1, 2):
        one.receive(torch.arange(10), latents[number, :10])
        one.step(number)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for number in (3, 4):
        results = []
        for server in (one, other):
            server.receive(torch.arange(number, N), latents[number - 1, number:])
            results.append(server.step(number))
        assert results[0][0] == results[1][0]
        assert torch.equal(results[0][1], results[1][1])
    assert one.accuracy() == other.accuracy()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("latent_size", 0),
        ("reg_weight", -1.0),
        ("reg_weight", math.nan),
        ("weight_decay", -0.1),
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
    ],
)
def test_impossible_numbers_are_refused(key: str, value: float):
    numbers = {"latent_size": C, "reg_weight": 0.0, "learning_rate": 0.1, "weight_decay": 0.0}
    with pytest.raises(ValueError, match=f"{key}: {value} is not"):
        RelayServer(graph(), Echo(), **{**numbers, key: value}, seed=0, device=CPU)


def test_resolve_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ValueError, match=r"device: 'cuda:1' is not there; 0 GPUs found"):
        resolve_device("cuda:1")
    with pytest.raises(ValueError, match=r"device: 'gpu' is none of auto, cpu, cuda, cuda:N"):
        resolve_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cuda:1").index == 1
