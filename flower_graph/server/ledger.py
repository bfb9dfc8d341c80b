"""How many bytes travelled, by direction, twice over; and how large a reply may be.

*Payload* is what the paper counts: the strategy says how many bytes of which kind (latents,
gradients, weights) a round carried; the figures of DESIGN.md come out of it exactly. *Wire* is
what the messages really held, array headers, keys and metrics included, bad replies too; the
exchange counts it without being asked. Both are cumulative, go into a checkpoint and come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from flower_graph.secure.channel import COMMITMENT_BYTES, KEY_BYTES, SHARE_BYTES
from flower_graph.secure.sum.messages import PACKET_BYTES, PrepareRequest, UnmaskRequest

DIRECTIONS = ("up", "down")  # client to server, server to client


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
    total = 0
    for key, value in record.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, (str, bytes)):
                total += len(item)
            else:
                total += 1 if isinstance(item, bool) else 8
        total += len(key)
    return total


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
SETUP = 64 << 20  # who is there, ids, blinded identities: only the client knows how many
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
