"""What the messages of FedGLS hold: four arrays, a few numbers, and nothing of φ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict
from plain_structure import FEDGLS
from structure_helpers import MODEL_KEYS, SETTINGS, Outcome, run, settings_of, toy_clients

from flower_graph.client.adaptor import make_client_app
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.structure_fedavg.strategy import StructureClient

# All that may be in a message besides the four arrays of the models
SAID = {
    "num-examples",
    "clients",
    "server-round",
    *("flower-graph", "message-format", "handled-messages"),  # of the first question
    "loss",
    *(f"{has}{name}" for has in ("", "has-") for name in ("contrast", "distillation")),
    *(f"{has}{name}" for has in ("", "has-") for name in ("train", "val", "test")),
    *(f"{has}cross-entropy" for has in ("", "has-")),
    *(
        f"{has}{name}"
        for has in ("", "has-")
        for name in ("precision", "recall", "homophily", "degree", "true-homophily", "true-degree")
    ),
}


class Spy(InProcessGrid):
    """Notes every message and, each time, what the graph learners are."""

    def push_messages(self, messages: Any) -> list[str]:
        sent = list(messages)
        self.seen: list[tuple[str, RecordDict]] = getattr(self, "seen", [])
        self.seen += [("down", message.content) for message in sent]
        ids = super().push_messages(sent)
        self.seen += [("up", self._replies[number].content) for number in ids]
        self.learned: list[np.ndarray] = getattr(self, "learned", [])
        if any(message.metadata.message_type == "query" for message in sent):
            return ids  # nobody has learnt anything yet
        self.learned += [
            part.numpy().ravel()
            for parts in Outcome(None, self).learners.values()  # type: ignore[arg-type]
            for part in parts
        ]
        return ids

    @property
    def leaks(self) -> list[str]:
        """Say what was in a message that must not be there."""
        numbers = np.unique(np.concatenate(self.learned))
        secret = numbers[~np.isin(numbers, [0.0, 1.0])]  # φ starts with ones
        assert secret.size > 20
        return [said for _, content in self.seen for said in _odd(content, secret)]


def _odd(content: RecordDict, secret: np.ndarray) -> list[str]:
    found = []
    arrays = [key for key, record in content.items() if isinstance(record, ArrayRecord)]
    if arrays and arrays != ["arrays"]:
        found.append(f"records {arrays}")
    names = [name for pair in MODEL_KEYS for name in pair]
    for record in content.values():
        if isinstance(record, ArrayRecord):
            if list(record) != names:
                found.append(f"arrays {list(record)}")
            values = [array.numpy() for array in record.values()]
        else:
            if record.keys() - SAID:
                found.append(f"entries {sorted(record.keys() - SAID)}")
            values = [value for value in record.values() if isinstance(value, (int, float))]
            found += [f"{k} is a {type(v)}" for k, v in record.items() if len(np.shape(v))]
        if any(np.isin(np.float32(value), secret).any() for value in values):
            found.append("a number of φ")
    return found


@pytest.mark.parametrize("encoder", ["attentive", "mlp"])
def test_nothing_of_the_graph_learner_leaves_its_client(encoder: str) -> None:
    learner = SETTINGS.learner._replace(encoder=encoder)
    own = settings_of(FEDGLS, learner=learner)
    outcome = run(rounds=3, supernodes=3, make_grid=Spy, settings=own)
    assert isinstance(outcome.grid, Spy)
    assert len(outcome.grid.seen) == 3 * 2 * (1 + 2 * 3)  # who is there, and three rounds of two
    assert outcome.grid.leaks == []
    shapes = {(8, 5), (5 + 5 * 4 + 4,)}
    for _, content in outcome.grid.seen:
        for record in content.array_records.values():
            assert {tuple(array.shape) for array in record.values()} <= shapes


class Leaky(StructureClient):
    """Sends φ along in one way or another."""

    how = ""

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, weight, metrics = super().fit(parameters, config)
        with self.opened() as cohort:
            learner = cohort.tensors()["learner.weight.first"].numpy()
        match self.how:
            case "array":
                names = [*metrics["array-names"], "learner"]
                return [*arrays, learner], weight, metrics | {"array-names": names}
            case "record":
                names = [*metrics["array-names"], "more/learner"]
                return [*arrays, learner], weight, metrics | {"array-names": names}
            case "inside an array":
                arrays[1][:3] = learner[:3, 0]
            case "list":
                metrics["learner"] = learner[:, 0].tolist()
            case "number":
                metrics["contrast"] = float(learner[0, 0])
            case "bytes":
                metrics["learner"] = learner.tobytes()
        return arrays, weight, metrics


@pytest.mark.parametrize(
    "how", ["array", "record", "inside an array", "list", "number", "bytes", "not at all"]
)
def test_the_spy_sees_what_leaks(how: str) -> None:
    leaky = type("Leaky", (Leaky,), {"how": how})
    graphs, own = toy_clients(), settings_of(FEDGLS)
    app = make_client_app(lambda context: leaky(context, graphs, own))
    outcome = run(app=app, supernodes=1, make_grid=Spy)
    assert isinstance(outcome.grid, Spy)
    assert bool(outcome.grid.leaks) == (how != "not at all")
