"""Local differential privacy of one array that a client sends, by Flower's mod and accountant.

What is protected is the whole of one client's data: two data sets are neighbours if they differ in
anything but the ids of the public nodes. In each round the client sends what it was given plus a
change of at most ``clipping_norm`` C in length, and Gaussian noise. With other data the change is
another vector of at most that length, so the sensitivity is 2 C. Nobody else's randomness is used,
and every client is asked in every round: nothing is amplified.

Flower's ``LocalDpMod`` clips and adds the noise. Its own formula, from its epsilon to the noise,
is proven for an epsilon below 1 only, and for one round. So the noise is chosen here from the
budget of the whole run, with Flower's accountant (Renyi differential privacy, valid for any noise),
and the mod is given the epsilon with which its formula gives that noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray

from flower_graph.config_ppfl import PrivacyConfig
from flower_graph.errors import ConfigError, RefusedError
from flower_graph.records.keys import CLIENTS, CONFIG, DISAGREEMENT, LOSS, METRICS

PROTECTED = "train"  # the kind of message whose reply has the array
WITHHELD = {LOSS, DISAGREEMENT}  # figures that replies have; accuracies are the judge's choice
RELEASES = "private-releases"  # in Context.state: how often this client has sent it
LEAST, MOST = 1e-7, 1e6  # noise multipliers that are looked at
HALVINGS = 60
SEED_WORDS = 8  # of 32 bits, for NumPy's generator


class PrivateReplies:
    """A Flower mod: ``LocalDpMod`` with what its promise takes besides.

    The noise is drawn anew from the operating system, whatever seeds the run has; an array that is
    not finite, which clipping would let through, is refused; so is more than one client behind one
    reply, which would be clipped and noised as if they were one; losses are withheld; and after
    ``releases`` replies nothing more is sent, whatever the server asks.

    Parameters
    ----------
    clipping_norm : float
        Longest change of a client's array, as one vector.
    noise_multiplier : float
        Standard deviation of the noise, as a multiple of the sensitivity, twice the norm.
    delta : float
        Delta of the budget; it only says how the mod is told of the noise.
    releases : int
        How many replies a client may send.
    """

    def __init__(
        self, clipping_norm: float, noise_multiplier: float, delta: float, releases: int
    ) -> None:
        self.releases = releases
        # The mod's formula the other way round.
        epsilon = math.sqrt(2 * math.log(1.25 / delta)) / noise_multiplier
        self._mod = LocalDpMod(clipping_norm, 2 * clipping_norm, epsilon, delta)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message; only a ``train`` reply may hold an array.

        Raises
        ------
        RefusedError
            If the budget is spent, or the answer cannot be protected; nothing is sent then.
        """
        if message.metadata.message_type != PROTECTED:
            reply = call_next(message, context)
            if reply.has_content() and any(map(len, reply.content.array_records.values())):
                raise RefusedError(f"{message.metadata.message_type}: its arrays have no noise")
            return reply
        self._count(message, context)
        before = np.random.get_state()
        try:
            return _silent(self._mod(message, context, lambda m, c: _checked(m, call_next(m, c))))
        finally:
            np.random.set_state(before)

    def _count(self, message: Message, context: Context) -> None:
        clients = _entry(message, CLIENTS)
        if isinstance(clients, list) and len(clients) != 1:
            raise RefusedError(_shared(clients))
        kept = context.state.config_records.get(RELEASES, ConfigRecord())
        sent = kept.get(RELEASES, 0)
        assert isinstance(sent, int)
        if sent >= self.releases:
            raise RefusedError(f"the privacy budget is spent: {sent} of {self.releases} replies")
        context.state[RELEASES] = ConfigRecord({RELEASES: sent + 1})


def privacy_mods(privacy: PrivacyConfig, rounds: int) -> list[Mod]:
    """Build the ``train_mods`` of a ClientApp.

    Parameters
    ----------
    privacy : PrivacyConfig
        Budget and clipping; without an epsilon there is no mod.
    rounds : int
        Rounds of the run.

    Returns
    -------
    list of Mod
        One, or none.

    Raises
    ------
    ConfigError
        If the budget is below what the accountant can prove, or the accountant is not installed.
    """
    if privacy.epsilon is None:
        return []
    multiplier = noise_multiplier(privacy.epsilon, privacy.delta, rounds)
    return [PrivateReplies(privacy.clipping_norm, multiplier, privacy.delta, rounds)]


def require_one_client(privacy: PrivacyConfig, clients: Sequence[int]) -> None:
    """Refuse several clients at one SuperNode where replies get noise; ``ConfigError``."""
    if privacy.epsilon is not None and len(clients) != 1:
        raise ConfigError(f"privacy.epsilon: {privacy.epsilon:g}: {_shared(clients)}")


