"""Clip and noise, client by client, by Flower's own functions.

``LocalDpMod`` treats a reply as one client's. Where a SuperNode hosts many clients, what each of
them sends is clipped and noised on its own here, with the functions that the mod calls; for one
client it is what the mod does to a reply whose request held zeros.

The noise is NumPy's, as Flower draws it. Its generator is seeded afresh by the operating system
before each draw: the server knows the run's seed, and must not know the noise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

# The module that Flower's mods and wrappers use; it is not part of Flower's documented surface.
from flwr.supercore.differential_privacy import add_gaussian_noise_inplace, clip_inputs_inplace
from numpy.typing import NDArray

from flower_graph.config.common import PrivacyConfig
from flower_graph.errors import RefusedError
from flower_graph.privacy.accountant import multiplier_of

RELEASES = "private-releases"  # in Context.state: how often clients have sent something
SEED_WORDS = 8  # of 32 bits, for NumPy's generator


@dataclass(frozen=True)
class ClientNoise:
    """Noise on what single clients send."""

    clipping_norm: float  # Longest vector that a client sends
    deviation: float  # Standard deviation of the noise on each of its numbers
    releases: int  # How many messages the clients of a SuperNode may send
    withholds: bool = True  # Whether clients keep what they measure to themselves

    def protect(self, vectors: NDArray[Any]) -> NDArray[Any]:
        """Clip each client's vector, and add noise."""
        # vectors [p, ...]
        refuse_infinite(vectors)
        result = np.array(vectors, order="C")  # a copy: it is clipped in place
        rows = result.reshape(result.shape[0], -1)
        # Flower's function takes one client at a time, and cannot divide by a length of 0. It
        # leaves short vectors as they are, so only the others are worth a call.
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
        for place in np.flatnonzero(lengths > self.clipping_norm):
            clip_inputs_inplace([rows[place]], self.clipping_norm)
        with fresh_noise():
            add_gaussian_noise_inplace([rows], self.deviation)
        return result

    def count(self, state: RecordDict) -> None:
        """Note that the clients here send once more; ``RefusedError`` if that is too much."""
        # Before anything is sent: what is lost on its way counts as sent.
        count_release(state, self.releases)


def client_noise(privacy: PrivacyConfig, rounds: int) -> ClientNoise | None:
    """Work out the noise of a run."""
    if not privacy.is_local:
        return None
    deviation = 2 * privacy.clipping_norm * multiplier_of(privacy, rounds)
    return ClientNoise(privacy.clipping_norm, deviation, rounds, privacy.withholds)


@contextmanager
def fresh_noise() -> Iterator[None]:
    """Let NumPy draw what nobody knows; afterwards its generator is as it was."""
    before = np.random.get_state()
    np.random.seed(np.frombuffer(os.urandom(4 * SEED_WORDS), np.uint32))
    try:
        yield
    finally:
        np.random.set_state(before)


def count_release(state: RecordDict, releases: int) -> None:
    """Count a reply in a ``Context.state``; ``RefusedError`` once the budget is spent."""
    kept = state.config_records.get(RELEASES, ConfigRecord())
    sent = kept.get(RELEASES, 0)
    assert isinstance(sent, int)
    if sent >= releases:
        raise RefusedError(f"the privacy budget is spent: {sent} of {releases} replies")
    state[RELEASES] = ConfigRecord({RELEASES: sent + 1})


def refuse_infinite(values: NDArray[Any]) -> None:
    """Refuse numbers that cannot be clipped; ``RefusedError``."""
    if not np.isfinite(values).all():
        raise RefusedError("its numbers are not finite: they cannot be clipped")
