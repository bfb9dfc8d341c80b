"""A run's privacy budget: what its log and its reports say of it."""

from __future__ import annotations

import logging
from typing import Any

from flower_graph.config.common import RunConfig
from flower_graph.privacy.accountant import spent, spent_until
from flower_graph.report.rounds import RoundReport

LOG = logging.getLogger(__name__)


def announce_privacy(config: RunConfig, *, measures: bool = True) -> None:
    """Say once what the budget is, and which figures of clients that measure a run will lack."""
    privacy = config.privacy
    if privacy.is_on:
        LOG.info(
            "privacy: epsilon %g at delta %g, %s", privacy.epsilon, privacy.delta, privacy.form
        )
    if privacy.withholds and measures:
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
