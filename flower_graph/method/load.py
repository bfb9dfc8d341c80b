"""Settings of a run, from a method's schema, YAML files and overrides.

Settings come from three layers: the defaults of the method's schema (``config.py`` in its folder),
one YAML file (and the parent that it names), and overrides such as ``strategy.reg_weight=10``. The
key ``app`` chooses the method. Keys and values that are unknown, of the wrong type or impossible
are refused here, before data are read or a client is asked.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flower_graph.config.common import RunConfig
from flower_graph.config.foreign import NOBODY, RUN_OF, Trust, as_text, is_of_run
from flower_graph.config.rules import message_of, refuse_key, show, suggest
from flower_graph.config.schema import LAST, flatten, known_keys
from flower_graph.data.sources.names import in_full, located
from flower_graph.errors import ConfigError, brief, one_line
from flower_graph.method.registry import DEFAULT, known_apps, schema_of
from flower_graph.storage.reading import (
    MOST_SETTINGS,
    Tree,
    check_yaml,
    read_text,
    reading,
)

# A file's key that names its parent config.
PARENT = "defaults"
# A reference to another setting only
_REFERENCE = re.compile(r"\$\{\.*\w+(\.\w+)*\}", re.ASCII)


def load_config(
    name_or_path: str,
    overrides: Sequence[str] = (),
    *,
    allowed: Collection[str] | None = None,
    environment: bool = True,
    of_run: bool = False,
    trust: Trust = NOBODY,
) -> RunConfig:
    """Build the settings of a run from a YAML file and overrides.

    Parameters
    ----------
    name_or_path : str
        A config that ships with the package (``nfedgnn/cora``), or the path of a YAML file of
        your own (it ends in ``.yaml`` or ``.yml``). Relative paths of data in such a file start
        from its folder, those in overrides from the working directory.
    overrides : sequence of str
        Settings as ``key=value`` with dotted keys, applied to the file in this order.
    allowed : collection of str or None
        Modules that ``app`` may name besides methods that ship or are announced; None: any.
    environment : bool
        Whether values may refer to more than settings, such as ``${oc.env:HOME}``; values from
        others may not.
    of_run : bool
        Whether the file is a run's: it may then name only methods that the user has, and its
        ``${...}`` is text. A ``config.yaml`` beside other files of a run always is.
    trust : Trust
        Whether a run's file may name other methods.

    Returns
    -------
    RunConfig
        Complete, resolved and validated settings.

    Raises
    ------
    ConfigError
        If a config, key or value is unknown, of the wrong type or impossible.
    """
    given = {key: value for one in overrides for key, value in read_override(one).items()}
    layers = [(at, _located(one, at)) for at, one in [*read_chain(name_or_path), ("", given)]]
    for number, (source, settings) in enumerate(layers):
        where = f" (in {source})" * bool(source)
        if source and (is_of_run(source) or (of_run and source == name_or_path)):
            # The file's author may be anybody: it is text, and imports no code
            if number:
                raise ConfigError(f"{PARENT}: the config of a run may not name another{where}")
            later = {key for _, other in layers[1:] for key in other}
            trust.admit_settings({k: v for k, v in settings.items() if k not in later}, where)
            layers[0] = source, as_text(settings)
            continue
        for key, value in () if environment else settings.items():
            # After plain references are removed, any other is a resolver, or hides one
            if "${" in _REFERENCE.sub("", repr(value)):
                words = f"{key}: {brief(value)}: in a run config ${{...}} names other settings"
                raise ConfigError(f"{words} alone{where}", key=key)
    app = next((settings["app"] for _, settings in layers[::-1] if "app" in settings), DEFAULT)
    if not isinstance(app, str):
        raise ConfigError(f"app: {show(app)} is not text")
    schema = schema_of(app, allowed)
    # mypy asks for a hash of instances where classes are hashed
    tree = deepcopy(_defaults(schema))  # type: ignore[arg-type]
    known, naming = known_keys(schema), [n for n, (_, one) in enumerate(layers) if "task" in one]
    if naming:  # the settings that come with a task lie under the layer that names it
        task = str(layers[naming[-1]][1]["task"])
        layers.insert(naming[-1], ("", dict(schema.of_task.get(task, {}))))
    for source, settings in layers:
        where = f" (in {source})" * bool(source)
        for key, value in settings.items():
            if key not in known:
                refuse_key(key, list(known), where)
            try:
                OmegaConf.update(tree, key, value)
            except OmegaConfBaseException as error:
                words = f"{key}: {show(value)} is not {known[key]}{where}"
                raise ConfigError(words, key=key) from error
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:  # an interpolation `${...}` that leads nowhere
        key = getattr(error, "full_key", None) or name_or_path
        raise ConfigError(f"{key}: {message_of(error)}", key=key) from error
    assert isinstance(config, RunConfig)
    config.validate()
    return config


# Cached: building takes six times as long as copying the result.
@cache
def _defaults(schema: type[RunConfig]) -> DictConfig:
    tree: DictConfig = OmegaConf.structured(schema)
    return tree


def to_dict(config: RunConfig) -> dict[str, object]:
    """Return the settings as nested plain dictionaries, in the order in which they are shown."""
    settings = asdict(config)
    return settings | {LAST: settings.pop(LAST)}


def to_yaml(config: RunConfig) -> str:
    """Return the settings as YAML text that `load_config` reads back to the same settings."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


Layer = tuple[str, dict[str, object]]  # a source, "" for an override; settings by dotted key


def _located(settings: Tree, source: str) -> dict[str, object]:
    """Make paths of data absolute: those in a file start from its folder, others from here."""
    # So a run can be resumed, and Flower can run it, from any folder.
    folder = Path(source).expanduser().parent if is_file_name(source) else Path()
    found = dict(settings)
    for key, full in (("data.name", located), ("data.add", in_full), ("data.root", in_full)):
        if isinstance(found.get(key), str):
            found[key] = full(found[key], folder)
    return found


