"""The audit's interface to a method, a grid that records every message, and an attack's success.

A method's audit says what a message shows of each client (``view``), and which attacks of
``suite.py`` apply (``findings``).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import ArrayLike, NDArray

from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.rng import derive_seed
from flower_graph.simulation import InProcessGrid
from flower_graph.storage.reading import Tree
from flower_graph.wire.arrays import decode_array
from flower_graph.wire.keys import CONFIG

C = TypeVar("C", bound=RunConfig, contravariant=True)  # the method's schema
NO_NOISE = "privacy.epsilon=null"
SERVER = -1  # in the place of a client, for what is of no single client
Floats = NDArray[np.floating]
# Measures and what they say
AUC, PRECISION = "AUC", "precision"
EVERYWHERE = (
    "All of it is read from the messages, so whoever sees the traffic of all SuperNodes without "
    "TLS does as well as the server. An attack that does no better than a guess proves nothing: "
    "these are simple ones, and a better one may succeed. Deviations of a guess are those of "
    "independent cases; these share clients and nodes, so a success just above a guess says little."
)
DEVIATING = (
    "*Deviating server*: the same run with a server that lies to its clients, each time in one "
    "way; nobody colludes. What of it succeeds, succeeds in the setting that was run: the "
    "semi-honest one trusts the server not to do so."
)


# Success -----------------------------------------------------------------------------------------


@dataclass
class Finding:
    """The result of one attack."""

    attack: str  # What was tried to find out
    measure: str  # AUC: how often a true case ranks above a false one; precision: of the guesses
    success: float  # The measure; and what guessing reaches
    chance: float
    n: int  # Cases that were decided: those ranked, or the guesses
    true: int = 0  # How many of the ranked ones are true; 0 for precision
    detail: dict[str, float] = field(default_factory=dict)  # Further figures, by name


def ranking(attack: str, scores: ArrayLike, truth: ArrayLike, **detail: float) -> Finding:
    """Judge scores that should be higher where ``truth`` holds."""
    # scores, truth [n]
    from sklearn.metrics import roc_auc_score

    hits = np.asarray(truth, bool).ravel()
    if hits.all() or not hits.any():
        raise ValueError(f"{hits.sum()} of {hits.size} cases are true: must be some, and not all")
    auc = float(roc_auc_score(hits, np.asarray(scores, float).ravel()))  # ties count half
    return Finding(attack, AUC, auc, 0.5, hits.size, int(hits.sum()), detail)


def guesses(attack: str, right: ArrayLike, chance: float, **detail: float) -> Finding:
    """Judge guesses, each of which is right or wrong."""
    # right [n]
    hits = np.asarray(right, bool).ravel()
    if not hits.size:
        raise ValueError(f"{attack}: nothing was guessed; at least one guess is needed")
    return Finding(attack, PRECISION, float(hits.mean()), chance, hits.size, 0, detail)


# Recorded messages --------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """One message and its reply."""

    kind: str  # Flower's message type, such as ``train`` or ``query``
    place: int  # of the SuperNode: its client's number, where each hosts one client
    request: RecordDict
    reply: RecordDict


class RecordingGrid(InProcessGrid):
    """The in-process grid, with a list of all answered exchanges."""

    # Without TLS, anybody that reads the traffic of all SuperNodes has the same list.

    @cached_property
    def exchanges(self) -> list[Exchange]:
        return []

    def _handle(self, message: Message, context: Context) -> Message:
        reply = super()._handle(message, context)
        if not reply.has_error():
            place = int(context.node_config["partition-id"])
            one = Exchange(message.metadata.message_type, place, message.content, reply.content)
            self.exchanges.append(one)
        return reply


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return the config entries of a recorded message; empty where it has none."""
    return dict(content.config_records.get(CONFIG, ConfigRecord()))


def array_of(content: RecordDict, record: str, key: str) -> NDArray[Any]:
    """Read one array of a recorded message."""
    arrays = content.array_records.get(record)
    if arrays is None or key not in arrays:
        raise ValueError(f"the message has no array {record}/{key}; it has {sorted(content)}")
    return decode_array(f"{record}/{key}", arrays[key])


class Seen(dict[str, dict[int, list[Any]]]):
    """The numbers that a run's messages show, by name and client, in the order of the messages."""

    # Any: an attack knows what it takes

    def __init__(self, views: Iterable[Iterable[tuple[str, int, Any]]]) -> None:
        for view in views:
            for name, client, value in view:
                self.setdefault(name, {}).setdefault(client, []).append(value)

    def of(self, name: str, clients: int = 1) -> list[list[Any]]:
        """Return all values of a name, client by client; ``ValueError`` for too few clients."""
        found = self.get(name, {})
        if len(found) < clients:
            raise ValueError(f"{name} of {len(found)} of {clients} clients were recorded")
        return [found[client] for client in sorted(found)]


class Deviation:
    """One way to lie: ``patch`` the strategy, and say in ``finding`` what that opened."""

    # Left open: lies change what is inside a server, for which there is no interface

    name: str
    told = 0  # lies that clients were told
    patch: Callable[[Any], None]
    finding: Callable[[], Finding]  # after the run, however it ended


