"""Data folders, partitions and versions that do not fit: each refused with what to do."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import context_of
from folder_helpers import (
    YAML,
    MakeConfig,
    folders_of,
    grid_of,
    partition,
    run_from,
    small_config,
    strategy_of,
)

from flower_graph.apps.run import client_app
from flower_graph.client.state import forget_run
from flower_graph.config.registry import method_of
from flower_graph.data.folders.party import client_folder, server_folder, share
from flower_graph.errors import ConfigError, DataError, NoClientsError
from flower_graph.report.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.procrustes_alignment import method as ppfl
from flower_graph.strategies.structure_fedavg import method as fedgls


@pytest.fixture
def config_of(tmp_path: Path) -> MakeConfig:
    return partial(small_config, tmp_path)


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node_config", "message"),
    [
        ({}, "node-config partition-id: is missing; start the SuperNode with --node-config 'part"),
        ({"partition-id": 0}, "node-config num-partitions: is missing"),
        ({"partition-id": "one", "num-partitions": 4}, "partition-id: 'one' is no whole number"),
        ({"partition-id": 0.5, "num-partitions": 4}, "partition-id: 0.5 is no whole number"),
        ({"partition-id": True, "num-partitions": 4}, "partition-id: True is no whole number"),
        ({"partition-id": 4, "num-partitions": 4}, "partition-id: 4 with num-partitions: 4; must"),
        ({"partition-id": -1, "num-partitions": 4}, "partition-id: -1 with num-partitions: 4"),
        ({"partition-id": 0, "num-partitions": 0}, "0 SuperNodes for 8 clients"),
        ({"partition-id": 0, "num-partitions": 9}, "9 SuperNodes for 8 clients; at most one each"),
    ],
)
def test_a_partition_that_is_none(node_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        share(context_of(node_config), 8)
    assert message in str(error.value)


@pytest.mark.parametrize("app", YAML)
@pytest.mark.parametrize(
    ("node_config", "message"),
    [
        ({"partition-id": "one"}, "node-config partition-id: 'one' is no whole number; start the"),
        ({"partition-id": 9}, "node-config partition-id: 9 with num-partitions: 1; must be"),
        ({"data-folder": "/nowhere/x"}, "data-folder /nowhere/x: there is no such folder; give"),
    ],
)
def test_what_no_supernode_can_work_with_stops_the_run_with_the_reason(
    app: str, node_config: dict[str, Any], message: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of(app)
    node = {"state-dir": str(tmp_path / "state"), **node_config}
    grid = InProcessGrid(client_app(config, None), num_supernodes=1, node_configs=[node])
    with pytest.raises(NoClientsError) as error:
        method_of(config).build_strategy(config, None).start(grid, num_rounds=1, timeout=5)
    assert message in str(error.value)
    forget_run(grid.run.run_id)


def test_a_supernode_with_a_damaged_folder_is_left_out_by_name(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of("ppfl")
    folders = folders_of(partition(config, tmp_path / "out"))
    with (folders[1] / "data.safetensors").open("ab") as file:
        file.write(b"more")
    grid = grid_of(config, folders)
    reports: list[RoundReport] = []
    ppfl.METHOD.build_strategy(config, None).start(grid, num_rounds=2, on_round=reports.append)
    for report in reports:
        assert report.answered == 2
        (entry,) = report.rejected
        assert entry["node"] == [*grid.contexts][1]
        assert f"{folders[1] / 'data.safetensors'}: its SHA-256 is not that of" in entry["reason"]
    forget_run(grid.run.run_id)


def test_a_folder_is_a_path_and_without_one_every_party_makes_its_own_data(
    config_of: MakeConfig,
) -> None:
    config = config_of("fedgls")
    for given in ("", 3, True):
        with pytest.raises(ConfigError, match=f"data-folder: {given!r} is no folder; write"):
            client_folder(config, context_of({"data-folder": given}))
    assert client_folder(config, context_of({"partition-id": 0, "num-partitions": 1})) is None
    assert server_folder(config, "") is None


@pytest.mark.parametrize(
    ("app", "change", "message"),
    [
        ("fedgls", "seed=1", "data folder of another run: seed is 0, this run's is 1"),
        ("fedgls", "graph.graphless_ratio=0.25", "graphless_ratio is 0.5, this run's is 0.25"),
        ("ppfl", "seed=0", "another run: app is 'fedgls', this run's is 'ppfl'"),
    ],
)
def test_folders_of_another_run_at_all_clients_stop_the_run(
    app: str, change: str, message: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    out = partition(config_of("fedgls"), tmp_path / "out")
    other = config_of(app, change)
    with pytest.raises(DataError) as server:
        run_from(other, out)  # the server's folder is looked at first
    with pytest.raises(DataError) as client:
        client_folder(other, context_of({"data-folder": str(out / "client-0002")}))
    for error, folder in ((server, "server-folder server"), (client, "data-folder client-0002")):
        assert f"{folder.replace(' ', f' {out}/')}: " in str(error.value)
        assert message in str(error.value)


def test_a_new_folder_in_the_same_place_is_read_anew(config_of: MakeConfig, tmp_path: Path) -> None:
    first, second = config_of("fedgls"), config_of("fedgls", "seed=1")
    context = context_of({"data-folder": str(tmp_path / "here" / "client-0000")})
    found = []
    for number, config in enumerate((first, second)):
        partition(config, tmp_path / "here")
        folder = client_folder(config, context)
        assert folder is not None
        found.append(folder.tensors["0.nodes"])
        (tmp_path / "here").rename(tmp_path / f"before-{number}")
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.name=fed-gnn"], "nobody has those of client .*partition --true-edges"),
        (["graph.neighbours=30", "strategy.name=fed-gnn-knn"], r"client \d has 2\d nodes"),
        (["graph.graphless_ratio=0"], "0 leaves none of 4 clients without edges"),
    ],
)
def test_clients_that_a_method_cannot_work_with(
    overrides: list[str], message: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of("fedgls", *overrides)
    folders = folders_of(partition(config, tmp_path / "out"))
    errors = []
    for folder in folders:
        context = context_of({"data-folder": str(folder), "state-dir": ":memory:"})
        try:
            fedgls.METHOD.build_client(config, context, None)
        except (ConfigError, DataError) as error:
            errors.append(str(error))
    assert errors and all(re.search(message, error) for error in errors)


# Two SuperNodes with one client, and other versions ----------------------------------------------


@pytest.mark.parametrize("app", YAML)
def test_one_folder_at_two_supernodes(
    app: str, config_of: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(app)
    out = partition(config, tmp_path / "out", "--supernodes", "3")
    folders = folders_of(out)
    grid = grid_of(config, [*folders, folders[1]])
    nodes = list(grid.contexts)
    reports: list[RoundReport] = []
    strategy_of(config, out).start(grid, num_rounds=2, on_round=reports.append)
    text = caplog.text + repr([report.rejected for report in reports])
    found = re.search(r"is hosted by node (\d+) already: give each SuperNode a partition-id", text)
    assert found, text
    # One of the two takes part, and the line names both.
    twins = {nodes[1], nodes[3]}
    (refused,) = twins - {int(found[1])}
    assert str(refused) in text
    assert reports[-1].answered == method_of(config).num_clients(config)
    forget_run(grid.run.run_id)


@pytest.mark.parametrize("app", YAML)
def test_another_message_format_is_refused_by_name(
    app: str, config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(app)
    out = partition(config, tmp_path / "out", "--supernodes", "2")
    monkeypatch.setattr("flower_graph.client.adaptor.FORMAT", 3)
    monkeypatch.setattr("flower_graph.client.adaptor.__version__", "0.3.0")
    grid = grid_of(config, folders_of(out))
    with pytest.raises(NoClientsError) as error:
        strategy_of(config, out).start(grid, num_rounds=1, timeout=5)
    assert "speaks message format 3 (flower-graph 0.3.0), the server 2 (" in str(error.value)
    assert "install the same version" in str(error.value)
