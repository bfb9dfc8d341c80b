"""Flower's FedAvg with checked replies and reports, by hand: a model of two numbers."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp.strategy import FedAdam, FedMedian, FedProx

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import NoClientsError
from flower_graph.report.rounds import RoundReport
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.simulation import InProcessGrid

Change = Callable[[int, int], Any]  # of node's place and round


class Client(NumPyClient):
    """Adds its place plus one to the model, and weighs as much."""

    def __init__(self, place: int, log: list[tuple[str, int, int]], bad: dict[str, Change]) -> None:
        self.place, self.log, self.bad = place, log, bad

    def fit(self, parameters, config):
        number = config["server-round"]
        self.log.append(("train", number, self.place))
        values = parameters[0] + np.float32(self.place + 1)
        weight, metrics = self.place + 1, {"number": float(number)}
        if "train" in self.bad:
            values, weight, more = self.bad["train"](self.place, number) or (values, weight, {})
            metrics |= more
        return [values], weight, metrics

    def evaluate(self, parameters, config):
        self.log.append(("evaluate", config["server-round"], self.place))
        loss = float(parameters[0].sum())
        if "evaluate" in self.bad:
            loss = self.bad["evaluate"](self.place, config["server-round"]) or loss
        return loss, 2, {"right": 0.5}


class Simple(ReportedFedAvg):
    """Reports the loss."""

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, Any]:
        nothing = dict.fromkeys(("train_accuracy", "val_accuracy", "test_accuracy"), math.nan)
        loss = evaluated.get("loss", math.nan)
        number = trained.get("number", math.nan)
        return {"loss": loss, "cross_entropy": loss, "regulariser": number, **nothing}


class Run:
    """A run over some nodes; ``bad`` says what goes wrong where."""

    def __init__(
        self,
        strategy: ReportedFedAvg,
        nodes: int = 3,
        rounds: int = 1,
        make_grid: type[InProcessGrid] = InProcessGrid,
        **bad: Change,
    ) -> None:
        self.log: list[tuple[str, int, int]] = []
        self.reports: list[RoundReport] = []
        self.strategy = strategy

        def client_fn(context: Context) -> Client:
            return Client(int(context.node_config["partition-id"]), self.log, bad)

        self.grid = make_grid(make_client_app(client_fn), num_supernodes=nodes)
        self.ids = list(self.grid.contexts)
        self.result = strategy.start(
            self.grid, start(), rounds, timeout=0.05, on_round=self.reports.append
        )

    @property
    def model(self) -> list[float]:
        (values,) = self.strategy.weights().values()
        return values.tolist()

    def trained(self, number: int) -> list[int]:
        return sorted(place for what, at, place in self.log if (what, at) == ("train", number))


def start() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(2, np.float32))})


def rejected(run: Run, number: int = 0) -> dict[int, str]:
    """Give the reasons of a round by the place of the node."""
    return {run.ids.index(e["node"]): e["reason"] for e in run.reports[number].rejected}


def test_the_mean_is_weighted_and_reported():
    run = Run(Simple(), rounds=2)
    # Each round (1 x 1 + 2 x 2 + 3 x 3) / 6 is added.
    assert run.model == pytest.approx([14 / 3] * 2)
    first, second = run.reports
    assert first.loss == pytest.approx(14 / 3) and second.loss == pytest.approx(28 / 3)
    assert (first.round, second.round) == (1, 2)
    assert (first.regulariser, second.regulariser) == (1, 2)
    assert (first.asked, first.answered, first.rejected, first.skipped) == (6, 6, [], "")
    arrays = run.result.arrays
    assert arrays is not None and arrays["w"].numpy().tolist() == run.model


def test_payload_counts_each_client_of_a_supernode_that_says_how_many_it_has():
    said = [4, 1, 2]
    values = np.zeros(2, np.float32)
    run = Run(Simple(), train=lambda place, _: (values, 1, {"clients": said[place]}))
    size = run.strategy.arrays.count_bytes()
    assert run.strategy.payload == {"up": {"weights": 7 * size}, "down": {"weights": 7 * size}}


def test_payload_is_the_models_once_each_way_and_wire_is_everything():
    run = Run(Simple(), rounds=2)
    size = run.strategy.arrays.count_bytes()
    assert run.strategy.payload == {"up": {"weights": 6 * size}, "down": {"weights": 6 * size}}
    wire = run.reports[-1].wire_bytes
    assert wire["down"] > 12 * size  # to train and to measure
    assert 6 * size < wire["up"] < wire["down"]
    assert run.reports[0].bytes["up"]["weights"] == 3 * size


BAD = {  # what is refused is shown in test_reply_checks.py
    "nan": (lambda v: (np.full(2, np.nan, np.float32), 1, {}), "NaN or infinite"),
    "error": (lambda v: 1 / 0, "error reply: ZeroDivisionError"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_reply_is_left_out_and_named(what: str, caplog: pytest.LogCaptureFixture):
    make, reason = BAD[what]
    run = Run(Simple(), train=lambda place, _: make(None) if place == 1 else None)
    assert run.model == pytest.approx([(1 * 1 + 3 * 3) / 4] * 2)
    assert rejected(run).keys() == {1} and reason in rejected(run)[1]
    assert run.reports[0].skipped == ""
    assert f"round 1: left out 1 (node {run.ids[1]})" in caplog.text


def test_without_a_usable_reply_the_last_model_stays():
    nan = np.full(2, np.nan, np.float32)
    run = Run(Simple(), rounds=3, train=lambda _, n: (nan, 1, {}) if n == 2 else None)
    assert run.model == pytest.approx([14 / 3] * 2)
    one, two, three = run.reports
    assert two.skipped == "none of 3 SuperNodes gave a usable answer to train"
    assert two.loss == one.loss and three.loss == pytest.approx(28 / 3)
    assert math.isnan(two.regulariser)
    assert len(two.rejected) == 3 and not one.rejected and not three.rejected


def test_clients_that_a_node_left_out_are_in_the_report():
    why = "client 3: weights are not finite"

    def fit(place: int, _: int) -> Any:
        more = {"left-out": [why]} if place == 2 else {}
        return np.full(2, place, np.float32), 1, more

    run = Run(Simple(), train=fit)
    assert run.model == [1, 1]  # what the node sent counts
    assert rejected(run) == {2: why}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_measurement_that_is_no_number_is_left_out(loss: float):
    run = Run(Simple(), evaluate=lambda place, _: loss if place == 0 else None)
    assert rejected(run) == {0: f"evaluate: loss is {loss}"}
    (report,) = run.reports
    assert report.loss == pytest.approx(14 / 3)
    assert (report.asked, report.answered, report.skipped) == (5, 4, "")


def test_nobody_measures():
    run = Run(Simple(), evaluate=lambda *_: math.nan)
    assert math.isnan(run.reports[0].loss)
    assert (run.reports[0].asked, run.reports[0].answered) == (3, 0)


# --- who is asked


def test_participation_is_drawn_by_seed_and_round():
    def draws(seed: int) -> list[list[int]]:
        run = Run(Simple(participation=0.5, seed=seed), nodes=6, rounds=4)
        assert [report.answered for report in run.reports] == [12] * 4  # all measure
        return [run.trained(number) for number in range(1, 5)]

    random.seed(1)
    first = draws(0)
    random.seed(2)
    assert draws(0) == first  # the global generator plays no part
    assert all(len(drawn) == 3 for drawn in first)
    assert len({tuple(drawn) for drawn in first}) > 1
    assert draws(1) != first


def test_a_small_share_still_asks_one():
    assert len(Run(Simple(participation=0.01), nodes=3).trained(1)) == 1


def test_min_nodes_are_waited_for_not_asked():
    run = Run(Simple(participation=0.5, min_nodes=4), nodes=4)
    assert len(run.trained(1)) == 2


def test_too_few_nodes_end_the_run_in_time():
    with pytest.raises(NoClientsError, match=r"3 of at least 4 nodes connected within 0\.05 s"):
        Run(Simple(min_nodes=4), nodes=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participation": 0}, "participation: 0 is not above 0 and at most 1"),
        ({"participation": 1.5}, "participation: 1.5 is not above 0"),
        ({"min_nodes": 0}, "min_nodes: 0 is not at least 1"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Simple(**options)


def test_no_rounds():
    with pytest.raises(ValueError, match="num_rounds: 0 is not at least 1"):
        Run(Simple(), rounds=0)


# --- other strategies


class Proximal(Simple, FedProx):
    """FedProx with reports."""


class Median(Simple, FedMedian):
    """FedMedian with reports."""


class Adaptive(Simple, FedAdam):
    """FedAdam with reports."""


def test_any_strategy_that_averages_may_do_it():
    with_term = Run(Proximal(proximal_mu=0.25))
    assert with_term.model == Run(Simple()).model
    assert Run(Median()).model == [2, 2]
    run = Run(Adaptive(eta=0.1, tau=1e-3), rounds=2)
    assert len(run.reports) == 2 and run.reports[1].loss > run.reports[0].loss > 0


def test_a_subclass_says_what_is_reported():
    with pytest.raises(NotImplementedError, match="ReportedFedAvg does not say"):
        Run(ReportedFedAvg())


def test_by_default_a_line_is_logged(caplog: pytest.LogCaptureFixture):
    run = Run(Simple())
    with caplog.at_level(logging.INFO, "flower_graph.server"):
        run.strategy.start(run.grid, start(), 1, timeout=1)
    assert "round 1/1  loss 4.667" in caplog.text
