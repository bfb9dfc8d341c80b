"""Who hosts whom: asked once; doubled clients are refused; who does not say is one client."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import NoClientsError
from flower_graph.messages.arrays import pack_integers
from flower_graph.messages.averaging import Enrolment
from flower_graph.messages.keys import CLIENTS, CONFIG, NUM_EXAMPLES
from flower_graph.report.rounds import RoundReport
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.server.ledger import Participation
from flower_graph.server.membership import Membership
from flower_graph.simulation import InProcessGrid

Deal = list[list[int]]  # clients of each SuperNode


class Client(NumPyClient):
    """Adds one to the model; says whom it hosts if it hosts anybody."""

    def __init__(self, clients: list[int], bad: Callable[[str, int], Any]) -> None:
        self.clients, self.bad = clients, bad

    def get_properties(self, config: Any) -> Any:
        self.bad("query", int(config.get("resume-round", 0)))
        return Enrolment(self.clients).to_config() if self.clients else {}

    def fit(self, parameters: Any, config: Any) -> Any:
        more = self.bad("train", config["server-round"]) or {}
        return [parameters[0] + 1], max(len(self.clients), 1), more

    def evaluate(self, parameters: Any, config: Any) -> Any:
        self.bad("evaluate", config["server-round"])
        return float(parameters[0].sum()), max(len(self.clients), 1), {}


class Simple(ReportedFedAvg):
    """Reports the loss."""

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, Any]:
        names = ("regulariser", "train_accuracy", "val_accuracy", "test_accuracy")
        loss = evaluated.get("loss", math.nan)
        return {"loss": loss, "cross_entropy": loss, **dict.fromkeys(names, math.nan)}


def app_of(deal: Deal, bad: Callable[[int, str, int], Any] | None = None) -> ClientApp:
    """``bad`` is called with place, kind of message and round before each answer."""

    def client_fn(context: Context) -> Client:
        place = int(context.node_config["partition-id"])
        return Client(deal[place], lambda what, number: bad and bad(place, what, number))

    return make_client_app(client_fn)


def run(
    deal: Deal,
    rounds: int = 1,
    bad: Callable[[int, str, int], Any] | None = None,
    make_grid: type[InProcessGrid] = InProcessGrid,
    app: ClientApp | None = None,
    **options: Any,
) -> tuple[ReportedFedAvg, list[RoundReport], list[int]]:
    reports: list[RoundReport] = []
    grid = make_grid(app or app_of(deal, bad), num_supernodes=len(deal))
    strategy, start = Simple(**options), ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    strategy.start(grid, start, rounds, timeout=0.05, on_round=reports.append)
    return strategy, reports, list(grid.contexts)


def took_part(report: RoundReport) -> Participation:
    return Participation.from_record(report.participation)


def test_every_client_is_known_by_its_number() -> None:
    deal = [[4, 5, 6], [0], [2, 9]]
    strategy, (report,), ids = run(deal)
    assert strategy.session.members.clients == dict(zip(ids, deal, strict=True))
    assert took_part(report).answered == {0, 2, 4, 5, 6, 9}
    assert (report.asked, report.answered) == (6, 6)
    assert strategy.payload["up"]["weights"] == 6 * strategy.arrays.count_bytes()


def test_the_second_of_two_with_one_client_is_left_out_and_named() -> None:
    strategy, reports, ids = run([[0, 1], [1, 2], [3]], rounds=2)
    first, second = sorted(ids[:2])
    for report in reports:
        assert [entry["node"] for entry in report.rejected] == [second]
        assert f"client 1 is hosted by node {first} already" in report.rejected[0]["reason"]
        assert took_part(report).answered == {3, *strategy.session.members.clients[first]}
    assert second not in strategy.session.members.clients


def test_nobody_can_take_part() -> None:
    def fails(place: int, what: str, number: int) -> None:
        raise OSError("no data here")

    with pytest.raises(NoClientsError, match=r"no SuperNode can take part: .*no data here"):
        run([[0], [1]], bad=fails)


def test_one_that_fails_to_say_is_left_out_and_asked_again() -> None:
    asked: list[int] = []

    def fails(place: int, what: str, number: int) -> None:
        if (place, what) == (1, "query"):
            asked.append(number)
            if len(asked) < 3:
                raise OSError("not yet")

    _, reports, _ = run([[0], [1]], rounds=4, bad=fails)
    assert [sorted(took_part(report).answered) for report in reports] == [[0], [0], [0, 1], [0, 1]]
    assert "not yet" in reports[0].rejected[0]["reason"]
    assert len(asked) == 3


# Plain ClientApps --------------------------------------------------------------------------------


def plain_app() -> ClientApp:
    """Make one that has never heard of this library, nor of ``query``."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        values = message.content["arrays"]["w"].numpy() + 1
        arrays, metrics = ArrayRecord({"w": Array(values)}), MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1, "loss": 2.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def test_a_plain_client_app_is_an_unknown_client(caplog: pytest.LogCaptureFixture) -> None:
    strategy, reports, ids = run([[], []], rounds=3, app=plain_app())
    assert strategy.weights()["w"].tolist() == [3, 3]
    assert strategy.session.members.clients == {node: [] for node in ids}
    for report in reports:
        assert (report.asked, report.answered, report.rejected) == (2, 2, [])
        assert report.participation == {}
    for node in ids:
        assert caplog.text.count(f"node {node} does not say which clients it hosts") == 1


