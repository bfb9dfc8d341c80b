"""Rules of settings: what a value must be, in the words of refusals and of the documentation.

A schema names them in its fields (``flower_graph.config.schema``); a constructor that takes the
same value may ask the same rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flower_graph.config.checks import nearest, require
from flower_graph.errors import ConfigError

__all__ = [
    "ABOVE_ZERO",
    "BELOW_ONE",
    "FRACTION",
    "NOT_NEGATIVE",
    "RATIOS",
    "SEED",
    "SHARE",
    "Choice",
    "Rule",
    "at_least",
    "choice",
]


@dataclass(frozen=True)
class Rule:
    """What a value must be.

    Parameters
    ----------
    words : str
        What is allowed, such as ``"at least 1"``: "it must be ...".
    admits : callable
        Whether a value of the setting's type is allowed. It says what is good and not what is bad:
        NaN then fails as it should.
    """

    words: str
    admits: Callable[[Any], bool]

    def check(self, key: str, value: Any) -> None:
        """Refuse what is not admitted; ``ConfigError`` names key, value and what is allowed."""
        require(self.admits(value), key, value, self.words)


@dataclass(frozen=True)
class Choice(Rule):
    """One of several words; a refusal names the nearest."""

    allowed: tuple[str, ...]

    def check(self, key: str, value: Any) -> None:
        """Refuse what is not admitted; ``ConfigError`` names key, value and what is allowed."""
        if self.admits(value):
            return
        close = nearest(value, self.allowed)
        hint = f"; did you mean {close}?" if close else ""
        raise ConfigError(f"{key}: {value!r} is not one of {self.words}{hint}")


def choice(*allowed: str, also: str = "", pattern: str = "") -> Choice:
    """Make the rule of a setting that is one of several words.

    Parameters
    ----------
    *allowed : str
        The words.
    also, pattern : str
        What else is allowed, in words and as a regular expression.

    Returns
    -------
    Choice
        The rule.
    """

    def admits(value: Any) -> bool:
        return value in allowed or bool(pattern and re.fullmatch(pattern, value))

    return Choice(", ".join(allowed) + (f" or {also}" if also else ""), admits, allowed)


def at_least(least: int) -> Rule:
    """Make the rule of a whole number that has a smallest value; the number is the argument."""
    return Rule(f"at least {least}", lambda value: least <= value < math.inf)


def _are_ratios(ratios: Any) -> bool:
    # The small slack lets shares such as 0.48, 0.32, 0.2 sum to one in floating point.
    shares_fit = len(ratios) == 3 and min(ratios) >= 0 and sum(ratios) <= 1 + 1e-9
    return bool(shares_fit and ratios[0] > 0)


ABOVE_ZERO = Rule("above 0 and finite", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Rule("at least 0 and finite", lambda value: 0 <= value < math.inf)
# What PyTorch's generators take
SEED = Rule("at least 0 and below 2^63", lambda value: 0 <= value < 2**63)
# A share of a whole that has something in it; one that may be nothing; one that leaves something,
# such as a dropout
SHARE = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)
FRACTION = Rule("at least 0 and at most 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Rule("at least 0 and below 1", lambda value: 0 <= value < 1)
RATIOS = Rule(
    "three shares for train (above 0), val and test (0 or more) that sum to at most 1", _are_ratios
)
