"""Small graphs as files, and a cache of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from app_helpers import MakeConfig
from torch_geometric.data import Data

from flower_graph.config.common import RunConfig
from flower_graph.config.load import load_config


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On graphs this small several threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def config_of(tmp_path: Path) -> MakeConfig:
    """Save a graph, write a YAML file that names it, and load that."""

    def make(data: Data, *overrides: str) -> RunConfig:
        torch.save(data, tmp_path / "graph.pt")
        path = tmp_path / "own.yaml"
        path.write_text(
            f"data:\n  name: {tmp_path / 'graph.pt'}\nrounds: 6\ncheckpoint_every: 2\n"
            "model:\n  hidden: 4\nstrategy:\n  reg_weight: 1\n"
        )
        return load_config(str(path), list(overrides))

    return make
