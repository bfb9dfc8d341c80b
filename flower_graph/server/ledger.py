"""What a round's report says of its messages: who took part, and how many bytes travelled.

Which clients answered, failed or were left out, and why: `Participation`. Bytes are counted twice
over. *Payload* is what the paper counts: the strategy says how many bytes of which kind (latents,
gradients, weights) a round carried; the figures of DESIGN.md come out of it exactly. *Wire* is
what the messages really held, array headers, keys and metrics included, bad replies too; the
exchange counts it without being asked. Both are cumulative, go into a checkpoint and come back.
Last comes how large a reply may be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import LOOKED_AT
from flower_graph.secure.channel import COMMITMENT_BYTES, KEY_BYTES, SHARE_BYTES
from flower_graph.secure.sum.messages import PACKET_BYTES, PrepareRequest, UnmaskRequest

Integers = NDArray[np.int64]

UNKNOWN, ANSWERED, FAILED, LEFT_OUT = range(4)  # what a client can be in a round
NOT_DRAWN, NOT_CONNECTED = "not drawn", "not connected"
NOT_READY = "its keys for the sum did not come in time"
DIRECTIONS = ("up", "down")  # client to server, server to client


@dataclass
class Participation:
    """The clients of one round, by number."""

    # Every client that the server knows is in ``answered``, ``failed`` or ``left_out``, once.

    answered: set[int] = field(default_factory=set)  # Asked, and their answer was used
    # Asked without a usable answer: client to reason
    failed: dict[int, str] = field(default_factory=dict)
    # Not asked, such as those that were not drawn or not connected: client to reason
    left_out: dict[int, str] = field(default_factory=dict)

    @property
    def asked(self) -> set[int]:
        """Clients that were asked."""
        return self.answered | self.failed.keys()

    def to_record(self) -> dict[str, Any]:
        """Give what a line of ``metrics.jsonl`` has: numbers as ranges, such as ``"0-4,6"``."""
        answered = ranges(self.answered)
        return {
            "asked": ranges(self.asked) if self.failed else answered,
            "answered": answered,
            "failed": by_reason(self.failed),
            "left-out": by_reason(self.left_out),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Participation:
        """Read what ``to_record`` gave."""
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
    """Say of every client of a round what became of it."""
    local, out, used = failed or {}, left_out or {}, set(answered)
    named = set(chain.from_iterable(asked.values()))
    used &= named
    otherwise = no_use or "its answer was not used"
    lost = {
        client: local.get(client) or silent.get(node) or otherwise
        for client, node in _hosts(asked, named - used)
    }
    there = set(connected)
    rest = set(chain.from_iterable(hosted.values())) - named
    absent = {
        client: out.get(client) or (idle if node in there else NOT_CONNECTED)
        for client, node in _hosts(hosted, rest)
    }
    absent |= {client: out[client] for client in out.keys() - named - rest}
    return Participation(used, lost, absent)


def _hosts(hosted: Mapping[int, Iterable[int]], wanted: set[int]) -> list[tuple[int, int]]:
    """Give these clients, each with its SuperNode; most often there are none."""
    if not wanted:
        return []
    return [(client, node) for node, here in hosted.items() for client in here if client in wanted]


def ranges(clients: Iterable[int]) -> str:
    """Write different numbers as ascending ranges: ``{0, 1, 2, 5}`` is ``"0-2,5"``."""
    result = np.fromiter(clients, np.int64)
    if not result.size:
        return ""
    result.sort(kind="stable")  # quick where it is in order, as it mostly is
    breaks = np.flatnonzero(np.diff(result) > 1)
    first = result[np.concatenate([[0], breaks + 1])].tolist()
    last = result[np.concatenate([breaks, [-1]])].tolist()
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def _expand(text: str) -> Integers:
    """Read what ``ranges`` wrote as an array."""
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
    """Read what ``ranges`` wrote."""
    listed: list[int] = _expand(text).tolist()
    return listed


def known_clients(records: Iterable[Mapping[str, Any]]) -> Integers:
    """Give the numbers of all clients that some round's record names, ascending."""
    result = np.zeros(0, np.int64)
    for text in {text for record in records for _, text in _texts(record)}:
        local = _expand(text)
        if not np.isin(local, result, assume_unique=True).all():
            result = np.union1d(result, local)
    return result


