"""Allowed arguments of the classes of saved models: types and bounds.

A run's folder may come from anybody. Of this package's classes only those declared here are built
from its files, and only with arguments of the declared types, within their bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from flower_graph.config.rules import Rule
from flower_graph.errors import OutputError

T = TypeVar("T")


def whole(least: int, most: int) -> Rule:
    """Make the rule of a whole number within bounds."""
    # bool is an int
    words = f"a whole number from {least} to {most}"
    return Rule(words, lambda value: type(value) is int and least <= value <= most)


def mapping(rules: Mapping[str, Rule], *, optional: bool = False) -> Rule:
    """Make the rule of arguments by name, each with a rule of its own; optional: or None."""

    def admits(value: object) -> bool:
        if not isinstance(value, dict):
            return optional and value is None
        return all(name in rules and rules[name].admits(one) for name, one in value.items())

    each = ", ".join(f"{name} ({rule.words})" for name, rule in rules.items())
    return Rule(f"a mapping of {each}", admits)


WIDTH = whole(1, 2**24)
LAYERS = whole(0, 64)  # each is a module: an unlimited number would fill the memory
HEADS = whole(1, 2**12)
COUNT = whole(0, 2**24)
SEED = whole(-(2**63), 2**64)
SHARE = Rule("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1)
FLAG = Rule("true or false", lambda value: type(value) is bool)

# By the dotted name of the class
DECLARED: dict[str, Rule] = {}


def built_with(**rules: Rule) -> Callable[[type[T]], type[T]]:
    """Declare a class of this package: a run's files may build it with these arguments only."""

    def declare(kind: type[T]) -> type[T]:
        DECLARED[f"{kind.__module__}.{kind.__qualname__}"] = mapping(rules)
        return kind

    return declare


def check_arguments(name: str, arguments: object) -> None:
    """Refuse arguments that are not declared for a class: ``OutputError``."""
    rule = DECLARED[name]
    if not rule.admits(arguments):
        raise OutputError(f"the model is a {name} with {arguments!r:.200}; allowed is {rule.words}")
