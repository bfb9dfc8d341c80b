"""A SuperNode with a key of its own works for no server that wants to be trusted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from federation import ALL
from flwr.app import ConfigRecord, Message, RecordDict

from flower_graph.apps.run import client_app
from flower_graph.config.registry import method_of
from flower_graph.errors import NoClientsError
from flower_graph.messages.keys import CONFIG
from flower_graph.secure.identity import new_identity
from flower_graph.secure.registry import Registry
from flower_graph.simulation import InProcessGrid

METHODS = ("fedscem", "fedscem, plain", "deepwalk, secure", "fedgls", "nfedgnn")


def parties(folder: Path, count: int) -> list[dict[str, Any]]:
    """Make keys and a registry; return each SuperNode's entries of the node config."""
    registry = Registry({}, 100)
    for number in range(count):
        clients = [range(100 * number, 100 * number + 100)]
        registry = registry.with_party(new_identity(folder / f"key-{number}"), clients)
    registry.write(folder / "registry.json")
    where = {"registry": str(folder / "registry.json")}
    return [{"identity-key": str(folder / f"key-{number}"), **where} for number in range(count)]


class Spy(InProcessGrid):
    """Remembers what SuperNodes send."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.replies: list[Any] = []

    def pull_messages(self, message_ids: Any) -> list[Any]:
        replies = super().pull_messages(message_ids)
        self.replies += replies
        return replies


@pytest.mark.parametrize("name", METHODS)
def test_nothing_leaves_a_supernode_with_a_key_of_its_own(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = ALL[name]
    config = setup.load()
    strategy: Any = method_of(config).build_strategy(config, None)
    grid = Spy(
        client_app(config, None),
        num_supernodes=setup.supernodes,
        node_configs=parties(tmp_path, setup.supernodes),
    )
    with caplog.at_level(logging.WARNING), pytest.raises(NoClientsError):
        strategy.start(grid, num_rounds=1, timeout=1.0)
    assert grid.replies
    assert all(reply.has_error() for reply in grid.replies)
    assert all(not context.state for context in grid.contexts.values())
    assert "has a key of its own (identity-key) and takes part in no run" in caplog.text


def test_half_of_the_settings_is_enough_to_refuse(tmp_path: Path) -> None:
    """A registry without a key is a mistake, and not a reason to trust the server."""
    setup = ALL["fedgls"]
    grid = InProcessGrid(
        client_app(setup.load(), None),
        num_supernodes=1,
        node_config={"registry": parties(tmp_path, 1)[0]["registry"]},
    )
    (node,) = grid.get_node_ids()
    content = RecordDict({CONFIG: ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([Message(content, node, "query")])
    assert reply.has_error()
    assert "key of its own" in reply.error.reason
