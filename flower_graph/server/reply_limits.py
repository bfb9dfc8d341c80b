"""How large a reply may be: what the request can rightfully bring, and some room.

A larger one is refused before anything of it is read. The limits are generous where a reply's size
is known only to the client, and tight where the request says it.
"""

from __future__ import annotations

from collections.abc import Iterable

from flower_graph.secure.channel import COMMITMENT_BYTES, KEY_BYTES, SHARE_BYTES
from flower_graph.secure.sum.messages import PACKET_BYTES, PrepareRequest, UnmaskRequest

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
