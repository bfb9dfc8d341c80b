from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

import flower_graph
from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import StateLostError
from flower_graph.flower_compat import NumPyClient
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import encode_array
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.exchange import Exchange

pytestmark = pytest.mark.usefixtures("identity")


class Recorder(NumPyClient):
    """Returns what it is told to, and remembers what it was given."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.parameters: list[np.ndarray] = []
        self.config: dict[str, Any] = {}

    def fit(self, parameters: Any, config: Any) -> Any:
        self.parameters, self.config = parameters, config
        return self.result

    actions = ("align",)
    align = fit
    evaluate = fit

    def get_properties(self, config: Any) -> Any:
        self.config = config
        return self.result


# In this process, where errors say all
CONTEXT = Context(1, 7, {"state-dir": ":memory:"}, RecordDict(), {})


def record_of(**arrays: Any) -> ArrayRecord:
    record = ArrayRecord()
    for key, values in arrays.items():
        record[key] = encode_array(key, np.asarray(values, np.float32))
    return record


def ask(app: ClientApp, kind: str = "train", **records: Any) -> Any:
    return app(Message(RecordDict(records), 7, kind), CONTEXT).content


def answer(result: Any, kind: str = "train", **records: Any) -> Any:
    return ask(make_client_app(lambda context: Recorder(result)), kind, **records)


def shape_of(content: Any) -> dict[str, list[str]]:
    return {name: list(record) for name, record in content.items()}


ONE, TWO = np.ones(1, np.float32), np.full(2, 2, np.float32)


def test_fit_gets_all_arrays_in_order_as_its_own_and_one_config() -> None:
    client, sent = Recorder(([ONE], 3, {})), record_of(b=[1, 2], a=[3])
    ask(
        make_client_app(lambda context: client),
        first=sent,
        config=ConfigRecord({"round": 4}),
        second=record_of(a=[5]),
        more=ConfigRecord({"lr": 0.5, "names": ["x", "y"]}),
    )
    assert [array.tolist() for array in client.parameters] == [[1, 2], [3], [5]]
    assert client.config == {"round": 4, "lr": 0.5, "names": ["x", "y"]}
    client.parameters[0] += 10
    assert sent["b"].numpy().tolist() == [1, 2]


def test_reply_keeps_the_keys_that_came_when_the_counts_match() -> None:
    # A slash in a key that came (Keras has them) is part of the key.
    weights = ArrayRecord({"dense/kernel": record_of(a=[1])["a"], "b": record_of(b=[2])["b"]})
    content = answer(([TWO, ONE], 3, {}), weights=weights)
    assert shape_of(content) == {"arrays": ["dense/kernel", "b"], "metrics": ["num-examples"]}
    assert content["arrays"]["dense/kernel"].numpy().tolist() == [2, 2]
    content = answer(([TWO, ONE], 3, {}), first=record_of(a=[1]), second=record_of(a=[1]))
    assert shape_of(content) == {"first": ["a"], "second": ["a"], "metrics": ["num-examples"]}
    content = answer(([TWO, ONE], 3, {}), weights=record_of(a=[1]))
    assert list(content["arrays"]) == ["0", "1"]
    assert shape_of(answer(([], 3, {}))) == {"arrays": [], "metrics": ["num-examples"]}


def test_client_may_name_its_arrays_and_their_records() -> None:
    names = ["latent", "weights/w", "weights/b/0"]
    content = answer(([ONE, TWO, ONE], 3, {"array-names": names}), arrays=record_of(a=[1]))
    named = {"arrays": ["latent"], "weights": ["w", "b/0"]}
    assert shape_of(content) == {**named, "metrics": ["num-examples"]}
    for bad in (["a"], "ab", ["a", "a"], ["a", "arrays/a"], ["a", ""], ["a", "metrics/x"]):
        with pytest.raises(ValueError, match="name"):
            answer(([ONE, TWO], 3, {"array-names": bad}))


def test_metrics_are_split_into_numbers_and_the_rest() -> None:
    numbers = {"acc": np.float32(0.5), "count": np.int64(3), "history": [1, 0.5], "empty": []}
    others = {"ok": np.bool_(True), "name": "node", "raw": b"\x00", "flags": [True, False]}
    metrics = {**numbers, "sizes": (1, 2), **others}
    content = answer(([ONE], np.int64(3), metrics))
    assert dict(content["metrics"]) == numbers | {"num-examples": 3, "sizes": [1, 2]}
    assert dict(content["config"]) == others
    assert metrics["sizes"] == (1, 2)  # the client's dict is left alone


def test_evaluate_and_query() -> None:
    content = answer((0.25, 4, {"acc": 0.5, "who": "me"}), "evaluate", arrays=record_of(a=[1]))
    assert dict(content["metrics"]) == {"loss": 0.25, "num-examples": 4, "acc": 0.5}
    assert dict(content["config"]) == {"who": "me"}
    assert isinstance(content["metrics"], MetricRecord)
    content = answer({"nodes": 5, "key": b"k", "ids": [1, 2], "gpu": False}, "query")
    stamp = {"flower-graph": flower_graph.__version__, "message-format": 3}
    said = {"nodes": 5, "key": b"k", "ids": [1, 2], "gpu": False}
    assert dict(content["config"]) == stamp | said


def test_only_named_actions_are_routed() -> None:
    def make(context: Context) -> NumPyClient:
        return Recorder(([ONE], context.node_id, {}))

    app = make_client_app(make)
    for _ in range(2):
        assert ask(app, "train.align")["metrics"]["num-examples"] == 7
        for other in ("evaluate", "absent", "__init__"):  # the client has the first, and the last
            with pytest.raises(ValueError, match=f"'{other}'"):
                ask(app, f"train.{other}")
    with pytest.raises(ValueError, match="'align'"):
        ask(app, "query.align")
    assert ask(app, "train.default")["metrics"]["num-examples"] == 7
    with pytest.raises(ValueError, match=r"NumPyClient.*'fit'"):
        ask(make_client_app(lambda _: NumPyClient()), "train.fit")


@pytest.mark.parametrize(
    ("kind", "result", "match"),
    [
        ("train", None, "return"),
        ("train", ([ONE], 3), "return"),
        ("train", (ONE, 3, {}), "list"),
        ("train", ([[1.0]], 3, {}), "'arrays/0'.*numpy.ndarray"),
        ("train", ([ONE], 3.0, {}), "num_examples.*3.0"),
        ("train", ([ONE], True, {}), "num_examples"),
        ("train", ([ONE], -1, {}), "0.*more"),
        ("train", ([ONE], 3, None), "metrics"),
        ("train", ([ONE], 3, {"x": None}), "'x'.*NoneType"),
        ("train", ([ONE], 3, {"num-examples": 4}), "reserved"),
        ("train", ([np.array([None])], 3, {}), "'arrays/0'"),
        ("evaluate", ("0.5", 3, {}), "float"),
        ("evaluate", (0.5, 3, {"loss": 1.0}), "reserved"),
        ("query", {"x": {}}, "'x'"),
    ],
)
def test_wrong_results_are_named(kind: str, result: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        answer(result, kind)


def test_a_client_without_outputs_keeps_nothing() -> None:
    with pytest.raises(TypeError, match="Recorder keeps nothing"):
        answer({}, "query.keep")


def test_what_is_no_client_and_no_request_is_refused() -> None:
    for wrong in (Recorder(None).to_client(), None):
        with pytest.raises(TypeError, match="client_fn"):
            ask(make_client_app(lambda _, wrong=wrong: wrong))
    lie = record_of(a=[1, 2])
    lie["a"].shape = (3,)
    with pytest.raises(ValueError, match="'arrays/a'"):
        answer(None, arrays=lie)


def test_mods_are_around_every_message_and_train_mods_around_training_alone() -> None:
    # This mod answers messages without arrays with an error.
    local_dp = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1e9, delta=1e-5)
    for place, answers in (("mods", False), ("train_mods", True)):
        app = make_client_app(lambda context: Recorder((0.5, 3, {})), **{place: [local_dp]})
        message = Message(RecordDict({"arrays": record_of(w=[1])}), 7, "evaluate")
        assert app(message, CONTEXT).has_content() == answers


def test_lost_state_is_told_by_a_code_and_undoes_what_the_message_changed() -> None:
    class Forgetful(NumPyClient):
        def __init__(self, context: Context) -> None:
            self.context = context

        def get_properties(self, config: Any) -> dict[str, Any]:
            self.context.state["half"] = ConfigRecord({"done": 1})
            raise StateLostError("gone")

    def other(context: Context) -> NumPyClient:
        raise ValueError("StateLostError: gone")

    for client_fn, kind in ((Forgetful, Kind.STATE_LOST), (other, Kind.OTHER)):
        grid = InProcessGrid(make_client_app(client_fn), num_supernodes=2)
        query = dict.fromkeys(grid.contexts, RecordDict())
        replies = Exchange(grid).send(
            query, message_type="query", server_round=1, timeout=1, read=lambda *_: None
        )
        assert [entry.kind for entry in replies.rejected] == [kind] * 2
        assert not any(context.state for context in grid.contexts.values())
