"""The run config of a Flower app, and the limits that a SuperNode sets to it.

The run config comes from the server. So a SuperNode's own node config may set limits: the least
noise, the fewest clients in a sum, the trust in the server, the data that it reads. A run beyond a
limit is refused by an error that names the limit; it is never answered with weaker protection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, UserConfigValue

from flower_graph.config.app_keys import RUN_CONFIG, SETTINGS
from flower_graph.config.common import RunConfig
from flower_graph.config.rules import nearest
from flower_graph.data.sources.datasets import once, saved_at
from flower_graph.data.sources.names import file_path, folder_path, is_known
from flower_graph.errors import ConfigError, RefusedError, brief, told
from flower_graph.method.load import is_file_name, load_config, parse_overrides
from flower_graph.method.trust import OpenedSums, TrustSection
from flower_graph.privacy.noise import multiplier_of
from flower_graph.secure import node_config
from flower_graph.storage.files import DATA_FOLDER, named
from flower_graph.wire.client_errors import is_own_machine, on_ray

ALLOW_TRUST, DATA = "allow-trust", "data"
USUAL_DELTA = 1e-5  # with `most-epsilon`, which promises nothing at a delta near 1
# Beginnings of keys that can only be misspelt limits
FLOORS = ("least-", "most-", "allow-", "differ-")
PLAIN = "plain"  # the server reads what each SuperNode sends
FORMS = (PLAIN, *node_config.TRUST)
Given = Mapping[str, UserConfigValue]


def _number(given: Given, key: str, below: float = math.inf) -> float:
    value = given[key]
    if type(value) not in (int, float) or not 0 < float(value) < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(f"node-config {key}: {brief(value)}; must be a number above 0{limit}")
    return float(value)


def _words(given: Given, key: str, allowed: tuple[str, ...] = ()) -> tuple[str, ...]:
    value = given[key]
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else None
    if words is None or (allowed and not {*words} <= {*allowed}):
        wanted = f"some of {', '.join(allowed)}" if allowed else "names with commas"
        raise ConfigError(f"node-config {key}: {brief(value)}; must be {wanted}")
    return tuple(filter(None, words))


def _limit(read: Callable[..., object], default: object = None) -> Any:
    """Declare a limit, whose key in the node config is the field's name with dashes."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class Permits:
    """The limits of a SuperNode; None: there is no limit.

    All that a server could turn to learn more is a setting that a limit is on: a test knows every
    other key of every method.
    """

    # A budget for the whole run; noise over sensitivity; the length of vectors before the noise;
    # the chance that the budget does not hold
    most_epsilon: float | None = _limit(_number)
    least_noise: float | None = _limit(_number)
    most_clip: float | None = _limit(_number)
    most_delta: float | None = _limit(partial(_number, below=1))
    # Clients of a masked sum; SuperNodes by which two sums differ; clients that hold a summed node
    least_clients: int | None = _limit(node_config.least_clients)
    differ_by: int | None = _limit(node_config.differ_by)
    least_holders: int = _limit(node_config.least_holders, node_config.LEAST_HOLDERS)
    # Points of a SuperNode that a key-holder, who alone says how much it works, multiplies
    most_points: int = _limit(node_config.most_points, node_config.MOST_POINTS)
    allow_trust: tuple[str, ...] = _limit(partial(_words, allowed=FORMS), FORMS)
    # None: no path of the run's and no download
    data: tuple[str, ...] | None = _limit(_words)

    @classmethod
    def of(cls, given: Given) -> Permits:
        """Read the limits of a node config; ``ConfigError`` names a key that cannot be used."""
        for key in given:
            if key.startswith(FLOORS) and key not in LIMITS:
                near = nearest(key, LIMITS, 0)
                raise ConfigError(f"node-config {key}: is unknown; the nearest is {near}")
        asked = {key: one for key, one in LIMITS.items() if given.get(key) is not None}
        read = {one.name: one.metadata["read"](given, key=key) for key, one in asked.items()}
        return cls(**({"most_delta": USUAL_DELTA} if "most_epsilon" in read else {}) | read)

    @property
    def noises(self) -> bool:
        """Whether every vector of a permitted run has noise."""
        return self.least_noise is not None or self.most_epsilon is not None

    def _shown(self, key: str) -> object:
        limit = getattr(self, LIMITS[key].name)
        return ", ".join(limit) if isinstance(limit, tuple) else limit

    def lines(self) -> list[str]:
        """Describe the limits, a line each."""
        shown = {key: self._shown(key) for key in LIMITS}
        return [f"{key:13}  {'not set' if one is None else one}" for key, one in shown.items()]

    def check(self, config: RunConfig) -> None:
        """Refuse a run that does not keep a limit; ``RefusedError`` names the limit."""

        def keep(key: str, is_kept: bool, what: str) -> None:
            if not is_kept:
                limit = f"this SuperNode's node config has {key}={self._shown(key)}"
                raise RefusedError(f"{limit}, and this run {what}")

        privacy, how = config.privacy, config.strategy
        # Of each limit of the noise the setting that it is the most for
        most = {"most-epsilon": "epsilon", "most-clip": "clipping_norm", "most-delta": "delta"}
        limits = {key: getattr(self, LIMITS[key].name) for key in (*most, "least-noise")}
        is_noised = privacy.is_local and privacy.withholds
        keys = ("epsilon", "form", "measurements")
        how_noised = ", ".join(f"privacy.{key}={getattr(privacy, key)}" for key in keys)
        for key, limit in limits.items():
            keep(key, limit is None or is_noised, f"has {how_noised}")
        for key, name in most.items():
            value = getattr(privacy, name)
            keep(key, limits[key] is None or value <= limits[key], f"has privacy.{name}={value}")
        if self.least_noise is not None:
            keep("least-noise", not config.sends_once, "has noise of another kind")
            noise = multiplier_of(privacy, config.rounds)
            is_kept = noise >= self.least_noise
            keep("least-noise", is_kept, f"has noise {noise:.3g} times the sensitivity")

        form, differ = PLAIN, None if self.noises else self.differ_by
        if not config.sends_singly:
            form = how.trust if isinstance(how, TrustSection) else node_config.SEMI_HONEST
        keep(ALLOW_TRUST, form in self.allow_trust, f"is {form}")
        keep("least-clients", self.least_clients is None or form != PLAIN, f"is {form}")
        holders = getattr(how, "least_holders", self.least_holders)
        keep("least-holders", holders >= self.least_holders, f"has least_holders={holders}")
        # Under other trust the server chooses the sums
        is_kept = form == node_config.MALICIOUS_SERVER
        apart = how.differ_by if is_kept and isinstance(how, OpenedSums) else 0
        what = f"is {form}, with differ_by={apart}"
        keep("differ-by", differ is None or apart >= differ, what)


