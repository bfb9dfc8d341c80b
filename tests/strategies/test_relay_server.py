"""The server of nFedGNN: what it computes. ``tests/plain`` has its training."""

import math
from typing import Any

import pytest
import torch
from graph_helpers import CLASSES, small_graph
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.config.common import LinksSection
from flower_graph.data.graph import Graph, to_undirected
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import DataError, DivergedError
from flower_graph.models import SplitModel, build_server_model
from flower_graph.ops import graph as ops_graph
from flower_graph.ops.links import both_directions, dot_products, undirected
from flower_graph.strategies.nfedgnn.config import SCHEDULES, StrategyConfig
from flower_graph.strategies.nfedgnn.strategy import (
    LinkRelayServer,
    RelayServer,
    config_of,
    scheduled,
)

N, C, CPU, RATE = 12, CLASSES, torch.device("cpu"), 0.05


def relay(model: nn.Module, data: Any = None, **more: Any) -> RelayServer:
    config = config_of(reg_weight=3.0, weight_decay=0.01, seed=7, **more)
    return RelayServer(data or small_graph(), model, config, getattr(model, "latent_size", C))


def step(server: RelayServer, number: int, rate: float) -> Any:
    result = server.gradients(number, server.latent, server.known)
    server.move(number, rate)
    return result


def gcn() -> SplitModel:
    return build_server_model("gcn", hidden=4, heads=2, classes=C, dropout=0.0, seed=7)


class Echo(nn.Module):
    """The latent vectors are the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x * self.scale


def test_accuracy_by_hand():
    data = small_graph()
    data.val_mask = torch.zeros(N, dtype=torch.bool)
    del data.test_mask
    server = relay(Echo(), data)
    logits = functional.one_hot(data.y, C).float()
    logits[[1, 3, 4]] = logits[[1, 3, 4]].roll(1, dims=1)  # wrong: one of them to train
    server.receive(torch.arange(N), logits)
    accuracy = server.accuracy()
    assert accuracy["train"] == pytest.approx(5 / 6)
    assert math.isnan(accuracy["val"]) and math.isnan(accuracy["test"])


def test_a_graph_without_a_training_node_is_refused():
    data = small_graph()
    data.train_mask = torch.zeros(N, dtype=torch.bool)
    with pytest.raises(DataError, match="train_mask"):
        relay(Echo(), data)


def test_the_only_round_has_the_whole_step_size() -> None:
    for schedule in SCHEDULES:
        assert scheduled(StrategyConfig(learning_rate=0.1, schedule=schedule), 1, 1) == 0.1


def test_the_average_of_the_servers_weights_by_hand():
    server, course = relay(Echo(), server_average=0.6), list[float]()
    server.receive(torch.arange(N), functional.one_hot(small_graph().y, C).float())
    average = 0.0
    for number in range(1, 6):
        step(server, number, RATE)
        course.append(server.model.scale.item())
        # A plain mean of the first two; from then on 0.4 of the new
        share = max(0.4, 1 / number)
        average += share * (course[-1] - average)
        assert server.eval_model.scale.item() == pytest.approx(average)
        assert torch.allclose(server.logits(), server.latent * average)
    again = relay(Echo(), server_average=0.6)
    again.load_state_dict(server.state_dict())
    assert torch.equal(again.logits(), server.logits())
    assert again.model.scale.item() == course[-1] != pytest.approx(average)
    without = relay(Echo())
    assert without.eval_model is without.model and "average" not in without.state_dict()


@pytest.mark.parametrize("few", [2, 8])  # 2: the rows next to the labelled ones are few, too
def test_a_loss_of_few_nodes_has_the_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, few: int
):
    rng = torch.Generator().manual_seed(3)
    pairs = torch.randint(400, (2, 500), generator=rng)
    data, latent = small_graph(), torch.randn(400, 4, generator=rng)
    data.edge_index = to_undirected(pairs, 400)
    data.y = torch.arange(400) % C
    data.train_mask = torch.arange(400) < 3
    data.val_mask = data.test_mask = torch.zeros(400, dtype=torch.bool)
    found, products = list[list[Tensor]](), list[int]()
    count = ops_graph._product
    monkeypatch.setattr(
        ops_graph, "_product", lambda a, x: (products.append(a.shape[0]), count(a, x))[1]
    )
    monkeypatch.setattr(ops_graph, "FEW", few)
    for least in (0, 1 << 17):  # entries
        monkeypatch.setattr(ops_graph, "SMALL", least)
        server = relay(
            build_server_model("gcn", hidden=4, heads=1, classes=C, dropout=0.5, seed=7), data
        )
        server.receive(torch.arange(400), latent)
        losses, gradient = step(server, 1, RATE)
        found.append([torch.tensor(losses["loss"]), gradient, *server.model.state_dict().values()])
    assert all(map(torch.equal, *found))
    assert min(products) == 3 and products[-4:] == [400] * 4


def test_nobody_with_a_label_has_answered():
    server = relay(gcn())
    assert not server.masks["train"][[3, 4]].any()
    server.receive(torch.tensor([3, 4]), torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]]))
    losses, gradient = step(server, 1, RATE)
    assert losses["cross_entropy"] == 0
    assert losses["loss"] == pytest.approx(server.reg_weight * losses["regulariser"])
    assert bool(gradient.any()) == (losses["regulariser"] > 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_before_the_step(value: float):
    server = relay(Echo())
    server.receive(torch.arange(N), torch.full((N, C), value))
    with pytest.raises(DivergedError, match=r"strategy\.learning_rate.*strategy\.reg_weight"):
        step(server, 4, RATE)
    assert server.model.scale.item() == 1.0


def test_resolve_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ValueError, match="device: 'cuda:1'"):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cuda:1").index == 1


# The server knows some edges and predicts others -------------------------------------------------

M = 70  # users


class Heard(nn.Module):
    """Gives latent vectors as they are, and notes over which edges it was to pass messages."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.ones(1)), list[set[int]]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.append(set(undirected(edge_index, M).tolist()))
        return self.scale * x


