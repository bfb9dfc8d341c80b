"""The limits that a SuperNode sets to runs, whatever their config says.

The run config comes from the server. So a SuperNode's own node config may set limits: the least
noise, the fewest clients in a sum, the trust in the server, the data that it reads. A run beyond a
limit is refused by an error that names the limit; it is never answered with weaker protection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import UserConfigValue

from flower_graph.config.common import RunConfig
from flower_graph.data.sources.names import file_path, folder_path
from flower_graph.errors import ConfigError, RefusedError, brief
from flower_graph.method.trust import OpenedSums, TrustSection
from flower_graph.privacy.noise import multiplier_of
from flower_graph.secure.node_config import (
    LEAST_HOLDERS,
    MALICIOUS_SERVER,
    MOST_POINTS,
    SEMI_HONEST,
    TRUST,
    differ_by,
    least_clients,
    least_holders,
    most_points,
)

ALLOW_TRUST, DATA = "allow-trust", "data"
USUAL_DELTA = 1e-5  # with `most-epsilon`, which promises nothing at a delta near 1
# Beginnings of keys that can only be misspelt limits
FLOORS = ("least-", "most-", "allow-", "differ-")
PLAIN = "plain"  # the server reads what each SuperNode sends
FORMS = (PLAIN, *TRUST)
_NOISED = ("privacy.epsilon", "privacy.form", "privacy.measurements")
_READ = ("strategy.name", "strategy.aggregation", "strategy.alignment", "strategy.share")
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


def _limit(read: Callable[..., object], *settings: str, default: object = None) -> Any:
    """Declare a limit, whose key in the node config is the field's name with dashes.

    ``settings`` of a run, which are the server's, are those that the promise depends on. All that a
    server could turn to learn more is in one of them: a test knows every other key of every method.
    """
    return field(default=default, metadata={"read": read, "settings": settings})


@dataclass(frozen=True)
class Permits:
    """The limits of a SuperNode; None: there is no limit."""

    # A budget for the whole run; noise over sensitivity; the length of vectors before the noise;
    # the chance that the budget does not hold
    most_epsilon: float | None = _limit(_number, *_NOISED, "privacy.delta", "rounds")
    least_noise: float | None = _limit(_number, *_NOISED)
    most_clip: float | None = _limit(_number, *_NOISED, "privacy.clipping_norm")
    most_delta: float | None = _limit(partial(_number, below=1), *_NOISED, "privacy.delta")
    # Clients of a masked sum; SuperNodes by which two sums differ; clients that hold a summed node
    least_clients: int | None = _limit(least_clients, *_READ)
    differ_by: int | None = _limit(differ_by, "strategy.differ_by", "strategy.trust", *_READ)
    least_holders: int = _limit(least_holders, "strategy.least_holders", default=LEAST_HOLDERS)
    # Points of a SuperNode that a key-holder, who alone says how much it works, multiplies
    most_points: int = _limit(most_points, default=MOST_POINTS)
    allow_trust: tuple[str, ...] = _limit(
        partial(_words, allowed=FORMS), "strategy.trust", *_READ, default=FORMS
    )
    # None: no path of the run's and no download
    data: tuple[str, ...] | None = _limit(_words, "data.name", "data.add", "data.root")

    @classmethod
    def of(cls, node_config: Given) -> Permits:
        """Read the limits of a node config; ``ConfigError`` names a key that cannot be used."""
        for key in node_config:
            if key.startswith(FLOORS) and key not in LIMITS:
                near = get_close_matches(key, LIMITS, 1, 0)
                raise ConfigError(f"node-config {key}: is unknown; the nearest is {near[0]}")
        return cls(
            **{
                one.name: one.metadata["read"](node_config, key=key)
                for key, one in LIMITS.items()
                if node_config.get(key) is not None
            }
        )

    @property
    def noises(self) -> bool:
        """Whether every vector of a permitted run has noise."""
        return self.least_noise is not None or self.most_epsilon is not None

    @property
    def _delta(self) -> float | None:
        return USUAL_DELTA if self.most_delta is None and self.most_epsilon else self.most_delta

    def _shown(self, key: str) -> object:
        limit = self._delta if key == "most-delta" else getattr(self, LIMITS[key].name)
        return ", ".join(limit) if isinstance(limit, tuple) else limit

    def lines(self) -> list[str]:
        """Describe the limits, a line each."""
        shown = {key: self._shown(key) for key in LIMITS}
        return [f"{key:13}  {'not set' if one is None else one}" for key, one in shown.items()]

    def check(self, config: RunConfig) -> None:
        """Refuse a run that does not keep a limit; ``RefusedError`` names the limit."""
        self._check_noise(config)
        how, form, differ = config.strategy, PLAIN, None if self.noises else self.differ_by
        if not config.sends_singly:
            form = how.trust if isinstance(how, TrustSection) else SEMI_HONEST
        holders = how.least_holders if isinstance(how, OpenedSums) else self.least_holders
        # Under other trust the server chooses the sums
        apart = how.differ_by if isinstance(how, OpenedSums) and form == MALICIOUS_SERVER else 0
        for key, is_kept, what in (
            (ALLOW_TRUST, form in self.allow_trust, f"is {form}"),
            ("least-clients", self.least_clients is None or form != PLAIN, f"is {form}"),
            ("least-holders", holders >= self.least_holders, f"has least_holders={holders}"),
            ("differ-by", differ is None or apart >= differ, f"is {form}, with differ_by={apart}"),
        ):
            if not is_kept:
                raise self._refused(key, what)

    def _check_noise(self, config: RunConfig) -> None:
        floors = ("most-epsilon", "least-noise", "most-clip", "most-delta")
        asked = [key for key in floors if getattr(self, LIMITS[key].name) is not None]
        privacy = config.privacy
        if asked and not (privacy.is_local and privacy.withholds):
            keys = ("epsilon", "form", "measurements")
            settings = (f"privacy.{key}={getattr(privacy, key)}" for key in keys)
            raise self._refused(asked[0], f"has {', '.join(settings)}")
        for key, most, name in (
            ("most-delta", self._delta, "delta"),
            ("most-epsilon", self.most_epsilon, "epsilon"),
            ("most-clip", self.most_clip, "clipping_norm"),
        ):
            if most is not None and (value := getattr(privacy, name)) > most:
                raise self._refused(key, f"has privacy.{name}={value:g}")
        if self.least_noise is not None:
            noise = multiplier_of(privacy, config.rounds)
            if noise < self.least_noise:
                raise self._refused("least-noise", f"has noise {noise:.3g} times the sensitivity")

    def allows_data(self, name: str) -> bool:
        """Return whether a run may use a data set, a file or a folder.

        A file or folder is allowed if `data` names it or a folder above it.
        """
        if self.data is None:
            return False
        path = file_path(name) or folder_path(name)
        if path is None:
            return name in self.data
        asked = path.expanduser().resolve()
        paths = [Path(one).expanduser() for one in self.data]
        return any(asked.is_relative_to(one.resolve()) for one in paths if one.is_absolute())

    def _refused(self, key: str, why: str) -> RefusedError:
        return RefusedError(
            f"this SuperNode's node config has {key}={self._shown(key)}, and this run {why}"
        )


LIMITS = {one.name.replace("_", "-"): one for one in fields(Permits)}
