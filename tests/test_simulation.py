from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_graph.flower_compat import SUPERLINK_NODE_ID, ErrorCode, Run, TaskIdentity
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.exchange import Exchange


@pytest.fixture(autouse=True)
def no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)


def app_of(function: Any) -> ClientApp:
    app = ClientApp()
    app.train()(function)
    return app


def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


ECHO = app_of(echo)


def message_to(node_id: int, **config: Any) -> Message:
    return Message(RecordDict({"config": ConfigRecord(config)}), node_id, "train")


def test_nodes_have_their_own_contexts_and_stable_ids() -> None:
    grid = InProcessGrid(
        ECHO, num_supernodes=3, run_config={"a": 1}, node_config={"state-dir": "here"}
    )
    contexts = list(grid.contexts.values())
    assert grid.get_node_ids() == [context.node_id for context in contexts]
    assert [context.node_config for context in contexts] == [
        {"partition-id": p, "num-partitions": 3, "state-dir": "here"} for p in range(3)
    ]
    contexts[0].run_config["a"] = 2
    assert contexts[1].run_config == {"a": 1}
    again = InProcessGrid(ECHO, num_supernodes=4)
    assert again.get_node_ids()[:3] == grid.get_node_ids()
    assert again.contexts[again.get_node_ids()[3]].node_config["state-dir"] == ":memory:"
    other = InProcessGrid(ECHO, num_supernodes=3, seed=1)
    assert other.get_node_ids()[0] not in again.contexts
    assert min(grid.get_node_ids()) > 1000  # nobody can take them for partition ids
    with pytest.raises(ValueError, match=r"num_supernodes.*0"):
        InProcessGrid(ECHO, num_supernodes=0)
    # A node can be told what others are not.
    own = [{"data-folder": "a"}, {"state-dir": "b", "partition-id": 7}]
    grid = InProcessGrid(ECHO, num_supernodes=2, node_config=own)
    assert [dict(context.node_config) for context in grid.contexts.values()] == [
        {"partition-id": 0, "num-partitions": 2, "state-dir": ":memory:", "data-folder": "a"},
        {"partition-id": 7, "num-partitions": 2, "state-dir": "b"},
    ]
    with pytest.raises(ValueError, match="node_config: 2"):
        InProcessGrid(ECHO, num_supernodes=3, node_config=own)


def test_messages_can_be_made_without_a_run_and_belong_to_the_grids_run() -> None:
    with pytest.raises(RuntimeError):
        message_to(1)
    grid = InProcessGrid(ECHO, num_supernodes=1, run_id=5)
    node = grid.get_node_ids()[0]
    assert (TaskIdentity.run_id, TaskIdentity.node_id) == (5, SUPERLINK_NODE_ID)
    other = InProcessGrid(ECHO, num_supernodes=1, run_id=6)
    assert TaskIdentity.run_id == 5  # an identity that is there stays
    (reply,) = other.send_and_receive([message_to(node, x=1)])
    assert (reply.metadata.run_id, other.run.run_id, other.contexts[node].run_id) == (6, 6, 6)
    fresh = [InProcessGrid(ECHO, num_supernodes=1).run.run_id for _ in range(2)]
    assert len({5, 6, *fresh}) == 4  # every grid without a number is a run of its own
    other.set_run(Run.create_empty(9))
    assert other.run.run_id == 9


def test_replies_are_kept_until_pulled_once() -> None:
    grid = InProcessGrid(ECHO, num_supernodes=2)
    first, second = grid.get_node_ids()
    ids = grid.push_messages([message_to(second, x=2), message_to(77, x=0), message_to(first, x=1)])
    assert len(set(ids)) == 2  # none for the unknown node
    replies = grid.pull_messages(ids)
    assert [reply.metadata.src_node_id for reply in replies] == [second, first]
    assert [reply.metadata.reply_to_message_id for reply in replies] == ids
    assert [reply.content["config"]["x"] for reply in replies] == [2, 1]
    assert grid.pull_messages([*ids, "unknown"]) == []
    made = grid.create_message(RecordDict(), "train", first, "3", ttl=7.0)
    assert (made.metadata.group_id, made.metadata.ttl) == ("3", 7.0)


def test_an_exception_becomes_an_error_reply_and_undoes_the_state() -> None:
    def fragile(message: Any, context: Context) -> Message:
        context.state["seen"] = ConfigRecord({"x": message.content["config"]["x"]})
        if message.content["config"]["x"] == 2:
            raise RuntimeError("no such luck")
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app_of(fragile), num_supernodes=1)
    (node,) = grid.get_node_ids()
    replies = grid.send_and_receive([message_to(node, x=x) for x in (1, 2)])
    assert replies[0].has_content()
    assert replies[1].error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert str(replies[1].error.reason).startswith(
        "RuntimeError: no such luck (test_simulation.py:"
    )
    assert grid.contexts[node].state["seen"]["x"] == 1
    (reply,) = InProcessGrid(app_of(lambda m, c: 3), num_supernodes=1).send_and_receive(
        [message_to(node)]
    )
    assert "ClientApp returned int" in str(reply.error.reason)


def test_clients_cannot_change_what_others_receive() -> None:
    seen = []

    def greedy(message: Any, context: Context) -> Message:
        seen.append({key: list(value) for key, value in message.content["config"].items()})
        message.content["config"]["ids"].append(0)
        message.content["config"]["new"] = [1]
        message.content["more"] = ConfigRecord()
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app_of(greedy), num_supernodes=3)
    shared = RecordDict({"config": ConfigRecord({"ids": [5]})})
    Exchange(grid).send(
        {node: shared for node in grid.get_node_ids()},
        server_round=1,
        timeout=1.0,
        read=lambda node_id, content: None,
    )
    assert seen == [{"ids": [5]}] * 3
    assert list(shared) == ["config"]
