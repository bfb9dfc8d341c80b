"""SecureAverage around Flower's strategies, with an app that knows nothing of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx, Result, Strategy
from sum_helpers import write_keys

from flower_graph.simulation import InProcessGrid
from flower_graph.strategies import secure_average
from flower_graph.strategies.secure_average import (
    MOST_METRICS,
    SecureAverage,
    mean_reply,
    secure_average_mod,
    vector_of,
)

CLIENTS = 8
FIRST = ArrayRecord({"w": Array(np.zeros((5, 3), np.float32)), "b": Array(np.zeros(3))})
AVERAGING = [FedAvg, FedAdam, FedAvgM, lambda: FedProx(proximal_mu=0.1)]
Answers = Callable[[Message, Context], None]


def make_app(
    mods: list[Any], change: Answers = lambda *_: None, *, evaluates: bool = True
) -> ClientApp:
    """Make an app whose replies follow from the client and the round; ``change`` may fail."""
    app = ClientApp(mods=mods)

    def draw_of(message: Message, context: Context) -> np.random.Generator:
        number = message.content["config"]["server-round"]
        return np.random.default_rng([int(context.node_config["partition-id"]), number])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        change(message, context)
        draw = draw_of(message, context)
        arrays = {
            name: Array(np.asarray(one.numpy() + draw.normal(size=one.shape), one.dtype))
            for name, one in message.content["arrays"].items()
        }
        metrics = {"num-examples": int(draw.integers(1, 100)), "loss": draw.random()}
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    if not evaluates:
        return app

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        draw = draw_of(message, context)
        mean = float(message.content["arrays"]["w"].numpy().mean())
        metrics = {"num-examples": int(draw.integers(1, 100)), "accuracy": mean * draw.random()}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def run(strategy: Strategy, grid: InProcessGrid, rounds: int = 3) -> Result:
    return strategy.start(grid, FIRST, num_rounds=rounds)


def secure(strategy: Strategy, rounds: int = 3, **how: Any) -> tuple[Result, InProcessGrid]:
    grid = InProcessGrid(make_app([secure_average_mod], **how), num_supernodes=CLIENTS)
    return run(SecureAverage(strategy), grid, rounds), grid


def assert_same(found: Result, expected: Result) -> None:
    for name, array in expected.arrays.items():
        assert found.arrays[name].numpy() == pytest.approx(array.numpy(), abs=1e-6)
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        for number, record in getattr(expected, kind).items():
            assert dict(getattr(found, kind)[number]) == pytest.approx(dict(record), abs=1e-6)


@pytest.mark.parametrize("make", AVERAGING)
def test_it_gives_what_plain_averaging_gives(make: Callable[[], Strategy]) -> None:
    expected = run(make(), InProcessGrid(make_app([]), num_supernodes=CLIENTS))
    found, grid = secure(make())
    assert_same(found, expected)
    assert len(found.evaluate_metrics_clientapp) == 3 and not grid.tracebacks


def test_arrays_may_be_those_of_scikit_learn() -> None:
    """Of a binary classifier, of a regression with one number, and how often it iterated."""
    coef = np.zeros((30, 1)).T  # in Fortran's order
    first = ArrayRecord([coef, np.zeros(1), np.array(0.0), np.zeros(1, np.int32)])
    results = []
    for mods in ([], [secure_average_mod]):
        grid = InProcessGrid(make_app(mods, evaluates=False), num_supernodes=CLIENTS)
        strategy = SecureAverage(FedAvg()) if mods else FedAvg()
        results.append(strategy.start(grid, first, num_rounds=2))
    expected, found = results
    assert_same(found, expected)
    for one, other in zip(found.arrays.values(), expected.arrays.values(), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)


def test_supernodes_that_do_not_trust_the_server(tmp_path) -> None:
    keys = write_keys(CLIENTS, tmp_path)
    app = make_app([secure_average_mod])
    grid = InProcessGrid(app, num_supernodes=CLIENTS, node_config=keys)
    found = run(SecureAverage(FedAvg(), registry=keys[0]["registry"]), grid)
    assert_same(found, run(FedAvg(), InProcessGrid(make_app([]), num_supernodes=CLIENTS)))
    trusting = InProcessGrid(app, num_supernodes=CLIENTS, node_config=keys)
    assert run(SecureAverage(FedAvg()), trusting, 1).train_metrics_clientapp == {}
    assert all("RefusedError" in text for text in trusting.tracebacks.values())


def fails(number: int, *clients: int) -> Answers:
    """Make some clients fail in a round of training."""

    def change(message: Message, context: Context) -> None:
        is_meant = context.node_config["partition-id"] in clients
        if is_meant and message.content["config"]["server-round"] == number:
            raise RuntimeError("out of memory")

    return change


def test_a_client_that_fails_is_left_out_of_the_mean() -> None:
    expected = InProcessGrid(make_app([], fails(2, 3)), num_supernodes=CLIENTS)
    assert_same(secure(FedAvg(), change=fails(2, 3))[0], run(FedAvg(), expected))


def test_a_round_with_too_few_clients_is_skipped(caplog) -> None:
    found, _ = secure(FedAvg(), change=fails(2, 1, 2, 3, 4))
    assert [*found.train_metrics_clientapp] == [1, 3]
    assert "train: no mean" in caplog.text


def test_a_share_of_the_clients_is_drawn_by_the_strategy() -> None:
    seen = set()

    def note(message: Message, context: Context) -> None:
        seen.add((message.content["config"]["server-round"], context.node_id))

    found, _ = secure(FedAvg(fraction_train=0.5), change=note)
    drawn = [{node for at, node in seen if at == number} for number in (1, 2, 3)]
    assert [len(nodes) for nodes in drawn] == [4, 4, 4]
    assert len(found.train_metrics_clientapp) == 3


@pytest.mark.parametrize(
    "kind",
    ["FedMedian", "Krum", "DifferentialPrivacyServerSideFixedClipping"],
)
def test_a_strategy_that_needs_each_reply_is_refused(kind: str) -> None:
    arguments = {"strategy": FedAvg(), "noise_multiplier": 1.0, "clipping_norm": 1.0}
    arguments = {**arguments, "num_sampled_clients": 4} if "Privacy" in kind else {}
    with pytest.raises(ValueError, match=f"strategy: \\w*{kind[:8]}"):
        SecureAverage(getattr(flower, kind)(**arguments))


class Median(FedMedian):
    """A strategy of a user's own."""