def spent(privacy: PrivacyConfig, rounds: int) -> dict[str, float]:
    """Account for the rounds that were run.

    Parameters
    ----------
    privacy : PrivacyConfig
        With an epsilon.
    rounds : int
        Rounds of the run, for which the noise was chosen.

    Returns
    -------
    dict
        ``epsilon`` of all rounds together and ``epsilon-of-a-round``, both at ``delta``, as
        Flower's accountant has them; ``noise-multiplier``, and ``noise``, the standard deviation.
    """
    assert privacy.epsilon is not None
    multiplier = noise_multiplier(privacy.epsilon, privacy.delta, rounds)
    return {
        "epsilon": accounted(multiplier, privacy.delta, rounds),
        "epsilon-of-a-round": accounted(multiplier, privacy.delta, 1),
        "delta": privacy.delta,
        "noise-multiplier": multiplier,
        "noise": 2 * privacy.clipping_norm * multiplier,
    }


@lru_cache(maxsize=16)
def noise_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Find the least noise with which Flower's accountant stays within a budget.

    Parameters
    ----------
    epsilon, delta : float
        Budget of all rounds together.
    rounds : int
        How many there are.

    Returns
    -------
    float
        Standard deviation of the noise over the sensitivity.

    Raises
    ------
    ConfigError
        If the accountant proves no such budget however much noise there is, or is not installed.
    """
    least, most = LEAST, MOST
    lowest = accounted(most, delta, rounds)
    if lowest > epsilon:
        raise ConfigError(
            f"privacy.epsilon: {epsilon:g} is less than Flower's accountant can prove at "
            f"privacy.delta: {delta:g}; at least {lowest:.2g}"
        )
    for _ in range(HALVINGS):
        middle = math.sqrt(least * most)
        if accounted(middle, delta, rounds) > epsilon:
            least = middle
        else:
            most = middle
    return most


def accounted(multiplier: float, delta: float, rounds: int) -> float:
    """Ask Flower's accountant for the epsilon of some rounds with the same noise.

    Parameters
    ----------
    multiplier : float
        Standard deviation of the noise over the sensitivity.
    delta : float
        Above 0 and below 1.
    rounds : int
        At least 1.

    Returns
    -------
    float
        Epsilon at that delta.
    """
    accountant, event = _accountant(delta)
    accountant.compose(event(multiplier, sample_size=1, population_size=1), rounds)
    return float(accountant.get_epsilon(delta))


def _accountant(delta: float) -> tuple[Any, Any]:
    """Make an accountant; without sampling it is of no matter which neighbours it is told of.

    Its figure for a Gaussian release depends on noise over sensitivity alone, and we give it the
    sensitivity to another client's data. "Replace one" it takes with sampling only.
    """
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
        return RdpAccountant(config), GaussianPrivacyEvent
    except ImportError as error:
        raise ConfigError(
            "privacy.epsilon: Flower's accountant is not installed; "
            "pip install 'flower-graph[dp]', or set privacy.epsilon=null"
        ) from error


def _checked(request: Message, reply: Message) -> Message:
    """Refuse what the mod cannot scale, and see to it that nobody knows the noise to come."""
    if reply.has_content():
        before, after = _numbers(request), _numbers(reply)
        if not np.isfinite(after).all():
            raise RefusedError("its numbers are not finite: they cannot be clipped")
        if np.array_equal(before, after):
            raise RefusedError("nothing changed: the mod would divide by the length of the change")
    np.random.seed(np.frombuffer(os.urandom(4 * SEED_WORDS), np.uint32))
    return reply


def _silent(reply: Message) -> Message:
    """Withhold what the model measured of itself: it comes from the data, and has no noise."""
    if reply.has_content():
        metrics = reply.content.metric_records.get(METRICS, MetricRecord())
        for key in WITHHELD & metrics.keys():
            value = metrics[key]
            metrics[key] = [math.nan] * len(value) if isinstance(value, list) else math.nan
    return reply


def _numbers(message: Message) -> NDArray[Any]:
    """Lay all arrays of a message in one line."""
    records = message.content.array_records.values()
    found = [array.numpy().ravel() for record in records for array in record.values()]
    return np.concatenate(found) if found else np.zeros(0)


def _entry(message: Message, key: str) -> object:
    return message.content.config_records.get(CONFIG, ConfigRecord()).get(key)


def _shared(clients: Sequence[object]) -> str:
    return (
        f"clients {list(clients)!s:.60} share a SuperNode, and Flower's LocalDpMod treats a reply "
        "as one client's; give each client a SuperNode of its own"
    )
