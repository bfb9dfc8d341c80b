"""``combine``: replies that passed the checks become one model, or one for each client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp.strategy.strategy import Strategy

from flower_graph.client.adaptor import make_client_app
from flower_graph.config.robust import Robust
from flower_graph.errors import NoClientsError
from flower_graph.messages.averaging import Enrolment
from flower_graph.messages.fields import Resume
from flower_graph.privacy.central import CentralNoise
from flower_graph.report.rounds import RoundReport
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.server.averaging_replies import ClientReply, Combined
from flower_graph.server.robust import make_robust
from flower_graph.simulation import InProcessGrid


class Client(NumPyClient):
    """Adds its number plus one to the model, and says what it was sent."""

    def __init__(self, clients: list[int], seen: list[Any], extra: Any) -> None:
        self.clients, self.seen, self.extra = clients, seen, extra

    def get_properties(self, config):
        if config.get("resume-round"):
            self.seen.append(Resume.from_config(config))
        return Enrolment(self.clients).to_config()

    def fit(self, parameters, config):
        self.seen.append(("train", config["server-round"], self.clients[0], parameters[0][0]))
        values = parameters[0] + np.float32(self.clients[0] + 1)
        if self.extra is None:
            return [values], 1, {"number": 1.0}
        names = ["arrays/w", "extras/side"]
        return [values, np.asarray(self.extra)], 1, {"number": 1.0, "array-names": names}

    def evaluate(self, parameters, config):
        self.seen.append(("evaluate", config["server-round"], self.clients[0], parameters[0][0]))
        return float(parameters[0][0]), 1, {}


class Reporting(ReportedFedAvg):
    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, Any]:
        names = ("train_accuracy", "val_accuracy", "test_accuracy")
        loss, number = evaluated.get("loss"), trained.get("number")
        return {"loss": loss, "cross_entropy": loss, "regulariser": number} | dict.fromkeys(
            names, math.nan
        )


class Own(Reporting):
    """Gives each client back what it sent, ten times."""

    personal = True

    def combine(self, replies: Any) -> Combined:
        return {reply.client: {"w": 10 * reply.arrays["w"]} for reply in replies}


def run(
    strategy: ReportedFedAvg,
    rounds: int = 1,
    clients: list[list[int]] | None = None,
    extra: Any = None,
    resume: bool = False,
) -> tuple[list[RoundReport], list[Any]]:
    hosted, seen, reports = clients or [[0], [1], [2]], list[Any](), list[RoundReport]()

    def client_fn(context: Context) -> Client:
        return Client(hosted[int(context.node_config["partition-id"])], seen, extra)

    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=len(hosted))
    start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    strategy.start(grid, start, rounds, 5.0, on_round=reports.append, resume=resume)
    return reports, seen


def of_kind(seen: list[Any], kind: str, number: int) -> dict[int, float]:
    told = (one for one in seen if not isinstance(one, Resume))
    return {
        client: float(value) for what, at, client, value in told if (what, at) == (kind, number)
    }


def test_each_client_is_sent_its_own_arrays_and_measures_them():
    strategy = Own()
    reports, seen = run(strategy, 2)
    assert of_kind(seen, "train", 1) == {0: 0, 1: 0, 2: 0}
    assert of_kind(seen, "evaluate", 1) == {0: 10, 1: 20, 2: 30}
    assert of_kind(seen, "train", 2) == {0: 10, 1: 20, 2: 30}
    assert of_kind(seen, "evaluate", 2) == {0: 110, 1: 220, 2: 330}
    assert [report.loss for report in reports] == [20, 220]
    assert [report.regulariser for report in reports] == [1, 1]
    assert {name: values[0] for name, values in strategy.weights().items()} == {
        "client-0.w": 110,
        "client-1.w": 220,
        "client-2.w": 330,
    }
    size = strategy.arrays.count_bytes()
    assert strategy.payload == {"up": {"weights": 6 * size}, "down": {"weights": 6 * size}}


def test_who_does_not_take_part_keeps_its_own():
    strategy = Own(participation=0.5, seed=1)
    _, seen = run(strategy, 6, [[c] for c in range(4)])
    had = dict.fromkeys(range(4), 0.0)
    for number in range(1, 7):
        drawn = of_kind(seen, "train", number)
        assert len(drawn) == 2 and drawn == {client: had[client] for client in drawn}
        had |= {client: 10 * (value + client + 1) for client, value in drawn.items()}
        assert of_kind(seen, "evaluate", number) == pytest.approx(had)


def test_personal_models_are_saved_and_resumed(tmp_path: Path):
    whole = Own()
    run(whole, 4)
    run(Own(checkpoint_dir=tmp_path, checkpoint_every=2), 2)
    again = Own(checkpoint_dir=tmp_path, checkpoint_every=2)
    _, seen = run(again, 4, resume=True)
    assert of_kind(seen, "train", 3) == {0: 110, 1: 220, 2: 330}
    wanted = {name: values.tolist() for name, values in whole.weights().items()}
    assert {name: values.tolist() for name, values in again.weights().items()} == wanted
    assert again.payload == whole.payload


def test_a_supernode_of_several_clients_takes_no_part_with_personal_models():
    reports, seen = run(Own(), 1, [[0], [1, 2]])
    assert of_kind(seen, "train", 1).keys() == of_kind(seen, "evaluate", 1).keys() == {0}
    assert "it hosts 2 clients" in reports[0].rejected[0]["reason"]
    with pytest.raises(NoClientsError, match="it needs a SuperNode for each"):
        run(Own(), 1, [[0, 1], [2, 3]])


def test_one_set_for_all_by_hand():
    class Largest(Reporting):
        def combine(self, replies: Any) -> Combined:
            assert [reply.clients for reply in replies] == [(0,), (1, 5), (2,)]
            assert replies[0].num_examples == 1 and replies[0].metrics == {"number": 1.0}
            with pytest.raises(ValueError, match="not of one"):
                _ = replies[1].client
            return {"w": np.max([reply.arrays["w"] for reply in replies], axis=0).astype("f8")}

    strategy = Largest()
    reports, seen = run(strategy, 2, [[0], [1, 5], [2]])
    assert of_kind(seen, "train", 2) == {0: 3, 1: 3, 2: 3}
    assert strategy.weights()["w"].dtype == np.float32
    assert reports[0].regulariser == 1


def test_what_is_changed_in_one_message_changes_no_other():
    class Changes(Reporting):
        def configure_train(self, server_round, arrays, config, grid):
            messages = super().configure_train(server_round, arrays, config, grid)
            (first, *_) = messages
            first.content["arrays"]["w"] = Array(np.full(2, 7, np.float32))
            first.content["config"]["secret"] = "mine"
            first.content["arrays"]["w"].shape = (2,)
            assert "secret" not in messages[1].content["config"]
            return messages

    strategy = Changes()
    _, seen = run(strategy)
    assert of_kind(seen, "train", 1) == {0: 7, 1: 0, 2: 0}
    assert of_kind(seen, "evaluate", 1) == pytest.approx(dict.fromkeys(range(3), 13 / 3))


class Side(Reporting):
    def extras(self):
        return {"side": (2, 2)}

    def combine(self, replies: Any) -> Combined:
        self.sides = [reply.extras["side"] for reply in replies]
        return super().combine(replies)


def test_extras_are_checked_counted_and_given_to_combine():
    strategy = Side()
    run(strategy, 1, extra=np.eye(2))
    assert len(strategy.sides) == 3 and all((side == np.eye(2)).all() for side in strategy.sides)
    assert strategy.weights()["w"].tolist() == [2, 2]
    up = strategy.payload["up"]
    assert up["extras"] == 3 * (len("side") + 128 + 32)
    assert strategy.payload["down"] == {"weights": up["weights"]}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (None, "array records ['arrays'], expected ['arrays', 'extras']"),
        (np.ones(3), "extras/side has shape (3,), expected (2, 2)"),
        (np.full((2, 2), np.nan), "extras/side has NaN or infinite values"),
    ],
)
def test_bad_extras_are_left_out(extra: Any, reason: str):
    reports, _ = run(Side(), 1, extra=extra)
    assert len(reports[0].rejected) == 3 and reason in reports[0].rejected[0]["reason"]


def test_extras_that_nobody_asked_for_are_refused():
    reports, _ = run(Reporting(), 1, extra=np.ones(2))
    assert "expected ['arrays']" in reports[0].rejected[0]["reason"]


BAD: dict[str, tuple[Any, str]] = {
    "names": (lambda replies: {"v": np.zeros(2)}, r"combine: arrays \['v'\], expected \['w'\]"),
    "shape": (lambda replies: {0: {"w": np.zeros(3)}}, r"client 0: w has shape \(3,\)"),
    "nan": (lambda replies: {"w": np.full(2, np.nan)}, "combine: w has NaN or infinite values"),
    "stranger": (lambda replies: {9: {"w": np.zeros(2)}}, r"clients \[9\], unknown here"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_combine_gives_is_checked(what: str):
    made, message = BAD[what]

    class Wrong(Own):
        def combine(self, replies: list[ClientReply]) -> Combined:  # type: ignore[override]
            result: Combined = made(replies)
            return result

    with pytest.raises(ValueError, match=message):
        run(Wrong())


def test_personal_models_are_declared():
    class Shared(Own):
        personal = False

    with pytest.raises(ValueError, match="it needs personal = True"):
        run(Shared())


def test_noise_or_a_robust_average_that_would_have_no_effect_is_refused():
    noisy = Own()
    noisy.central_noise = CentralNoise(1.0, 1.0)
    with pytest.raises(ValueError, match="central_noise has no effect"):
        run(noisy)
    with pytest.raises(ValueError, match="average: krum has no effect"):
        run(make_robust(Own, Robust("krum")))


def test_flowers_own_loop_sends_personal_arrays_too():
    seen: list[Any] = []

    def client_fn(context: Context) -> Client:
        return Client([int(context.node_config["partition-id"])], seen, None)

    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=2)
    start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    Strategy.start(Own(), grid, start, num_rounds=2, train_config=ConfigRecord())
    assert of_kind(seen, "train", 2) == {0: 10, 1: 20}


# --- patience

ACCURACY = [0.1, 0.3, float("nan"), 0.3, 0.2, 0.4, 0.1, 0.1, 0.1, 0.9]


class Patient(Reporting):
    """Is told how good each round is."""

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, Any]:
        value = ACCURACY[self._round.number - 1]
        return super().report_fields(trained, evaluated) | {"val_accuracy": value}


@pytest.mark.parametrize(("patience", "rounds"), [(0, 10), (1, 3), (3, 5), (4, 10), (9, 10)])
def test_a_run_ends_when_validation_does_not_improve(patience: int, rounds: int):
    reports, _ = run(Patient(patience=patience), 10)
    assert len(reports) == rounds


def test_patience_lasts_over_a_resumed_run(tmp_path: Path):
    saving: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    run(Patient(patience=3, **saving), 4)
    again = Patient(patience=3, **saving)
    reports, _ = run(again, 10, resume=True)
    assert [report.round for report in reports] == [5] and again.best_round == 2
    # The last round is saved, though nobody knew before that it is the last.
    reports, seen = run(Patient(patience=3, **saving), 10, resume=True)
    assert reports == [] and {resume.server_round for resume in seen} == {5}
    reports, _ = run(Patient(patience=4, **saving), 10, resume=True)
    assert [report.round for report in reports] == [6, 7, 8, 9, 10]


def test_impossible_patience():
    with pytest.raises(ValueError, match="patience is -1, must be at least 0"):
        Patient(patience=-1)