@pytest.mark.parametrize("wrong", [{"limit": -1.0}, {"resolution": 0.0}, {"dropout": 0.7}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SecureAverage(FedAvg(), **wrong)
    with pytest.raises(ValueError, match="strategy: FedMedian"):
        SecureAverage(Median())


def test_a_server_without_a_sum_gets_nothing() -> None:
    grid = InProcessGrid(make_app([secure_average_mod]), num_supernodes=CLIENTS)
    assert run(FedAvg(), grid, 1).train_metrics_clientapp == {}
    assert "RefusedError" in next(iter(grid.tracebacks.values()))


class WatchedGrid(InProcessGrid):
    """Keeps all replies."""

    def pull_messages(self, message_ids: Any) -> list[Message]:
        replies = super().pull_messages(message_ids)
        self.replies = [*getattr(self, "replies", []), *replies]
        return replies


def test_no_reply_has_a_number_of_the_clients_own() -> None:
    own = []

    def note(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        own.append(reply.content)
        return reply

    grid = WatchedGrid(make_app([secure_average_mod, note]), num_supernodes=CLIENTS)
    run(SecureAverage(FedAvg()), grid, 1)
    assert len(own) == 2 * CLIENTS
    for content in (reply.content for reply in grid.replies):
        numbers = {**content["metrics"]} if "metrics" in content else {}
        assert numbers.pop("num-examples", 1) == 1  # of a stage, not of a client
        assert not any(isinstance(value, float) for value in numbers.values())
        assert not {"loss", "accuracy"} & numbers.keys()
    # Masked words are as random ones: as numbers of the ring half of them are negative
    words = [
        record["masked-sum"].numpy()
        for reply in grid.replies
        for record in reply.content.array_records.values()
        if "masked-sum" in record
    ]
    assert len(words) == 2 * CLIENTS
    bits = np.unpackbits(np.concatenate(words).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 4 * 0.5 / np.sqrt(bits.size)


def one_changed(change: Callable[[RecordDict], None]) -> Any:
    """Make a mod with which client 2 answers training with something else."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        is_it = context.node_config["partition-id"] == 2
        if is_it and message.metadata.message_type == "train":
            change(reply.content)
        return reply

    return mod


def too_large(content: RecordDict) -> None:
    content["arrays"]["b"] = Array(np.full(3, 1e9))


def not_finite(content: RecordDict) -> None:
    content["arrays"]["b"] = Array(np.array([0, np.nan, 0]))


def of_another_shape(content: RecordDict) -> None:
    content["arrays"]["b"] = Array(np.zeros(4))


def without_a_weight(content: RecordDict) -> None:
    del content["metrics"]["num-examples"]


def with_a_list(content: RecordDict) -> None:
    content["metrics"]["loss"] = [1.0, 2.0]


def with_many_metrics(content: RecordDict) -> None:
    content["metrics"].update({f"metric-{i}": 1.0 for i in range(MOST_METRICS)})


@pytest.mark.parametrize(
    "change",
    [too_large, not_finite, of_another_shape, without_a_weight, with_a_list, with_many_metrics],
)
def test_a_reply_that_is_in_no_sum_costs_that_client_the_round(change: Any) -> None:
    app = make_app([secure_average_mod, one_changed(change)])
    found = run(SecureAverage(FedAvg()), InProcessGrid(app, num_supernodes=CLIENTS), 1)
    others = InProcessGrid(make_app([], fails(1, 2)), num_supernodes=CLIENTS)
    assert_same(found, run(FedAvg(), others, 1))


def test_metrics_of_other_names_give_no_mean_of_metrics(caplog) -> None:
    def renamed(content: RecordDict) -> None:
        content["metrics"]["other"] = content["metrics"].pop("loss")

    app = make_app([secure_average_mod, one_changed(renamed)])
    found = run(SecureAverage(FedAvg()), InProcessGrid(app, num_supernodes=CLIENTS), 1)
    assert dict(found.train_metrics_clientapp[1]) == {}
    assert "different metrics" in caplog.text
    expected = run(FedAvg(), InProcessGrid(make_app([]), num_supernodes=CLIENTS), 1)
    assert found.arrays["w"].numpy() == pytest.approx(expected.arrays["w"].numpy(), abs=1e-6)


def test_a_vector_by_hand() -> None:
    like = ArrayRecord({"w": Array(np.array([[1.0, 2.0]], np.float32)), "n": Array(np.array(3))})
    metrics = MetricRecord({"num-examples": 4, "loss": 0.5})
    content = RecordDict({"arrays": like, "metrics": metrics})
    vector, names = vector_of(content, like, "num-examples")
    assert names == ["loss"] and vector.tolist() == [4, 8, 12, 4, 2, *[0] * (MOST_METRICS - 1)]
    total = (
        vector
        + vector_of(
            RecordDict({"arrays": like, "metrics": MetricRecord({"num-examples": 0})}),
            like,
            "num-examples",
        )[0]
    )
    mean = mean_reply(total, like, "num-examples", names)
    assert dict(mean["metrics"]) == {"num-examples": 4.0, "loss": 0.5}
    assert mean["arrays"]["w"].numpy().tolist() == [[1, 2]]
    assert (mean["arrays"]["n"].dtype, mean["arrays"]["n"].numpy()) == ("float64", 3.0)


def test_all_weights_may_be_zero(caplog) -> None:
    def weightless(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        reply.content["metrics"]["num-examples"] = 0
        return reply

    app = make_app([secure_average_mod, weightless])
    found = run(SecureAverage(FedAvg()), InProcessGrid(app, num_supernodes=CLIENTS), 1)
    assert found.train_metrics_clientapp == {} and "all weights are 0" in caplog.text


def of_values(make: Callable[[Message, Context], Any]) -> Any:
    """Make a mod with which clients answer training with other metrics."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        reply.content["metrics"] = MetricRecord(make(message, context))
        return reply

    return mod


@pytest.mark.parametrize("value", [-1234.5, [1234, 5]])
def test_an_error_quotes_no_number_of_a_client(tmp_path, value: Any) -> None:
    """A server that has clients weigh by a metric that is no weight is not told the metric."""
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.weighted_by_key = "balance"

    def metrics(message: Message, context: Context) -> Any:
        if context.node_config["partition-id"] == 0:
            raise RuntimeError(f"the balance is {value}")
        return {"balance": value}

    # As on a machine of its own: in one process errors keep their words
    grid = InProcessGrid(
        make_app([secure_average_mod, of_values(metrics)]),
        num_supernodes=CLIENTS,
        node_config={"state-dir": str(tmp_path)},
    )
    watched: list[str] = []
    pull = grid.pull_messages

    def keep(ids: Any) -> list[Message]:
        replies = pull(ids)
        watched.extend(one.error.reason for one in replies if one.has_error())
        return replies

    grid.pull_messages = keep  # type: ignore[method-assign]
    assert run(SecureAverage(strategy), grid, 1).train_metrics_clientapp == {}
    assert len(watched) == CLIENTS and not any("1234" in reason for reason in watched)


def test_clients_that_got_other_models_are_in_no_sum(monkeypatch, caplog) -> None:
    """A lying server sends all but one a model of zeros, to read what that one answers."""
    send = secure_average.AppExchange.send

    def lie(self: Any, requests: Any, **how: Any) -> Any:
        honest = self.messages
        zeros = ArrayRecord({n: Array(np.zeros_like(a.numpy())) for n, a in ONES.items()})
        for node in sorted(honest)[1:]:
            content = RecordDict({**honest[node].content, "arrays": zeros})
            self.messages = {**self.messages, node: Message(content, node, "train")}
        return send(self, requests, **how)

    monkeypatch.setattr(secure_average.AppExchange, "send", lie)
    grid = InProcessGrid(make_app([secure_average_mod]), num_supernodes=CLIENTS)
    found = SecureAverage(FedAvg(fraction_evaluate=0.0)).start(grid, ONES, num_rounds=1)
    assert found.train_metrics_clientapp == {} and "not as agreed" in caplog.text


ONES = ArrayRecord({name: Array(np.ones_like(one.numpy())) for name, one in FIRST.items()})


class Uneven(FedAvg):
    """A strategy with another config for each client."""

    def configure_train(self, *arguments: Any) -> Any:
        for number, one in enumerate(super().configure_train(*arguments)):
            config = ConfigRecord({**one.content["config"], "number": number})
            one.content = RecordDict({**one.content, "config": config})
            yield one


def test_a_strategy_that_sends_different_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="different messages"):
        secure(Uneven())


def test_an_app_without_evaluation_trains_on() -> None:
    app = make_app([secure_average_mod], evaluates=False)
    found = run(SecureAverage(FedAvg()), InProcessGrid(app, num_supernodes=CLIENTS))
    assert [*found.train_metrics_clientapp] == [1, 2, 3]


def test_arrays_may_come_in_another_order() -> None:
    def turned(content: RecordDict) -> None:
        content["arrays"] = ArrayRecord(dict(reversed(content["arrays"].items())))

    app = make_app([secure_average_mod, one_changed(turned)])
    found = run(SecureAverage(FedAvg()), InProcessGrid(app, num_supernodes=CLIENTS), 1)
    assert_same(found, run(FedAvg(), InProcessGrid(make_app([]), num_supernodes=CLIENTS), 1))


def test_a_run_may_start_twice(tmp_path) -> None:
    keys = write_keys(CLIENTS, tmp_path)
    app = make_app([secure_average_mod])
    grid = InProcessGrid(app, num_supernodes=CLIENTS, node_config=keys)
    strategy = SecureAverage(FedAvg(), registry=keys[0]["registry"])
    for _ in range(2):
        assert [*run(strategy, grid, 2).train_metrics_clientapp] == [1, 2]


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a strategy"):
        SecureAverage(FedAvg)  # type: ignore[arg-type]
