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
from flower_graph.privacy.accountant import multiplier_of
from flower_graph.secure.node_config import (
    LEAST_HOLDERS,
    MALICIOUS_SERVER,
    MOST_POINTS,
    SEMI_HONEST,
    TRUST,
    USUAL_DIFFERENCE,
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


def _limit(
    read: Callable[..., object],
    words: str,
    *settings: str,
    default: object = None,
    otherwise: str = "any",
) -> Any:
    """Declare a limit, whose key in the node config is the field's name with dashes.

    ``read`` reads it; ``words`` say what is permitted, ``otherwise`` what is without the limit.
    ``settings`` of a run, which are the server's, are those that the promise depends on. All that a
    server could turn to learn more is in one of them: a test knows every other key of every method.
    """
    about = {"read": read, "words": words, "settings": settings, "otherwise": otherwise}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Permits:
    """The limits of a SuperNode; None: there is no limit."""

    most_epsilon: float | None = _limit(
        _number, "a budget of at most {:g} for the whole run", *_NOISED, "privacy.delta", "rounds"
    )
    least_noise: float | None = _limit(
        _number, "noise of at least {:g} times the sensitivity", *_NOISED
    )
    most_clip: float | None = _limit(
        _number,
        "vectors of length {:g} at most, before the noise",
        *(*_NOISED, "privacy.clipping_norm"),
    )
    most_delta: float | None = _limit(
        partial(_number, below=1),
        "a chance of at most {:g} that the budget does not hold",
        *(*_NOISED, "privacy.delta"),
    )
    least_clients: int | None = _limit(
        least_clients, "masked sums of at least {} clients alone", *_READ
    )
    differ_by: int | None = _limit(
        differ_by,
        "sums that differ by {} SuperNodes at least, or by none",
        *("strategy.differ_by", "strategy.trust", *_READ),
        otherwise=f"any; {USUAL_DIFFERENCE} under {MALICIOUS_SERVER}",
    )
    least_holders: int = _limit(
        least_holders,
        "sums over nodes that at least {} clients hold",
        "strategy.least_holders",
        default=LEAST_HOLDERS,
    )
    # The key-holder alone says how much it works, if the server is not trusted
    most_points: int = _limit(
        most_points, "as key-holder at most {} points of one SuperNode", default=MOST_POINTS
    )
    allow_trust: tuple[str, ...] = _limit(
        partial(_words, allowed=FORMS), "{}", "strategy.trust", *_READ, default=FORMS
    )
    data: tuple[str, ...] | None = _limit(
        _words,
        "{}",
        *("data.name", "data.add", "data.root"),
        otherwise="no path of the run's and no download",
    )

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
        lines = []
        for key, one in LIMITS.items():
            shown = self._shown(key)
            words = one.metadata["otherwise" if shown is None else "words"]
            lines.append(f"{key:13}  {words.format(shown)}")
        return lines

    def check(self, config: RunConfig) -> None:
        """Refuse a run that does not keep a limit; ``RefusedError`` names the limit."""
        self._check_noise(config)
        form, how = PLAIN, config.strategy
        if not config.sends_singly:
            form = how.trust if isinstance(how, TrustSection) else SEMI_HONEST
        if form not in self.allow_trust:
            raise self._refused(ALLOW_TRUST, f"this run is {form}")
        if self.least_clients is not None and form == PLAIN:
            why = "in this run the server reads what each SuperNode sends"
            raise self._refused("least-clients", why)
        if isinstance(how, OpenedSums) and how.least_holders < self.least_holders:
            why = f"this run has strategy.least_holders={how.least_holders}"
            raise self._refused("least-holders", why)
        if self.differ_by is None or self.noises:
            return
        if form != MALICIOUS_SERVER or not isinstance(how, OpenedSums):
            why = f"two sums of a run that is {form} may differ by a single SuperNode here"
            raise self._refused("differ-by", why)
        if how.differ_by < self.differ_by:
            raise self._refused("differ-by", f"this run has strategy.differ_by={how.differ_by}")

    def _check_noise(self, config: RunConfig) -> None:
        floors = ("most-epsilon", "least-noise", "most-clip", "most-delta")
        asked = [key for key in floors if getattr(self, LIMITS[key].name) is not None]
        if not asked:
            return
        privacy, key = config.privacy, asked[0]
        if not privacy.is_local:
            server = "this run leaves the noise to the server (privacy.form=central)"
            lack = server if privacy.is_on else "this run has no budget (privacy.epsilon=null)"
            raise self._refused(key, lack)
        if not privacy.withholds:
            exact = f"in this run (privacy.measurements={privacy.measurements}) clients send "
            raise self._refused(key, f"{exact}accuracies and losses without noise")
        for key, most, name in (
            ("most-delta", self._delta, "delta"),
            ("most-epsilon", self.most_epsilon, "epsilon"),
            ("most-clip", self.most_clip, "clipping_norm"),
        ):
            if most is not None and (value := getattr(privacy, name)) > most:
                raise self._refused(key, f"this run has privacy.{name}={value:g}")
        noise = math.inf if self.least_noise is None else multiplier_of(privacy, config.rounds)
        if self.least_noise is not None and noise < self.least_noise:
            why = f"this run's noise over the sensitivity is {noise:.3g}"
            raise self._refused("least-noise", why)

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
        return RefusedError(f"this SuperNode's node config has {key}={self._shown(key)}, and {why}")


LIMITS = {one.name.replace("_", "-"): one for one in fields(Permits)}
