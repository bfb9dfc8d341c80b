"""Settings of averages that a few hostile clients cannot move far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flower_graph.config.rules import Rule, at_least, choice
from flower_graph.config.schema import setting
from flower_graph.errors import ConfigError

NO_DEFENCE, KRUM, TRIMMED_MEAN, MEDIAN = "none", "krum", "trimmed-mean", "median"
ROBUST = (NO_DEFENCE, KRUM, TRIMMED_MEAN, MEDIAN)


class Robust(NamedTuple):
    """Which average, and what it needs to know."""

    name: str = NO_DEFENCE  # none, krum, trimmed-mean or median
    num_malicious: int = 1  # SuperNodes that may be hostile; krum only
    beta: float = 0.2  # Share of the SuperNodes that is cut off at each end; trimmed-mean only


@dataclass
class RobustSection:
    """What the section ``strategy`` of a method has whose clients' weights are averaged."""

    robust: str = setting(
        NO_DEFENCE, choice(*ROBUST), help="what stands for the mean of the clients' weights"
    )
    num_malicious: int = setting(1, at_least(0), help="SuperNodes that may be hostile; `krum` only")
    beta: float = setting(
        0.2,
        Rule("at least 0 and less than 0.5", lambda beta: 0 <= beta < 0.5),
        help="share of the SuperNodes cut off at each end; `trimmed-mean` only",
    )

    @property
    def average(self) -> Robust:
        """What stands for the mean of the clients' weights."""
        return Robust(self.robust, self.num_malicious, self.beta)

    def refuse_robust(self, method: str, not_with: Mapping[str, str]) -> None:
        """Refuse another average than the mean with methods for which it would be wrong."""
        if self.robust != NO_DEFENCE and method in not_with:
            raise ConfigError(
                f"strategy.robust: {self.robust} is not allowed with strategy.name={method}, where "
                f"{not_with[method]}: set strategy.robust=none"
            )
