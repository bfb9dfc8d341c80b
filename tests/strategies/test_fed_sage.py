"""LocalSage+ and FedSage+: what they learn, what travels, and what goes wrong."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from sage_helpers import (
    CLASSES,
    FEATURES,
    SETTINGS,
    client_app,
    networks,
    ring,
    run_sage,
)

from flower_graph.errors import CheckpointError, NoClientsError
from flower_graph.records.participation import Participation
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fed_sage.cohort import CLASSIFIER_NAMES, FEATURE_NAMES
from flower_graph.strategies.fed_sage.cohort_client import SageClient
from flower_graph.strategies.fed_sage.messages import read_settings
from flower_graph.strategies.fed_sage.neighbour_generation import LATENT
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
    assert run_sage(LocalSage).strategy.payload == {"up": {}, "down": {}}
    strategy = run_sage(FedSage, rounds=4).strategy
    count = {name: int(np.prod(shape)) for name, shape in strategy.shapes.items()}
    classifier = 4 * sum(count[name] for name in CLASSIFIER_NAMES)
    made = 4 * sum(count[name] for name in FEATURE_NAMES)
    up, down = strategy.payload["up"], strategy.payload["down"]
    assert up["weights"] == down["weights"] == down["evaluation"] == 4 * 6 * classifier
    assert up["judgements"] == 3 * 6 * 5 * made  # epochs, authors, the other clients
    assert down["judgements"] == 3 * 6 * made
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
            alone[int(self.clients[0])] = reply
            return reply

    again = run_sage(FedSage, rounds=1, supernodes=6, client=Spy)
    sizes = {ego.client: int(ego.train_mask.sum()) for ego in networks()}
    assert {client: reply[1] for client, reply in alone.items()} == sizes
    for place, name in enumerate(CLASSIFIER_NAMES):
        mean = sum(size * alone[client][0][place] for client, size in sizes.items())
        wanted = torch.from_numpy(mean / sum(sizes.values()))
        torch.testing.assert_close(again.strategy.weights()[name], wanted.float())
        torch.testing.assert_close(outcome.strategy.weights()[name], wanted.float())


def test_no_training_nodes_anywhere() -> None:
    egos = [ring(0, 6, labelled=False), ring(1, 1, labelled=False)]
    for strategy in (LocalSage, FedSage):
        outcome = run_sage(strategy, egos=egos)
        assert math.isnan(outcome.reports[-1].test_accuracy)


def test_a_message_that_comes_twice_is_applied_once() -> None:
    """Every message is handled twice; the second reply is the one that counts."""

    class Twice(SageClient):
        pass

    def double(name: str) -> Any:
        def method(self: SageClient, parameters: Any, config: Any) -> Any:
            getattr(SageClient, name)(self, [p.copy() for p in parameters], dict(config))
            return getattr(SageClient, name)(self, parameters, config)

        return method

    for name in ("generate", "judge", "fit", "evaluate"):
        setattr(Twice, name, double(name))
    twice, once = run_sage(FedSage, client=Twice), run_sage(FedSage)
    assert torch.equal(twice.figures, once.figures)


def test_a_faulty_supernode_is_named_and_left_out() -> None:
    """Of three, one sends NaN from its first training on, and fails when it is to judge."""

    class Faulty(SageClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, size, metrics = super().fit(parameters, config)
            if 0 in self.clients:
                arrays[0][:] = np.nan
            return arrays, size, metrics

        def judge(self, parameters: Any, config: Any) -> Any:
            if 0 in self.clients:
                raise RuntimeError("no room")
            return super().judge(parameters, config)

    first, *rest = run_sage(FedSage, supernodes=3, client=Faulty).reports
    assert any("no room" in entry["reason"] for entry in first.rejected)
    for report in rest:
        assert [entry["reason"] for entry in report.rejected] == [
            "arrays/classifier-1.weight has NaN or infinite values in float32"
        ]
    assert report.answered < report.asked == 6
    assert math.isfinite(report.loss)


@pytest.mark.parametrize("strategy", [LocalSage, FedSage])
def test_a_supernode_that_comes_later_trains_its_generator_first(
    strategy: type[LocalSage],
) -> None:
    class Late(InProcessGrid):
        """Its last node appears once somebody has trained."""

        trained = False

        def get_node_ids(self) -> list[int]:
            return super().get_node_ids()[: None if self.trained else -1]

        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            self.trained |= messages[0].metadata.message_type == "train"
            return super().push_messages(messages)

    outcome = run_sage(strategy, supernodes=3, make_grid=Late)
    assert [report.answered for report in outcome.reports] == [4, 6, 6, 6]
    assert not any(report.rejected for report in outcome.reports)


def test_other_sizes_take_no_part() -> None:
    with pytest.raises(NoClientsError, match="it has 8 features and 3 classes, expected 9 and 3"):
        run_sage(settings=SETTINGS._replace(num_features=FEATURES + 1))
    with pytest.raises(NoClientsError, match=f"{CLASSES} classes, expected {FEATURES} and 4"):
        run_sage(settings=SETTINGS._replace(num_classes=CLASSES + 1))


def test_arguments_are_checked() -> None:
    for name, value in (("participation", 0.0), ("min_nodes", 0), ("generator_epochs", 0)):
        with pytest.raises(ValueError, match=f"{name}: {value}"):
            LocalSage(SETTINGS, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(NoClientsError, match="clients"):
        run_sage(egos=[ring(2, 5), ring(2, 5)], supernodes=1)


@pytest.mark.parametrize("strategy", [LocalSage, FedSage])
def test_flowers_own_steps_give_the_same(strategy: type[LocalSage]) -> None:
    grid = InProcessGrid(client_app(networks()), num_supernodes=2)
    own = strategy(SETTINGS, generator_epochs=3)
    found = []
    for server_round in (1, 2):
        messages: list[Message] = list(
            own.configure_train(server_round, ArrayRecord(), ConfigRecord(), grid)
        )
        replies = grid.send_and_receive(messages)
        _, metrics = own.aggregate_train(server_round, replies)
        assert metrics is not None
        found.append(metrics["loss"])
    assert found == [r.loss for r in run_sage(strategy, rounds=2).reports]


# State and checkpoints ------------------------------------------------------------------------


def test_what_does_not_fit(tmp_path: Path) -> None:
    own: dict[str, Any] = {"client": partial(SageClient, checkpoint_dir=tmp_path)}
    own |= {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    run_sage(LocalSage, rounds=2, **own)
    with pytest.raises(CheckpointError, match="its strategy is LocalSage, this run's is FedSage"):
        run_sage(FedSage, resume=True, **own)


@pytest.mark.parametrize("strategy", [LocalSage, FedSage])
def test_a_training_that_failed_changes_nothing(strategy: type[LocalSage]) -> None:
    """In round 2 all clients fail once, half way; asked again, they train as if nothing was."""
    failed: list[int] = []

    class Fails(SageClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            number = int(config["server-round"])
            if number == 2 and self.clients[0] not in failed:
                failed.append(int(self.clients[0]))
                with pytest.raises(OSError, match="full"):
                    self._half(config)
            return super().fit(parameters, config)

        def _half(self, config: Any) -> None:
            with self._opened(read_settings(config)) as cohort:
                cohort.train(2, torch.arange(len(self.clients)))
                raise OSError("the disk is full")

    outcome = run_sage(strategy, client=Fails)
    assert len(failed) == 2
    assert torch.equal(outcome.figures, run_sage(strategy).figures)


@pytest.mark.parametrize("strategy", [LocalSage, FedSage])
def test_a_supernode_that_has_lost_everything_begins_anew(
    strategy: type[LocalSage], caplog: pytest.LogCaptureFixture
) -> None:
    class Forgets(InProcessGrid):
        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            kinds = {m.metadata.message_type for m in messages}
            if kinds == {"train"} and {m.metadata.group_id for m in messages} == {"2"}:
                next(iter(self.contexts.values())).state.clear()
            return super().push_messages(messages)

    outcome = run_sage(strategy, make_grid=Forgets)
    who = [Participation.from_record(report.participation) for report in outcome.reports]
    assert [len(one.answered) for one in who] == [6, 3, 6, 6]
    assert all("StateLostError" in why for why in who[1].failed.values())
    assert "has lost its state: its clients begin anew" in caplog.text
