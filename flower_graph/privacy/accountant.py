"""From a privacy budget to the noise and back, by Flower's accountant.

All data of one client are protected, over the whole run: two data sets are neighbours if they
differ in one client's data. So if a client sends a vector of at most ``clipping_norm`` C in length,
or a change of at most that length, the sensitivity is 2 C. Rounds are composed as Renyi
differential privacy; a client counts as asked in every round, and no amplification by sampling is
claimed. The log and the reports of a run have the budget.
"""

import logging
import math
from functools import lru_cache

from flower_graph.config.common import REPORT, PrivacyConfig, RunConfig
from flower_graph.errors import ConfigError
from flower_graph.records.rounds import RoundReport

LOG = logging.getLogger(__name__)

LEAST, MOST = 1e-7, 1e6  # range of noise multipliers that is searched
HALVINGS = 60
ACCURACIES = "accuracies and losses that clients measure on their own data"


def spent(privacy: PrivacyConfig, rounds: int) -> dict[str, object]:
    """Return the budget that the finished rounds have spent."""
    multiplier = multiplier_of(privacy, rounds)
    result: dict[str, object] = {
        "epsilon": accounted(multiplier, privacy.delta, rounds),
        "epsilon-of-a-round": accounted(multiplier, privacy.delta, 1),
        "delta": privacy.delta,
        "form": privacy.form,
        "clipping-norm": privacy.clipping_norm,
        "noise-multiplier": multiplier,
        "noise": 2 * privacy.clipping_norm * multiplier,
        "measurements": privacy.measurements,
    }
    return result | ({"not-covered": ACCURACIES} if privacy.measurements == REPORT else {})


def multiplier_of(privacy: PrivacyConfig, rounds: int) -> float:
    """Return noise over sensitivity for a budget; raises as ``noise_multiplier``."""
    assert privacy.epsilon is not None
    return noise_multiplier(privacy.epsilon, privacy.delta, rounds)


@lru_cache(maxsize=16)
def noise_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Find the least noise with which Flower's accountant stays within a budget."""
    least, most = LEAST, MOST
    lowest = accounted(most, delta, rounds)
    if lowest > epsilon:
        words = f"privacy.epsilon: {epsilon:g} cannot be proven at privacy.delta: {delta:g}"
        raise ConfigError(f"{words}; at least {lowest:.2g}")
    for _ in range(HALVINGS):
        middle = math.sqrt(least * most)
        if accounted(middle, delta, rounds) > epsilon:
            least = middle
        else:
            most = middle
    return most


def accounted(multiplier: float, delta: float, rounds: int) -> float:
    """Ask Flower's accountant for the epsilon of some rounds with the same noise."""
    # Its figure for a Gaussian release depends on noise over sensitivity alone, and we give it the
    # sensitivity to another client's data. "Replace one" it takes with sampling only, without which
    # the kind of neighbours does not matter.
    from flwr.serverapp import (
        GaussianPrivacyEvent,
        NeighboringRelation,
        RdpAccountant,
        SamplingMethod,
    )
    from flwr.serverapp import PrivacyConfig as AccountantConfig

    config = AccountantConfig(
        target_delta=delta,
        population_size=1,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
    )
    try:
        accountant = RdpAccountant(config)
    except ImportError as error:
        raise ConfigError(
            "privacy.epsilon: Flower's accountant is not installed; "
            "pip install 'flower-graph[dp]', or set privacy.epsilon=null"
        ) from error
    event = GaussianPrivacyEvent(multiplier, sample_size=1, population_size=1)
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))


def announce_privacy(config: RunConfig, *, measures: bool = True) -> None:
    """Log the budget once, and which figures of clients the run will lack."""
    privacy = config.privacy
    if privacy.is_on:
        budget = privacy.epsilon, privacy.delta, privacy.form
        LOG.info("privacy: epsilon %g at delta %g, %s", *budget)
    if privacy.withholds and measures:
        LOG.warning(
            "privacy.measurements=withhold: clients keep accuracies and losses to themselves, and "
            "reports have null for them; privacy.measurements=report sends them without noise"
        )


def note_privacy(config: RunConfig, report: RoundReport) -> None:
    """Add the budget spent so far to a report, if there is a budget."""
    if config.privacy.is_on:
        delta, multiplier = config.privacy.delta, multiplier_of(config.privacy, config.rounds)
        epsilon = accounted(multiplier, delta, report.round)
        report.privacy = {"epsilon": epsilon, "delta": delta}


def final_privacy(config: RunConfig) -> dict[str, object]:
    """Return the budget's entry of ``result.json``; nothing without a budget."""
    return {"privacy": spent(config.privacy, config.rounds)} if config.privacy.is_on else {}