def test_a_plain_client_app_beside_others(tmp_path: Path) -> None:
    """It takes part in a run that saves checkpoints, and in one that goes on from them."""
    ours, plain = app_of([[0], []]), plain_app()

    class Both(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            return (ours, plain)[int(context.node_config["partition-id"])](message, context)

    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    run([[0], []], rounds=2, app=Both(), **saving)
    again = Simple(**saving)
    reports: list[RoundReport] = []
    grid = InProcessGrid(Both(), num_supernodes=2)
    start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    again.start(grid, start, 3, timeout=1, on_round=reports.append, resume=True)
    assert [report.round for report in reports] == [3]
    assert again.weights()["w"].tolist() == [3, 3]
    assert took_part(reports[0]).answered == {0}


# Who took part -----------------------------------------------------------------------------------


def test_draws_and_sums_do_not_depend_on_how_flower_numbers_supernodes() -> None:
    class Renumbered(InProcessGrid):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, seed=99, **more)

    deal = [[k] for k in range(7)]
    one, other = (
        run(deal, rounds=4, participation=0.5, make_grid=grid)
        for grid in (InProcessGrid, Renumbered)
    )
    assert set(one[2]).isdisjoint(other[2])
    assert [r.participation for r in one[1]] == [r.participation for r in other[1]]


def test_who_failed_and_why() -> None:
    def fails(place: int, what: str, number: int) -> Any:
        if (place, what, number) == (1, "train", 2):
            raise OSError("the disk is full")
        if (place, what, number) == (2, "train", 3):
            # One of its own, and one of somebody else's, for whom it cannot speak.
            return {"left-out": ["client 4: weights are not finite", "client 0: gone"]}
        return None

    _, reports, _ = run([[0], [1, 2], [3, 4]], rounds=3, bad=fails)
    one, two, three = map(took_part, reports)
    assert one.answered == {0, 1, 2, 3, 4}
    assert two.answered == {0, 3, 4}
    assert two.failed.keys() == {1, 2}
    assert all("the disk is full" in why for why in two.failed.values())
    assert three.answered == {0, 1, 2, 3}
    assert three.failed == {4: "weights are not finite"}
    assert not (one.left_out or two.left_out or three.left_out)


def test_all_are_gone_when_they_should_measure() -> None:
    class Renamed(InProcessGrid):
        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            answer = super().push_messages(messages)
            if messages and messages[0].metadata.message_type == "train" and 1 not in self.contexts:
                old = list(self.contexts.values())
                self.contexts = {
                    number: Context(one.run_id, number, one.node_config, one.state, {})
                    for number, one in enumerate(old, 1)
                }
            return answer

    strategy, reports, _ = run([[0], [1]], rounds=2, make_grid=Renamed)
    assert [report.answered for report in reports] == [0, 2]
    assert math.isnan(reports[0].loss)
    assert took_part(reports[0]).answered == {0, 1}  # their training counted
    assert strategy.session.members.clients == {1: [0], 2: [1]}


