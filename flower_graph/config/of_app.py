"""The run config of a Flower app."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from flower_graph.config.common import RunConfig
from flower_graph.config.load import load_config, parse_overrides
from flower_graph.data.sources.datasets import saved_at
from flower_graph.errors import ConfigError

METHODS = "methods"  # of the node config: modules of methods that a run may name, with commas


def configured(
    context: Context, allowed: frozenset[str] | None = None
) -> tuple[RunConfig, Path | None]:
    """Read the run config of a Flower app: the run, and its output folder if one is named.

    `allowed` are the modules of somebody else's methods that may be imported; None: any.
    """
    given = context.run_config
    name, overrides = str(given.get("config", "quickstart")), str(given.get("overrides", ""))
    config = _configuration(name, overrides, saved_at(name), allowed)
    folder = str(given.get("output-dir", ""))
    if config.checkpoint_every and not folder:
        raise ConfigError(
            f"checkpoint_every: {config.checkpoint_every} needs output-dir in the run config, "
            "where clients save their part"
        )
    return config, Path(folder).expanduser().absolute() if folder else None


def allowed_methods(context: Context) -> frozenset[str] | None:
    """Say which modules of methods a run may make this SuperNode import; None: any."""
    # A run must not choose what a client's machine imports. Where Flower simulates, the machine is
    # that of whoever started the run: clients are then actors of Ray, which no SuperNode is.
    given = context.node_config.get(METHODS, "")
    if not isinstance(given, str):
        raise ConfigError(
            f"node-config {METHODS}: {given!r:.60} is no text; write "
            f"--node-config '{METHODS}=\"package.module\"'"
        )
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return None
    return frozenset(name.strip() for name in given.split(",") if name.strip())


@lru_cache(maxsize=4)
def _configuration(
    name: str, overrides: str, saved: int, allowed: frozenset[str] | None
) -> RunConfig:
    """Load a config once a process: for a client of one user it takes longer than all the rest."""
    # `saved`, the time of its file, is there to read a new file anew.
    return load_config(name, parse_overrides(overrides), allowed=allowed)
