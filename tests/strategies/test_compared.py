"""SCAFFOLD, MOON and FedOpt beside plain loops, by hand, and beside Flower's own strategies."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from federation import METHODS, one_fast, run_rounds
from flwr.serverapp import strategy as flower
from torch import Tensor
from torch.nn.functional import cross_entropy

from flower_graph.apps.run import client_app
from flower_graph.client import module_client
from flower_graph.client.learner import SharedModule
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.models import GCN
from flower_graph.ops.adam import Adam
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.moon import contrast

ROUNDS, RATE = 4, {"scaffold": 0.5, "moon": 0.01}
SETTINGS = ("data.nodes=160", "partition.clients=4", "model.dropout=0", f"rounds={ROUNDS}")
Net = dict[str, Tensor]


def small(name: str, *more: str) -> Any:
    return load_config(f"{name}/cora-linqs", [*SETTINGS, "strategy.optimiser=reset", *more])


def scaffold(of: Any, graphs: list[Any], make: Callable[[], GCN], x: Net) -> Net:
    """Run algorithm 1 with all clients; return the last model."""
    c = {name: torch.zeros_like(value) for name, value in x.items()}
    own, steps = [dict(c) for _ in graphs], of.strategy.local_epochs * RATE["scaffold"]
    for _ in range(ROUNDS):
        ends, changes = [], []
        for i, graph in enumerate(graphs):
            net = make()
            net.load_state_dict(x)
            for _ in range(of.strategy.local_epochs):
                net.zero_grad()
                logits = net(graph.x, graph.edge_index)[graph.train_mask]
                cross_entropy(logits, graph.y[graph.train_mask]).backward()
                with torch.no_grad():
                    for name, value in net.named_parameters():
                        value -= RATE["scaffold"] * (value.grad - own[i][name] + c[name])
            y = dict(net.state_dict())
            new = {n: own[i][n] - c[n] + (x[n] - y[n]) / steps for n in y}
            changes.append({n: new[n] - own[i][n] for n in y})
            ends.append(y)
            own[i] = new
        x = {n: torch.stack([one[n] for one in ends]).mean(0) for n in x}
        c = {n: c[n] + torch.stack([one[n] for one in changes]).mean(0) for n in c}
    return x


def moon(of: Any, graphs: list[Any], make: Callable[[], GCN], x: Net) -> Net:
    """Run algorithm 1 with all clients; return the last model."""
    last, sizes = [x] * len(graphs), [int(graph.train_mask.sum()) for graph in graphs]
    for _ in range(ROUNDS):
        for i, graph in enumerate(graphs):
            net, common, before = make(), make(), make()
            for one, state in ((net, x), (common, x), (before, last[i])):
                one.load_state_dict(state)
            adam, train = Adam(net.parameters(), lr=RATE["moon"]), graph.train_mask
            for _ in range(of.strategy.local_epochs):
                rows = [
                    one.embed(graph.x, graph.edge_index)[train] for one in (net, common, before)
                ]
                unit = [one / one.norm(dim=1, keepdim=True).clamp(min=1e-8) for one in rows]
                near, far = ((unit[0] * one).sum(1) / of.strategy.temperature for one in unit[1:])
                pulled = -(near.exp() / (near.exp() + far.exp())).log().mean()
                adam.zero_grad()
                logits = net(graph.x, graph.edge_index)[train]
                loss = cross_entropy(logits, graph.y[train]) + of.strategy.contrast * pulled
                loss.backward()
                adam.step()
            last[i] = dict(net.state_dict())
        parts = zip(sizes, last, strict=True)
        shares = [{n: size / sum(sizes) * v for n, v in one.items()} for size, one in parts]
        x = {n: torch.stack([one[n] for one in shares]).sum(0) for n in x}
    return x


@pytest.mark.parametrize("supernodes", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", [scaffold, moon])
def test_it_is_the_algorithm_as_a_group_and_one_by_one(
    algorithm: Callable[..., Net], supernodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = algorithm.__name__
    more = ["strategy.contrast=5"] if name == "moon" else []
    of = small(name, f"strategy.learning_rate={RATE[name]}", *more)
    graphs: Any = method_of(of).graphs(of)  # type: ignore[attr-defined]

    def make() -> GCN:
        return GCN(graphs[0].x.shape[1], of.model.hidden, 7, dropout=0.0)

    wanted = algorithm(of, graphs, make, dict(SharedModule(make, of.seed).first().state_dict()))
    grouped, figures = run_rounds(of, supernodes)
    monkeypatch.setattr(module_client.ModuleClient, "_can_group", lambda *_: False)
    looped, again = run_rounds(of, supernodes)
    for key, value in wanted.items():
        for found in (grouped[f"net.{key}"], looped[f"net.{key}"]):
            np.testing.assert_allclose(found, value.numpy(), atol=2e-4)  # Adam's near 0
    assert figures == pytest.approx(again, abs=1e-5)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_variate_is_the_mean_of_all_clients_though_some_take_part(share: float) -> None:
    rate = f"strategy.learning_rate={RATE['scaffold']}"
    of = small("scaffold", f"strategy.participation={share}", rate, "rounds=1")
    weights, _ = run_rounds(of, 4)
    method: Any = method_of(of)
    start = SharedModule(method.module(of, 1433, 7), of.seed).first().state_dict()
    assert not any(name.startswith("own.") for name in weights)
    for name in ("first.weight", "second.bias"):
        moved = start[f"net.{name}"].numpy() - weights[f"net.{name}"]
        goal = share * moved / (of.strategy.local_epochs * RATE["scaffold"])
        assert abs(goal).max() > 1e-3
        np.testing.assert_allclose(weights[f"common.{name}"], goal, atol=1e-5)


def test_moons_contrast_by_hand() -> None:
    z = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    common, last = torch.tensor([[2.0, 0.0], [4.0, 3.0]]), torch.tensor([[0.0, 1.0], [6.0, 8.0]])
    of_first, of_second = (1, 0), (0.96, 1)  # cosines with both
    wanted = [
        -math.log(math.exp(near / 0.5) / (math.exp(near / 0.5) + math.exp(far / 0.5)))
        for near, far in (of_first, of_second)
    ]
    assert contrast(z, common, last, 0.5).tolist() == pytest.approx(wanted)


def test_moon_is_fedavg_without_the_contrast() -> None:
    alike = "strategy.weight_decay=0", "strategy.optimiser=keep"
    (wanted, figures), (found, again) = (
        run_rounds(small(*one, *alike), 4) for one in (["fedavg"], ["moon", "strategy.contrast=0"])
    )
    for name, value in wanted.items():
        np.testing.assert_allclose(found[f"net.{name}"], value, atol=1e-6)
    assert figures == pytest.approx(again, abs=1e-6)


BETAS = {"beta_1": 0.8, "beta_2": 0.95}
KINDS: dict[str, tuple[Any, dict[str, float]]] = {
    "adam": (flower.FedAdam, BETAS),
    "yogi": (flower.FedYogi, BETAS),
    "adagrad": (flower.FedAdagrad, {}),
}


@pytest.mark.parametrize("name", one_fast(KINDS, "yogi"))
def test_fedopt_is_flowers_own_strategy_on_the_same_clients(name: str) -> None:
    kind, betas = KINDS[name]
    words = {"server_optimiser": name, "server_learning_rate": 0.02, "tau": 0.01} | BETAS
    of = small("fedopt", *(f"strategy.{key}={value}" for key, value in words.items()))
    found, _ = run_rounds(of, 4)
    method: Any = method_of(of)
    first = method.build_strategy(of, None).first_arrays()
    grid = InProcessGrid(client_app(of, None), num_supernodes=4)
    own = kind(eta=0.02, tau=0.01, min_train_nodes=4, min_evaluate_nodes=4, **betas)
    wanted = own.start(grid, first, ROUNDS).arrays
    for key, value in found.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, wanted[key].numpy(), atol=1e-4)


def test_what_they_cannot_do_is_refused_by_name() -> None:
    refused = {
        "moon": ["model.name=sgc", "task=links"],
        "fedopt": ["strategy.server_optimiser=sgd", "strategy.beta_1=1"],
    }
    for name, settings in refused.items():
        for one in settings:
            with pytest.raises(ConfigError, match=one.partition("=")[0]):
                METHODS[name].load(one)
    with pytest.raises(ConfigError, match="privacy"):
        METHODS["fedopt"].load("privacy.epsilon=1", "privacy.form=central")
    assert isinstance(METHODS["fedopt"].load("privacy.epsilon=1"), RunConfig)
