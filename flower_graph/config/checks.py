"""Messages for settings that are refused: key, value and what is allowed or was meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NoReturn

from flower_graph.errors import ConfigError


def require(good: bool, key: str, value: object, allowed: str) -> None:
    """Refuse a value unless it is good."""
    # Conditions say what is good, not what is bad: NaN then fails them as it should.
    if not good:
        raise ConfigError(f"{key}: {show(value)} is not allowed; it must be {allowed}")


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