def states(records: Sequence[Mapping[str, Any]], clients: Integers) -> Iterator[NDArray[np.int8]]:
    """Give what each client was in each round, one round at a time."""
    for record in records:
        result = np.full(clients.size, UNKNOWN, np.int8)
        for state, text in _texts(record):
            result[np.searchsorted(clients, _expand(text))] = state
        yield result


def summarise_participation(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Say how often the clients of a run took part."""
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
    """Give the ranges of a record, each with what its clients were."""
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
    # In the order of the clients: that of SuperNodes differs from run to run.
    ordered = sorted(grouped.items(), key=lambda item: min(item[1]))
    return [{"clients": ranges(result), "reason": reason} for reason, result in ordered]


# Bytes --------------------------------------------------------------------------------------------


def count_bytes(content: RecordDict) -> int:
    """Count the bytes that a message's content holds, as Flower's records count them."""
    # Array records: the serialised data (NumPy's header, mostly 128 bytes, and the values) and the
    # characters of each key. Metric records: 8 for each number, and the keys. Config records: 8 for
    # a number, 1 for a bool, the length of a str or bytes, and the keys. Names of records, metadata
    # and what the transport adds are not counted.
    return sum(
        _config_bytes(record) if isinstance(record, ConfigRecord) else record.count_bytes()
        for record in content.values()
    )


def _config_bytes(record: ConfigRecord) -> int:
    """Count as ``ConfigRecord.count_bytes``, which raises on an empty str, bytes or list."""
    return sum(map(len, record)) + sum(map(_value_bytes, record.values()))


def _value_bytes(value: Any) -> int:
    """Count an entry; a reply may have forty thousand, so that nothing is made for each."""
    if not isinstance(value, list):
        return (
            len(value) if isinstance(value, (str, bytes)) else 1 if isinstance(value, bool) else 8
        )
    kinds = set(map(type, value))  # Flower sees to it that there is one at most
    if kinds & {str, bytes}:
        return sum(map(len, value))
    return len(value) * (1 if kinds == {bool} else 8)


class ByteLedger:
    """Counts bytes up (client to server) and down, by kind of payload and on the wire."""

    def __init__(self) -> None:
        self._payload: dict[str, dict[str, int]] = {direction: {} for direction in DIRECTIONS}
        self._wire: dict[str, int] = dict.fromkeys(DIRECTIONS, 0)

    def count(self, direction: str, kind: str, nbytes: int) -> None:
        """Add payload."""
        _check(direction, nbytes)
        kinds = self._payload[direction]
        kinds[kind] = kinds.get(kind, 0) + int(nbytes)

    def count_wire(self, direction: str, nbytes: int) -> None:
        """Add what a message held; `direction` and `nbytes` as in `count`."""
        _check(direction, nbytes)
        self._wire[direction] += int(nbytes)

    def count_messages(self, direction: str, messages: Iterable[Message]) -> None:
        """Add what messages held that have content."""
        for message in messages:
            if message.has_content():
                self.count_wire(direction, count_bytes(message.content))

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        return {direction: dict(kinds) for direction, kinds in self._payload.items()}

    @property
    def wire(self) -> dict[str, int]:
        """Message bytes so far, as `count_bytes` counts: direction to bytes."""
        return dict(self._wire)

    def state_dict(self) -> dict[str, Any]:
        """Return everything counted, fit for JSON."""
        return {"payload": self.payload, "wire": self.wire}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything counted by what `state_dict` returned."""
        restored = ByteLedger()
        try:
            for direction in DIRECTIONS:
                for kind, nbytes in state["payload"][direction].items():
                    restored.count(direction, kind, nbytes)
                restored.count_wire(direction, state["wire"][direction])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the state of a byte ledger: {error!r}") from error
        self._payload, self._wire = restored._payload, restored._wire


def _check(direction: str, nbytes: int) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}, must be one of {DIRECTIONS}")
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}, must be 0 or more")


