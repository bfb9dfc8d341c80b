"""Runs in one process whose parties each have a folder of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flower_graph.apps.cli import main as cli
from flower_graph.apps.run import client_app
from flower_graph.client.state import forget_run
from flower_graph.config.common import RunConfig
from flower_graph.config.load import load_config, to_yaml
from flower_graph.config.registry import method_of
from flower_graph.data.folders.party import server_folder
from flower_graph.report.rounds import RoundReport
from flower_graph.simulation import InProcessGrid

DATA = """
rounds: 2
data:
  {name: csbm, nodes: 90, classes: 3, degree: 6, features: 30, active: 5,
   split: random, ratios: [0.4, 0.3, 0.3]}
"""
YAML = {
    "nfedgnn": "model: {hidden: 4}\n",
    "fedscem": "partition: {clients: 5, min_nodes: 6}\nmodel: {hidden: 4}\n",
    "fedgls": "partition: {clients: 4, method: random}\ngraph: {neighbours: 3}\n",
    "ppfl": (
        "judge: {folds: 2, mlp: false}\nmodel: {name: gat}\n"
        "partition: {clients: 3, private_share: 0.2, ratios: [0.2, 0.4, 0.4]}\n"
    ),
}
MakeConfig = Callable[..., RunConfig]


def small_config(folder: Path, app: str, *overrides: str) -> RunConfig:
    """Write a config of a method on a small generated graph, and load it."""
    file = folder / f"{app}.yaml"
    file.write_text(f"app: {app}\n{DATA}{YAML[app]}", encoding="utf-8")
    return load_config(str(file), overrides)


def partition(config: RunConfig, out: Path, *words: str) -> Path:
    """Have the command write the folders of a config."""
    file = out.with_suffix(".yaml")
    file.write_text(to_yaml(config), encoding="utf-8")
    assert cli.main(["partition", str(file), "--out", str(out), *words]) == 0
    return out


def folders_of(out: Path) -> list[Path]:
    return sorted(out.glob("client*"))


def run_from(config: RunConfig, out: Path) -> tuple[list[RoundReport], dict[str, Any]]:
    """Run a config in this process, every party with its own folder."""
    server = server_folder(config, str(out / "server"))
    grid = grid_of(config, folders_of(out))
    for context in grid.contexts.values():
        del context.node_config["partition-id"], context.node_config["num-partitions"]
    method, reports = method_of(config), list[RoundReport]()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        strategy = method.build_strategy(config, None, server)
        strategy.start(grid, num_rounds=config.rounds, on_round=reports.append)
        return reports, method.final_figures(config, strategy, server)
    finally:
        forget_run(grid.run.run_id)


def plain(reports: list[RoundReport]) -> list[dict[str, Any]]:
    """Give reports without what differs from run to run, and comparable where NaN."""
    left_out = ("seconds", "parts", "structure")
    return [
        {k: repr(v) for k, v in asdict(report).items() if k not in left_out} for report in reports
    ]


def grid_of(config: RunConfig, folders: list[Path]) -> InProcessGrid:
    """Make a grid of as many nodes as folders."""
    own = [{"data-folder": str(folder)} for folder in folders]
    app = client_app(config, None)
    return InProcessGrid(app, num_supernodes=len(own), seed=config.seed, node_configs=own)


def strategy_of(config: RunConfig, out: Path) -> Any:
    """Make the strategy of a run whose server has its own folder."""
    server = server_folder(config, str(out / "server"))
    return method_of(config).build_strategy(config, None, server)
