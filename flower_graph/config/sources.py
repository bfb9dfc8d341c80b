"""Where settings come from: YAML files, shipped or the user's own, and ``key=value`` overrides."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flower_graph.config.checks import one_line, show, suggest
from flower_graph.errors import ConfigError

# A file's key that names the one config which it differs from.
PARENT = "defaults"
TABLES = "reproduce/"  # Folder of the papers' tables, which `flower-graph reproduce` reads


def list_configs() -> list[str]:
    """Name the configs that ship with the package, sorted; papers' tables are none."""
    names = _yaml_names(resources.files("flower_graph.conf"), "")
    return sorted(name for name in names if not name.startswith(TABLES))


def describe_config(name: str) -> str:
    """Give the first line of a shipped config: the comment that says what it is for."""
    first = _shipped(name).read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def is_file_name(name_or_path: str) -> bool:
    """Tell whether a config is named by its path rather than by a shipped name."""
    return name_or_path.endswith((".yaml", ".yml"))


def read_chain(name_or_path: str) -> list[tuple[str, dict[str, Any]]]:
    """Read a config and its parents."""
    chain: list[tuple[str, dict[str, Any]]] = []
    name: str | None = name_or_path
    while name is not None:
        if any(name == source for source, _ in chain):
            raise ConfigError(f"{PARENT}: {name} is a parent of itself")
        tree = _parse_yaml(_read_text(name), name)
        parent = tree.pop(PARENT, None)
        chain.append((name, dict(_flatten(tree))))
        name = None if parent is None else _parent_name(parent, child=name)
    return chain[::-1]


def read_override(override: str) -> dict[str, Any]:
    """Read one override."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip() or not text.strip():
        raise ConfigError(
            f"override {override!r}: write key=value, such as rounds=100; null stands for no value"
        )
    # Behind "value=" the text is read by the rules that OmegaConf has for values.
    tree = _plain(lambda: OmegaConf.from_dotlist([f"value={text}"]), f"override {override!r}")
    return dict(_flatten({key.strip(): tree["value"]}))


def parse_overrides(text: str) -> list[str]:
    """Split one string of overrides as a shell would.

    Parameters
    ----------
    text : str
        Such as ``"model.name=gat data.name='my graph.pt'"``.

    Returns
    -------
    list of str
        One ``key=value`` each; `shlex.join` is the way back.

    Raises
    ------
    ConfigError
        If a quotation mark is left open.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides {text!r}: {error}") from error


def _read_text(name: str) -> str:
    if is_file_name(name):
        try:
            return Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"config file {name}: {reason}") from error
    configs = list_configs()
    if name not in configs:
        close = suggest(name, configs, "/")
        hint = f"did you mean {close}?" if close else f"there are {', '.join(configs)}"
        raise ConfigError(
            f"config {name!r}: unknown; {hint} (a file of your own must end in .yaml or .yml)"
        )
    return _shipped(name).read_text(encoding="utf-8")


def _parent_name(parent: Any, *, child: str) -> str:
    if not isinstance(parent, str):
        raise ConfigError(f"{PARENT}: {show(parent)} is not the name of one config (in {child})")
    # A file names another file from where it lies itself, not from where the command is typed.
    return str(Path(child).parent / parent) if is_file_name(parent) else parent


def _parse_yaml(text: str, name: str) -> dict[str, Any]:
    tree = _plain(lambda: OmegaConf.create(text), f"config {name}")
    if not isinstance(tree, dict):
        raise ConfigError(f"config {name}: a list; a config has keys and values")
    return tree


def _plain(parse: Callable[[], Any], what: str) -> Any:
    """Parse to plain dictionaries and lists, with ``${...}`` left for later."""
    try:
        return OmegaConf.to_container(parse(), resolve=False)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{what}: malformed YAML: {one_line(error)}") from error


def _flatten(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give dotted keys and values; an empty mapping counts as a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _yaml_names(folder: Traversable, prefix: str) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _yaml_names(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml")


def _shipped(name: str) -> Traversable:
    place: Traversable = resources.files("flower_graph.conf")
    # Step by step: without `__init__.py` (a bundle may lack it) several at once are refused.
    for part in f"{name}.yaml".split("/"):
        place = place.joinpath(part)
    return place