class Audit(Generic[C]):
    """The attacks on one method; a method overrides the defaults."""

    rounds = 5  # that are recorded: enough for the attacks; more add time and hardly anything else
    notes: Sequence[str] = ()  # what an attacker needs besides the messages, and others for readers
    audited: Sequence[str] = ()  # strategies whose messages the attacks read; empty: all of them
    shorter: Sequence[str] = ()  # overrides that leave out slow parts that no attack reads
    one_supernode = False  # whether one hosts all clients; else each has its own, as when deployed

    def refuse(self, config: C) -> None:
        """Raise ``ConfigError`` for settings whose messages no attack here reads."""
        name, names = config.strategy.name, ", ".join(self.audited)
        if names and name not in self.audited:
            raise ConfigError(f"strategy.name: {name} has no audit; must be one of {names}")

    def counterparts(self, config: C, noisy: Sequence[list[str]]) -> list[list[str]]:
        """Return each run's overrides, the config's own first; `noisy` are those with noise."""
        return [[], [NO_NOISE], *noisy]

    def label(self, config: C) -> str:
        budget = config.privacy.epsilon
        return "no noise" if budget is None else f"noise, epsilon {budget:g}"

    def deviations(self, config: C, method: Any) -> Sequence[Deviation]:
        """Return the lies of a deviating server about a run's hidden values, if there are any."""
        return ()

    def view(self, message: Exchange) -> Iterable[tuple[str, int, Any]]:
        """Return what a recorded message shows: a name, the client, and a value for the suite."""
        raise NotImplementedError

    def findings(self, config: C, seen: Seen, method: Any) -> list[Finding]:
        """Run the attacks that apply; `method`, which was run, knows its clients' data."""
        raise NotImplementedError

    def attack(self, config: C, grid: RecordingGrid, method: Any) -> list[Finding]:
        """Attack the recorded messages."""
        return self.findings(config, Seen(map(self.view, grid.exchanges)), method)


def audit_rng(config: RunConfig) -> np.random.Generator:
    """Make the generator of an attack's draws."""
    return np.random.default_rng(derive_seed(config.seed, "audit"))


def users_drawn(x: NDArray[np.generic], count: int, rng: np.random.Generator) -> list[int]:
    """Draw at most ``count`` of the users that have a feature in ``x``, ``[n, f]``."""
    having = np.flatnonzero((x != 0).any(1))
    drawn: list[int] = rng.choice(having, min(count, having.size), replace=False).tolist()
    return drawn


# Report -----------------------------------------------------------------------------------------


def findings_of(setting: str, seeds: Sequence[Sequence[Finding]]) -> list[dict[str, object]]:
    """Join the findings of one setting, one list a seed, attack by attack, as the file has them."""
    names, result = [[finding.attack for finding in one] for one in seeds], []
    if any(other != names[0] for other in names):
        raise ValueError(f"{setting}: seeds have different attacks: {names}")
    for same in zip(*seeds, strict=True):
        values, first = [one.success for one in same], same[0]
        mean, chance = float(np.mean(values)), float(np.mean([one.chance for one in same]))
        # Two standard deviations of a guess's mean, as if cases were independent
        slack = 2 * math.sqrt(sum(guess_variance(one) for one in same)) / len(same)
        joined = {
            "setting": setting,
            "attack": first.attack,
            "measure": first.measure,
            "mean": mean,
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "values": values,
            "chance": chance,
            "two-deviations-of-a-guess": slack,
            "beats-chance": mean > chance + slack,
            "n": sum(one.n for one in same),
            "detail": {k: float(np.mean([one.detail[k] for one in same])) for k in first.detail},
        }
        result.append(joined)
    return result


def guess_variance(one: Finding) -> float:
    """Return the variance of a guess's success, if cases are independent of each other."""
    if one.measure == AUC:
        return (one.n + 1) / (12 * one.true * (one.n - one.true))
    return one.chance * (1 - one.chance) / one.n


def page(record: Tree, notes: Sequence[str], *, level: int = 1) -> str:
    """Return an audit's record as Markdown, with ``notes`` below it."""
    seeds = ", ".join(str(seed) for seed in record["seeds"])
    # The settings of one attack below each other, in the order in which attacks came
    attacks = list(dict.fromkeys(finding["attack"] for finding in record["findings"]))
    ordered = sorted(record["findings"], key=lambda finding: attacks.index(finding["attack"]))
    budgets = [one["config"]["privacy"] for one in record["settings"]]
    noise = [
        "Noise: each client's own, for the budget of the recorded rounds alone, at "
        f"`privacy.delta={one['delta']:g} privacy.clipping_norm={one['clipping_norm']:g}`.\n"
        for one in budgets
        if one["epsilon"] is not None
    ]
    lines = [
        f"{'#' * level} {record['config']}",
        "",
        f"`{record['command']}`: {record['rounds']} rounds, seeds {seeds}. "
        "Mean over the seeds ± sample deviation; a guess ± two deviations of its own mean.",
        "",
        *noise[:1],
        "| what was tried | setting | measure | success | a guess | better | cases |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in ordered:
        spread = "" if one["std"] is None else f" ± {one['std']:.3f}"
        more = "".join(f"; {name} {value:.2f}" for name, value in one["detail"].items())
        success = f"{one['mean']:.3f}{spread}{more}"
        guess = f"{one['chance']:.3f} ± {one['two-deviations-of-a-guess']:.3f}"
        words = one["attack"], one["setting"], one["measure"], success, guess
        is_better = "yes" if one["beats-chance"] else "no"
        lines.append(f"| {' | '.join(words)} | {is_better} | {one['n']:,} |")
    lines.append("")
    for note in notes:
        lines += [note, ""]
    return "\n".join(lines)
