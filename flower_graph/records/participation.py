"""Each client's outcome in a round: it answered, failed or was left out, and why."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import brief

Integers = NDArray[np.int64]
Clients = Collection[int] | Integers

MOST_CLIENTS = 1 << 24  # in what is read: each takes some ten bytes
# A client's number is an int64, which a SuperNode claims: it has up to 19 digits.
_RANGES = re.compile(r"\d{1,19}(-\d{1,19})?(,\d{1,19}(-\d{1,19})?)*", re.ASCII)
UNKNOWN, ANSWERED, FAILED, LEFT_OUT = range(4)  # the states of a client in a round
NOT_DRAWN, NOT_CONNECTED = "not drawn", "not connected"
NOT_READY = "its keys for the sum did not come in time"


@dataclass
class Participation:
    """The clients of one round: every client that the server knows is in one of the three."""

    answered: Integers  # asked, and their answer was used; ascending
    failed: Mapping[int, str]  # asked without a usable answer: client to reason
    left_out: Mapping[str, Integers]  # not asked, for example not drawn: reason to clients

    def to_record(self) -> dict[str, object]:
        """Return the entry of ``metrics.jsonl``: numbers as ranges, such as ``"0-4,6"``."""
        return {
            "asked": ranges(np.append(self.answered, integers(self.failed))),
            "answered": ranges(self.answered),
            "failed": by_reason(grouped(self.failed)),
            "left-out": by_reason(self.left_out),
        }


def flat(hosted: Mapping[int, Clients]) -> tuple[Integers, Integers]:
    """Return the clients of all nodes, and which node each is at."""
    here = list(hosted.values())
    sizes = [len(local) for local in here]
    if any(isinstance(local, np.ndarray) for local in here):
        clients = np.concatenate([np.asarray(local, np.int64) for local in here])
    else:
        clients = np.fromiter(chain.from_iterable(here), np.int64, sum(sizes))
    return clients, np.repeat(np.arange(len(here)), sizes)


def last_of_each(clients: Integers, at: Integers) -> tuple[Integers, Integers]:
    """Sort clients; of repeated ones, take the last."""
    # ``np.unique`` takes a second for a million. Mostly they are in order.
    if (clients[1:] > clients[:-1]).all():
        return clients, at
    order = np.argsort(clients, kind="stable")
    order = order[np.append(np.diff(clients[order]) > 0, True)]
    return clients[order], at[order]


def integers(clients: Iterable[int] | Integers) -> Integers:
    """Return clients as an array."""
    return clients if isinstance(clients, np.ndarray) else np.fromiter(clients, np.int64)


def ranges(clients: Iterable[int] | Integers) -> str:
    """Write distinct numbers as ascending ranges: ``{0, 1, 2, 5}`` is ``"0-2,5"``."""
    result = integers(clients)
    if not result.size:
        return ""
    result = np.sort(result, kind="stable")  # quick where it is in order, as it mostly is
    breaks = np.flatnonzero(np.diff(result) > 1)
    first = result[np.concatenate([[0], breaks + 1])].tolist()
    last = result[np.concatenate([breaks, [-1]])].tolist()
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def _ends(text: str) -> tuple[Integers, Integers]:
    """Read the text of ``ranges`` as first and last numbers; ``ValueError`` if it is none."""
    if not text:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if not _RANGES.fullmatch(text):
        raise ValueError(f"{brief(text)} is no list of clients' numbers")
    parts = text.split(",")
    is_range = np.array(["-" in part for part in parts])
    pairs = "-".join(part if "-" in part else f"{part}-{part}" for part in parts)
    listed = [int(number) for number in pairs.split("-")]
    if max(listed) > np.iinfo(np.int64).max:
        raise ValueError(f"{brief(text)} has a number beyond 64 bits")
    first, last = np.array(listed, np.int64).reshape(-1, 2).T
    if (last - first < is_range).any() or (first[1:] <= last[:-1]).any():
        raise ValueError(f"{brief(text)} is not in order")
    return first, last


def _listed(first: Integers, last: Integers) -> Integers:
    sizes = last - first + 1
    starts = np.cumsum(sizes) - sizes
    result: Integers = np.arange(sizes.sum()) + np.repeat(first - starts, sizes)
    return result


def numbers(text: str, most: int = MOST_CLIENTS) -> list[int]:
    """Read the text of ``ranges`` as a list; ``ValueError`` if it is none, or has too many."""
    first, last = _ends(text)
    _check_count(first, last, most)
    listed: list[int] = _listed(first, last).tolist()
    return listed


def known_clients(records: Iterable[Mapping[str, object]]) -> Integers:
    """Return the numbers of all clients that any round's record names, ascending."""
    return _listed(*_known(records))


# Any: entries of a file, which are checked here
def check_records(records: Iterable[Mapping[str, Any]]) -> None:
    """Refuse entries that ``to_record`` cannot have made, or that name too many clients."""
    records = [record for record in records if record]
    for record in records:
        reasons = [entry["reason"] for key in ("failed", "left-out") for entry in record[key]]
        if bad := [one for one in reasons if not isinstance(one, str)]:
            raise ValueError(f"participation: {brief(bad[0])} is no reason")
        _ends(record["asked"])
    first, last = _known(records)
    _check_count(first, last, MOST_CLIENTS)


def _check_count(first: Integers, last: Integers, most: int) -> None:
    if (count := sum((last - first).tolist()) + first.size) > most:
        raise ValueError(f"{count:,} clients are more than {most:,}")


def _known(records: Iterable[Mapping[str, object]]) -> tuple[Integers, Integers]:
    first, last = _ends("")
    for text in {text for record in records for _, text in _texts(record)}:
        begins, ends = _ends(text)
        place = np.searchsorted(first, begins, side="right") - 1
        if begins.size and not (first.size and ((place >= 0) & (ends <= last[place])).all()):
            first, last = np.append(first, begins), np.append(last, ends)
            order = np.argsort(first, kind="stable")
            first, last = first[order], np.maximum.accumulate(last[order])
            starts = np.append(True, first[1:] - 1 > last[:-1])
            first, last = first[starts], last[np.append(starts[1:], True)]
    return first, last


def states(
    records: Sequence[Mapping[str, object]], clients: Integers
) -> Iterator[NDArray[np.int8]]:
    """Yield the state of every client, one round after the other."""
    for record in records:
        result = np.full(clients.size, UNKNOWN, np.int8)
        for state, text in _texts(record):
            result[np.searchsorted(clients, _listed(*_ends(text)))] = state
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


def by_reason(groups: Mapping[str, Integers]) -> list[dict[str, str]]:
    """Return an entry for each reason: a thousand silent clients are one entry."""
    # In the order of the clients, since the order of SuperNodes differs from run to run.
    ordered = sorted(groups.items(), key=lambda item: int(item[1].min()))
    return [{"clients": ranges(result), "reason": reason} for reason, result in ordered]
