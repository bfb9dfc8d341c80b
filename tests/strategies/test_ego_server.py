"""Whom the server asks, who may enrol with which keys, and what a sum says."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ego_helpers import HIDDEN, SETTINGS
from flwr.app import ConfigRecord, RecordDict

from flower_graph.errors import MalformedReplyError, NoClientsError
from flower_graph.secure.channel import new_key
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import KeyReply
from flower_graph.strategies.fedscem.config import StrategyConfig
from flower_graph.strategies.fedscem.messages import Layout, contrast_scale
from flower_graph.strategies.fedscem.strategy import (
    EgoSession,
    MaskedEmbeddingAveraging,
    RoundSum,
    mean_metrics,
)
from flower_graph.wire.exchange import Replies
from flower_graph.wire.keys import HANDLED


class Answers:
    """An exchange in which SuperNodes give the answers that a test has."""

    def __init__(self, answers: dict[int, RecordDict]) -> None:
        self.answers = answers

    def send(self, requests: Any, *, read: Any, **_: Any) -> Replies[Any]:
        return Replies({node: read(node, self.answers[node]) for node in requests})


def session_of(hosted: dict[int, list[int]], **options: Any) -> EgoSession:
    given = {"limit": 8.0, "resolution": 2.0**-10, **options}
    session = EgoSession(StrategyConfig(**given), SETTINGS.seed)
    grid: Any = SimpleNamespace(get_node_ids=lambda: list(hosted))
    session.open(grid, 1.0, 3)
    ask(session, {node: keys_of(session, clients) for node, clients in hosted.items()})
    session.members.has_new = False
    return session


def ask(session: EgoSession, answers: dict[int, RecordDict], gone: int | None = None) -> list[str]:
    """Let SuperNodes enrol; return why some take no part."""
    connected = sorted((session.members.clients.keys() | answers.keys()) - {gone})
    exchange: Any = Answers(answers)
    return [entry.reason for entry in session.members.ask(exchange, connected, 1, 1.0)]


def keys_of(session: EgoSession, clients: list[int], handled: int | None = None) -> RecordDict:
    public = np.frombuffer(new_key()[1], np.uint8)
    reply = KeyReply(session.sums.server.run_id, np.array(clients, np.int64), public)
    entries = reply.to_config() | ({} if handled is None else {HANDLED: handled})
    return RecordDict({"config": ConfigRecord(entries)})


HOSTED = {71: [1, 5, 9], 72: [2, 4], 73: [3, 8, 6, 7]}


def test_only_connected_and_honest_clients_are_drawn() -> None:
    session = session_of(HOSTED)
    session.exchange.grid.get_node_ids = lambda: [72, 73]  # type: ignore[method-assign]
    session.sums.server.exclude([3])
    assert session.sample(1) == [2, 4, 6, 7, 8]
    session.exchange.grid.get_node_ids = list  # type: ignore[method-assign]
    with pytest.raises(NoClientsError, match="round 4"):
        session.sample(4)


def test_keys_of_another_run_and_none_are_refused() -> None:
    session, other = session_of(HOSTED), session_of({99: [2, 4]})
    with pytest.raises(MalformedReplyError, match="expected"):
        session.members.read(99, keys_of(other, [2, 4]))
    with pytest.raises(MalformedReplyError):
        session.members.read(74, RecordDict())
    assert session.sums.server.node_of(4) == 72


METRICS = np.array([1.5, 2, 0.25, 1, 0, 0, 6.0, 0.5, 2, 0])


def server_of(ring: Ring | None = None) -> MaskedEmbeddingAveraging:
    """A server in a round with two slots, for which three clients were asked."""
    server = MaskedEmbeddingAveraging(SETTINGS)
    server.layout, server.ring = Layout(2, HIDDEN), ring
    server.session.asked = {1: [4, 5], 2: [6]}
    return server


def total_of(server: MaskedEmbeddingAveraging) -> np.ndarray:
    layout, total = server.layout, np.zeros(server.layout.length)
    total[layout.embeddings] = np.arange(layout.slots * layout.hidden)
    total[layout.counts] = [1, 2]
    total[layout.metrics] = METRICS
    return total


def test_a_sum_says_means_over_those_that_have_something() -> None:
    server = server_of()
    found = RoundSum(2, total_of(server), [4, 5])
    means = mean_metrics(server._take(2, found), SETTINGS.tau)
    assert (means["train"], means["val"]) == (0.75, 0.25)
    assert math.isnan(means["test"])
    assert means["cross-entropy"] == 3.0
    assert means["contrast"] == 0.25 * contrast_scale(SETTINGS.tau)
    # What one client alone holds is not handed on.
    sums = server.sums
    assert sums is not None
    assert sums.counts.tolist() == [0, 2]
    assert sums.embeddings.tolist() == [0.0] * HIDDEN + list(range(HIDDEN, 2 * HIDDEN))
    assert (sums.server_round, sums.origin) == (2, [2, 2])
    # A skipped round leaves nothing.
    assert math.isnan(server._take(3, RoundSum(3, skipped="too few"))["cross-entropy"])
    assert server.sums is None


@pytest.mark.parametrize("word", [None, 32])
def test_payload_by_hand(word: int | None) -> None:
    ring = None if word is None else Ring.fit(3, 4.0, 2.0**-8, guard=True)
    server = server_of(ring)
    total = total_of(server)
    if ring is not None:
        assert ring.word == word
        total = (total * 2**ring.fraction_bits).astype(ring.dtype) << ring.guard_bits
    size = 8 if word is None else 4
    for number in (1, 2):
        found = RoundSum(number, total, [4, 5])
        server._count(found)
        server._take(number, found)
    up, down = server.payload["up"], server.payload["down"]
    assert up["embeddings"] == 2 * 2 * (2 * HIDDEN) * size  # rounds, clients, numbers
    assert up["activations"] == 2 * 2 * 2 * size
    assert up["metrics"] == 2 * 2 * 10 * size
    # The second round brought the sums of the first to the three clients that were asked.
    assert down["embeddings"] == 3 * (2 * HIDDEN + 2) * size


@pytest.mark.parametrize("aggregation", ["masked", "plain"])
def test_pretended_loss_of_state_aligns_all_anew_so_many_times(aggregation: str) -> None:
    session, begun = session_of(HOSTED, aggregation=aggregation), []
    for server_round in range(1, 20):
        node = next((at for at, local in session.members.clients.items() if 2 in local), None)
        if node is not None:
            session.members.forget(node)
        try:
            ask(session, {100 + server_round: keys_of(session, [2, 4])})
        except MalformedReplyError as error:  # which the exchange puts down to the SuperNode
            assert "begun anew too often" in str(error)
        begun += [server_round] * session.members.has_new
        session.members.has_new = False
    assert begun == [1, 2, 3, 4, 5, 6, 7]