# How large a reply may be ------------------------------------------------------------------------

# What the request can rightfully bring, and some room: a larger one is refused before anything of
# it is read. The limits are generous where a size is known only to the client, and tight where the
# request says it.
ROOM = 1 << 20  # any reply: headers, keys, measurements, reasons
PER_CLIENT = 1 << 13  # what a reply may say about each of its clients besides numbers
SETUP = 64 << 20  # blinded identities, keys: only the client knows how many
ENROLMENT = 16 << 20  # who is there: numbers of a million clients or public nodes, twice over
NUMBER = 8  # bytes: a client may answer with float64 where float32 would do


def reply_bytes(numbers: int = 0, clients: int = 0) -> int:
    """Return the most bytes of a reply with so many numbers about so many clients."""
    return ROOM + NUMBER * numbers + PER_CLIENT * clients


def setup_bytes(clients: int = 0) -> int:
    """Return the most bytes of a reply that says who is there, or aligns identities."""
    return SETUP + 2 * PER_CLIENT * clients


def sum_bytes(unmask: Iterable[UnmaskRequest], prepare: Iterable[PrepareRequest]) -> int:
    """Return the most bytes of a reply with shares of one sum and keys for the next."""
    shares = max((r.clients.nbytes + r.kinds.size * (1 + SHARE_BYTES) for r in unmask), default=0)
    per_partner = 2 * COMMITMENT_BYTES + PACKET_BYTES
    keys = max(
        (
            r.clients.size * (8 + KEY_BYTES + COMMITMENT_BYTES) + r.partners.size * per_partner
            for r in prepare
        ),
        default=0,
    )
    return ROOM + shares + keys


def size_of(reply: Message) -> int:
    """Count the bytes of a reply's content."""
    return count_bytes(reply.content) if reply.has_content() else 0


def too_large(reply: Message, size: int, most: int | None) -> str | None:
    """Say that a reply, whose content has so many bytes, has more than it may have, or None."""
    if most is None:
        return None
    # Names and metadata are no payload, and the client's to write all the same.
    unpaid = _unpaid_bytes(reply)
    if reply.has_error():
        # So much of a text is looked at in any case: a traceback may be longer than a small answer.
        return _too_long(reply.error.reason or "", max(most, LOOKED_AT), unpaid)
    if size + unpaid <= most:
        return None
    return f"reply of {size if size > most else size + unpaid} bytes, at most {most} allowed"


def _too_long(text: str, most: int, beside: int) -> str | None:
    """Say that an error's text, and bytes beside it, are more than they may be, or None."""
    # No more is counted than tells: bytes of fifty million characters take a tenth of a second.
    parts = (text[start : start + LOOKED_AT] for start in range(0, len(text), LOOKED_AT))
    size = beside + len(text)
    if size <= most:
        size = beside + sum(len(part.encode("utf-8", "surrogatepass")) for part in parts)
    if size <= most:
        return None
    return f"error reply of {len(text)} characters, at most {most} bytes allowed"


def _unpaid_bytes(reply: Message) -> int:
    """Count what a reply's writer chose and `count_bytes` leaves out: names and descriptions."""
    metadata = reply.metadata
    total = len(metadata.group_id) + len(metadata.message_type)
    for name, record in reply.content.items() if reply.has_content() else ():
        total += len(name)
        if isinstance(record, ArrayRecord):
            for array in record.values():
                total += len(array.dtype) + len(array.stype) + NUMBER * len(array.shape)
    return total
