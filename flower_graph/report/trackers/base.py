"""Shows the rounds of a run to trackers, and keeps their failures from the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

from flower_graph.errors import OutputError, one_line
from flower_graph.records.rounds import WAYS, RoundReport
from flower_graph.storage.files import write_json
from flower_graph.storage.reading import Tree, read_json, reading

LOG = logging.getLogger(__name__)
PROJECT = "flower-graph"  # the experiment or project that runs are listed in
IDS = "trackers.json"  # in a run's folder: the names that trackers gave to the run
SECRET = ("data.root", "strategy.registry")  # where files of this machine lie
PLAIN = ("loss", "cross_entropy", "regulariser", "train_accuracy", "val_accuracy", "test_accuracy")
COUNTS = ("asked", "answered", "seconds")


@dataclass(frozen=True)
class Subject:
    """The run that a tracker shows."""

    out: Path  # its folder
    beside: Path  # the folder that holds what its command wrote
    name: str
    group: str  # the same for all seeds of a command
    settings: Mapping[str, object]  # by dotted key, without what others must not see
    first_round: int  # that will be shown; above 1 in a resumed run
    known_as: str | None  # the identity that the tracker gave to the run before it was resumed


class Tracker(Protocol):
    """One tracker's record of one run. Its errors end the tracking, not the run."""

    identity: str  # by which the record is continued; may be empty

    def log(self, server_round: int, figures: Mapping[str, float]) -> None: ...

    def finish(self, final: Mapping[str, float] | None) -> None:
        """End the record, with the run's final figures; None if the run stopped early."""


# Starts the record of a run; each module of this folder has one, and loads its library there.
Start = Callable[[Subject], Tracker]


class Trackers:
    """The trackers of one run, started with its first round."""

    def __init__(self, names: Sequence[str], out: Path, config: Tree, title: str = "") -> None:
        self._names, self._out, self._config, self._title = names, out, config, title
        self._active: dict[str, Tracker] = {}
        self._is_started = False

    def see(self, report: RoundReport) -> None:
        # Not earlier: a run that fails before its first round leaves nothing, anywhere.
        if not self._is_started:
            self._is_started = True
            self._start(report.round)
        shown = figures_of(report)
        for name, tracker in list(self._active.items()):
            self._guarded(name, partial(tracker.log, report.round, shown))

    def finish(self, result: Mapping[str, object] | None) -> None:
        final = None if result is None else _finite(result)
        for name, tracker in list(self._active.items()):
            self._guarded(name, partial(tracker.finish, final))
        self._active = {}

    def _start(self, first_round: int) -> None:
        if not self._names:
            return
        known = _read_identities(self._out / IDS) if first_round > 1 else {}
        for name in self._names:
            self._guarded(name, partial(self._start_one, name, first_round, known.get(name)))
        identities = {name: one.identity for name, one in self._active.items() if one.identity}
        if identities:
            write_json(self._out / IDS, {**known, **identities})

    def _start_one(self, name: str, first_round: int, known_as: str | None) -> None:
        # `flower-graph run --seeds` makes a folder `seed-N` for each seed.
        is_one_of_several = self._out.name == f"seed-{self._config.get('seed')}"
        top = self._out.parent if is_one_of_several else self._out
        label = f"{top.name}/{self._out.name}" if is_one_of_several else top.name
        settings = visible({"config": self._title, **self._config})
        subject = Subject(self._out, top.parent, label, top.name, settings, first_round, known_as)
        start: Start = import_module(f"{__package__}.{name}").start
        self._active[name] = start(subject)

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        """Call a tracker; if it fails, warn and drop it for this run."""
        try:
            action()
        except Exception as error:
            LOG.warning("track: %s failed and is left out from here on: %s", name, _said(error))
            self._active.pop(name, None)


def _said(error: Exception) -> str:
    """Return an error's words, unless they may hold an address with a password."""
    words = one_line(str(error))
    return type(error).__name__ + (f": {words}" if words and "@" not in words else "")


def _read_identities(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    with reading(path, OutputError, "not the identities of trackers"):
        return {str(name): str(identity) for name, identity in read_json(path).items()}


def figures_of(report: RoundReport) -> dict[str, float]:
    """Return the measured figures of a round by name, without clients' names and errors."""
    names = {name.replace("_", "-"): getattr(report, name) for name in (*PLAIN, *COUNTS)}
    names["rejected"] = len(report.rejected)
    names |= {f"bytes/{way}": sum(report.bytes.get(way, {}).values()) for way in WAYS}
    for group in ("structure", "alignment", "privacy"):
        names |= {f"{group}/{name}": value for name, value in getattr(report, group).items()}
    for metric, by_role in report.scores.items():
        names |= {f"{metric}/{role}": value for role, value in by_role.items()}
    return _finite(names)


def _finite(figures: Mapping[str, object]) -> dict[str, float]:
    numbers = {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def visible(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return settings by dotted key; of paths only the last name, and no paths of keys or files."""
    result: dict[str, object] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            result |= visible(value, f"{key}.")
        elif key not in SECRET:
            if isinstance(value, str) and value.startswith(("/", "~", ".")):
                value = Path(value).name
            result[key] = value
    return result
