"""The bytes of messages: how many were sent, and how many a reply may have.

*Payload* is the paper's count: the strategy reports the bytes of each kind (latents, gradients,
weights) in a round. *Wire* is the size of all messages, with array headers, keys and metrics, bad
replies too; the exchange counts it. Both are cumulative.
"""

import copy
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flower_graph.errors import LOOKED_AT
from flower_graph.storage.reading import StateDict

DIRECTIONS = ("up", "down")  # client to server, server to client


def count_bytes(content: RecordDict) -> int:
    """Count the bytes that a message's content holds, as Flower's records count them."""
    # Names of records, metadata and what the transport adds are not counted.
    # ``ConfigRecord.count_bytes`` raises on an empty str, bytes or list.
    return sum(
        sum(map(len, record)) + sum(map(_value_bytes, record.values()))
        if isinstance(record, ConfigRecord)
        else record.count_bytes()
        for record in content.values()
    )


def _value_bytes(value: object) -> int:
    # Without making objects: a reply may have forty thousand entries
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_value_bytes, value))
    return 1 if isinstance(value, bool) else 8


class ByteLedger:
    """Counts bytes up (client to server) and down, by kind of payload and on the wire."""

    def __init__(self) -> None:
        self.payload: dict[str, dict[str, int]] = {way: {} for way in DIRECTIONS}
        self.wire = dict.fromkeys(DIRECTIONS, 0)

    def count(self, direction: str, kind: str, nbytes: int) -> None:
        kinds = self.payload[direction]
        kinds[kind] = kinds.get(kind, 0) + int(nbytes)

    def count_messages(self, direction: str, messages: Iterable[Message]) -> None:
        self.wire[direction] += sum(count_bytes(m.content) for m in messages if m.has_content())

    # Any: counts by direction, and by kind
    def state_dict(self) -> dict[str, dict[str, Any]]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: StateDict) -> None:
        self.payload = {way: dict(state["payload"][way]) for way in DIRECTIONS}
        self.wire = {way: state["wire"][way] for way in DIRECTIONS}


# How large a reply may be ------------------------------------------------------------------------

# The size of an honest reply, and some room: a larger one is refused before any of it is read. The
# limits are generous where a size is known only to the client, and tight where the request says it.
ROOM = 1 << 20  # any reply: headers, keys, measurements, reasons
PER_CLIENT = 1 << 13  # what a reply may say about each of its clients besides numbers
SETUP = 64 << 20  # blinded identities, keys: only the client knows how many
ENROLMENT = 16 << 20  # enrolment: numbers of a million clients or public nodes, twice over
NUMBER = 8  # bytes: a client may answer with float64 where float32 would do


def reply_bytes(numbers: int = 0, clients: int = 0) -> int:
    """Return the most bytes of a reply with so many numbers about so many clients."""
    return ROOM + NUMBER * numbers + PER_CLIENT * clients


def setup_bytes(clients: int = 0) -> int:
    """Return the most bytes of a reply that enrols clients or aligns identities."""
    return SETUP + 2 * PER_CLIENT * clients


def too_large(reply: Message, most: int | None) -> str | None:
    """Return why a reply exceeds so many bytes, or None."""
    if most is None:
        return None
    # Names and descriptions are no payload, but a client writes them too.
    size, content = len(reply.metadata.group_id) + len(reply.metadata.message_type), RecordDict()
    if reply.has_error():  # a traceback may be longer than a small answer
        size, most = size + len(reply.error.reason or ""), max(most, LOOKED_AT)
    elif reply.has_content():
        content = reply.content
    for name, record in content.items():
        arrays = record.values() if isinstance(record, ArrayRecord) else ()
        sizes = (len(a.dtype) + len(a.stype) + NUMBER * len(a.shape) for a in arrays)
        size += len(name) + sum(sizes)
    size += count_bytes(content)
    return f"reply of {size} bytes, at most {most} allowed" if size > most else None
