"""What every method's app shares: the choice of the method, its data, a run and its outputs.

A method's app is one module, ``apps/<app>.py``, with the members that ``Method`` names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_graph import checkpoint
from flower_graph.apps.privacy import (
    announce_privacy,
    client_mods,
    final_privacy,
    note_privacy,
)
from flower_graph.client import make_client_app
from flower_graph.config import (
    DataConfig,
    RunConfig,
    load_config,
    parse_overrides,
    to_dict,
)
from flower_graph.data import load_data
from flower_graph.errors import ConfigError
from flower_graph.report import RoundReport, RunWriter

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from flower_graph.data.run_folder import RunFolder

CHECKPOINTS = "checkpoints"


class Method(Protocol):
    """What the module of a method's app has. ``config`` is of the method's own schema."""

    @property
    def ACTIONS(self) -> Sequence[str]:  # noqa: N802 - a constant of the module
        """Named actions of its clients, for ``make_client_app``."""

    def build_client(self, config: Any, context: Context, out: Path | None) -> NumPyClient:
        """Build the client of one SuperNode; ``out`` is the output folder, if there is one."""

    def build_strategy(self, config: Any, out: Path | None, folder: RunFolder | None = None) -> Any:
        """Build the server's half, with ``start`` and ``weights``.

        With a ``folder`` the server reads nothing else of the data; so in the next two.
        """

    def num_clients(self, config: Any, folder: RunFolder | None = None) -> int:
        """Count the clients of the federation, all SuperNodes' together."""

    def final_figures(
        self, config: Any, strategy: Any, folder: RunFolder | None = None
    ) -> dict[str, Any]:
        """Give what ``result.json`` has and the rounds do not say."""


def method_of(config: RunConfig) -> Method:
    """Import the method's module: a process that answers one message pays for one method."""
    if config.app == "fedscem":
        from flower_graph.apps import fedscem

        return fedscem
    if config.app == "fedgls":
        from flower_graph.apps import fedgls

        return fedgls
    if config.app == "ppfl":
        from flower_graph.apps import ppfl

        return ppfl
    from flower_graph.apps import nfedgnn

    return nfedgnn


def client_app(config: RunConfig, out: Path | None) -> ClientApp:
    """Build the ClientApp of a run.

    Parameters
    ----------
    config : RunConfig
        The run.
    out : Path, optional
        Output folder; clients' checkpoints go below it.
    """
    method = method_of(config)
    mods, train_mods = client_mods(config)

    def client_fn(context: Context) -> NumPyClient:
        return method.build_client(config, context, out)

    return make_client_app(client_fn, actions=method.ACTIONS, mods=mods, train_mods=train_mods)


def run_server(
    config: RunConfig,
    grid: Grid,
    out: Path,
    *,
    engine: str,
    resume: bool = False,
    on_round: Callable[[RoundReport], None] | None = None,
    folder: RunFolder | None = None,
) -> dict[str, Any]:
    """Run the method over a grid and write every output.

    Parameters
    ----------
    config, grid : RunConfig, Grid
        The run; Flower's grid, or the in-process one.
    out : Path
        Output folder, new unless ``resume``.
    engine : str
        Name of the engine, for the result.
    resume : bool
        Go on from the folder's last checkpoint.
    on_round : callable, optional
        Called with every round's report.
    folder : RunFolder, optional
        All that the server reads of the data.

    Returns
    -------
    dict
        What ``result.json`` holds.
    """
    first = checkpoint.last_round(out / CHECKPOINTS) if resume else None
    writer = RunWriter(out, to_dict(config), resume_round=first)
    try:
        method = method_of(config)
        strategy = method.build_strategy(config, out, folder)
        announce_privacy(config)

        def report(entry: RoundReport) -> None:
            note_privacy(config, entry)
            writer.write_round(entry)
            if on_round is not None:
                on_round(entry)

        rounds, timeout = config.rounds, config.strategy.timeout
        strategy.start(grid, num_rounds=rounds, timeout=timeout, on_round=report, resume=resume)
        final = {"clients": method.num_clients(config, folder), "engine": engine}
        final |= final_privacy(config)
        return writer.finish(
            final | method.final_figures(config, strategy, folder), strategy.weights()
        )
    finally:
        writer.close()


def checkpoint_settings(config: RunConfig, out: Path | None) -> dict[str, Any]:
    """Say where and how often a strategy saves; a run without a folder saves nothing."""
    if out is None:
        return {"checkpoint_dir": None, "checkpoint_every": 0}
    return {"checkpoint_dir": out / CHECKPOINTS, "checkpoint_every": config.checkpoint_every}


def cached_data(config: RunConfig) -> Data:
    """Load the run's graph once a process; clients are built anew for every message."""
    # JSON, because writing YAML takes longer than a client's whole answer.
    settings = json.dumps(asdict(config.data))
    return _cached_data(settings, config.seed, saved_at(config.data.name))


@lru_cache(maxsize=2)
def _cached_data(settings: str, seed: int, saved: int) -> Data:
    """Load the graph; `saved`, the time of its file, is there to read a new file anew."""
    return load_data(DataConfig(**json.loads(settings)), seed=seed)


def saved_at(name: str) -> int:
    """Return when a file, or the last of a folder's, was saved; 0 for other names.

    With it a cache reads a new one anew.
    """
    file = Path(name)
    files = [file] if file.is_file() else file.glob("*.pt")
    return max((one.stat().st_mtime_ns for one in files), default=0)


def configured(context: Context) -> tuple[RunConfig, Path | None]:
    """Read the run config of a Flower app: the run, and its output folder if one is named."""
    given = context.run_config
    name, overrides = str(given.get("config", "quickstart")), str(given.get("overrides", ""))
    config = _configuration(name, overrides, saved_at(name))
    folder = str(given.get("output-dir", ""))
    if config.checkpoint_every and not folder:
        raise ConfigError(
            f"checkpoint_every: {config.checkpoint_every} needs output-dir in the run config, "
            "where clients save their part"
        )
    return config, Path(folder).expanduser().absolute() if folder else None


@lru_cache(maxsize=4)
def _configuration(name: str, overrides: str, saved: int) -> RunConfig:
    """Load a config once a process: for a client of one user it takes longer than all the rest.

    `saved`, the time of its file, is there to read a new file anew.
    """
    return load_config(name, parse_overrides(overrides))
