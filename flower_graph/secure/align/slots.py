"""The slots of a SuperNode's clients, and the pads that hide even the sum of a slot.

A slot is the place of one identity in the vectors that clients add up. All holders of a slot share
a secret key of it that nobody else knows, and derive from it, in every round, the same *pad*.
Holders add the pad to what they send, so that the sum over *c* of them holds the pad *c* times: the
server adds up without seeing even the sum, and holders take the pad out again.

All clients of a run, holders or not, also have one *group key* in common. Its stream, added by
every client everywhere, hides from the server which slots had how many holders in a round; without
it, a sum with one client fewer would reveal which slots that client holds.

With *C* contributors, *c* of them holders, a holder sends ``(x + pad) · 2^g + group`` and any other
client ``group``; the sum is ``(Σx + c · pad) · 2^g + C · group`` modulo 2^64. ``C · group`` has as
many zeros at its end as *C* has, and hides all that stands above them: so ``2^g >= C`` leaves the
server nothing.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flower_graph.secure.align.blinded import TOKEN, Bytes2D, Words
from flower_graph.secure.channel import KEY_BYTES, framed, pieces
from flower_graph.secure.relayed import CHECKS

DOMAIN = b"flower-graph/pad/2/"


@dataclass(frozen=True)
class SlotTable:
    """The slots that the clients of one SuperNode hold."""

    num_slots: int  # How many there are over all clients
    # [n_c] slot of each of a client's nodes, -1 for a node that no other client holds
    by_client: Mapping[int, NDArray[np.int64]]
    held: NDArray[np.int64]  # [s] distinct slots of these clients, ascending
    # [s, 32] their secret keys; [0, 32] in the forms of alignment that have none
    keys: Bytes2D = field(repr=False)
    # What all clients of the run have in common; empty in the forms that have none
    group_key: bytes = field(repr=False)
    # Pads that were made last: a round's are put on, and taken off again at the next message.
    _made: dict[bytes, tuple[tuple[object, ...], Words]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def pads(self, run_id: bytes, server_round: int, width: int) -> NDArray[np.uint64]:
        """Return the pads of one round, ``[s, width]``; ``run_id`` also names the sum."""
        if len(self.keys) != self.held.size:
            raise ValueError("slots aligned in the clear have no keys, and so no pads")

        def make() -> bytes:
            base, pads = hashlib.shake_128(_context(run_id, b"slot", server_round, width)), []
            for key in pieces(self.keys):
                stream = base.copy()
                stream.update(key)
                pads.append(stream.digest(8 * width))
            return b"".join(pads)

        return self._once(b"slot", (run_id, server_round, width), make).reshape(-1, width)

    def group_pad(self, run_id: bytes, server_round: int, length: int) -> NDArray[np.uint64]:
        """Return ``[length]`` numbers of one round that all clients have in common."""
        return self._common(b"group", run_id, server_round, length)

    def check(self, run_id: bytes, server_round: int, length: int) -> Words:
        """Return the subsets of a sum's checks, which show changes without the group key."""
        return self._common(b"check", run_id, server_round, length)

    def _common(self, kind: bytes, run_id: bytes, server_round: int, length: int) -> Words:
        if not self.group_key:
            raise ValueError("clients aligned in the clear have no common key, and so no pad")

        def make() -> bytes:
            context = _context(run_id, kind, server_round, length)
            return hashlib.shake_128(context + self.group_key).digest(8 * length)

        return self._once(kind, (run_id, server_round, length), make)

    def check_pads(
        self, run_id: bytes, server_round: int, clients: Iterable[int]
    ) -> NDArray[np.uint64]:
        """Return, for some clients, the sum of the pads that each puts on its checks."""
        # Each has its own, as a multiple of one would leave lowest bits in the clear: those of
        # what is checked, which slots' pads are in, are not zeros.
        base = hashlib.shake_128(_context(run_id, b"member", server_round, CHECKS))
        base.update(self.group_key)
        total = np.zeros(CHECKS, np.uint64)
        for client in clients:
            stream = base.copy()
            stream.update(int(client).to_bytes(8, "big"))
            total += np.frombuffer(stream.digest(8 * CHECKS), "<u8")
        return total

    def _once(self, kind: bytes, what: tuple[object, ...], make: Callable[[], bytes]) -> Words:
        """Return the words of a kind that were made last, or make others; read-only."""
        if self._made.get(kind, (None,))[0] != what:
            self._made[kind] = what, np.frombuffer(make(), "<u8")
        return self._made[kind][1]


def find_slots(order: Bytes2D, tokens: Mapping[int, Bytes2D]) -> dict[int, NDArray[np.int64]]:
    """Look up the slots of clients' identities by their tokens; -1 for those without a slot."""
    # order [s, 12], tokens [n_c, 12]
    slot_of = {token: slot for slot, token in enumerate(pieces(order))}
    return {
        client: np.array([slot_of.get(token, -1) for token in pieces(rows)], np.int64)
        for client, rows in tokens.items()
    }


def slot_table(order: Bytes2D, names: Mapping[int, Bytes2D], group_key: bytes) -> SlotTable:
    """Look up the slots of a SuperNode's clients by the names of their identities."""
    # order [s, 12], names [n_c, 44]: tokens and keys
    by_client = find_slots(order, {client: rows[:, :TOKEN] for client, rows in names.items()})
    if not by_client or not group_key:
        return open_table(len(order), by_client, group_key)
    held, first = np.unique(np.concatenate(list(by_client.values())), return_index=True)
    first, held = first[held >= 0], held[held >= 0]
    keys = np.concatenate(list(names.values()))[first, TOKEN:]
    return SlotTable(len(order), by_client, held, keys, group_key)


def open_table(
    num_slots: int, by_client: Mapping[int, NDArray[np.int64]], group_key: bytes = b""
) -> SlotTable:
    """Return a table of slots, without keys, that were agreed on in the clear."""
    slots: Sequence[NDArray[np.int64]] = [*by_client.values(), np.zeros(0, np.int64)]
    held = np.unique(np.concatenate(slots))
    return SlotTable(
        num_slots, by_client, held[held >= 0], np.zeros((0, KEY_BYTES), np.uint8), group_key
    )


def _context(run_id: bytes, purpose: bytes, server_round: int, numbers: int) -> bytes:
    """Return a stream's context; the key that follows is always 32 bytes long."""
    # How long it is goes in: of two lengths the shorter would be the beginning of the other.
    ends = server_round.to_bytes(8, "big") + numbers.to_bytes(8, "big")
    return DOMAIN + framed(run_id, purpose) + ends