# Replies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        (pack_integers(np.array([], np.int64)), "clients: there is no client"),
        (pack_integers(np.array([1, 1])), "clients: client 1 is there twice"),
        (pack_integers(np.array([-1])), "clients: -1 is below 0"),
        (b"123", "clients: expected 64-bit integers as bytes"),
        ("0,1", "clients: expected 64-bit integers as bytes"),
    ],
)
def test_answers_that_are_refused(clients: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Enrolment.read(RecordDict({CONFIG: ConfigRecord({CLIENTS: clients})}))


def test_answers_that_are_read() -> None:
    properties = Enrolment([3, 1], handled=4, most_examples=70).to_config()
    record = RecordDict({CONFIG: ConfigRecord(properties)})
    assert Enrolment.read(record) == Enrolment([1, 3], 4, 70)
    assert Enrolment.read(RecordDict()) == Enrolment()


@pytest.mark.parametrize("value", [0, -1, 2**53 + 1, 1.5, "many", True])
def test_examples_that_nobody_has(value: Any) -> None:
    said = Enrolment([1]).to_config() | {NUM_EXAMPLES: value}
    with pytest.raises(ValueError, match="num-examples: expected a positive number, got"):
        Enrolment.read(RecordDict({CONFIG: ConfigRecord(said)}))


class Weighing(Client):
    """Says what it weighs, and may then weigh more."""

    def __init__(self, clients: list[int], examples: int | None, heavy: tuple[str, int]) -> None:
        super().__init__(clients, lambda what, number: None)
        self.examples, self.heavy = examples, heavy

    def get_properties(self, config: Any) -> Any:
        return Enrolment(self.clients, most_examples=self.examples).to_config()

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, weight, more = super().fit(parameters, config)
        is_heavy = self.heavy == ("train", config["server-round"])
        return arrays, 10**12 if is_heavy else weight, more

    def evaluate(self, parameters: Any, config: Any) -> Any:
        loss, weight, more = super().evaluate(parameters, config)
        is_heavy = self.heavy == ("evaluate", config["server-round"])
        return loss, 10**12 if is_heavy else weight, more


def weighing(deal: Deal, examples: list[int] | None, heavy: tuple[str, int] = ("", 0)) -> ClientApp:
    """The SuperNode in place 1 weighs 10^12 in one answer."""

    def client_fn(context: Context) -> Client:
        place = int(context.node_config["partition-id"])
        own = None if examples is None else examples[place]
        return Weighing(deal[place], own, heavy if place == 1 else ("", 0))

    return make_client_app(client_fn)


@pytest.mark.parametrize(("most", "is_named"), [(80, False), (10**12, True)])
def test_who_says_that_nearly_all_examples_are_its_own(
    most: int, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    deal = [[0], [1]]
    run(deal, rounds=2, app=weighing(deal, [10, most]))
    named = [text for text in caplog.messages if f"says that it has {most} of {most + 10}" in text]
    assert len(named) == is_named


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_reply_weighs_no_more_than_was_said(kind: str) -> None:
    deal = [[0, 1], [2, 3], [4]]
    app = weighing(deal, [2, 2, 1], (kind, 2))
    _, reports, ids = run(deal, rounds=3, app=app)
    why = "num-examples is 1000000000000, its SuperNode has 2"
    why = why if kind == "train" else f"evaluate: {why}"
    assert [report.rejected for report in reports] == [[], [{"node": ids[1], "reason": why}], []]
    # Of those that do not say what they have, it is not known.
    _, reports, _ = run(deal, rounds=3, app=weighing(deal, None, (kind, 2)))
    assert not any(report.rejected for report in reports)


def test_the_order_is_that_of_the_clients() -> None:
    who = Membership()
    who.clients = {9: [5], 1: [], 4: [2, 8], 3: []}
    assert who.present([1, 3, 4, 9, 77]) == [4, 9, 1, 3]
    assert [who.count(node) for node in (4, 1, 77)] == [2, 1, 1]
