"""Settings of differential privacy, the same for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flower_graph.config.rules import ABOVE_ZERO, Rule, choice
from flower_graph.config.schema import setting
from flower_graph.errors import ConfigError

FORMS = ("local", "central")
LOCAL_FORM, CENTRAL_FORM = FORMS
MEASUREMENTS = ("withhold", "report")
WITHHOLD, REPORT = MEASUREMENTS


@dataclass
class PrivacyConfig:
    """Differential privacy of what clients send, by Flower's functions and accountant."""

    epsilon: float | None = setting(
        None,
        ABOVE_ZERO,
        help="budget of the whole run, for all data of a client; null: no noise",
    )
    delta: float = setting(
        1e-5,
        Rule("above 0 and below 1", lambda delta: 0 < delta < 1),
        help="chance, over the whole run, that the promise of epsilon fails",
    )
    clipping_norm: float = setting(
        10.0,
        ABOVE_ZERO,
        help="longest vector that a client sends in a round: a user's latent vector, an "
        "ego-network's shared embeddings together, the change of a client's weights or of its "
        "public embeddings",
    )
    form: str = setting(
        LOCAL_FORM,
        choice(*FORMS),
        help="`local`: clients add noise; `central`: the server does, to averaged weights",
    )
    measurements: str = setting(
        WITHHOLD,
        choice(*MEASUREMENTS),
        help="whether clients send what they measure on their own data, without noise",
    )

    @property
    def is_on(self) -> bool:
        """Whether there is a budget at all."""
        return self.epsilon is not None

    @property
    def is_central(self) -> bool:
        """Whether it is the server that clips and adds noise."""
        return self.is_on and self.form == CENTRAL_FORM

    @property
    def is_local(self) -> bool:
        """Whether each client adds noise to what it sends."""
        return self.is_on and self.form == LOCAL_FORM

    @property
    def withholds(self) -> bool:
        """Whether clients keep what they measure of their own data to themselves."""
        return self.is_on and self.measurements == WITHHOLD

    def refuse_checkpoints(self, checkpoint_every: int) -> None:
        """Refuse checkpoints: rounds that are run again would be released a second time."""
        if self.is_on and checkpoint_every:
            raise ConfigError(
                f"checkpoint_every: {checkpoint_every} is not allowed with privacy.epsilon="
                f"{self.epsilon:g}: a resumed run repeats rounds, and each repetition sends what "
                "the budget does not cover; set checkpoint_every=0"
            )

    def refuse_with(self, setting: str, why: str) -> None:
        """Refuse the budget beside another setting, given as ``key=value``."""
        if self.is_on:
            raise ConfigError(
                f"privacy.epsilon: {self.epsilon:g} is not allowed with {setting}: {why}; "
                "set privacy.epsilon=null"
            )

    def require_averaging(self, name: str, averaging: Sequence[str]) -> None:
        """Refuse the central form with a method whose clients send no weights to be averaged."""
        if self.is_central and name not in averaging:
            raise ConfigError(
                f"privacy.form: {CENTRAL_FORM} is not allowed with strategy.name={name}: the "
                "server adds noise to a mean of weights, and there is none; "
                f"set privacy.form={LOCAL_FORM}"
            )
