"""Flower's FedAvg with checked replies and reports, by hand; ``combine`` in its place."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from averaging_helpers import Client, Run, Simple, app_of, good
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedAdam, FedMedian

from flower_graph.client.adaptor import make_client_app
from flower_graph.config.common import RobustSection
from flower_graph.errors import ClientBugError, NoClientsError
from flower_graph.flower_compat import stamp
from flower_graph.privacy.noise import CentralNoise
from flower_graph.server.averaging import Combined, Wanted, check_replies, make_robust
from flower_graph.wire.exchange import MAX_NAMED, few
from flower_graph.wire.ledger import reply_bytes

pytestmark = pytest.mark.usefixtures("identity")
NAN = np.full(2, np.nan, np.float32)
THREE = [[0], [1], [2]]  # SuperNodes that say whom they host


def test_the_mean_is_weighted_reported_and_counted():
    run = Run(Simple(), rounds=2)
    # Each round (1 x 1 + 2 x 2 + 3 x 3) / 6 is added.
    assert run.model == pytest.approx([14 / 3] * 2)
    first, second = run.reports
    assert first.loss == pytest.approx(7 / 3) and second.loss == pytest.approx(14 / 3)
    assert (first.round, second.round) == (1, 2)
    assert (first.regulariser, second.regulariser) == (1, 2)
    assert (first.asked, first.answered, first.rejected, first.skipped) == (3, 3, [], "")
    arrays = run.result.arrays
    assert arrays is not None and arrays["w"].numpy().tolist() == run.model
    # Payload is the models once each way, wire everything.
    size = run.strategy.arrays.count_bytes()
    assert run.strategy.payload == {"up": {"weights": 6 * size}, "down": {"weights": 6 * size}}
    assert first.bytes["up"]["weights"] == 3 * size
    assert second.wire_bytes["down"] > 12 * size  # to train and to measure
    assert 6 * size < second.wire_bytes["up"] < second.wire_bytes["down"]


def test_bad_replies_are_left_out_and_without_a_usable_one_the_last_model_stays(
    caplog: pytest.LogCaptureFixture,
):
    spoilt = {1: [1], 2: [0, 1, 2], 3: []}

    def bad(place: int, kind: str, number: int) -> Any:
        return (NAN, 1, {}) if kind == "train" and place in spoilt[number] else None

    run = Run(Simple(), rounds=3, bad=bad)
    assert run.model == pytest.approx([10 / 4 + 14 / 6] * 2)
    one, two, three = run.reports
    assert run.rejected().keys() == {1} and "NaN or infinite" in run.rejected()[1]
    assert f"round 1: left out 1 (node {run.ids[1]})" in caplog.text
    assert "none of 3" in two.skipped and not one.skipped and math.isnan(two.regulariser)
    assert two.loss == one.loss and three.loss == pytest.approx(10 / 4 + 14 / 6)
    assert [len(report.rejected) for report in run.reports] == [1, 3, 0]


@pytest.mark.parametrize(("places", "wanted"), [({0}, 7 / 3), ({0, 1, 2}, math.nan)])
def test_a_measurement_that_is_no_number_is_left_out(places: set[int], wanted: float):
    def bad(place: int, kind: str, number: int) -> Any:
        return (math.inf, 2) if kind == "evaluate" and place in places else None

    run = Run(Simple(), bad=bad)
    assert run.rejected() == dict.fromkeys(places, "evaluate: loss is inf")
    (report,) = run.reports
    assert report.loss == pytest.approx(wanted, nan_ok=True)
    assert (report.answered, report.skipped) == (3, ""), "their training counts"


# Who is asked ------------------------------------------------------------------------------------


def test_participation_is_drawn_by_seed_and_round():
    def draws(seed: int) -> list[list[int]]:
        run = Run(Simple(participation=0.5, seed=seed), 6, rounds=4)
        assert [report.answered for report in run.reports] == [3] * 4
        return [sorted(run.got("train", number)) for number in range(1, 5)]

    random.seed(1)
    first = draws(0)
    random.seed(2)
    assert draws(0) == first  # the global generator plays no part
    assert all(len(drawn) == 3 for drawn in first)
    assert len({tuple(drawn) for drawn in first}) > 1
    assert draws(1) != first


def test_a_small_share_asks_one_and_min_nodes_are_only_waited_for():
    assert len(Run(Simple(participation=0.01), 4).got("train", 1)) == 1
    assert len(Run(Simple(participation=0.5, min_nodes=4), 4).got("train", 1)) == 2
    with pytest.raises(ValueError, match="num_rounds: 0"):
        Run(Simple(), rounds=0)
    with pytest.raises(NoClientsError, match=r"3.*4.*connected"):
        Run(Simple(min_nodes=4))


# One model for each client -----------------------------------------------------------------------


class Own(Simple):
    """Gives each client back what it sent, ten times."""

    personal = True

    def combine(self, replies: Any) -> Combined:
        return {reply.client: {"w": 10 * reply.arrays["w"]} for reply in replies}


def test_each_client_is_sent_its_own_arrays_and_measures_them():
    run = Run(Own(), THREE, 2)
    assert run.got("train", 1) == {0: 0, 1: 0, 2: 0}
    assert run.got("evaluate", 1) == run.got("train", 2) == {0: 10, 1: 20, 2: 30}
    assert run.got("evaluate", 2) == {0: 110, 1: 220, 2: 330}
    assert [report.loss for report in run.reports] == [20, 220]
    assert [report.regulariser for report in run.reports] == [1, 2]
    firsts = {name: float(values[0]) for name, values in run.strategy.weights().items()}
    assert firsts == {"client-0.w": 110, "client-1.w": 220, "client-2.w": 330}
    size = run.strategy.arrays.count_bytes()
    assert run.strategy.payload == {"up": {"weights": 6 * size}, "down": {"weights": 6 * size}}


class Median(Simple):
    """Not a sum of what clients send."""

    def combine(self, replies: Any) -> Combined:
        self.seen = [reply.client for reply in replies]
        for reply in replies:
            assert reply.num_examples == 1 and reply.metrics == {"number": self._number}
        return {"w": np.median([reply.arrays["w"] for reply in replies], axis=0).astype("f8")}


ASSIGNMENTS = [[[c] for c in range(8)], [[*range(8)]], [[0, 7, 2], [1], [6, 3, 5, 4]]]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_median_is_one_of_clients(share: float):
    runs = [Run(Median(participation=share, seed=2), hosted, 3) for hosted in ASSIGNMENTS]
    for run in runs:
        assert run.model == runs[0].model and run.who == runs[0].who
        assert [one.answered for one in run.reports] == [8 * share] * 3
        assert run.strategy.seen == sorted(run.who[-1].answered)  # type: ignore[attr-defined]
        assert [one.regulariser for one in run.reports] == [1, 2, 3]
        assert run.strategy.weights()["w"].dtype == np.float32
    if share == 1:
        assert runs[0].model == [13.5] * 2
        assert runs[2].got("train", 2) == dict.fromkeys(range(8), 4.5)


class Alone(Client):
    """Written before there were rows."""

    fit_each = None  # type: ignore[assignment]


def test_a_mean_is_sent_only_where_nothing_else_is_needed():
    declared = type("Declared", (Simple,), {"weighted_sum": True, "combine": Median.combine})
    below = type("Below", (declared,), {"combine": Median.combine})
    for kind in (Simple, type("Kin", (Simple, FedAdam), {}), declared):
        assert kind().is_weighted_sum
        assert not make_robust(kind, RobustSection("median")).is_weighted_sum
    for kind in (below, Median, type("Robustly", (Simple, FedMedian), {}), Own):
        assert not kind().is_weighted_sum


def test_a_client_whose_row_is_bad_or_missing_costs_no_other():
    rows = {1: NAN, 2: None}  # of those at the second SuperNode

    def bad(place: int, kind: str, number: int) -> Any:
        return rows if (place, kind) == (1, "train") else None

    run = Run(Median(), [[0], [1, 2, 3]], bad=bad)
    (who,) = run.who
    assert who.answered == {0, 3} and who.failed.keys() == {1, 2}
    assert "NaN" in who.failed[1] and run.model == [2.5] * 2
    reasons = [entry["reason"] for entry in run.reports[0].rejected]
    assert [reason.partition(":")[0] for reason in reasons] == ["client 1", "client 2"]
    assert (run.reports[0].asked, run.reports[0].answered) == (4, 2)


def test_one_mean_for_several_clients_is_not_taken_for_a_row():
    app = app_of([[0, 1]], [])

    def blind(message: Message, context: Context) -> Message:
        for record in message.content.config_records.values():
            record.pop("row-each", None)
        return app(message, context)

    run = Run(Median(), [[0, 1]], app=blind, skipped=True)
    assert "a row" in run.rejected()[0] and run.who[0].failed.keys() == {0, 1}


def test_a_client_of_somebodys_own_that_stands_for_several_is_told_what_it_lacks():
    app = make_client_app(lambda context: Alone(0, [0, 1], [], good, None))
    with pytest.raises(ClientBugError, match="fit_each"):
        Run(Median(), [[0, 1]], app=app)
    assert Run(Simple(), [[0, 1]], app=app).reports[0].answered == 2


# What combine is given, and gives ----------------------------------------------------------------


class Side(Simple):
    def extras(self):
        return {"side": (2, 2)}

    def combine(self, replies: Any) -> Combined:
        self.sides = [reply.extras["side"] for reply in replies]
        return super().combine(replies)


def test_extras_are_checked_counted_and_given_to_combine():
    run = Run(strategy := Side(), THREE, extra=np.eye(2))
    assert len(strategy.sides) == 3 and all((side == np.eye(2)).all() for side in strategy.sides)
    assert run.model == [2, 2]
    up = strategy.payload["up"]
    assert up["extras"] == 3 * (len("side") + 128 + 32)
    assert strategy.payload["down"] == {"weights": up["weights"]}


@pytest.mark.parametrize(
    ("kind", "extra", "reason"),
    [
        (Side, None, "array records ['arrays'], expected ['arrays', 'extras']"),
        (Side, np.ones(3), "extras/side has shape (3,), expected (2, 2)"),
        (Side, np.full((2, 2), np.nan), "extras/side has NaN or infinite values"),
        (Simple, np.ones(2), "expected ['arrays']"),  # nobody asked for it
    ],
)
def test_bad_extras_are_left_out(kind: type[Simple], extra: Any, reason: str):
    rejected = Run(kind(), THREE, extra=extra, skipped=True).rejected()
    assert rejected.keys() == {0, 1, 2} and all(reason in said for said in rejected.values())


@pytest.mark.parametrize(
    ("declared", "made", "key"),
    [
        (True, {"v": np.zeros(2)}, "'v'"),
        (True, {0: {"w": np.zeros(3)}}, "client 0: w"),
        (True, {"w": NAN}, "w has NaN"),
        (True, {9: {"w": np.zeros(2)}}, r"\[9\]"),
        (False, {0: {"w": np.zeros(2)}}, "personal"),
    ],
)
def test_what_combine_gives_is_checked(declared: bool, made: Any, key: str):
    wrong = {"personal": declared, "combine": lambda self, replies: made}
    with pytest.raises(ValueError, match=f"combine.*{key}"):
        Run(type("Wrong", (Simple,), wrong)(), THREE)


def test_noise_or_a_robust_average_that_would_have_no_effect_is_refused():
    noisy = Own()
    noisy.central_noise = CentralNoise(1.0, 1.0)
    with pytest.raises(ValueError, match="central_noise"):
        Run(noisy, THREE)
    with pytest.raises(ValueError, match="average"):
        Run(make_robust(Own, RobustSection("krum")), THREE)


# Replies that cannot be averaged: left out, each with its reason ----------------------------------

MODEL = ArrayRecord({"a": Array(np.zeros((2, 3), np.float32)), "b": Array(np.zeros(4, np.float32))})


def content(
    metrics: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **changed: Any
) -> RecordDict:
    """Make a good answer, some of its arrays replaced, or left out where None is given."""
    named = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32), **changed}
    arrays = ArrayRecord(
        {key: Array(values) for key, values in named.items() if values is not None}
    )
    record = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics or {"num-examples": 3})})
    if config:
        record["config"] = ConfigRecord(config)
    return record


def stamped(message: Message) -> Message:
    stamp(message, message_id=f"id-{message.metadata.dst_node_id}")
    return message


def checked(*answers: RecordDict | Error | None, model: ArrayRecord | None = MODEL) -> Any:
    """Let nodes 1, 2, ... answer so; None is silence."""
    replies = {
        node: Message(answer, reply_to=stamped(Message(RecordDict(), node, "train")))
        for node, answer in enumerate(answers, 1)
        if answer is not None
    }
    backwards = dict(reversed(replies.items()))
    return check_replies(range(1, len(answers) + 1), backwards, Wanted(model), 2.5)


def check(*answers: Any, model: ArrayRecord | None = MODEL) -> tuple[list[int], dict[int, str]]:
    """Return the usable nodes, and the reasons of the others."""
    usable, rejected, _ = checked(*answers, model=model)
    nodes = [reply.message.metadata.src_node_id for reply in usable]
    return nodes, {entry.node_id: entry.reason for entry in rejected}


GOOD, ONE = content(), MetricRecord({"num-examples": 3})
TORN = Array("float32", (4,), "numpy.ndarray", b"no array")
TURNED = ArrayRecord(dict(reversed(GOOD["arrays"].items())))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (content(b=None), "arrays ['a'], expected ['a', 'b']"),
        (content(a=None, b=None), "arrays [], expected ['a', 'b']"),
        (content(c=np.ones(1)), "arrays ['a', 'b', 'c'], expected ['a', 'b']"),
        (RecordDict({**GOOD, "arrays": TURNED}), "arrays ['b', 'a']"),
        (content(a=np.ones((3, 2), np.float32)), "arrays/a has shape (3, 2), expected (2, 3)"),
        (content(b=np.ones(4, np.float16)), "b has type float16, expected float32"),
        (content(b=np.ones(4, np.int64)), "b has type int64, expected float32"),
        (content(b=np.array(["x"] * 4)), "arrays/b has type <U1, expected numbers"),
        (content(b=np.array([1, math.nan, 1, 1], np.float32)), "arrays/b has NaN or infinite"),
        (content(a=np.full((2, 3), -math.inf, np.float32)), "arrays/a has NaN or infinite"),
        (content(a=np.full((2, 3), 1e300)), "arrays/a has NaN or infinite values in float32"),
        (
            RecordDict({**GOOD, "arrays": ArrayRecord({"a": GOOD["arrays"]["a"], "b": TORN})}),
            "arrays/b",
        ),
        (RecordDict({**GOOD, "more": ArrayRecord()}), "array records ['arrays', 'more']"),
        (RecordDict({"weights": GOOD["arrays"], "metrics": ONE}), "array records ['weights']"),
        (RecordDict({**GOOD, "more": ONE}), "2 metric records, expected 1"),
        (RecordDict({"arrays": GOOD["arrays"]}), "0 metric records, expected 1"),
    ],
)
def test_malformed_answers_are_left_out(answer: RecordDict, reason: str):
    nodes, reasons = check(content(), answer)
    assert nodes == [1]
    assert reasons.keys() == {2} and reason in reasons[2]


def test_a_large_model_may_come_in_twice_its_bytes():
    count = reply_bytes() // 2  # float32 numbers of twice the bytes that a reply may have besides
    model = ArrayRecord({"a": Array(np.zeros(count, np.float32))})
    wide, more = np.ones(count), np.ones((3, count), np.float32)
    assert check(content(a=wide, b=None), model=model) == ([1], {})
    assert "bytes" in check(content(a=more, b=None), model=model)[1][1]


@pytest.mark.parametrize("weight", [0, -1, 0.0, math.nan, math.inf, 2**60, [3], None])
def test_a_weight_that_is_no_positive_number(weight: Any):
    metrics = {"other": 1.0} if weight is None else {"num-examples": weight}
    for model in (MODEL, None):
        nodes, reasons = check(content(), content(metrics=metrics), model=model)
        assert nodes == [1]
        assert reasons[2].startswith(f"num-examples is {weight}")


def test_silence_and_errors():
    error = Error(0, "ValueError: no\nweights\x07 here")
    late, why = "no reply within 2.5 s", "error reply: ValueError: no weights? here"
    assert check(content(), None, error) == ([1], {2: late, 3: why})


def test_metrics_as_most_have_them():
    common = {"num-examples": 3, "loss": 1.0, "by-role": [1.0, 2.0]}
    short = common | {"by-role": [1.0]}
    fewer = {"num-examples": 3, "loss": 1.0}
    answers = [content(metrics=metrics) for metrics in (fewer, common, short, common)]
    nodes, reasons = check(*answers)
    assert nodes == [2, 4]
    assert reasons == dict.fromkeys((1, 3), "metrics are not as in the other replies: ['by-role']")
    # A metric's name cannot stand for what the check itself notes
    odd = [content(metrics=common | {"record metrics": [1.0] * n, "metrics": n}) for n in (1, 2)]
    assert check(*[content(metrics=common)] * 2, *odd)[0] == [1, 2]


def test_arrays_beside_measurements_are_not_read():
    torn = RecordDict({**GOOD, "extras": ArrayRecord({"b": TORN})})
    assert check(content(), torn, model=None) == ([1, 2], {})


def test_measurements_that_are_called_extras_stay_in_their_reply():
    alone = RecordDict({"arrays": GOOD["arrays"], "extras": ONE})
    for model in (MODEL, None):
        ((reply,), rejected, _) = checked(alone, model=model)
        assert reply.num_examples == 3 and not rejected


@pytest.mark.parametrize("loss", [math.nan, math.inf, [1.0, math.nan]])
def test_measurements_are_finite(loss: Any):
    good = 1.0 if isinstance(loss, float) else [1.0, 1.0]
    one, other = (content(metrics={"num-examples": 3, "loss": v}) for v in (good, loss))
    assert check(one, other, model=None) == ([1], {2: f"loss is {loss}"})
    # In training a diagnostic that is no number costs no weights.
    assert check(one, other) == ([1, 2], {})


def test_clients_that_their_node_left_out_are_named_as_far_as_the_report_has_room():
    why = ["3:weights are not finite", "5:lost"]
    nodes, reasons = check(*(content(config={"left-out": said}) for said in (why[:1], why[1])))
    assert nodes == [1, 2]
    assert reasons == {1: "client 3: weights are not finite", 2: "client 5: lost"}

    long = content(config={"left-out": [f"{n}:" + "x" * 10_000 for n in range(MAX_NAMED + 7)]})
    found = few(checked(long)[1])
    assert len(found) == MAX_NAMED + 1 and found[-1].reason == "and 7 more"
    assert max(len(entry.reason) for entry in found) <= 300
    assert "number:reason" in check(content(config={"left-out": ["why"]}))[1][1]


# What a strategy keeps in attributes --------------------------------------------------------------


class Remembers(Simple, FedAdam):
    """Keeps its moments, and a list of rounds, in attributes."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.history: list[Any] = []
        self.helpers = {"double": lambda one: 2 * one}  # no checkpoint can hold it, and none need

    def combine(self, replies: Any) -> Combined:
        self.history.append([self._number, "x", None, True])
        return super().combine(replies)


def test_attributes_that_change_come_back(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    whole, _ = Run(Remembers(), rounds=3), Run(Remembers(**saving), rounds=2)
    again = Run(Remembers(**saving), rounds=3, resume=True)
    assert again.model == whole.model
    one, other = (vars(run.strategy) for run in (whole, again))
    assert one["history"] == other["history"] == [[n, "x", None, True] for n in (1, 2, 3)]
    for name in ("m_t", "v_t"):
        np.testing.assert_array_equal(one[name]["w"], other[name]["w"])
        assert one[name]["w"].dtype == other[name]["w"].dtype
