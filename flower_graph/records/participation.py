"""What became of every client in a round: who answered, failed or was left out, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

UNKNOWN, ANSWERED, FAILED, LEFT_OUT = range(4)  # the states of a client in a round
NOT_DRAWN, NOT_CONNECTED = "not drawn", "not connected"
NOT_READY = "its keys for the sum did not come in time"


@dataclass
class Participation:
    """The clients of one round, by number."""

    # Every client that the server knows is in ``answered``, ``failed`` or ``left_out``, once.

    answered: set[int] = field(default_factory=set)  # Asked, and their answer was used
    # Asked without a usable answer: client to reason
    failed: dict[int, str] = field(default_factory=dict)
    # Not asked, for example not drawn or not connected: client to reason
    left_out: dict[int, str] = field(default_factory=dict)

    @property
    def asked(self) -> set[int]:
        """Clients that were asked."""
        return self.answered | self.failed.keys()

    def to_record(self) -> dict[str, object]:
        """Return the entry of ``metrics.jsonl``: numbers as ranges, such as ``"0-4,6"``."""
        answered = ranges(self.answered)
        return {
            "asked": ranges(self.asked) if self.failed else answered,
            "answered": answered,
            "failed": by_reason(self.failed),
            "left-out": by_reason(self.left_out),
        }

    # Any: the entry is nested as ``to_record`` made it
    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Participation:
        """Read an entry that ``to_record`` made."""
        failed, left_out = (
            {
                client: entry["reason"]
                for entry in record[key]
                for client in numbers(entry["clients"])
            }
            for key in ("failed", "left-out")
        )
        return cls(set(numbers(record["answered"])), failed, left_out)


def account_for(
    hosted: Mapping[int, Iterable[int]],
    connected: Collection[int],
    asked: Mapping[int, Iterable[int]],
    answered: Collection[int],
    *,
    silent: Mapping[int, str],
    failed: Mapping[int, str] | None = None,
    left_out: Mapping[int, str] | None = None,
    idle: str = NOT_DRAWN,
    no_use: str = "",
) -> Participation:
    """Return what became of every client in a round."""
    local, out, used = failed or {}, left_out or {}, set(answered)
    named = set(chain.from_iterable(asked.values()))
    used &= named
    otherwise = no_use or "its answer was not used"
    lost = {
        client: local.get(client) or silent.get(node) or otherwise
        for client, node in _hosts(asked, named - used)
    }
    online = set(connected)
    rest = set(chain.from_iterable(hosted.values())) - named
    absent = {
        client: out.get(client) or (idle if node in online else NOT_CONNECTED)
        for client, node in _hosts(hosted, rest)
    }
    absent |= {client: out[client] for client in out.keys() - named - rest}
    return Participation(used, lost, absent)


def _hosts(hosted: Mapping[int, Iterable[int]], wanted: set[int]) -> list[tuple[int, int]]:
    """Return the wanted clients, each with its SuperNode."""
    if not wanted:
        return []
    return [(client, node) for node, here in hosted.items() for client in here if client in wanted]


def ranges(clients: Iterable[int]) -> str:
    """Write distinct numbers as ascending ranges: ``{0, 1, 2, 5}`` is ``"0-2,5"``."""
    result = np.fromiter(clients, np.int64)
    if not result.size:
        return ""
    result.sort(kind="stable")  # quick where it is in order, as it mostly is
    breaks = np.flatnonzero(np.diff(result) > 1)
    first = result[np.concatenate([[0], breaks + 1])].tolist()
    last = result[np.concatenate([breaks, [-1]])].tolist()
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def _expand(text: str) -> Integers:
    """Read the text of ``ranges`` as an array."""
    if not text:
        return np.zeros(0, np.int64)
    ends = np.array(text.replace("-", ",").split(","), np.int64)
    marks = np.frombuffer(text.encode(), np.uint8)
    marks = marks[(marks == ord(",")) | (marks == ord("-"))]
    is_last = np.concatenate([[False], marks == ord("-")])  # a number after a dash ends its range
    first = np.flatnonzero(~is_last)
    last = np.concatenate([first[1:], [ends.size]]) - 1
    sizes = ends[last] - ends[first] + 1
    starts = np.cumsum(sizes) - sizes
    result: Integers = np.arange(sizes.sum()) + np.repeat(ends[first] - starts, sizes)
    return result


def numbers(text: str) -> list[int]:
    """Read the text of ``ranges`` as a list."""
    listed: list[int] = _expand(text).tolist()
    return listed


def known_clients(records: Iterable[Mapping[str, object]]) -> Integers:
    """Return the numbers of all clients that any round's record names, ascending."""
    result = np.zeros(0, np.int64)
    for text in {text for record in records for _, text in _texts(record)}:
        local = _expand(text)
        if not np.isin(local, result, assume_unique=True).all():
            result = np.union1d(result, local)
    return result


def states(
    records: Sequence[Mapping[str, object]], clients: Integers
) -> Iterator[NDArray[np.int8]]:
    """Yield the state of every client, one round after the other."""
    for record in records:
        result = np.full(clients.size, UNKNOWN, np.int8)
        for state, text in _texts(record):
            result[np.searchsorted(clients, _expand(text))] = state
        yield result


def summarise_participation(records: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Return how often the clients of a run took part."""
    told = [record for record in records if record]
    clients = known_clients(told)
    if not clients.size:
        return {}
    answered, failed = np.zeros(clients.size, np.int64), np.zeros(clients.size, bool)
    for result in states(told, clients):
        answered += result == ANSWERED
        failed |= result == FAILED
    share = answered / len(told)
    figures = {"min": share.min(), "mean": share.mean(), "max": share.max()}
    return {
        "share-answered": {name: float(value) for name, value in figures.items()},
        "failed-once": int(failed.sum()),
    }


def _texts(record: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield each range of a record with the state of its clients."""
    if not record:
        return
    yield ANSWERED, record["answered"]
    for state, key in ((FAILED, "failed"), (LEFT_OUT, "left-out")):
        for entry in record[key]:
            yield state, entry["clients"]


def by_reason(clients: Mapping[int, str]) -> list[dict[str, str]]:
    """Group clients by reason: a thousand silent ones are one entry."""
    grouped: dict[str, list[int]] = {}
    for client, reason in clients.items():
        grouped.setdefault(reason, []).append(client)
    # In the order of the clients, since the order of SuperNodes differs from run to run.
    ordered = sorted(grouped.items(), key=lambda item: min(item[1]))
    return [{"clients": ranges(result), "reason": reason} for reason, result in ordered]
