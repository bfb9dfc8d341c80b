"""Runs a config on the in-process engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context

from flower_graph.apps.nfedgnn import build_client, build_strategy, cached_data, run_server
from flower_graph.client import make_client_app
from flower_graph.config import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.report import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.split_gradient_relay import ACTIONS, NodeClient


def run(
    config: RunConfig,
    out: Path,
    *,
    supernodes: int = 1,
    resume: bool = False,
    progress: Callable[[RoundReport], None] | None = None,
) -> dict[str, Any]:
    """Run a config in this process and write every output.

    Parameters
    ----------
    config : RunConfig
        The run.
    out : Path
        Output folder, new unless ``resume``.
    supernodes : int
        Cohorts that the users are dealt to; the result does not depend on it.
    resume : bool
        Go on from the folder's last checkpoint.
    progress : callable, optional
        Called with every round's report.

    Returns
    -------
    dict
        What ``result.json`` holds.
    """
    grid = _grid(config, supernodes, out)
    return run_server(config, grid, out, engine="in-process", resume=resume, on_round=progress)


def simulate(config: RunConfig, *, supernodes: int = 1) -> list[RoundReport]:
    """Run a config in this process and write nothing.

    Parameters
    ----------
    config : RunConfig
        The run.
    supernodes : int
        Cohorts that the users are dealt to.

    Returns
    -------
    list of RoundReport
        One a round.
    """
    reports: list[RoundReport] = []
    strategy = build_strategy(config, cached_data(config), None)
    strategy.start(
        _grid(config, supernodes, None), num_rounds=config.rounds, on_round=reports.append
    )
    return reports


def _grid(config: RunConfig, supernodes: int, out: Path | None) -> InProcessGrid:
    nodes = cached_data(config).num_nodes
    if supernodes > nodes:
        raise ConfigError(f"supernodes: {supernodes} for {nodes} users; at most one each")

    def client_fn(context: Context) -> NodeClient:
        return build_client(config, context, out)

    app = make_client_app(client_fn, actions=ACTIONS)
    return InProcessGrid(app, num_supernodes=supernodes, seed=config.seed)
