"""No number of φ is in a message of FedGLS; all that may be in one is on the page of messages."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Context, Message, RecordDict
from structure_helpers import client_app, cohort_of, learners_of, run, settings_of


class Spy:
    """A mod that notes the numbers of every message and, each time, those of the learners."""

    def __init__(self) -> None:
        self.said: list[np.ndarray] = []
        self.learned: list[np.ndarray] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.messages = 0

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        for content in (message.content, reply.content):
            self.messages += 1
            self.said += numbers(content)
            for record in content.array_records.values():
                self.shapes |= {tuple(array.shape) for array in record.values()}
        if message.metadata.message_type != "query":  # nobody has learnt anything yet
            parts = learners_of(cohort_of(context)).values()
            self.learned += [part.numpy().ravel() for own in parts for part in own]
        return reply

    @property
    def leaks(self) -> bool:
        """Say whether a number of φ, which starts with ones, was in a message."""
        secret = np.setdiff1d(np.concatenate(self.learned), [0.0, 1.0])
        assert secret.size > 20
        return bool(np.isin(np.concatenate(self.said), secret).any())


def numbers(content: RecordDict) -> list[np.ndarray]:
    """Give all that can be read as numbers, bytes too."""
    values = [value for record in content.values() for value in record.values()]
    found = [value.numpy() if isinstance(value, Array) else np.asarray(value) for value in values]
    found += [np.frombuffer(v, np.float32) for v in values if isinstance(v, bytes)]
    return [one.astype(np.float32).ravel() for one in found if one.dtype.kind in "iuf"]


@pytest.mark.parametrize("encoder", ["attentive", "mlp"])
def test_nothing_of_the_graph_learner_leaves_its_client(encoder: str) -> None:
    own, spy = settings_of(graph={"encoder": encoder}), Spy()
    run(own, app=client_app(own, mods=[spy]), supernodes=3)
    assert spy.messages == 3 * 2 * (1 + 2 * 3)  # who is there, and three rounds of two
    assert spy.shapes == {(8, 5), (5 + 5 * 4 + 4,)}
    assert not spy.leaks


@pytest.mark.parametrize("how", ["array", "number", "bytes"])
def test_the_spy_sees_what_leaks(how: str) -> None:
    def leaky(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if message.metadata.message_type == "train":
            learner = cohort_of(context).tensors()["learner.weight.first"].numpy()
            if how == "array":
                values = reply.content["arrays"]["gnn-rest"].numpy().copy()
                values[:3] = learner[:3, 0]
                reply.content["arrays"]["gnn-rest"] = Array(values)
            elif how == "number":
                reply.content["metrics"]["contrast"] = float(learner[0, 0])
            else:
                reply.content["config"] = ConfigRecord({"learner": learner.tobytes()})
        return reply

    spy = Spy()
    run(app=client_app(mods=[spy, leaky]), supernodes=1)
    assert spy.leaks