def list_configs() -> list[str]:
    """List the configs of this package, sorted."""
    names = (path.relative_to(_shipped()).with_suffix("") for path in _shipped().rglob("*.yaml"))
    return sorted(name.as_posix() for name in names)


def describe_config(name: str) -> str:
    """Return the first sentence of a shipped config's comment, which says what it is for."""
    lines = read_text(_shipped(f"{name}.yaml"), MOST_SETTINGS).splitlines()
    comment = (line.lstrip("# ") for line in takewhile(lambda line: line.strip("# "), lines))
    return re.split(r"(?<=\.)\s", " ".join(comment))[0]


def data_name_of(name: str) -> str:
    """Return ``data.name`` of a shipped config: its own, its parents', or the schema's default."""
    app = ""
    while name:
        tree = _quickly_read(name)
        if named := tree.get("data", {}).get("name"):
            return str(named)
        app, name = app or tree.get("app", ""), str(tree.get(PARENT, ""))
    return schema_of(app or DEFAULT)().data.name


# Cached: many configs have one parent. OmegaConf takes twenty times as long for a file.
@cache
def _quickly_read(name: str) -> Tree:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree: Tree = yaml.load(read_text(_shipped(f"{name}.yaml"), MOST_SETTINGS), Loader=loader)
    return tree


def title_of(name_or_path: str) -> str:
    """Return a config's title; for a run's own file, that of the config it was run with."""
    if is_file_name(name_or_path):
        with suppress(OSError, ValueError):  # reading the file raises the error
            first = read_text(name_or_path, MOST_SETTINGS).partition("\n")[0]
            if first.startswith(RUN_OF):
                return one_line(first.removeprefix(RUN_OF))  # it may be anybody's file
    return name_or_path


def is_file_name(name_or_path: str) -> bool:
    """Return whether a config is named by its path, not by a shipped name."""
    return name_or_path.endswith((".yaml", ".yml"))


def read_chain(name_or_path: str) -> list[Layer]:
    """Read a config and its parents."""
    chain: list[Layer] = []
    name: str | None = name_or_path
    while name is not None:
        if any(name == source for source, _ in chain):
            raise ConfigError(f"{PARENT}: {name} is a parent of itself")
        text = _read_text(name)
        with reading(f"config {name}", ConfigError):
            check_yaml(text)
            tree = _plain(OmegaConf.create, text, f"config {name}")
            if not isinstance(tree, dict):
                raise ConfigError(f"config {name}: a list; a config has keys and values")
            parent = tree.pop(PARENT, None)
            chain.append((name, dict(flatten(tree))))
        if parent is not None and not isinstance(parent, str):
            raise ConfigError(f"{PARENT}: {show(parent)} is not the name of one config (in {name})")
        # A file's path to another file starts from its own folder, not from the working directory.
        name = str(Path(name).parent / parent) if parent and is_file_name(parent) else parent
    return chain[::-1]


def read_override(override: str) -> dict[str, object]:
    """Read one override."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip() or not text.strip():
        how = "write key=value, such as rounds=100; null stands for no value"
        raise ConfigError(f"override {override!r}: {how}")
    # After "value=" OmegaConf parses the text as a value.
    tree = _plain(OmegaConf.from_dotlist, [f"value={text}"], f"override {override!r}")
    return dict(flatten({key.strip(): tree["value"]}))


def as_overrides(given: Mapping[str, object] | Sequence[str] | None) -> list[str]:
    """Turn settings, a nested or dotted mapping or a list of ``key=value``, into overrides."""
    if isinstance(given, Mapping):
        # A JSON value is a YAML value, whatever characters a text has.
        with reading(f"overrides {given!r:.60}", ConfigError):
            items = flatten(dict(given))
            return [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in items]
    if isinstance(given, str) or not all(isinstance(one, str) for one in given or ()):
        raise ConfigError(f"overrides {given!r:.60}: give a mapping or a list of key=value")
    return list(given or ())


def parse_overrides(text: str) -> list[str]:
    """Split one string such as ``"model.name=gat data.name='my graph.pt'"`` as a shell would."""
    with reading(f"overrides {text!r}", ConfigError, "malformed"):
        return shlex.split(text)


def _read_text(name: str) -> str:
    if is_file_name(name):
        with reading(f"config file {name}", ConfigError):
            return read_text(name, MOST_SETTINGS)
    configs = list_configs()
    if name not in configs:
        # Suggest no config of another method
        own = [config for config in configs if config.startswith(f"{name.partition('/')[0]}/")]
        close = ", ".join(own) if name in known_apps() else suggest(name, own or configs, "/")
        hint = f"did you mean {close}?" if close else "see `flower-graph list`"
        raise ConfigError(f"config {name!r}: unknown; {hint} (a file ends in .yaml or .yml)")
    return read_text(_shipped(f"{name}.yaml"), MOST_SETTINGS)


def _plain(parse: Callable[..., object], given: object, what: str) -> Any:
    """Parse to plain dictionaries and lists, with ``${...}`` left for later."""
    try:
        return OmegaConf.to_container(parse(given), resolve=False)
    # OmegaConf asserts that a text is more than one number
    except (OmegaConfBaseException, YAMLError, AssertionError) as error:
        raise ConfigError(f"{what}: malformed YAML: {message_of(error)}") from error


def _shipped(file: str = "") -> Path:
    # A bundle may lack `__init__.py`, so the folder may be a namespace package
    return Path(next(iter(import_module("flower_graph.conf").__path__))) / file
