"""A run's privacy budget: which mods its clients get, and what its reports say of it."""

from __future__ import annotations

import logging
import math
from typing import Any

from flwr.clientapp.typing import Mod

from flower_graph.client_noise import ClientNoise, client_noise
from flower_graph.config import FedSCemConfig, NFedGNNConfig, RunConfig
from flower_graph.config_fedscem import FEDSCEM
from flower_graph.errors import ConfigError
from flower_graph.local_privacy import PrivateRows, privacy_mods, withhold_measurements
from flower_graph.privacy_account import spent, spent_until
from flower_graph.report import RoundReport

LOG = logging.getLogger(__name__)
# A noise so many deviations long comes once in 4e11 draws; a run draws fewer.
FARTHEST = 7


def client_mods(config: RunConfig) -> tuple[list[Mod], list[Mod]]:
    """Build the mods of a run's ClientApp.

    Parameters
    ----------
    config : RunConfig
        The run.

    Returns
    -------
    tuple
        Mods around every message, and mods around training alone.

    Raises
    ------
    ConfigError
        If the budget is below what Flower's accountant can prove, or it is not installed.
    """
    around: list[Mod] = [withhold_measurements] if config.privacy.withholds else []
    if isinstance(config, NFedGNNConfig):
        noise = client_noise(config.privacy, config.rounds)
        return around, [PrivateRows(noise)] if noise else []
    if isinstance(config, FedSCemConfig) and config.strategy.name == FEDSCEM:
        return around, []  # no mod may touch masked words: the clients add their noise before
    return around, privacy_mods(config.privacy, config.rounds)


def embedding_noise(config: FedSCemConfig) -> ClientNoise | None:
    """Give the noise that FedSCem's clients add to embeddings before pads and masks.

    Raises
    ------
    ConfigError
        As above, or if such noise does not fit the numbers of a masked sum.
    """
    noise, how = client_noise(config.privacy, config.rounds), config.strategy
    if noise is None or how.aggregation != "masked":
        return noise
    longest = noise.clipping_norm + FARTHEST * noise.deviation
    if longest > how.limit:
        raise ConfigError(
            f"strategy.limit: {how.limit:g} is too small for noise of {noise.deviation:.3g}, which "
            f"privacy.epsilon={config.privacy.epsilon:g} takes: clients would be left out; set "
            f"strategy.limit={math.ceil(longest)} or more, or a smaller privacy.clipping_norm"
        )
    return noise


def announce_privacy(config: RunConfig) -> None:
    """Say once what the budget is, and which figures a run will not have because of it."""
    privacy = config.privacy
    if privacy.is_on:
        LOG.info(
            "privacy: epsilon %g at delta %g, %s", privacy.epsilon, privacy.delta, privacy.form
        )
    # The users of nFedGNN measure nothing: the server judges the noisy vectors that it has.
    if privacy.withholds and not isinstance(config, NFedGNNConfig):
        LOG.warning(
            "privacy.measurements=withhold: clients keep accuracies and losses to themselves, and "
            "reports have null for them; privacy.measurements=report sends them without noise"
        )


def note_privacy(config: RunConfig, report: RoundReport) -> None:
    """Write into a round's report what the rounds so far have spent, if there is a budget."""
    if config.privacy.is_on:
        report.privacy = spent_until(config.privacy, config.rounds, report.round)


def final_privacy(config: RunConfig) -> dict[str, Any]:
    """Give what ``result.json`` says of the budget; nothing without one."""
    return {"privacy": spent(config.privacy, config.rounds)} if config.privacy.is_on else {}
