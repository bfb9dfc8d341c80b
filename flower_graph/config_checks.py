"""Checks that every schema uses, and the messages for settings that do not pass them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import NoReturn, get_type_hints

from flower_graph.errors import ConfigError

# What a message calls the type that a key wants.
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list of numbers",
}


def choice(key: str, value: str, allowed: Sequence[str], also: str = "") -> None:
    """Refuse a word that is not one of those allowed, naming the nearest."""
    if value in allowed:
        return
    close = nearest(value, allowed)
    hint = f"; did you mean {close}?" if close else ""
    raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}{also}{hint}")


def at_least(key: str, value: float, least: int, why: str = "") -> None:
    """Refuse a number below the least one, and one that is not finite."""
    finite = " and finite" if isinstance(value, float) else ""
    require(least <= value < math.inf, key, value, f"at least {least}{why}{finite}")


def above_zero(key: str, value: float) -> None:
    """Refuse a number that is not positive and finite."""
    require(0 < value < math.inf, key, value, "above 0 and finite")


def is_seed(key: str, value: int) -> None:
    """Refuse a number that PyTorch's generators do not take as a seed."""
    require(0 <= value < 2**63, key, value, "at least 0 and below 2^63")


def is_share(key: str, value: float) -> None:
    """Refuse what is not a share of a whole that has something in it."""
    require(0 < value <= 1, key, value, "above 0 and at most 1")


def is_dropout(key: str, value: float) -> None:
    """Refuse what leaves nothing, and what is no share."""
    require(0 <= value < 1, key, value, "at least 0 and below 1")


def are_ratios(key: str, ratios: list[float]) -> None:
    """Refuse shares that do not split a whole into train, val and test."""
    # The small slack lets shares such as 0.48, 0.32, 0.2 sum to one in floating point.
    good = len(ratios) == 3 and ratios[0] > 0 and min(ratios) >= 0 and sum(ratios) <= 1 + 1e-9
    allowed = "three shares for train (above 0), val and test (0 or more) that sum to at most 1"
    require(good, key, ratios, allowed)


def require(good: bool, key: str, value: object, allowed: str) -> None:
    """Refuse a value unless it is good."""
    # Conditions say what is good, not what is bad: NaN then fails them as it should.
    if not good:
        raise ConfigError(f"{key}: {show(value)} is not allowed; it must be {allowed}")


def known_keys(schema: type) -> dict[str, str]:
    """Give every dotted key of a schema and, in words, the type that its value must have."""
    return dict(_leaves(schema, ""))


def _leaves(schema: type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, hint in get_type_hints(schema).items():
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{name}.")
        else:
            text = hint.__name__ if isinstance(hint, type) else str(hint)
            wanted = _WANTED[re.split(r"\W", text)[0]]
            yield prefix + name, wanted + (" or null" if "None" in text else "")


def refuse_key(key: str, known: Sequence[str], where: str = "") -> NoReturn:
    """Raise the error for a key that is not known, naming the nearest one that is."""
    inside = [other for other in known if other.startswith(f"{key}.")]
    if inside:
        raise ConfigError(f"{key}: a section, not a setting; set {', '.join(inside)}{where}")
    section = [other for other in known if other.rpartition(".")[0] == key.partition(".")[0]]
    close = suggest(key, known, ".")
    hint = f"did you mean {close}?" if close else f"known keys are {', '.join(section or known)}"
    raise ConfigError(f"{key}: unknown key; {hint}{where}")


def suggest(word: str, known: Sequence[str], separator: str) -> str | None:
    """Find what was meant: known words that end like the word, else the one most like it."""
    # `reg_weight` for `strategy.reg_weight` is a slip of its own; `name` is in three sections.
    same_end = [other for other in known if other.endswith(separator + word)]
    return " or ".join(same_end) or nearest(word, known)


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Find the known word that a mistyped one is most like, if any is alike at all."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else None


def show(value: object) -> str:
    """Write a value as YAML would have it, so that the user knows their own words again."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def one_line(error: Exception) -> str:
    """Give an error's message without OmegaConf's details and YAML's line breaks."""
    return " ".join(str(error).split("\n    full_key")[0].split())
