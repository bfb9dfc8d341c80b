"""The privacy audit: runs a config with a recording grid and plays the curious server.

Each client is on a SuperNode of its own, as in a deployment, but for nFedGNN, whose messages have
one row a user wherever the users are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.apps import fedgls, fedscem, ppfl
from flower_graph.apps.common import cached_data, client_app, method_of
from flower_graph.audit import ego, embeddings, models, relay
from flower_graph.audit.record import RecordingGrid
from flower_graph.audit.scores import Finding
from flower_graph.config import (
    FedGLSConfig,
    FedSCemConfig,
    NFedGNNConfig,
    PPFLConfig,
    RunConfig,
    load_config,
)
from flower_graph.config_fedgls import AVERAGING
from flower_graph.config_fedscem import FEDSCEM
from flower_graph.config_ppfl import LOCAL, SECURE
from flower_graph.data.names import folder_path
from flower_graph.errors import ConfigError
from flower_graph.rng import derive_seed
from flower_graph.state import forget_run

# Enough for the attacks; more rounds add time and hardly anything else.
ROUNDS = {"nfedgnn": 10, "fedscem": 2, "fedgls": 30, "ppfl": 5}
USERS = 25  # of nFedGNN that are attacked in a run: each takes a second
NO_NOISE = "privacy.epsilon=null"
# FedSCem's forms: how identities are aligned, how vectors are summed
FEDSCEM_FORMS = (("psi", "masked"), ("psi", "plain"), ("polynomial", "masked"))


class Setting(NamedTuple):
    """One way to run the config.

    Attributes
    ----------
    name : str
        What it is called in tables.
    config : RunConfig
        All settings.
    """

    name: str
    config: RunConfig


def settings_of(
    name: str,
    overrides: Sequence[str],
    *,
    rounds: int | None,
    epsilons: Sequence[float],
    alone: bool,
) -> list[Setting]:
    """Say which runs an audit has: the config's own first, then its counterparts.

    Parameters
    ----------
    name, overrides : str, sequence of str
        The config.
    rounds : int, optional
        Rounds that are recorded; the method's entry of ``ROUNDS``, or the config's if fewer.
    epsilons : sequence of float
        Budgets of the counterparts with noise, for the rounds that are recorded.
    alone : bool
        Leave counterparts out.

    Raises
    ------
    ConfigError
        If the config, or a counterpart, is none that can be audited.
    """
    own = load_config(name, overrides)
    _check(own)
    count = min(own.rounds, ROUNDS[own.app]) if rounds is None else rounds
    more = (
        [[]]
        if alone
        else _counterparts(own, [[f"privacy.epsilon={budget:g}"] for budget in epsilons])
    )
    found: list[Setting] = []
    for extra in more:
        config = load_config(name, [*overrides, *extra, f"rounds={count}", *_unjudged(own)])
        if all(config != other.config for other in found):
            found.append(Setting(label(config), config))
    return found


def label(config: RunConfig) -> str:
    """Name what protects a run."""
    budget = config.privacy.epsilon
    noise = "no noise" if budget is None else f"noise, epsilon {budget:g}"
    if isinstance(config, FedSCemConfig):
        how = config.strategy
        form = f"{how.alignment}, {how.aggregation} sum"
        return form if budget is None else f"{form}, {noise}"
    if isinstance(config, PPFLConfig) and config.strategy.alignment == SECURE:
        return "secure sum"
    return noise


def audit_run(config: RunConfig) -> tuple[list[Finding], float]:
    """Run a config with a recording grid and attack what was recorded.

    Returns
    -------
    tuple
        What the attacks reached; and how long run and attacks took, in seconds.
    """
    started = time.perf_counter()
    # Flower's own strategies write a dozen lines a round.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    method = method_of(config)
    clients = 1 if isinstance(config, NFedGNNConfig) else method.num_clients(config)
    grid = RecordingGrid(client_app(config, None), num_supernodes=clients, seed=config.seed)
    try:
        method.build_strategy(config, None).start(grid, num_rounds=config.rounds)
        findings = _ATTACKS[config.app](config, grid)
    finally:
        forget_run(grid.run.run_id)
    return findings, time.perf_counter() - started


def _check(config: RunConfig) -> None:
    """Refuse methods that send nothing which an attack here reads."""
    name = config.strategy.name
    allowed: dict[str, Sequence[str]] = {"fedscem": (FEDSCEM,), "fedgls": AVERAGING}
    if config.app in allowed and name not in allowed[config.app]:
        known = ", ".join(allowed[config.app])
        raise ConfigError(f"strategy.name: {name} has no audit; must be one of {known}")
    if config.app == "ppfl" and name == LOCAL:
        raise ConfigError(f"strategy.name: {LOCAL} has no audit, since its clients send nothing")
    if config.app == "ppfl" and folder_path(config.data.name) is not None:
        raise ConfigError(
            f"data.name: {config.data.name!r} is a folder with one graph a client, and the audit "
            "of app=ppfl needs the whole graph to judge by; name a data set or a file"
        )
    if config.privacy.is_central:
        raise ConfigError(
            "privacy.form: central is not audited: the server, who adds the noise, sees what "
            "clients send without it; set privacy.form=local or privacy.epsilon=null"
        )


def _counterparts(config: RunConfig, noisy: Sequence[list[str]]) -> list[list[str]]:
    """Give the overrides of every run, the config's own first."""
    if isinstance(config, FedSCemConfig):
        forms = [[f"strategy.alignment={a}", f"strategy.aggregation={s}"] for a, s in FEDSCEM_FORMS]
        return [[], *forms]
    if isinstance(config, PPFLConfig):
        pairs = ["strategy.alignment=pairs"] if config.strategy.alignment == SECURE else []
        whole = ["strategy.participation=1", "strategy.absent=leave-out"]
        secure = [f"strategy.alignment={SECURE}", NO_NOISE, *whole]
        return [[], [*pairs, NO_NOISE], *([*pairs, *noise] for noise in noisy), secure]
    if isinstance(config, NFedGNNConfig) and config.strategy.average_every:
        return [[], [NO_NOISE]]  # averaged weights get no noise, so it is refused beside them
    return [[], [NO_NOISE], *noisy]