LIMITS = {one.name.replace("_", "-"): one for one in fields(Permits)}


# The run config ----------------------------------------------------------------------------------

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

    def load() -> RunConfig:
        settings = [*parse_overrides(overrides), *(f"{SETTINGS[key]}={one}" for key, one in keys)]
        return load_config(name, settings, allowed=allowed, environment=False)

    # For a client of one user nothing else takes as long
    return once(f"config {name} {overrides} {keys}", saved_at(name), load, by=allowed)


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
        if name and permits.data is not None and not _names(permits.data, name):
            raise RefusedError(f"{key}: is not among the data that this SuperNode may read")
        # A name that no data set has is refused as a path is, so that whether a file has it stays
        is_set = key == "data.name" and NAMED.fullmatch(data.name) and is_known(data.name)
        if name and permits.data is None and not is_set:
            raise _no_path(key)


def _names(allowed: Sequence[str], name: str) -> bool:
    """Return whether some names have a data set, a file or folder, or a folder above it."""
    if (path := file_path(name) or folder_path(name)) is None:
        return name in allowed
    asked, paths = path.expanduser().resolve(), [Path(one).expanduser() for one in allowed]
    return any(asked.is_relative_to(one.resolve()) for one in paths if one.is_absolute())


def _no_path(key: str) -> ConfigError:
    # The value is not quoted: it was made absolute, from this machine's folders.
    how = f"the node config does ({DATA_FOLDER}, {DATA_ROOT}, {DATA})"
    words = f"{key}: a run names no path on a SuperNode's machine; {how}"
    return told(ConfigError(words), words)


def allowed_methods(context: Context) -> frozenset[str] | None:
    """Return the modules of methods that a run may make this SuperNode import; None: any."""
    # A run must not choose the imports of a client's machine. In a simulation of Flower's, the
    # clients are actors of Ray, on the machine of the person that started the run.
    given = {METHODS: context.node_config.get(METHODS, "")}
    return None if on_ray() else frozenset(_words(given, METHODS))
