"""A SuperNode with a key of its own works for no server that wants to be trusted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from federation import ALL, Federation
from flwr.app import ConfigRecord, Message, RecordDict

from flower_graph.apps.run import client_app
from flower_graph.errors import NoClientsError
from flower_graph.method.registry import method_of
from flower_graph.secure.parties.identity import new_identity
from flower_graph.secure.parties.registry import Registry
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.keys import CONFIG

METHODS = ("fedscem", "fedscem, plain", "deepwalk, secure", "fedgls", "nfedgnn")


def parties(folder: Path, count: int) -> list[dict[str, Any]]:
    """Make keys and a registry of five or more; return each SuperNode's node config."""
    registry = Registry({}, 100)
    for number in range(max(count, 5)):
        clients = [range(100 * number, 100 * number + 100)]
        registry = registry.with_party(new_identity(folder / f"key-{number}"), clients)
    registry.write(folder / "registry.json")
    where = {"registry": str(folder / "registry.json")}
    return [{"identity-key": str(folder / f"key-{number}"), **where} for number in range(count)]


@pytest.mark.parametrize("name", METHODS)
def test_nothing_leaves_a_supernode_with_a_key_of_its_own(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = ALL[name]
    config = setup.load()
    strategy: Any = method_of(config).build_strategy(config, None)
    grid = Federation(
        client_app(config, None),
        num_supernodes=setup.supernodes,
        node_configs=parties(tmp_path, setup.supernodes),
    )
    with caplog.at_level(logging.WARNING), pytest.raises(NoClientsError):
        strategy.start(grid, num_rounds=1, timeout=1.0)
    assert grid.exchanged
    assert all(reply.has_error() for _, reply in grid.exchanged)
    assert all(not context.state for context in grid.contexts.values())
    assert "identity-key" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identity-key": None}, "identity-key: None"),
        ({"trust-minimun": 5}, "trust-minimun"),
        ({"identity-key": None, "registry": None, "trust-minimum": 5}, "identity-key: None"),
        ({"identity-key": None, "registry": None, "block-cap": 64}, "identity-key: None"),
        ({"identity-key": "/nowhere"}, "/nowhere:"),
        ({"trust-corrupt": 0.5}, "trust-corrupt: 0.5"),
    ],
)
def test_settings_that_are_wrong_are_no_reason_to_trust_the_server(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The SuperNode's own log has what is wrong; the server is told nothing of it."""
    given = parties(tmp_path, 5)[0] | changes
    grid = InProcessGrid(
        client_app(ALL["fedgls"].load(), None),
        num_supernodes=1,
        node_config={key: value for key, value in given.items() if value is not None},
    )
    (node,) = grid.get_node_ids()
    content = RecordDict({CONFIG: ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([Message(content, node, "query")])
    assert "key of its own, or should have" in reply.error.reason
    assert "its own log says why" in reply.error.reason and "/" not in reply.error.reason
    assert said in caplog.text
