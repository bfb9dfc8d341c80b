"""Rules of settings: the allowed values, in words for errors and documentation.

A schema names them in its fields (``flower_graph.config.schema``); a constructor may ask the same
rule. An error names key, value, what is allowed and, for words, the nearest.
"""

import difflib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NoReturn

from yaml import MarkedYAMLError

from flower_graph.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """The allowed values of a setting.

    Parameters
    ----------
    words : str
        What is allowed, such as ``"at least 1"``: "it must be ...".
    admits : callable
        Whether a value of the setting's type is allowed. It must test for good values, not bad
        ones, so that NaN fails.
    allowed : tuple of str
        All words, if the setting is one of several; a refusal names the nearest.
    """

    words: str
    admits: Callable[[Any], bool]  # Left open: each rule takes values of its settings' type
    allowed: tuple[str, ...] = ()

    def check(self, key: str, value: object) -> None:
        if not self.admits(value):
            close = nearest(str(value), self.allowed)
            hint = f"; did you mean {close}?" if close else ""
            require(False, key, value, f"{self.words}{hint}")


def choice(*allowed: str) -> Rule:
    """Make the rule of a setting that is one of several words."""
    return Rule(f"one of {', '.join(allowed)}", allowed.__contains__, allowed)


def at_least(least: int) -> Rule:
    """Make the rule of a whole number that has a smallest value; the number is the argument."""
    return Rule(f"at least {least}", lambda value: least <= value < math.inf)


ABOVE_ZERO = Rule("above 0 and finite", lambda value: 0 < value < math.inf)
FINITE = Rule("finite", math.isfinite)
NOT_NEGATIVE = Rule("at least 0 and finite", lambda value: 0 <= value < math.inf)
# What PyTorch's generators take
SEED = Rule("at least 0 and below 2^63", lambda value: 0 <= value < 2**63)
# A share above 0; a share that may be 0; a share below 1, such as a dropout
SHARE = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)
FRACTION = Rule("at least 0 and at most 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Rule("at least 0 and below 1", lambda value: 0 <= value < 1)
# The small slack lets shares such as 0.48, 0.32, 0.2 sum to one in floating point
RATIOS = Rule(
    "three shares for train (above 0), val and test (0 or more) that sum to at most 1",
    lambda parts: len(parts) == 3 and min(parts) >= 0 < parts[0] and sum(parts) <= 1 + 1e-9,
)


def require(good: bool, key: str, value: object, allowed: str) -> None:
    """Refuse a value unless it is good."""
    # Conditions say what is good, not what is bad: NaN then fails them as it should.
    if not good:
        words = f"{key}: {show(value)} is not allowed; it must be {allowed}"
        raise ConfigError(words, key=key)


def require_library(library: str, key: str, *, extra: str, otherwise: str = "") -> None:
    """Refuse what needs a library that is not installed; ``ConfigError`` names the extra."""
    if find_spec(library) is None:
        words = f"{library} is not installed: pip install 'flower-graph[{extra}]'"
        raise ConfigError(f"{key}: {words}" + f", or {otherwise}" * bool(otherwise), key=key)


# Keys of earlier builds, with what to do instead
GONE = {
    "data.split_index": "of k fixed splits a run takes the one of number seed modulo k; set seed",
    "partition.drawn_share": "each client draws half of a part's nodes; leave the key out",
    "strategy.block_cap": "key-holders set it, in the node config (block-cap); leave it out",
    "strategy.most_points": "key-holders set it, in the node config (most-points); leave it out",
    "strategy.rotations_only": "maps between embeddings are orthogonal; leave the key out",
}


def refuse_key(key: str, known: Sequence[str], where: str = "") -> NoReturn:
    """Raise the error for a key that is not known, naming the nearest one that is."""
    if key in GONE:
        raise ConfigError(f"{key} is gone: {GONE[key]}{where}", key=key)
    inside = [other for other in known if other.startswith(f"{key}.")]
    if inside:
        raise ConfigError(f"{key}: a section of {', '.join(inside)}{where}", key=key)
    section = [other for other in known if other.rpartition(".")[0] == key.partition(".")[0]]
    close = suggest(key, known, ".")
    hint = f"did you mean {close}?" if close else f"known keys are {', '.join(section or known)}"
    raise ConfigError(f"{key}: unknown key; {hint}{where}", key=key)


def suggest(word: str, known: Sequence[str], separator: str) -> str | None:
    """Find the known words that end like the given one, else the one most like it."""
    # `reg_weight` for `strategy.reg_weight` is a slip of its own; `name` is in three sections.
    same_end = [other for other in known if other.endswith(separator + word)]
    return " or ".join(same_end) or nearest(word, known)


def nearest(word: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """Find the known word that is most like a mistyped one, if any is."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return close[0] if close else None


def show(value: object) -> str:
    """Write a value as in YAML, so that users recognise their own words."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def message_of(error: Exception) -> str:
    """Return an error's message without OmegaConf's details and YAML's line breaks."""
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split("\n    full_key")[0].split())
