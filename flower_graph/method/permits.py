"""The limits that a SuperNode sets to runs, whatever their config says.

The run config comes from the server. So a SuperNode's own node config may set limits: the least
noise, the fewest clients in a sum, the trust in the server, the data that it reads. A run beyond a
limit is refused by an error that names the limit; it is never answered with weaker protection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from flwr.app import UserConfigValue

from flower_graph.config.common import RunConfig, StrategySection
from flower_graph.data.sources.names import file_path, folder_path
from flower_graph.errors import ConfigError, RefusedError, brief
from flower_graph.method.trust import OpenedSums, TrustSection
from flower_graph.privacy.accountant import multiplier_of
from flower_graph.secure.node_config import (
    DIFFER_BY,
    HOLDERS,
    LEAST_CLIENTS,
    LEAST_HOLDERS,
    MALICIOUS_SERVER,
    MOST_POINTS,
    OF_NODE,
    SEMI_HONEST,
    TRUST,
    USUAL_DIFFERENCE,
    differ_by,
    least_clients,
    least_holders,
    most_points,
)

MOST_EPSILON, LEAST_NOISE, MOST_CLIP = "most-epsilon", "least-noise", "most-clip"
ALLOW_TRUST, DATA = "allow-trust", "data"
MOST_DELTA = "most-delta"
USUAL_DELTA = 1e-5  # with `most-epsilon`, which promises nothing at a delta near 1
NOISE = (MOST_EPSILON, LEAST_NOISE, MOST_CLIP, MOST_DELTA)
# Beginnings of keys that can only be misspelt limits
FLOORS = ("least-", "most-", "allow-", "differ-")
PLAIN = "plain"  # the server reads what each SuperNode sends
FORMS = (PLAIN, *TRUST)
HERE = "this SuperNode's node config"
_NOISED = ("privacy.epsilon", "privacy.form", "privacy.measurements")
_READ = ("strategy.name", "strategy.aggregation", "strategy.alignment", "strategy.share")
# The settings of a run, which are the server's, that the promise of each limit depends on. All that
# a server could turn to learn more is here: a test knows every other key of every method.
PROMISES = {
    MOST_EPSILON: (*_NOISED, "privacy.delta", "rounds"),
    LEAST_NOISE: _NOISED,
    MOST_CLIP: (*_NOISED, "privacy.clipping_norm"),
    MOST_DELTA: (*_NOISED, "privacy.delta"),
    LEAST_CLIENTS: _READ,
    HOLDERS: ("strategy.least_holders",),
    OF_NODE: (),  # the key-holder alone says how much it works
    DIFFER_BY: ("strategy.differ_by", "strategy.trust", *_READ),
    ALLOW_TRUST: ("strategy.trust", *_READ),
    DATA: ("data.name", "data.add", "data.root"),
}
KEYS = tuple(PROMISES)


@dataclass(frozen=True)
class Permits:
    """The limits of a SuperNode.

    Attributes
    ----------
    most_epsilon : float or None
        ``most-epsilon``: the largest budget of a whole run; None: a run may go without noise.
    least_noise : float or None
        ``least-noise``: the least standard deviation of the noise over the sensitivity.
    most_clip : float or None
        ``most-clip``: the longest vector that a client sends before the noise.
    most_delta : float or None
        ``most-delta``: the largest chance, over the whole run, that the budget does not hold.
    least_clients : int or None
        ``least-clients``: the fewest clients in a sum; no vector leaves outside a masked sum then.
    least_holders : int
        ``least-holders``: how many clients must hold a node whose embeddings are summed.
    most_points : int
        ``most-points``: the most points of another SuperNode that it multiplies as a key-holder, if
        the server is not trusted.
    differ_by : int or None
        ``differ-by``: the least number of SuperNodes in which two sums of a run differ, unless they
        do not differ or every vector has the noise that this node config asks for.
    allow_trust : tuple of str
        ``allow-trust``: what the server may be, of ``plain`` (it reads what each sends),
        ``semi-honest`` (masked sums, by a server that follows the protocol) and
        ``malicious-server``.
    data : tuple of str or None
        ``data``: names of data sets, files and folders that a run may use. Without it a deployed
        SuperNode accepts no path from a run, and downloads nothing.
    """

    most_epsilon: float | None = None
    least_noise: float | None = None
    most_clip: float | None = None
    most_delta: float | None = None
    least_clients: int | None = None
    least_holders: int = LEAST_HOLDERS
    most_points: int = MOST_POINTS
    differ_by: int | None = None
    allow_trust: tuple[str, ...] = FORMS
    data: tuple[str, ...] | None = None

    @classmethod
    def of(cls, node_config: Mapping[str, UserConfigValue]) -> Permits:
        """Read the limits of a node config; ``ConfigError`` names a key that cannot be used."""
        for key in node_config:
            if key.startswith(FLOORS) and key not in KEYS:
                near = get_close_matches(key, KEYS, 1, 0)
                raise ConfigError(f"node-config {key}: is unknown; the nearest is {near[0]}")
        trust = _words(node_config, ALLOW_TRUST)
        if trust is not None and (wrong := [one for one in trust if one not in FORMS] or not trust):
            raise ConfigError(
                f"node-config {ALLOW_TRUST}: {brief(wrong)}; must be some of {', '.join(FORMS)}"
            )
        return cls(
            most_epsilon=_number(node_config, MOST_EPSILON),
            least_noise=_number(node_config, LEAST_NOISE),
            most_clip=_number(node_config, MOST_CLIP),
            most_delta=_number(node_config, MOST_DELTA, 1),
            least_clients=least_clients(node_config) if LEAST_CLIENTS in node_config else None,
            least_holders=least_holders(node_config),
            most_points=most_points(node_config),
            differ_by=differ_by(node_config) if DIFFER_BY in node_config else None,
            allow_trust=FORMS if trust is None else trust,
            data=_words(node_config, DATA),
        )

    def check(self, config: RunConfig) -> None:
        """Refuse a run that does not keep a limit; ``RefusedError`` names the limit."""
        self._check_noise(config)
        form, how = PLAIN, config.strategy
        if not config.sends_singly:
            form = how.trust if isinstance(how, TrustSection) else SEMI_HONEST
        if form not in self.allow_trust:
            raise _refused(ALLOW_TRUST, ",".join(self.allow_trust), f"this run is {form}")
        if self.least_clients is not None and form == PLAIN:
            why = "in this run the server reads what each SuperNode sends"
            raise _refused(LEAST_CLIENTS, self.least_clients, why)
        if isinstance(how, OpenedSums) and how.least_holders < self.least_holders:
            why = f"this run has strategy.least_holders={how.least_holders}"
            raise _refused(HOLDERS, self.least_holders, why)
        self._check_differences(form, how)

    @property
    def noises(self) -> bool:
        """Whether every vector of a permitted run has noise."""
        return self.least_noise is not None or self.most_epsilon is not None

    @property
    def _delta(self) -> float | None:
        return USUAL_DELTA if self.most_delta is None and self.most_epsilon else self.most_delta

    def lines(self) -> list[str]:
        otherwise = {
            DIFFER_BY: f"any; {USUAL_DIFFERENCE} under {MALICIOUS_SERVER}",
            DATA: "no path of the run's and no download",
        }
        permitted: list[tuple[str, object, str]] = [
            (MOST_EPSILON, self.most_epsilon, "a budget of at most {:g} for the whole run"),
            (LEAST_NOISE, self.least_noise, "noise of at least {:g} times the sensitivity"),
            (MOST_CLIP, self.most_clip, "vectors of length {:g} at most, before the noise"),
            (MOST_DELTA, self._delta, "a chance of at most {:g} that the budget does not hold"),
            (LEAST_CLIENTS, self.least_clients, "masked sums of at least {:g} clients alone"),
            (DIFFER_BY, self.differ_by, "sums that differ by {:g} SuperNodes at least, or by none"),
            (HOLDERS, self.least_holders, "sums over nodes that at least {} clients hold"),
            (OF_NODE, self.most_points, "as key-holder at most {} points of one SuperNode"),
            (ALLOW_TRUST, ", ".join(self.allow_trust), "{}"),
            (DATA, None if self.data is None else ", ".join(self.data), "{}"),
        ]
        return [
            f"{key:13}  {otherwise.get(key, 'any') if limit is None else words.format(limit)}"
            for key, limit, words in permitted
        ]

    def _check_differences(self, form: str, how: StrategySection) -> None:
        if self.differ_by is None or self.noises:
            return
        if form != MALICIOUS_SERVER or not isinstance(how, OpenedSums):
            why = f"two sums of a run that is {form} may differ by a single SuperNode here"
            raise _refused(DIFFER_BY, self.differ_by, why)
        if how.differ_by < self.differ_by:
            why = f"this run has strategy.differ_by={how.differ_by}"
            raise _refused(DIFFER_BY, self.differ_by, why)

    def _check_noise(self, config: RunConfig) -> None:
        values = (self.most_epsilon, self.least_noise, self.most_clip, self.most_delta)
        floors = {key: one for key, one in zip(NOISE, values, strict=True) if one is not None}
        if not floors:
            return
        privacy, (key, floor) = config.privacy, next(iter(floors.items()))
        if privacy.epsilon is None or not privacy.is_local:
            server = "this run leaves the noise to the server (privacy.form=central)"
            lack = server if privacy.is_on else "this run has no budget (privacy.epsilon=null)"
            raise _refused(key, floor, lack)
        if not privacy.withholds:
            exact = f"in this run (privacy.measurements={privacy.measurements}) clients send "
            raise _refused(key, floor, f"{exact}accuracies and losses without noise")
        for key, most, name in (
            (MOST_DELTA, self._delta, "delta"),
            (MOST_EPSILON, self.most_epsilon, "epsilon"),
            (MOST_CLIP, self.most_clip, "clipping_norm"),
        ):
            if most is not None and (value := getattr(privacy, name)) > most:
                raise _refused(key, most, f"this run has privacy.{name}={value:g}")
        if self.least_noise is not None:
            noise = multiplier_of(privacy, config.rounds)
            if noise < self.least_noise:
                why = f"this run's noise over the sensitivity is {noise:.3g}"
                raise _refused(LEAST_NOISE, self.least_noise, why)

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


def _refused(key: str, floor: object, why: str) -> RefusedError:
    return RefusedError(f"{HERE} has {key}={floor}, and {why}")


def _number(
    node_config: Mapping[str, UserConfigValue], key: str, below: float = math.inf
) -> float | None:
    value = node_config.get(key)
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 < float(value) < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(f"node-config {key}: {brief(value)}; must be a number above 0{limit}")
    return float(value)


def _words(node_config: Mapping[str, UserConfigValue], key: str) -> tuple[str, ...] | None:
    value = node_config.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigError(f"node-config {key}: {brief(value)} is no text; write names with commas")
    return tuple(word.strip() for word in value.split(",") if word.strip())
