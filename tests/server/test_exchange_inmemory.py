"""The exchange on Flower's own grid of ``flwr run``, with its message store but without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, cast
from uuid import uuid4

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from flower_graph.client.adaptor import make_client_app
from flower_graph.flower_compat import (
    FLWR_IN_MEMORY_DB_NAME,
    NOOP_FEDERATION_ID,
    SUPERLINK_NODE_ID,
    InMemoryGrid,
    InMemoryLinkState,
    LinkStateFactory,
    NoOpFederationManager,
    NumPyClient,
    ObjectStoreFactory,
    Run,
    RunRecord,
    Task,
    TaskIdentity,
    register_nodes,
    stamp,
)
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import encode_array
from flower_graph.wire.exchange import Exchange

RUN_ID = 11


class Doubler(NumPyClient):
    def fit(self, parameters: Any, config: Any) -> Any:
        return [2 * parameters[0]], 1, {}


APP = make_client_app(lambda context: Doubler())


class Fleet:
    """Plays the SuperNodes: takes messages from the store, runs the app, puts replies back."""

    def __init__(self, num_nodes: int) -> None:
        factory = LinkStateFactory(
            FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
        )
        run = Run.create_empty(RUN_ID)
        run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
        self.state = cast(InMemoryLinkState, factory.state())
        self.state.run_ids[RUN_ID] = RunRecord(run=run)
        self.state.task_store[1] = Task(task_id=1, run_id=RUN_ID)
        self.grid = InMemoryGrid(factory)
        self.grid.set_run(run)
        self.nodes = list(register_nodes(num_nodes, factory))

    def serve(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            for message in self.state.get_message_ins(node, limit=None):
                reply = APP(message, Context(RUN_ID, node, {}, RecordDict(), {}))
                stamp(reply, message_id=str(uuid4()))
                assert self.state.store_message_res(reply) is not None

    def serve_soon(self, nodes: Iterable[int]) -> threading.Timer:
        timer = threading.Timer(0.05, self.serve, [list(nodes)])
        timer.start()
        return timer


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    for name, value in {"_run_id": RUN_ID, "_node_id": SUPERLINK_NODE_ID, "_task_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    yield Fleet(3)


def content(value: float) -> RecordDict:
    record = ArrayRecord()
    record["x"] = encode_array("x", np.array([value], np.float32))
    return RecordDict({"arrays": record, "config": ConfigRecord({"round": 1})})


def read(node_id: int, reply: Any) -> float:
    return float(reply["arrays"]["x"].numpy()[0])


def test_flowers_grid_and_ours_give_the_same(fleet: Fleet) -> None:
    exchange = Exchange(fleet.grid)
    nodes = exchange.nodes(3, timeout=1.0)
    assert nodes == sorted(fleet.nodes)
    fleet.serve_soon(nodes)
    requests = {node: content(place) for place, node in enumerate(nodes)}
    replies = exchange.send(requests, server_round=1, timeout=5.0, read=read)
    assert replies.values == {node: 2.0 * place for place, node in enumerate(nodes)}

    ours = Exchange(grid := InProcessGrid(APP, num_supernodes=3))
    requests = {node: content(place) for place, node in enumerate(grid.get_node_ids())}
    same = ours.send(requests, server_round=1, timeout=5.0, read=read)
    assert list(same.values.values()) == list(replies.values.values())
    assert ours.ledger.wire == exchange.ledger.wire
    assert exchange.ledger.wire["down"] == 3 * (1 + 128 + 4 + 5 + 8)


def test_nodes_that_are_unknown_or_offline_are_reported_without_waiting(fleet: Fleet) -> None:
    stranger, (gone, *others) = 12345, fleet.nodes
    fleet.state.nodes[gone].online_until = 0.0
    fleet.serve_soon(others)
    replies = Exchange(fleet.grid).send(
        dict.fromkeys([stranger, *fleet.nodes], content(1)),
        server_round=1,
        timeout=60.0,
        read=read,
    )
    assert replies.values == dict.fromkeys(others, 2.0)
    unknown, offline = replies.rejected
    assert (unknown.node_id, offline.node_id) == (stranger, gone)
    assert unknown.reason.startswith("not sent")
    assert offline.reason.startswith("error reply: ")
