"""nFedGNN's relay against the plain reference: users' own layers, averages, one layer for all."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from graph_helpers import CLASSES, FEATURES, Outcome, small_graph
from nfedgnn import GCN, OneNetwork, Relay
from relay_helpers import asked_users, run
from test_summed import DECAY, LINEAR, RATE, Summed, rich_graph
from torch import nn
from torch_geometric.data import Data

from flower_graph.models import build_server_model
from flower_graph.rng import seeded
from flower_graph.strategies.nfedgnn.algorithm import UserSettings, shared_linear_weight

ROUNDS = 20


def wave(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


SHARES = {
    "constant": lambda number: 1.0,
    "cosine": lambda number: wave((number - 1) / ROUNDS),
    # The first of ten parts is two rounds
    "warmup-cosine": lambda number: 0.5 if number == 1 else wave(max(number - 3, 0) / 18),
}


@torch.no_grad()
def linear_map(size: int, bias: bool, seed: int = 3) -> nn.Linear:
    """Make the module with which the strategy's users begin."""
    layer = nn.Linear(FEATURES, size, bias)
    weight = shared_linear_weight(FEATURES, UserSettings(size, bias, DECAY, seed))
    layer.weight.copy_(weight[:FEATURES].T)
    if bias:
        layer.bias.zero_()
    return layer


def compare(
    data: Data,
    *,
    model: str = "gcn",
    bias: bool = False,
    **options: Any,
) -> Outcome:
    """Run both; `options` are those of the strategy."""
    dropout, participation = options.pop("dropout", 0.0), options.pop("participation", 1.0)
    how = {"dropout": dropout, "participation": participation, "user_bias": bias, **options}
    outcome = run(data, rounds=ROUNDS, model=model, supernodes=3, **how)
    server = build_server_model(model, hidden=4, heads=2, classes=CLASSES, dropout=dropout, seed=3)
    if model == "gcn" and not dropout:
        plain: Any = GCN(server.latent_size, CLASSES)
        plain.load_state_dict(server.state_dict())
    else:
        plain = copy.deepcopy(server)
    relay = Relay(
        data,
        plain,
        linear_map(server.latent_size, bias),
        share=SHARES[options.pop("schedule", "constant")],
        draws=lambda number: seeded(torch.device("cpu"), 3, "server-dropout", number),
        **options,
    )
    for number, loss in enumerate(outcome.losses, start=1):
        users = asked_users(data.num_nodes, participation, 3, number).tolist()
        assert loss == pytest.approx(relay.round(number, users), rel=1e-5, abs=1e-5)
    assert torch.allclose(outcome.weights["latent"], relay.latent, rtol=1e-5, atol=1e-5)
    return outcome


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "gat", "bias": True},
        {"model": "sage", "dropout": 0.5, "participation": 0.6, "bias": True},
        {"participation": 0.4, "dropout": 0.5},
        {"average_every": 2, "participation": 0.5},
        {"average_every": 2, "average_over": "all", "bias": True},
        {"average_every": 1, "average_over": "all", "reg_weight": 0.0},  # CNFGNN
        {"schedule": "cosine", "participation": 0.6},
        {"schedule": "warmup-cosine", "average_every": 2},
        {"gradient_norm": 0.05, "schedule": "cosine"},
    ],
)
def test_every_option_is_what_it_says(options: dict[str, Any]) -> None:
    compare(small_graph(15), **options)


@pytest.mark.parametrize("lonely", [[3], range(15)], ids=["one", "all"])
def test_users_without_edges_take_part(lonely: Iterable[int]) -> None:
    data = small_graph(15)
    touched = torch.isin(data.edge_index, torch.tensor(list(lonely))).any(0)
    data.edge_index = data.edge_index[:, ~touched]
    for report in compare(data).reports:
        assert report.answered == 15
        assert (report.regulariser == 0) == bool(touched.all())


# With one SuperNode and with several, in each form
CELLS = ["gcn 1 plain", "gat 4 masked", "gcn 5 untrusted"]


@pytest.mark.parametrize(
    ("model", "supernodes", "form"), [cell.split() for cell in CELLS], ids=CELLS
)
def test_one_layer_for_all_is_one_network_in_one_place(
    model: str, supernodes: str, form: str
) -> None:
    how: dict[str, Any] = {"is_masked": form in ("masked", "untrusted")}
    how |= {"distrusts": True} if form == "untrusted" else {}
    run, count = Summed(rich_graph(), model, supernodes=int(supernodes), **how), int(supernodes)
    user = linear_map(run.strategy.layer.settings.latent_size, False, run.seed)
    server = build_server_model(model, hidden=4, heads=2, classes=CLASSES, dropout=0.0, seed=3)
    plain = GCN(4, CLASSES) if model == "gcn" else server
    plain.load_state_dict(run.first)
    network = OneNetwork(run.data, user, plain, RATE, DECAY)
    losses = [network.epoch() for _ in range(ROUNDS)]
    assert run.losses == pytest.approx(losses, abs=1e-5)
    for name, trained in network.model.state_dict().items():
        assert (run.weights[f"server.{name}"] - trained).abs().max() < 1e-4, name
    (weight,) = network.user.parameters()
    for layer in run.layers[-count:]:
        assert (layer[LINEAR] - weight.T).abs().max() < 1e-4
    assert len(run.layers) == count * ROUNDS
