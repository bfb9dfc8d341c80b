"""Runs a config on the in-process engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flower_graph.apps.common import client_app, method_of, run_server
from flower_graph.config import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.report import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.state import forget_run


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
        Cohorts that the clients are dealt to; the result does not depend on it.
    resume : bool
        Go on from the folder's last checkpoint.
    progress : callable, optional
        Called with every round's report.

    Returns
    -------
    dict
        What ``result.json`` holds.
    """
    with _grid(config, supernodes, out) as grid:
        return run_server(config, grid, out, engine="in-process", resume=resume, on_round=progress)


def simulate(config: RunConfig, *, supernodes: int = 1) -> list[RoundReport]:
    """Run a config in this process and write nothing.

    Parameters
    ----------
    config : RunConfig
        The run.
    supernodes : int
        Cohorts that the clients are dealt to.

    Returns
    -------
    list of RoundReport
        One a round.
    """
    return simulate_whole(config, supernodes=supernodes)[0]


def simulate_whole(
    config: RunConfig, *, supernodes: int = 1
) -> tuple[list[RoundReport], dict[str, Any]]:
    """Run a config in this process and write nothing; parameters as of ``simulate``.

    Returns
    -------
    tuple
        Reports, one a round; and what ``result.json`` would have besides.
    """
    reports: list[RoundReport] = []
    method = method_of(config)
    with _grid(config, supernodes, None) as grid:
        strategy = method.build_strategy(config, None)
        strategy.start(grid, num_rounds=config.rounds, on_round=reports.append)
        return reports, method.final_figures(config, strategy)


@contextmanager
def _grid(config: RunConfig, supernodes: int, out: Path | None) -> Iterator[InProcessGrid]:
    """Make a run's grid; what its clients keep in this process goes when the run ends."""
    clients = method_of(config).num_clients(config)
    if supernodes > clients:
        raise ConfigError(f"supernodes: {supernodes} for {clients} clients; at most one each")
    # Flower's own strategies write a dozen lines a round; here the progress bar says it in one.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    grid = InProcessGrid(client_app(config, out), num_supernodes=supernodes, seed=config.seed)
    try:
        yield grid
    finally:
        forget_run(grid.run.run_id)
