"""Settings of averages that a few hostile clients cannot move far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flower_graph.config_checks import at_least, choice, require
from flower_graph.errors import ConfigError

NO_DEFENCE, KRUM, TRIMMED_MEAN, MEDIAN = "none", "krum", "trimmed-mean", "median"
ROBUST = (NO_DEFENCE, KRUM, TRIMMED_MEAN, MEDIAN)


class Robust(NamedTuple):
    """Which average, and what it needs to know.

    Attributes
    ----------
    name : str
        ``none``, ``krum``, ``trimmed-mean`` or ``median``.
    num_malicious : int
        SuperNodes that may be hostile; ``krum`` only.
    beta : float
        Share of the SuperNodes that is cut off at each end; ``trimmed-mean`` only.
    """

    name: str = NO_DEFENCE
    num_malicious: int = 1
    beta: float = 0.2

    def validate(self, method: str, not_with: Mapping[str, str]) -> None:
        """Refuse impossible settings, and methods for which the average would be wrong.

        Parameters
        ----------
        method : str
            ``strategy.name``.
        not_with : mapping
            Methods that do not go with any of the averages, and why.

        Raises
        ------
        ConfigError
            Names key and value.
        """
        choice("strategy.robust", self.name, ROBUST)
        at_least("strategy.num_malicious", self.num_malicious, 0)
        require(0 <= self.beta < 0.5, "strategy.beta", self.beta, "at least 0 and less than 0.5")
        if self.name != NO_DEFENCE and method in not_with:
            raise ConfigError(
                f"strategy.robust: {self.name} is not allowed with strategy.name={method}, where "
                f"{not_with[method]}: set strategy.robust=none"
            )
