"""Reads parts of a table's YAML: templates, names of functions, mappings as dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from string import Formatter
from typing import Any, TypeVar, cast

from flower_graph.config.rules import message_of, refuse_key
from flower_graph.errors import ConfigError

Values = Mapping[str, Any]  # of the YAML. Any: whoever reads a key checks its value
T = TypeVar("T")


class _Text(Formatter):
    """Fills in ``{name}``, in lower case ``{name!l}``, in upper ``{name!u}``, numbers as ``g``."""

    def convert_field(self, value: object, conversion: str | None) -> object:
        if conversion in ("l", "u"):
            return str(value).lower() if conversion == "l" else str(value).upper()
        return super().convert_field(value, conversion)

    def format_field(self, value: object, format_spec: str) -> str:
        short = not format_spec and isinstance(value, float)
        return str(super().format_field(value, "g" if short else format_spec))


def fill(template: str, values: Values) -> str:
    """Fill in a template of the YAML."""
    try:
        return _Text().vformat(template, (), values)
    except KeyError as error:
        raise ConfigError(
            f"{template!r}: {error} is unknown; there are {', '.join(values)}"
        ) from None


# Any: the caller knows what the function returns
def function(name: str) -> Callable[..., Any]:
    """Import a function that the YAML names as ``package.module:function``."""
    module, _, attribute = name.partition(":")
    try:
        return cast("Callable[..., object]", getattr(import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"function {name!r}: {error}; write package.module:function") from error


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value of the YAML that is not one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}")


def make(kind: type[T], tree: Values, where: str) -> T:
    """Make a dataclass of a mapping."""
    names = [one.name for one in fields(cast("Any", kind))]
    for key in tree:
        if key not in names:
            refuse_key(key, names, f" (in {where})")
    frozen = {key: tuple(one) if isinstance(one, list) else one for key, one in tree.items()}
    try:
        return kind(**frozen)
    except TypeError as error:
        raise ConfigError(f"{where}: {message_of(error)}") from error
