"""Allowed arguments of the classes of saved models: types and bounds.

A run's folder may come from anybody. Of this package's classes only those declared here are built
from its files, and only with arguments of the declared types, within their bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flower_graph.config.rules import show
from flower_graph.errors import OutputError

T = TypeVar("T")


class Rule(Protocol):
    """The rule of one argument."""

    def refuses(self, value: object) -> str:
        """Return what is allowed instead of a value; empty if the value is allowed."""


@dataclass(frozen=True)
class Whole:
    """A whole number."""

    least: int
    most: int

    def refuses(self, value: object) -> str:
        """Say which numbers are allowed."""
        # bool is an int
        good = type(value) is int and self.least <= value <= self.most
        return "" if good else f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True)
class Part:
    """A number from 0 to 1."""

    def refuses(self, value: Any) -> str:
        """Say which numbers are allowed."""
        good = type(value) in (int, float) and 0 <= value <= 1
        return "" if good else "a number from 0 to 1"


@dataclass(frozen=True)
class OneOf:
    """One of a few words, or true and false."""

    allowed: tuple[str | bool, ...]

    def refuses(self, value: object) -> str:
        """Say which are allowed."""
        good = type(value) in (str, bool) and value in self.allowed
        return "" if good else f"one of {', '.join(map(show, self.allowed))}"


@dataclass(frozen=True)
class Arguments:
    """Arguments of another class that is made inside."""

    rules: Mapping[str, Rule]
    optional: bool = False

    def refuses(self, value: object) -> str:
        """Say which are allowed."""
        if value is None and self.optional:
            return ""
        if not isinstance(value, dict):
            return "a mapping of arguments"
        for name, one in value.items():
            if name not in self.rules:
                return f"a mapping of {', '.join(self.rules)}"
            if instead := self.rules[name].refuses(one):
                return f"a mapping whose {name} is {instead}"
        return ""


WIDTH = Whole(1, 2**24)
LAYERS = Whole(0, 64)  # each is a module: an unlimited number would fill the memory
HEADS = Whole(1, 2**12)
COUNT = Whole(0, 2**24)
SEED = Whole(-(2**63), 2**64)
SHARE = Part()
FLAG = OneOf((False, True))

# By the dotted name of the class
DECLARED: dict[str, Arguments] = {}


def built_with(**rules: Rule) -> Callable[[type[T]], type[T]]:
    """Declare a class of this package: a run's files may build it with these arguments only."""

    def declare(kind: type[T]) -> type[T]:
        DECLARED[f"{kind.__module__}.{kind.__qualname__}"] = Arguments(rules)
        return kind

    return declare


def check_arguments(name: str, arguments: object) -> None:
    """Refuse arguments that a declared class may not be made with: ``OutputError``."""
    if instead := DECLARED[name].refuses(arguments):
        raise OutputError(f"the model is a {name} with {arguments!r:.200}; allowed is {instead}")
