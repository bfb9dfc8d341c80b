"""Whom the server asks, how it sizes the ring, and who may enrol with which keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ego_helpers import SETTINGS
from flwr.app import ConfigRecord, RecordDict

from flower_graph.errors import MalformedReplyError, NoClientsError
from flower_graph.messages.keys import HANDLED
from flower_graph.secure.channel import new_key
from flower_graph.secure.sum.messages import KeyReply
from flower_graph.server.exchange import Replies
from flower_graph.strategies.masked_embedding_averaging.messages import EgoRequest
from flower_graph.strategies.masked_embedding_averaging.session import EgoSession


class Nodes:
    """A grid of which only the nodes matter."""

    def __init__(self, nodes: list[int]) -> None:
        self.nodes = nodes

    def get_node_ids(self) -> list[int]:
        return self.nodes


class Answers:
    """An exchange in which SuperNodes give the answers that a test has."""

    def __init__(self, answers: dict[int, RecordDict]) -> None:
        self.answers = answers

    def send(self, requests: Any, *, read: Any, **_: Any) -> Replies[Any]:
        return Replies({node: read(node, self.answers[node]) for node in requests})


def session_of(hosted: dict[int, list[int]], **options: Any) -> EgoSession:
    given: dict[str, Any] = {
        "alignment": "psi",
        "aggregation": "masked",
        "participation": 1.0,
        "limit": 8.0,
        "resolution": 2.0**-10,
        "dropout": 0.3,
        "min_nodes": 1,
    }
    session = EgoSession(SETTINGS, **{**given, **options})
    session.open(Nodes(list(hosted)), 1.0, 3)  # type: ignore[arg-type]
    ask(session, {node: keys_of(session, clients) for node, clients in hosted.items()})
    session.members.new = []
    return session


def ask(session: EgoSession, answers: dict[int, RecordDict], gone: int | None = None) -> list[str]:
    """Let SuperNodes enrol; return why some take no part."""
    connected = sorted((session.members.clients.keys() | answers.keys()) - {gone})
    exchange: Any = Answers(answers)
    return [entry.reason for entry in session.members.ask(exchange, connected, 1, 1.0)]


def keys_of(session: EgoSession, clients: list[int], handled: int | None = None) -> RecordDict:
    public = np.frombuffer(b"".join(new_key()[1] for _ in clients), np.uint8).reshape(-1, 32)
    reply = KeyReply(session.sums.server.run_id, np.array(clients, np.int64), public)
    entries = reply.to_config() | ({} if handled is None else {HANDLED: handled})
    return RecordDict({"config": ConfigRecord(entries)})


HOSTED = {71: [1, 5, 9], 72: [2, 4], 73: [3, 8, 6, 7]}


def test_all_are_drawn_in_order() -> None:
    assert session_of(HOSTED).sample(1) == list(range(1, 10))


def test_who_is_drawn_depends_on_the_round_alone() -> None:
    one, other = (
        session_of(HOSTED, participation=0.5),
        session_of({5: [9, 8, 7, 6, 5], 6: [4, 3, 2, 1]}, participation=0.5),
    )
    drawn = [one.sample(number) for number in range(1, 9)]
    assert drawn == [other.sample(number) for number in range(1, 9)]
    assert {len(clients) for clients in drawn} == {4}
    assert len({tuple(clients) for clients in drawn}) > 4


@pytest.mark.parametrize(("aggregation", "count"), [("masked", 2), ("plain", 1)])
def test_a_masked_sum_needs_two(aggregation: str, count: int) -> None:
    session = session_of(HOSTED, participation=0.01, aggregation=aggregation)
    assert len(session.sample(1)) == count


def test_only_connected_and_honest_clients_are_drawn() -> None:
    session = session_of(HOSTED)
    session.exchange.grid.nodes = [72, 73]  # type: ignore[attr-defined]
    session.sums.server.excluded.add(3)
    assert session.sample(1) == [2, 4, 6, 7, 8]
    session.exchange.grid.nodes = []  # type: ignore[attr-defined]
    with pytest.raises(NoClientsError, match="round 4: no client of the run is connected"):
        session.sample(4)


def test_the_ring_does_not_shrink_when_a_client_is_excluded() -> None:
    session = session_of(HOSTED)
    before = session.ring()
    assert before is not None
    assert before.guard_bits == 4  # nine clients
    session.sums.server.excluded |= {1, 2, 3}
    assert session.ring() == before
    assert session_of(HOSTED, aggregation="plain").ring() is None


def test_a_client_has_one_host() -> None:
    session = session_of(HOSTED)
    (why,) = ask(session, {74: keys_of(session, [10, 4])})
    assert why.startswith("client 4 is hosted by node 72 already")
    assert 10 not in session.sums.server.clients  # nothing of it was taken


def test_one_that_is_back_under_another_id_keeps_its_place() -> None:
    session = session_of({71: [1, 5, 9], 73: [3, 6]})
    keys = keys_of(session, [2, 4])
    assert ask(session, {72: keys}) == []
    session.members.new, session.members.unsent = [], {72: {"slots": 1}}
    session.sums.server.excluded = {4}
    assert ask(session, {99: keys}, gone=72) == []
    assert list(session.clients.items()) == [(71, [1, 5, 9]), (73, [3, 6]), (99, [2, 4])]
    assert session.members.unsent == {99: {"slots": 1}}
    assert session.sums.server.node_of(4) == 99
    assert session.sums.server.excluded == {4}
    assert session.members.new == []


def test_one_that_is_back_with_other_keys_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    session = session_of(HOSTED)
    session.members.begun = {2}
    assert ask(session, {99: keys_of(session, [4, 2], 0)}, gone=72) == []
    assert sorted(session.clients) == [71, 73, 99]
    assert session.members.new == [99]
    assert session.clients[99] == [2, 4]
    assert session.sums.server.node_of(4) == 99
    assert "node 99 has lost its state: its clients begin anew" in caplog.text


def test_one_that_has_lost_its_keys_is_asked_again() -> None:
    session = session_of(HOSTED)
    session.members._lost = {72}
    assert ask(session, {72: keys_of(session, [2])}) == []
    assert session.members.new == [72]
    assert session.clients[72] == [2]
    assert session.sums.server.node_of(4) is None


def test_keys_of_another_run_and_none_are_refused() -> None:
    session, other = session_of(HOSTED), session_of({99: [2, 4]})
    with pytest.raises(MalformedReplyError, match=r"run .*, expected"):
        session.members.read(99, keys_of(other, [2, 4]))
    with pytest.raises(MalformedReplyError):
        session.members.read(74, RecordDict())
    assert session.sums.server.node_of(4) == 72


def test_requests_go_to_the_hosts_of_those_drawn() -> None:
    session = session_of(HOSTED, aggregation="plain", participation=0.3)
    base = EgoRequest(2, np.zeros(0, np.int64), SETTINGS, "full")
    requests = session.requests(2, base, 9)
    asked = sorted(c for request in requests.values() for c in request.clients.tolist())
    assert asked == session.sample(2)
    assert len(asked) == 3
    for node, request in requests.items():
        assert set(request.clients.tolist()) <= set(HOSTED[node])
