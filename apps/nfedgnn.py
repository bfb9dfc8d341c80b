"""nFedGNN from a config: builds the server's and the clients' half, and runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid
from torch import Tensor

from flower_graph import checkpoint
from flower_graph.config import (
    DataConfig,
    RunConfig,
    load_config,
    parse_overrides,
    to_dict,
)
from flower_graph.data import load_data
from flower_graph.errors import ConfigError
from flower_graph.models import build_server_model
from flower_graph.report import RoundReport, RunWriter
from flower_graph.strategies.split_gradient_relay import NodeClient, SplitGradientRelay

if TYPE_CHECKING:
    from torch_geometric.data import Data

CHECKPOINTS = "checkpoints"


def build_strategy(config: RunConfig, data: Data, out: Path | None) -> SplitGradientRelay:
    """Build the server's half.

    Parameters
    ----------
    config : RunConfig
        The run.
    data : Data
        The graph; its features are not handed on.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    model = build_server_model(
        config.model.name,
        hidden=config.model.hidden,
        heads=config.model.heads,
        classes=int(data.num_classes),
        dropout=config.model.dropout,
        seed=config.seed,
    )
    how = config.strategy
    return SplitGradientRelay(
        data,
        model,
        latent_size=model.latent_size,
        user_bias=config.model.user_bias,
        reg_weight=how.reg_weight,
        learning_rate=how.learning_rate,
        weight_decay=how.weight_decay,
        participation=how.participation,
        average_every=how.average_every,
        average_over=how.average_over,
        seed=config.seed,
        device=config.device,
        min_nodes=how.min_nodes,
        checkpoint_dir=None if out is None else out / CHECKPOINTS,
        checkpoint_every=0 if out is None else config.checkpoint_every,
    )


def build_client(config: RunConfig, context: Context, out: Path | None) -> NodeClient:
    """Build the client of one SuperNode: its share of the users, dealt by its partition.

    Parameters
    ----------
    config : RunConfig
        The run.
    context : Context
        The ClientApp's; ``partition-id`` and ``num-partitions`` say which users are here.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    data = cached_data(config)
    part, parts = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    return NodeClient(
        context,
        *deal(data.x, part, parts),
        device=config.device,
        checkpoint_dir=None if out is None else out / CHECKPOINTS,
    )


def deal(x: Tensor, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Deal users to SuperNodes in runs of neighbouring numbers.

    Parameters
    ----------
    x : Tensor
        ``[n, f]`` features of all users.
    part, parts : int
        Which share, and how many there are.

    Returns
    -------
    tuple of Tensor
        ``[n_c, f]`` features and ``[n_c]`` numbers of the users of this share.
    """
    n = x.shape[0]
    if parts > n:
        raise ConfigError(f"num-supernodes: {parts} SuperNodes for {n} users; at most one each")
    first, last = part * n // parts, (part + 1) * n // parts
    return x[first:last], torch.arange(first, last)


def cached_data(config: RunConfig) -> Data:
    """Load the run's graph once a process; clients are built anew for every message."""
    # JSON, because writing YAML takes longer than a client's whole answer.
    settings = json.dumps(asdict(config.data))
    return _cached_data(settings, config.seed, _saved_at(config.data.name))


def _saved_at(name: str) -> int:
    """Return when a file was saved, so that a cache reads a new one anew; 0 for other names."""
    file = Path(name)
    return file.stat().st_mtime_ns if file.is_file() else 0


@lru_cache(maxsize=2)
def _cached_data(settings: str, seed: int, saved: int) -> Data:
    """Load the graph; `saved`, the time of its file, is there to read a new file anew."""
    return load_data(DataConfig(**json.loads(settings)), seed=seed)


def run_server(
    config: RunConfig,
    grid: Grid,
    out: Path,
    *,
    engine: str,
    resume: bool = False,
    on_round: Callable[[RoundReport], None] | None = None,
) -> dict[str, Any]:
    """Run the method over a grid and write every output.

    Parameters
    ----------
    config : RunConfig
        The run.
    grid : Grid
        Flower's, or the in-process one.
    out : Path
        Output folder, new unless ``resume``.
    engine : str
        Name of the engine, for the result.
    resume : bool
        Go on from the folder's last checkpoint.
    on_round : callable, optional
        Called with every round's report.

    Returns
    -------
    dict
        What ``result.json`` holds.
    """
    first = checkpoint.last_round(out / CHECKPOINTS) if resume else None
    writer = RunWriter(out, to_dict(config), resume_round=first)
    data = cached_data(config)
    strategy = build_strategy(config, data, out)

    def report(entry: RoundReport) -> None:
        writer.write_round(entry)
        if on_round is not None:
            on_round(entry)

    strategy.start(
        grid,
        num_rounds=config.rounds,
        timeout=config.strategy.timeout,
        on_round=report,
        resume=resume,
    )
    final = {
        "clients": int(data.num_nodes),
        "engine": engine,
        "bytes": strategy.book.ledger.payload,
    }
    return writer.finish(final, strategy.weights())


def configured(context: Context) -> tuple[RunConfig, Path | None]:
    """Read the run config of a Flower app: the run, and its output folder if one is named."""
    given = context.run_config
    name, overrides = str(given.get("config", "quickstart")), str(given.get("overrides", ""))
    config = _configuration(name, overrides, _saved_at(name))
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
