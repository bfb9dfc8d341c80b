"""Each client's outcome in a round: it answered, failed or was left out, and why."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import brief

Integers = NDArray[np.int64]
Range = tuple[int, int]  # first and last number

MOST_CLIENTS = 1 << 24  # in what is read: each takes some ten bytes
# A client's number is an int64, which a SuperNode claims: it has up to 19 digits.
_RANGES = re.compile(r"\d{1,19}(-\d{1,19})?(,\d{1,19}(-\d{1,19})?)*", re.ASCII)
UNKNOWN, ANSWERED, FAILED, LEFT_OUT = range(4)  # the states of a client in a round
NOT_DRAWN, NOT_CONNECTED = "not drawn", "not connected"
NOT_READY = "its keys for the sum did not come in time"


class Participation:
    """The clients of one round, and what became of each: `mark` says it, the last time counts."""

    def __init__(self, clients: Iterable[Integers]) -> None:
        # Not ``np.unique``, which takes a second for a million: mostly parts are in order
        every = np.sort(np.concatenate([np.zeros(0, np.int64), *clients]), kind="stable")
        self.clients = every[np.append(every[1:] > every[:-1], True)[: every.size]]
        self._codes = {(UNKNOWN, ""): 0}  # of state and reason
        self._outcome = np.zeros(self.clients.size, np.int32)

    def mark(self, clients: Integers, state: int, reason: str = "", *, asked: bool = False) -> None:
        """Say what became of clients; if ``asked``, of the clients among them that have failed."""
        at = np.searchsorted(self.clients, clients)
        if asked:
            is_known = np.append(self.clients, -1)[at] == clients
            at = at[is_known & np.append(self._is(FAILED), False)[at]]
        self._outcome[at] = self._codes.setdefault((state, reason), len(self._codes))

    def _is(self, *states: int) -> NDArray[np.bool_]:
        wanted: NDArray[np.bool_] = np.array([state in states for state, _ in self._codes])
        result: NDArray[np.bool_] = wanted[self._outcome]
        return result

    def of(self, *states: int) -> Integers:
        """Return the clients in some states, ascending."""
        result: Integers = self.clients[self._is(*states)]
        return result

    def to_record(self) -> dict[str, object]:
        """Return the entry of ``metrics.jsonl``: numbers as ranges, such as ``"0-4,6"``."""
        # An entry for each reason: a thousand silent clients are one entry. In the order of the
        # clients, since the order of SuperNodes differs from run to run.
        groups: dict[int, list[dict[str, str]]] = {FAILED: [], LEFT_OUT: []}
        order = np.argsort(self._outcome, kind="stable")
        ends = np.bincount(self._outcome, minlength=len(self._codes)).cumsum()
        parts = zip(np.split(order, ends[:-1]), self._codes, strict=True)
        for at, (state, reason) in sorted(parts, key=lambda part: part[0][:1].tolist()):
            if state in groups and at.size:
                groups[state].append({"clients": ranges(self.clients[at]), "reason": reason})
        return {
            "asked": ranges(self.of(ANSWERED, FAILED)),
            "answered": ranges(self.of(ANSWERED)),
            "failed": groups[FAILED],
            "left-out": groups[LEFT_OUT],
        }


def ranges(clients: Iterable[int] | Integers) -> str:
    """Write distinct numbers as ascending ranges: ``{0, 1, 2, 5}`` is ``"0-2,5"``."""
    listed = clients if isinstance(clients, np.ndarray) else [*clients]
    result = np.sort(np.asarray(listed, np.int64), kind="stable")  # quick if it is in order
    if not result.size:
        return ""
    breaks = np.flatnonzero(np.diff(result) > 1)
    first = result[np.concatenate([[0], breaks + 1])].tolist()
    last = result[np.concatenate([breaks, [-1]])].tolist()
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def read_ranges(text: str) -> list[Range]:
    """Read the text of ``ranges`` as first and last numbers; ``ValueError`` if it is none."""
    if not text:
        return []
    if not _RANGES.fullmatch(text):
        raise ValueError(f"{brief(text)} is no list of clients' numbers")
    parts = (part.partition("-") for part in text.split(","))
    ends = [(int(first), int(last or first)) for first, _, last in parts]
    is_mixed = any(one[1] >= other[0] for one, other in pairwise(ends))
    if is_mixed or any(first > last for first, last in ends) or ends[-1][1] >= 1 << 63:
        raise ValueError(f"{brief(text)} is not in order, or has a number beyond 64 bits")
    return ends


def _listed(ends: Sequence[Range], most: int = MOST_CLIENTS) -> Integers:
    if (count := sum(last - first + 1 for first, last in ends)) > most:
        raise ValueError(f"{count:,} clients are more than {most:,}")
    first, last = np.array(ends, np.int64).reshape(-1, 2).T
    starts = np.cumsum(last - first + 1) - (last - first + 1)
    result: Integers = np.arange(count) + np.repeat(first - starts, last - first + 1)
    return result


def numbers(text: str, most: int = MOST_CLIENTS) -> list[int]:
    """Read the text of ``ranges`` as a list; ``ValueError`` if it is none, or has too many."""
    listed: list[int] = _listed(read_ranges(text), most).tolist()
    return listed


# Any: entries of a file, which are checked here
def known_clients(records: Iterable[Mapping[str, Any]]) -> Integers:
    """Return the numbers of all clients that any round's record names, ascending.

    ``ValueError`` if ``to_record`` cannot have made a record, or if they are too many.
    """
    texts = set[str]()
    for record in filter(None, records):
        texts |= {record["asked"], *(text for _, text in _texts(record))}
    known = list[Range]()
    for text in texts:
        merged = list[Range]()
        for first, last in sorted({*known, *read_ranges(text)}):
            if merged and first <= merged[-1][1] + 1:
                first, other = merged.pop()
                last = max(last, other)
            merged.append((first, last))
        known = merged
    return _listed(known)


def states(
    records: Sequence[Mapping[str, object]], clients: Integers
) -> Iterator[NDArray[np.int8]]:
    """Yield the state of every client, one round after the other."""
    for record in records:
        result = np.full(clients.size, UNKNOWN, np.int8)
        for state, text in _texts(record):
            result[np.searchsorted(clients, _listed(read_ranges(text)))] = state
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
    if not record:
        return
    yield ANSWERED, record["answered"]
    for state, key in ((FAILED, "failed"), (LEFT_OUT, "left-out")):
        for entry in record[key]:
            yield state, entry["clients"]


def grouped(clients: Mapping[int, str]) -> dict[str, Integers]:
    """Return the clients of each reason."""
    grouped: dict[str, list[int]] = {}
    for client, reason in clients.items():
        grouped.setdefault(reason, []).append(client)
    return {reason: np.array(local, np.int64) for reason, local in grouped.items()}
