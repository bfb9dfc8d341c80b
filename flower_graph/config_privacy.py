"""Settings of differential privacy, the same for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flower_graph.config_checks import above_zero, choice, require
from flower_graph.errors import ConfigError

FORMS = ("local", "central")
LOCAL_FORM, CENTRAL_FORM = FORMS
MEASUREMENTS = ("withhold", "report")
WITHHOLD, REPORT = MEASUREMENTS


@dataclass
class PrivacyConfig:
    """Differential privacy of what clients send, by Flower's functions and accountant."""

    epsilon: float | None = None  # budget of the whole run, for all of a client's data; null: none
    delta: float = 1e-5  # chance, over the whole run, that the promise of epsilon fails
    clipping_norm: float = 10.0  # longest vector, or change of one, that a client sends in a round
    form: str = "local"  # local | central: clients add the noise, or the server that they trust
    measurements: str = "withhold"  # withhold | report: what clients measure of their own data

    def validate(self) -> None:
        """Refuse values that no mechanism can have; ``ConfigError`` names key and value."""
        if self.epsilon is not None:
            above_zero("privacy.epsilon", self.epsilon)
        good = 0 < self.delta < 1
        require(good, "privacy.delta", self.delta, "above 0 and below 1")
        above_zero("privacy.clipping_norm", self.clipping_norm)
        choice("privacy.form", self.form, FORMS)
        choice("privacy.measurements", self.measurements, MEASUREMENTS)

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
