"""Flower's own strategies and mods with our clients; what is tried elsewhere is on the page."""

import logging
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doc_helpers import DOCS, run_blocks
from ego_helpers import SETTINGS as EGO_SETTINGS
from ego_strategy_helpers import client_app as ego_app
from ego_strategy_helpers import seven_egos
from federation import METHODS, tried
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, arrays_size_mod, message_size_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    FedAdam,
    FedAvg,
    Krum,
    Strategy,
)
from graph_helpers import Outcome, small_graph
from relay_helpers import strategy_for
from structure_helpers import client_app as structure_app
from structure_helpers import settings_of

from flower_graph.client import adaptor as client
from flower_graph.errors import LegacyAppError, NoClientsError
from flower_graph.rng import generator
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls.strategy import StructureFedAvg, initial_arrays
from flower_graph.strategies.fedscem import EgoFedAvg, EgoModelClient

LEARNING = replace(EGO_SETTINGS, learning_rate=0.02, local_epochs=3)


def flower_egos(strategy: Strategy, rounds: int) -> tuple[dict[str, Any], list[float]]:
    """Run one of Flower's strategies over ego-networks: the model, and the losses."""
    arrays = EgoFedAvg(LEARNING).first_arrays()
    app = ego_app(seven_egos(), client=EgoModelClient, settings=LEARNING)
    grid = InProcessGrid(app, num_supernodes=7)
    result = strategy.start(grid, arrays, num_rounds=rounds)
    losses = [metrics["loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert result.arrays is not None
    return {name: array.numpy() for name, array in result.arrays.items()}, losses


def test_flowers_fedavg_is_ours() -> None:
    found, losses = flower_egos(FedAvg(), 2)
    app = ego_app(seven_egos(), client=EgoModelClient, settings=LEARNING)
    ours = Outcome(EgoFedAvg(LEARNING), InProcessGrid(app, num_supernodes=7)).run(2)
    for name, values in ours.weights.items():
        assert np.allclose(found[name], values, atol=1e-6)
    assert len(losses) == len(ours.reports) == 2


@pytest.mark.parametrize("strategy", [FedAdam(eta=0.02), Krum(num_malicious_nodes=1)])
def test_others_of_flowers_learn_with_ego_networks(strategy: Strategy) -> None:
    _, losses = flower_egos(strategy, 5)
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_adaptive_clipping_bounds_what_a_client_of_fedgls_sends() -> None:
    """To a norm that is far too small, and adapts."""
    start = initial_arrays(settings_of())
    wrapped = DifferentialPrivacyClientSideAdaptiveClipping(
        FedAvg(), 0.01, 6, initial_clipping_norm=0.01, clip_norm_lr=1.0, clipped_count_stddev=0.01
    )
    app = structure_app(train_mods=[adaptiveclipping_mod])
    result = wrapped.start(InProcessGrid(app, num_supernodes=6), start, num_rounds=1)
    assert result.arrays is not None
    moved = sum(
        float(((result.arrays[name].numpy() - array.numpy()) ** 2).sum())
        for name, array in start.items()
    )
    assert 0 < moved**0.5 < 0.02
    assert wrapped.clipping_norm != 0.01  # it has heard from the clients


def ours(name: str) -> Any:
    if name == "nFedGNN":
        return strategy_for(small_graph(12))
    return EgoFedAvg(LEARNING) if name == "FedAvg" else StructureFedAvg(settings_of())


STRATEGIES = ("nFedGNN", "FedAvg", "FedGLS")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_server_of_flowers_older_interface_is_refused_by_name(name: str) -> None:
    legacy = import_module("flwr.server")
    components = legacy.ServerAppComponents(
        strategy=ours(name), config=legacy.ServerConfig(num_rounds=1)
    )
    app = legacy.ServerApp(server_fn=lambda context: components)
    grid = InProcessGrid(
        ego_app(seven_egos(), client=EgoModelClient, settings=LEARNING), num_supernodes=2
    )
    with pytest.raises(LegacyAppError, match="Message API"):
        app(grid, Context(1, 1, {}, RecordDict(), {}))


@pytest.mark.parametrize(
    ("name", "app"),
    [(name, ClientApp(client_fn=lambda context: None)) for name in STRATEGIES]
    + [("nFedGNN", ClientApp())],  # where weights are averaged it may be any that trains
)
def test_clients_of_others_are_refused_by_name(name: str, app: ClientApp) -> None:
    with pytest.raises(NoClientsError, match="no SuperNode"):
        ours(name).start(InProcessGrid(app, num_supernodes=2), num_rounds=1, timeout=5)


def test_a_personalised_method_is_in_an_app_by_the_front_door() -> None:
    def graph_of(client: int) -> SimpleNamespace:
        draw = generator(client, "graph")
        y = torch.arange(30) % 3
        ends = torch.randint(30, (2, 60), generator=draw)
        x = 4 * torch.nn.functional.one_hot(y, 8) + torch.rand(30, 8, generator=draw)
        return SimpleNamespace(x=x, y=y, edge_index=torch.cat([ends, ends.flip(0)], 1))

    page = run_blocks(DOCS / "existing-app.md", 2, slice(0, 1), {"graph_of": graph_of})
    grid = InProcessGrid(page["client_app"], num_supernodes=3)
    reports = Outcome(page["strategy"], grid).run(4, timeout=20).reports
    assert len(reports) == 4 and not any(one.skipped or one.rejected for one in reports)
    assert reports[-1].train_accuracy > 0.6


# One method that relays, one whose sums have stages
@pytest.mark.parametrize("name", tried(METHODS, slow=["fedscem"]))
def test_mods_that_measure_around_the_clients_of_every_method(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = METHODS[name].whole("rounds=3")

    class Sized(client._ActingClientApp):
        def __init__(self, mods: Any = None) -> None:
            super().__init__(mods=[message_size_mod, arrays_size_mod, *mods])

    monkeypatch.setattr(client, "_ActingClientApp", Sized)
    with caplog.at_level(logging.INFO, "flwr"):
        sized = METHODS[name].run(tmp_path, "rounds=3")
    assert sized.figures == pytest.approx(plain.figures, nan_ok=True, abs=1e-5)
    sizes = [re.search(r"message size: (\d+) bytes", one.getMessage()) for one in caplog.records]
    assert sum(found is not None for found in sizes) >= 4
