"""LocalSage+ and FedSage+: what they learn, what travels, and what goes wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sage_helpers import CLASSES, SETTINGS, networks, new_client, ring, run_sage
from sage_helpers import few_epochs as few_epochs

from flower_graph.strategies.fed_sage.client import SageClient
from flower_graph.strategies.fed_sage.networks import FEATURES, LATENT
from flower_graph.strategies.fed_sage.strategy import FedSage, LocalSage


@pytest.mark.parametrize("strategy", [LocalSage, FedSage])
def test_it_learns_with_odd_clients_among_them(strategy: type[LocalSage]) -> None:
    outcome = run_sage(strategy, rounds=40)
    first, last = outcome.reports[0], outcome.reports[-1]
    assert last.loss < 0.6 * first.loss
    assert last.train_accuracy > 0.8
    assert last.asked == last.answered == 6
    assert not last.rejected
    assert all(math.isfinite(r.loss) for r in outcome.reports)


def test_local_sage_sends_no_payload_and_fed_sage_all_of_it() -> None:
    assert run_sage(LocalSage).strategy.payload == {"up": {"weights": 0}, "down": {"weights": 0}}
    strategy = run_sage(FedSage, rounds=4).strategy
    state = {name: value.numel() for name, value in strategy.make_module().state_dict().items()}
    classifier = 4 * sum(count for name, count in state.items() if "generator" not in name)
    made = 4 * sum(state[f"generator.{name}"] for name in FEATURES)
    up, down = strategy.payload["up"], strategy.payload["down"]
    assert up["weights"] == down["weights"] > 4 * 6 * classifier
    assert up["gradients"] == 3 * 6 * 5 * made  # epochs, authors, the other clients
    assert down["gradients"] == 3 * 6 * made
    encoded = up["generators"] - 3 * 6 * made
    assert encoded > 0
    assert encoded % (3 * 4 * LATENT) == 0
    assert down["generators"] == 5 * up["generators"]


def test_fed_sage_averages_by_training_nodes() -> None:
    """One round, from one start: the mean of what each client learns alone on its own graph."""
    outcome = run_sage(FedSage, rounds=1)
    alone: dict[int, Any] = {}

    class Spy(SageClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            reply = super().fit(parameters, config)
            alone[self.graphs[0].client] = reply
            return reply

    again = run_sage(FedSage, rounds=1, supernodes=6, client=Spy)
    sizes = {ego.client: max(1, int(ego.train_mask.sum())) for ego in networks()}
    assert {client: reply[1] for client, reply in alone.items()} == sizes
    for place, (name, found) in enumerate(again.strategy.weights().items()):
        mean = sum(size * alone[client][0][place] for client, size in sizes.items())
        assert found == pytest.approx(mean / sum(sizes.values()), abs=1e-6)
        assert outcome.strategy.weights()[name] == pytest.approx(found, abs=1e-6)


def test_no_training_nodes_anywhere() -> None:
    egos = [ring(0, 6, labelled=False), ring(1, 1, labelled=False)]
    for strategy in (LocalSage, FedSage):
        outcome = run_sage(strategy, egos=egos)
        assert math.isnan(outcome.reports[-1].test_accuracy)


def test_a_faulty_supernode_is_named_and_left_out() -> None:
    """Of three, one sends NaN from its first training on, and fails when it is to compare."""

    class Faulty(SageClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, size, metrics = super().fit(parameters, config)
            if self.graphs[0].client == 0:
                arrays[0][:] = np.nan
            return arrays, size, metrics

        def compare(self, parameters: Any, config: Any) -> Any:
            if self.graphs[0].client == 0:
                raise RuntimeError("no room")
            return super().compare(parameters, config)

    first, *rest = run_sage(FedSage, supernodes=3, client=Faulty).reports
    assert any("no room" in entry["reason"] for entry in first.rejected)
    for report in rest:
        (entry,) = report.rejected
        assert "arrays/conv1.bias" in entry["reason"]
    assert [one["clients"] for one in report.participation["failed"]] == ["0,7"]
    assert math.isfinite(report.loss)


def test_arguments_are_checked() -> None:
    for name, value in (("participation", 0.0), ("min_nodes", 0)):
        with pytest.raises(ValueError, match=name):
            LocalSage(SETTINGS, **{name: value})
    for other in ({"num_features": 9}, {"num_classes": CLASSES - 1}):
        with pytest.raises(ValueError, match="client 0"):
            new_client(networks(), SETTINGS._replace(**other))


# State and checkpoints ------------------------------------------------------------------------
