"""Schemas of settings: dataclasses whose fields carry default, rules and meaning.

A method's schema is a ``RunConfig`` with sections of its own, each a dataclass::

    @dataclass
    class ModelConfig:
        hidden: int = setting(16, at_least(1), help="numbers in the hidden layer")
        name: str = setting("gcn", choice("gcn", "gat"))
        "what embeds the nodes: a string beneath a field is its ``help``"

    @dataclass
    class MyConfig(RunConfig):
        data: DataConfig = section(DataConfig, split="random")
        model: ModelConfig = section(ModelConfig)

A subclass that only gives another default, ``rounds: int = 400``, keeps rules and meaning. Loading
checks the rules of all fields. Rules on several settings together are in a section's
``validate(self) -> None``, or in that of the whole schema.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from flower_graph.config.rules import Rule

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LAST = "strategy"  # the section that is shown last
# What a message calls the type that a key wants.
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list of numbers",
}


@dataclass(frozen=True)
class Setting:
    """A schema's information on one key: its type in words, default, rules and meaning."""

    key: str
    wanted: str
    default: object
    rules: tuple[Rule, ...]
    help: str


def setting(default: object, *rules: Rule, help: str = "") -> Any:
    """Declare a field of a schema.

    Parameters
    ----------
    default : object
        The value without a file and an override; a list is copied.
    *rules : Rule
        The rules, in the order of the checks. ``None`` passes all of them if the field's type has
        it.
    help : str
        The setting's meaning in a few words: a line of the documentation's table. By default the
        string beneath the field.
    """
    about = {"rules": rules, "help": help}
    if isinstance(default, list):
        return field(default_factory=partial(deepcopy, default), metadata=about)
    return field(default=default, metadata=about)


def section(kind: type, **changed: object) -> Any:
    """Declare a field of a schema that has keys of its own.

    ``kind`` is the section's dataclass, ``changed`` are defaults that differ from its own.
    """
    return field(default_factory=lambda: kind(**deepcopy(changed)))


def check_settings(settings: DataclassInstance, prefix: str = "") -> None:
    """Check values against the rules of their fields; ``ConfigError`` names key and value.

    A section's own ``validate`` is called after its fields. ``prefix`` stands before the keys, such
    as ``"strategy."``.
    """
    for name, hint, about in _fields(type(settings)):
        value = getattr(settings, name)
        if is_dataclass(value) and not isinstance(value, type):
            check_settings(value, f"{prefix}{name}.")
            validate = getattr(value, "validate", None)
            if validate is not None:
                validate()
        elif value is not None or not _is_optional(hint):
            for rule in about.get("rules", ()):
                rule.check(prefix + name, value)


def known_keys(schema: type) -> dict[str, str]:
    """Return every dotted key of a schema with its value's type in words."""
    return {prefix + name: _words(hint) for prefix, _, name, hint, _ in _leaves(schema(), "")}


def settings_of(schema: type) -> list[Setting]:
    """Return a schema's settings, in the order of its fields."""
    result = []
    for prefix, section, name, hint, about in _leaves(schema(), ""):
        kinds = type(section).__mro__
        beneath = (_beneath(kind.__module__).get((kind.__name__, name)) for kind in kinds)
        help = about.get("help") or next(filter(None, beneath), "")
        rules, default = about.get("rules", ()), getattr(section, name)
        result.append(Setting(prefix + name, _words(hint), default, rules, help))
    return result


def _leaves(settings: object, prefix: str) -> Iterator[tuple[str, object, *_Field]]:
    # mypy asks for a hash of instances where classes are hashed
    for one in _fields(type(settings)):  # type: ignore[arg-type]
        if is_dataclass(value := getattr(settings, one[0])):
            yield from _leaves(value, f"{prefix}{one[0]}.")
        else:
            yield prefix, settings, *one


@cache
def _beneath(module: str) -> dict[tuple[str, str], str]:
    """Read the strings beneath fields, by class and field; a notebook has no source to read."""
    try:
        kinds = ast.parse(inspect.getsource(sys.modules[module])).body
    except (OSError, TypeError):
        kinds = []
    return {
        (kind.name, ast.unparse(one.target)): " ".join(ast.literal_eval(below.value).split())
        for kind in kinds
        if isinstance(kind, ast.ClassDef)
        for one, below in pairwise(kind.body)
        if isinstance(one, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Return dotted keys and values; an empty mapping counts as a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


_Field = tuple[str, object, Mapping[str, Any]]  # name, type, and what `setting` was told


# Cached: resolving the types takes longer than all else, and a table loads hundreds of configs.
@cache
def _fields(schema: type) -> list[_Field]:
    hints = get_type_hints(schema)
    # The common part declares `strategy` early; it is shown after a method's other sections.
    names = sorted((one.name for one in fields(schema)), key=lambda name: name == LAST)
    # A subclass that only sets another default keeps its parent's rules and meaning
    about: dict[str, Mapping[str, Any]] = {}
    for kind in reversed(schema.__mro__):
        own = vars(kind).get("__dataclass_fields__", {})
        about |= {name: one.metadata for name, one in own.items() if one.metadata}
    return [(name, hints[name], about.get(name, {})) for name in names]


def _is_optional(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def _words(hint: Any) -> str:
    if _is_optional(hint):
        kept = [kind for kind in get_args(hint) if kind is not type(None)]
        return " or ".join(_words(kind) for kind in kept) + " or null"
    if hint == list[str]:
        return "a list of words"
    if hint is Any:
        return "text or a list of words"
    name: str = (get_origin(hint) or hint).__name__
    return _WANTED.get(name, name)
