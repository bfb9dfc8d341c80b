"""The run config of a Flower app."""

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from flower_graph.config.app_keys import RUN_CONFIG, SETTINGS
from flower_graph.config.common import RunConfig
from flower_graph.data.sources.datasets import saved_at
from flower_graph.data.sources.names import is_known
from flower_graph.errors import ConfigError, RefusedError, brief, told
from flower_graph.handed import handed_over
from flower_graph.method.load import is_file_name, load_config, parse_overrides
from flower_graph.method.permits import DATA, Permits
from flower_graph.storage.files import DATA_FOLDER, named
from flower_graph.wire.client_errors import is_own_machine, on_ray

DATA_ROOT = "data-root"  # of the node config: where raw data sets are
# Names of data sets; several separators, or a part that begins with a dot, make a path
NAMED = re.compile(r"\w[\w-]*(/\w[\w.+-]*)?", re.ASCII)
METHODS = "methods"  # of the node config: modules of methods that a run may name, with commas


def configured(
    context: Context, allowed: frozenset[str] | None = None
) -> tuple[RunConfig, Path | None]:
    """Read the run config of a Flower app: the run, and its output folder if one is named.

    `allowed` are the modules of foreign methods that may be imported; None: any.
    """
    config, folder = _settings(context, allowed), str(context.run_config.get("output-dir", ""))
    if config.checkpoint_every and not folder:
        needed = "needs output-dir in the run config, where clients save their part"
        raise ConfigError(f"checkpoint_every: {config.checkpoint_every} {needed}")
    return config, named(folder) if folder else None


def _settings(context: Context, allowed: frozenset[str] | None) -> RunConfig:
    given = {**RUN_CONFIG, **context.run_config}
    name = str(given["config"])
    # As text, the key of the cache; in Flower's spelling of true and false.
    keys = tuple((key, str(given[key])) for key in SETTINGS if given[key] != "")
    overrides = str(given["overrides"])
    return handed_over(
        f"config {name} {overrides} {keys}",
        lambda: _configuration(name, overrides, keys, saved_at(name), allowed),
    )


def configured_client(context: Context) -> tuple[RunConfig, Path | None]:
    """Read the run config at a client, where only the node config chooses paths."""
    allowed, permits = allowed_methods(context), Permits.of(context.node_config)
    if is_own_machine(context):
        config, out = configured(context, allowed)
        permits.check(config)
        return config, out
    if is_file_name(str(context.run_config.get("config", ""))):
        raise _no_path("config")
    config, root = _settings(context, allowed), context.node_config.get(DATA_ROOT)
    permits.check(config)
    if DATA_FOLDER not in context.node_config:
        _refuse_paths(config, permits, named_here=root is not None)
    own = None if root is None else str(root)
    return replace(config, data=replace(config.data, root=own)), None


def fetches(context: Context) -> bool:
    """Return whether a client may download data; a deployed one only what ``data`` names."""
    # The data set was checked when the run config was read, so any list is enough here.
    return is_own_machine(context) or context.node_config.get(DATA) is not None


def _refuse_paths(config: RunConfig, permits: Permits, *, named_here: bool) -> None:
    """Refuse paths on this machine that a run names: the files may be pickles, or private."""
    data = config.data
    if data.root is not None and not named_here:
        raise _no_path("data.root")
    asked = {"data.name": data.name, "data.add": getattr(data, "add", None)}
    for key, name in asked.items():
        if name and permits.data is not None and not permits.allows_data(name):
            raise RefusedError(f"{key}: is not among the data that this SuperNode may read")
        # A name that no data set has is refused as a path is, so that whether a file has it stays
        is_set = key == "data.name" and NAMED.fullmatch(data.name) and is_known(data.name)
        if name and permits.data is None and not is_set:
            raise _no_path(key)


def _no_path(key: str) -> ConfigError:
    # The value is not quoted: it was made absolute, from this machine's folders.
    how = f"the node config does ({DATA_FOLDER}, {DATA_ROOT}, {DATA})"
    words = f"{key}: a run names no path on a SuperNode's machine; {how}"
    return told(ConfigError(words), words)


def allowed_methods(context: Context) -> frozenset[str] | None:
    """Return the modules of methods that a run may make this SuperNode import; None: any."""
    # A run must not choose the imports of a client's machine. In a simulation of Flower's, the
    # clients are actors of Ray, on the machine of the person that started the run.
    given = context.node_config.get(METHODS, "")
    if not isinstance(given, str):
        raise ConfigError(f"node-config {METHODS}: {brief(given)}; must be names with commas")
    return None if on_ray() else frozenset(filter(None, map(str.strip, given.split(","))))


@lru_cache(maxsize=4)
def _configuration(
    name: str,
    overrides: str,
    keys: tuple[tuple[str, str], ...],
    saved: int,
    allowed: frozenset[str] | None,
) -> RunConfig:
    """Load a config once a process: for a client of one user nothing else takes as long."""
    # With `saved`, the time of its file, a changed file is read again.
    given = [*parse_overrides(overrides), *(f"{SETTINGS[key]}={value}" for key, value in keys)]
    return load_config(name, given, allowed=allowed, environment=False)
