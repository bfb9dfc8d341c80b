"""What an audit must know of a method: its settings, its refusals and its attacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flower_graph.audit.record import RecordingGrid
from flower_graph.audit.scores import Finding, Floats
from flower_graph.config.common import RunConfig
from flower_graph.rng import derive_seed

__all__ = ["NO_NOISE", "Audit", "audit_rng", "dense"]

NO_NOISE = "privacy.epsilon=null"


class Audit:
    """The attacks on one method; a method overrides what it does otherwise.

    Attributes
    ----------
    rounds : int
        How many rounds are recorded where nobody says: enough for the attacks; more rounds add
        time and hardly anything else.
    notes : sequence of str
        What an attacker needs besides the messages, and what else a reader must know.
    """

    rounds = 5
    notes: Sequence[str] = ()

    def refuse(self, config: Any) -> None:
        """Raise ``ConfigError`` for settings whose messages no attack here reads."""

    def counterparts(self, config: Any, noisy: Sequence[list[str]]) -> list[list[str]]:
        """Give the overrides of every run, the config's own first; `noisy` are those with noise."""
        return [[], [NO_NOISE], *noisy]

    def shorten(self, config: Any) -> list[str]:
        """Give overrides that leave out what takes time and no attack reads."""
        return []

    def label(self, config: Any) -> str:
        """Name what protects a run."""
        budget = config.privacy.epsilon
        return "no noise" if budget is None else f"noise, epsilon {budget:g}"

    def supernodes(self, clients: int) -> int:
        """Say on how many SuperNodes so many clients are: each on its own, as in a deployment."""
        return clients

    def attack(self, config: Any, grid: RecordingGrid, method: Any) -> list[Finding]:
        """Attack what was recorded; `method`, which was run, knows what its clients have."""
        raise NotImplementedError


def audit_rng(config: RunConfig) -> np.random.Generator:
    """Make the generator of an attack's draws."""
    return np.random.default_rng(derive_seed(config.seed, "audit"))


def dense(x: torch.Tensor) -> Floats:
    """Turn a feature matrix, which may be sparse, into an array."""
    values: Floats = (x if x.layout == torch.strided else x.to_dense()).numpy()
    return values