def _unjudged(config: RunConfig) -> list[str]:
    """Leave out what takes time and that no attack reads."""
    return ["judge.every=1000000", "judge.mlp=false"] if isinstance(config, PPFLConfig) else []


def _relay(config: RunConfig, grid: RecordingGrid) -> list[Finding]:
    x = _dense(cached_data(config).x)
    return relay.attack(
        grid.exchanges, x, _rng(config), users=USERS, sums_to_one=config.data.normalize
    )


def _ego(config: RunConfig, grid: RecordingGrid) -> list[Finding]:
    assert isinstance(config, FedSCemConfig)
    held = [list(one.identities) for one in fedscem.cached_egos(config)]
    return ego.attack(grid.exchanges, held)


def _models(config: RunConfig, grid: RecordingGrid) -> list[Finding]:
    assert isinstance(config, FedGLSConfig)
    graphs = fedgls.cached_clients(config)
    truth = {
        place: models.Truth(_dense(one.x), one.y.numpy(), one.train_mask.numpy())
        for place, one in enumerate(graphs)
    }
    sent = models.read(grid.exchanges, list(grid.get_node_ids()))
    return models.attack(sent, truth, fedgls.structure_settings(config).num_classes)


def _embeddings(config: RunConfig, grid: RecordingGrid) -> list[Finding]:
    assert isinstance(config, PPFLConfig)
    graphs, data = ppfl.cached_clients(config), cached_data(config)
    count = int(data.num_nodes)
    edges = np.zeros((count, count), bool)
    source, target = data.edge_index.numpy()
    edges[source, target] = edges[target, source] = True
    np.fill_diagonal(edges, False)
    owner = np.full(count, -1)
    for graph in graphs:
        owner[graph.nodes[~graph.public].numpy()] = graph.client
    public = graphs[0].nodes[graphs[0].public].numpy()
    truth = embeddings.Graph(edges, public, owner)
    return embeddings.attack(grid.exchanges, truth, _rng(config))


def _dense(x: torch.Tensor) -> NDArray[np.floating[Any]]:
    values: NDArray[np.floating[Any]] = (x if x.layout == torch.strided else x.to_dense()).numpy()
    return values


def _rng(config: RunConfig) -> np.random.Generator:
    return np.random.default_rng(derive_seed(config.seed, "audit"))


_ATTACKS: dict[str, Callable[[RunConfig, RecordingGrid], list[Finding]]] = {
    "nfedgnn": _relay,
    "fedscem": _ego,
    "fedgls": _models,
    "ppfl": _embeddings,
}
