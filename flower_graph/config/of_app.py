"""The run config of a Flower app."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from flower_graph.config.common import RunConfig
from flower_graph.config.load import load_config, parse_overrides
from flower_graph.config.schema import known_keys
from flower_graph.data.sources.datasets import saved_at
from flower_graph.errors import ConfigError

METHODS = "methods"  # of the node config: modules of methods that a run may name, with commas
# Keys that Flower's own apps have, and the settings that they are; "" is "as in the config".
SETTINGS = {
    "num-server-rounds": "rounds",
    "seed": "seed",
    "strategy-name": "strategy.name",
    "fraction-train": "strategy.participation",
    "learning-rate": "strategy.learning_rate",
    "local-epochs": "strategy.local_epochs",
    "min-available-nodes": "strategy.min_nodes",
}
# Flower refuses every key that an app's pyproject.toml does not have, but takes any type for it.
RUN_CONFIG: Mapping[str, str | bool] = {
    "config": "quickstart",
    "overrides": "",
    "output-dir": "",
    "resume": False,
    "server-folder": "",
    **dict.fromkeys(SETTINGS, ""),
}


def configured(
    context: Context, allowed: frozenset[str] | None = None
) -> tuple[RunConfig, Path | None]:
    """Read the run config of a Flower app: the run, and its output folder if one is named.

    `allowed` are the modules of somebody else's methods that may be imported; None: any.
    """
    given = {**RUN_CONFIG, **context.run_config}
    name = str(given["config"])
    # As text, since a config is kept by it; in Flower's spelling of true and false.
    keys = tuple((key, str(given[key])) for key in SETTINGS if given[key] != "")
    config = _configuration(name, str(given["overrides"]), keys, saved_at(name), allowed)
    folder = str(given["output-dir"])
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
    name: str,
    overrides: str,
    keys: tuple[tuple[str, str], ...],
    saved: int,
    allowed: frozenset[str] | None,
) -> RunConfig:
    """Load a config once a process: for a client of one user it takes longer than all the rest."""
    # `saved`, the time of its file, is there to read a new file anew.
    given = parse_overrides(overrides)
    settings = [f"{SETTINGS[key]}={value}" for key, value in keys]
    try:
        return load_config(name, [*given, *settings], allowed=allowed)
    except ConfigError as error:
        blamed = [key for key, _ in keys if str(error).startswith(f"{SETTINGS[key]}: ")]
        if not blamed:
            raise
        # What is wrong without these keys is told as it is, and not as theirs.
        _require_known(blamed[0], load_config(name, given, allowed=allowed))
        raise ConfigError(f"{blamed[0]} in the run config: {error}") from error


def _require_known(key: str, config: RunConfig) -> None:
    """Refuse a key that is no setting of the method, and name what there is."""
    known, setting = known_keys(type(config)), SETTINGS[key]
    if setting in known:
        return
    last = setting.rpartition(".")[2]
    near = [other for other in known if last.endswith(other.rpartition(".")[2])]
    there = f"set {' or '.join(near)} in overrides" if near else "leave it out"
    has = ", ".join(other for other, setting in SETTINGS.items() if setting in known)
    raise ConfigError(
        f"{key} in the run config: {config.app} has no {setting}; {there}. It has {has}"
    )
