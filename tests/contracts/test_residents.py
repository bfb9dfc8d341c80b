"""Clients that live in workers give what clients in the process give, to the bit."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from federation import METHODS, tried

from flower_graph.apps.client_app import app
from flower_graph.client import resident
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.simulation import InProcessGrid
from flower_graph.storage.files import STATE_VARIABLE

ROUNDS = 2


def play(name: str, place: Path, node_config: dict[str, Any]) -> tuple[list[Any], InProcessGrid]:
    """Run a method's first rounds with two SuperNodes, or the fewest that it takes."""
    setup = METHODS[name]
    config = load_config(setup.config, [*setup.overrides, f"rounds={ROUNDS}"])
    nodes = max(min(2, setup.supernodes), setup.fewest)
    grid = InProcessGrid(
        app,
        num_supernodes=nodes,
        run_config={"config": setup.config, "overrides": " ".join(setup.overrides)},
        run_id=11,
        node_config={"state-dir": str(place), **node_config},
    )
    reports: list[Any] = []
    strategy = method_of(config).build_strategy(config, None, None)
    strategy.start(grid, num_rounds=ROUNDS, on_round=reports.append)
    assert not grid.tracebacks
    return [replace(one, seconds=0.0) for one in reports], grid


# Each SuperNode's worker imports PyTorch: some 6 s of a core a method
@pytest.mark.parametrize("name", tried(METHODS, (), ("nfedgnn", "fedscem")))
def test_a_method_gives_the_same_from_workers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "sockets"))
    here, _ = play(name, tmp_path / "here", {"resident": False})
    before = set(psutil.Process().children())
    monkeypatch.setattr(resident, "owner_of_message", os.getpid)
    there, grid = play(name, tmp_path / "there", {"resident-idle": 60})
    assert there == here
    workers = set(psutil.Process().children()) - before
    assert len(workers) == len(grid.contexts)
    for worker in workers:
        worker.terminate()
        worker.wait(20)
    assert list((tmp_path / "sockets").iterdir()) == []
    assert kept(tmp_path / "there") == kept(tmp_path / "here")


def kept(place: Path) -> set[str]:
    """List the names of the files that SuperNodes have left."""
    return {path.name for path in place.rglob("*.*") if path.is_file()}
