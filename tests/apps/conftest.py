"""Small graphs as files, and a cache of the test's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import InlinePool, MakeConfig
from table_helpers import report
from torch_geometric.data import Data

from flower_graph.apps import parallel
from flower_graph.apps.reproduce import command, runs
from flower_graph.config.common import RunConfig
from flower_graph.method.load import load_config
from flower_graph.records.rounds import RoundReport


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


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Have runs take no time, and break with seed 7; the configs that were run."""
    ran: list[RunConfig] = []

    def simulate(config: RunConfig) -> tuple[list[RoundReport], dict[str, Any]]:
        if config.seed == 7:
            raise RuntimeError("the run broke")
        ran.append(config)
        better = 0.1 * (getattr(config, "graph", None) is not None and config.graph.neighbours == 7)
        reports = [report(1, 0.5, 0.6), report(2, 0.7 + better, 0.8), report(3, 0.6, 0.9)]
        return reports, {}

    monkeypatch.setattr(runs, "simulate_whole", simulate)
    monkeypatch.setattr(runs, "steps_of", lambda config: (2, 5))
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(command, "cached_data", lambda config: None)
    return ran