def link_relay(model: nn.Module) -> LinkRelayServer:
    rng = torch.Generator().manual_seed(0)
    pairs = torch.randint(M, (2, 5 * M), generator=rng)
    edges = both_directions(pairs[:, pairs[0] != pairs[1]]).unique(dim=1)
    train = torch.ones(M) > 0
    data = Graph(torch.zeros(M, 1), edges, torch.zeros(M).long(), 2, train, ~train, ~train)
    config = config_of(reg_weight=0.0, weight_decay=0.0)
    config.links = LinksSection(0.1, 0.2, 3)
    one = LinkRelayServer(data, model, config, 4)
    one.receive(torch.arange(M), torch.randn(M, 4, generator=rng))
    return one


def test_the_server_passes_over_no_edge_that_it_is_judged_by() -> None:
    model = Heard()
    server = link_relay(model)
    split = server.split
    code = split.pairs[0] * M + split.pairs[1]
    train, val, test = (
        set(code[split.is_edge & (split.role == role)].tolist()) for role in range(3)
    )
    server.gradients(1, server.latent, server.known)
    accuracy = server.accuracy()
    learnt, early, late = model.seen
    assert learnt == early == train and late == train | val and not late & test
    score = dot_products(server.logits(split.later), split.pairs)
    chosen = split.role == 2
    assert accuracy["test"] == pytest.approx(
        float(((score > 0) == split.is_edge)[chosen].double().mean())
    )


def test_users_who_were_not_heard_teach_nothing() -> None:
    server = link_relay(Heard())
    heard = torch.arange(M) < 40
    _, gradient = server.gradients(1, server.latent, heard)
    assert not gradient[~heard].any() and bool(gradient[heard].any())
    losses, nothing = server.gradients(1, server.latent, heard & False)
    assert losses["cross_entropy"] == 0 and not nothing.any()
