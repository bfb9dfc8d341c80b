"""SCAFFOLD against a plain loop over its algorithm; grouped as one by one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from federation import run_rounds
from torch.nn.functional import cross_entropy

from flower_graph.client import module_client
from flower_graph.client.learner import SharedModule
from flower_graph.config.common import RunConfig
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.models import GCN
from flower_graph.strategies.scaffold import APP

ROUNDS, ETA = 4, 0.5
SETTINGS = ("data.name=cora-linqs", "data.nodes=160", "partition.clients=4", "model.dropout=0")


def config(folder: Path, *more: str) -> RunConfig:
    file = folder / "scaffold.yaml"
    file.write_text(f"app: {APP}\n")
    rates = f"strategy.learning_rate={ETA}", f"rounds={ROUNDS}"
    return load_config(str(file), [*SETTINGS, *rates, *more])


def plain(of: RunConfig) -> dict[str, torch.Tensor]:
    """Run the algorithm with all clients; return the last model."""
    graphs = method_of(of).graphs(of)
    make = lambda: GCN(graphs[0].x.shape[1], of.model.hidden, 7, dropout=0.0)  # noqa: E731
    x = dict(SharedModule(make, of.seed).first().named_parameters())
    c = {name: torch.zeros_like(value) for name, value in x.items()}
    own = [dict(c) for _ in graphs]
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
                        value -= ETA * (value.grad - own[i][name] + c[name])
            y = {name: value.detach() for name, value in net.named_parameters()}
            steps = of.strategy.local_epochs * ETA
            new = {n: own[i][n] - c[n] + (x[n] - y[n]) / steps for n in y}
            changes.append({n: new[n] - own[i][n] for n in y})
            ends.append(y)
            own[i] = new
        x = {n: torch.stack([one[n] for one in ends]).mean(0) for n in x}
        c = {n: c[n] + torch.stack([one[n] for one in changes]).mean(0) for n in c}
    return x


@pytest.mark.parametrize("supernodes", [1, 4])
def test_it_is_the_algorithm_as_a_group_and_one_by_one(
    supernodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = config(tmp_path)
    wanted = plain(of)
    grouped, figures = run_rounds(of, supernodes)
    monkeypatch.setattr(module_client.ModuleClient, "_can_group", lambda *_: False)
    looped, again = run_rounds(of, supernodes)
    for name, value in wanted.items():
        goal = value.detach().numpy()
        for found in (grouped[f"net.{name}"], looped[f"net.{name}"]):
            np.testing.assert_allclose(found, goal, atol=1e-5)
    assert figures == pytest.approx(again, abs=1e-5)


@pytest.mark.parametrize(("participation", "share"), [(1.0, 1.0), (0.5, 0.5)])
def test_the_variate_is_the_mean_of_all_clients_though_some_take_part(
    participation: float, share: float, tmp_path: Path
) -> None:
    of = config(tmp_path, f"strategy.participation={participation}", "rounds=1")
    weights, _ = run_rounds(of, 4)
    start = SharedModule(method_of(of).module(of, 1433, 7), of.seed).first().state_dict()
    assert not any(name.startswith("own.") for name in weights)
    for name in ("first.weight", "second.bias"):
        moved = start[f"net.{name}"].numpy() - weights[f"net.{name}"]
        goal = share * moved / (of.strategy.local_epochs * ETA)
        assert abs(goal).max() > 1e-3
        found = weights[f"common.{name.replace('.', '-')}"]
        np.testing.assert_allclose(found, goal, atol=1e-5)
