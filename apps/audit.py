"""The privacy audit: runs a config with a recording grid and plays the curious server."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from flower_graph.apps.run import client_app
from flower_graph.audit.attacks import Audit
from flower_graph.audit.record import RecordingGrid
from flower_graph.audit.scores import Finding
from flower_graph.client.state import forget_run
from flower_graph.config.common import RunConfig
from flower_graph.config.load import load_config
from flower_graph.config.registry import method_of
from flower_graph.errors import ConfigError


class Setting(NamedTuple):
    """One way to run the config."""

    name: str  # What it is called in tables
    config: RunConfig  # All settings


def settings_of(
    name: str,
    overrides: Sequence[str],
    *,
    rounds: int | None,
    epsilons: Sequence[float],
    alone: bool,
) -> list[Setting]:
    """Say which runs an audit has: the config's own first, then its counterparts."""
    local = load_config(name, overrides)
    audit = _audit_of(local)
    count = min(local.rounds, audit.rounds) if rounds is None else rounds
    noisy = [[f"privacy.epsilon={budget:g}"] for budget in epsilons]
    more = [[]] if alone else audit.counterparts(local, noisy)
    result: list[Setting] = []
    for extra in more:
        config = load_config(name, [*overrides, *extra, f"rounds={count}", *audit.shorten(local)])
        if all(config != other.config for other in result):
            result.append(Setting(audit.label(config), config))
    return result


def audit_run(config: RunConfig) -> tuple[list[Finding], float]:
    """Run a config with a recording grid and attack what was recorded."""
    started = time.perf_counter()
    # Flower's own strategies write a dozen lines a round.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    method, audit = method_of(config), _audit_of(config)
    nodes = audit.supernodes(method.num_clients(config))
    grid = RecordingGrid(client_app(config, None), num_supernodes=nodes, seed=config.seed)
    try:
        method.build_strategy(config, None).start(grid, num_rounds=config.rounds)
        findings = audit.attack(config, grid, method)
    finally:
        forget_run(grid.run.run_id)
    return findings, time.perf_counter() - started


def _audit_of(config: RunConfig) -> Audit:
    """Give what the config's method has for an audit; refuse settings that have no audit."""
    audit = method_of(config).audit()
    if audit is None:
        raise ConfigError(f"app: {config.app} has no audit: its method names no attack")
    audit.refuse(config)
    if config.privacy.is_central:
        raise ConfigError(
            "privacy.form: central is not audited: the server, who adds the noise, sees what "
            "clients send without it; set privacy.form=local or privacy.epsilon=null"
        )
    return audit
