"""What settings may be, and the messages for those that may not."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, NoReturn, get_type_hints

from flower_graph.errors import ConfigError

if TYPE_CHECKING:
    from flower_graph.config import DataConfig, RunConfig, StrategyConfig

APPS = ("nfedgnn",)
STRATEGIES = ("split-gradient-relay",)
MODELS = ("gcn", "gat", "sage")
SPLITS = ("public", "geom-gcn", "random")
AVERAGE_OVER = ("holders", "all")
DEVICES = ("auto", "cpu", "cuda")

# What a message calls the type that a key wants.
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list of numbers",
}


def validate(config: RunConfig) -> None:
    """Refuse values that no run can have.

    Parameters
    ----------
    config : RunConfig
        Settings of the right types.

    Raises
    ------
    ConfigError
        Naming the key, the value and what is allowed.
    """
    _choice("app", config.app, APPS)
    _choice("model.name", config.model.name, MODELS)
    _choice("strategy.name", config.strategy.name, STRATEGIES)
    if not re.fullmatch(r"cuda:\d+", config.device):
        _choice("device", config.device, DEVICES, also=" or cuda:N")
    _is_seed("seed", config.seed)
    _at_least("rounds", config.rounds, 1)
    _at_least("checkpoint_every", config.checkpoint_every, 0)
    _at_least("model.hidden", config.model.hidden, 1)
    _at_least("model.heads", config.model.heads, 1)
    dropout = config.model.dropout
    _require(0 <= dropout < 1, "model.dropout", dropout, "at least 0 and below 1")
    _validate_strategy(config.strategy)
    _validate_data(config.data)


def _validate_strategy(strategy: StrategyConfig) -> None:
    _at_least("strategy.reg_weight", strategy.reg_weight, 0)
    _at_least("strategy.weight_decay", strategy.weight_decay, 0)
    _above_zero("strategy.learning_rate", strategy.learning_rate)
    _above_zero("strategy.timeout", strategy.timeout)
    _at_least("strategy.min_nodes", strategy.min_nodes, 1)
    share = strategy.participation
    _require(0 < share <= 1, "strategy.participation", share, "above 0 and at most 1")
    _at_least("strategy.average_every", strategy.average_every, 0)
    _choice("strategy.average_over", strategy.average_over, AVERAGE_OVER)
    if strategy.average_every > 0 and strategy.average_over == "all" and share < 1:
        raise ConfigError(
            f"strategy.participation: {share} is not allowed with strategy.average_over=all, "
            "which averages the weights of all users: set strategy.participation=1, "
            "strategy.average_over=holders or strategy.average_every=0"
        )


def _validate_data(data: DataConfig) -> None:
    _require(bool(data.name.strip()), "data.name", data.name, "the name of a data set or a file")
    _choice("data.split", data.split, SPLITS)
    if data.split_index is not None:
        _at_least("data.split_index", data.split_index, 0)
    _is_seed("data.split_seed", data.split_seed)
    _at_least("data.train_per_class", data.train_per_class, 1)
    _at_least("data.num_val", data.num_val, 0)
    _at_least("data.num_test", data.num_test, 0)
    if data.ratios is not None:
        _validate_ratios(data.ratios)
    _at_least("data.classes", data.classes, 2)
    _at_least("data.nodes", data.nodes, data.classes, " (data.classes)")
    _above_zero("data.degree", data.degree)
    _at_least("data.active", data.active, 1)
    _at_least("data.features", data.features, data.active, " (data.active)")
    share = data.homophily
    _require(0 <= share <= 1, "data.homophily", share, "at least 0 and at most 1")


def _validate_ratios(ratios: list[float]) -> None:
    # The small slack lets shares such as 0.48, 0.32, 0.2 sum to one in floating point.
    good = len(ratios) == 3 and ratios[0] > 0 and min(ratios) >= 0 and sum(ratios) <= 1 + 1e-9
    allowed = "three shares for train (above 0), val and test (0 or more) that sum to at most 1"
    _require(good, "data.ratios", ratios, allowed)


def _choice(key: str, value: str, allowed: Sequence[str], also: str = "") -> None:
    if value in allowed:
        return
    close = nearest(value, allowed)
    hint = f"; did you mean {close}?" if close else ""
    raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}{also}{hint}")


def _at_least(key: str, value: float, least: int, why: str = "") -> None:
    finite = " and finite" if isinstance(value, float) else ""
    _require(least <= value < math.inf, key, value, f"at least {least}{why}{finite}")


def _above_zero(key: str, value: float) -> None:
    _require(0 < value < math.inf, key, value, "above 0 and finite")


def _is_seed(key: str, value: int) -> None:
    _require(0 <= value < 2**63, key, value, "at least 0 and below 2^63")


def _require(good: bool, key: str, value: object, allowed: str) -> None:
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
