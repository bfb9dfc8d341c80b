"""The clients' half of the alignment by blinded identities, for all clients of one SuperNode.

Stages, in the order in which ``align_server`` asks for them: *blind* the identities; *evaluate*
everybody's blinded points, if a key-holder is among the clients; take the answers and add up the
table of tokens (*union*); look up the slots in what is *published*. A stage that is asked for twice
gives the same again, except for the random points that fill up a block.

A slot is the place of one identity in the vectors that clients add up. All holders of a slot know
a secret key of it that nobody else knows, and from it, in every round, the same *pad*. Holders add
the pad to what they send, so that the sum over *c* of them holds the pad *c* times: the server adds
up without seeing even the sum, and holders take the pad out again.

All clients of a run, holders or not, also have one *group key* in common. Its stream, added by
every client everywhere, hides from the server which slots had how many holders in a round; without
it, a sum with one client fewer would tell which slots that client holds.

With *C* contributors, *c* of them holders, a holder sends ``(x + pad) · 2^g + group`` and any other
client ``group``; the sum is ``(Σx + c · pad) · 2^g + C · group`` modulo 2^64. ``C · group`` has as
many zeros at its end as *C* has, and hides all that stands above them: so ``2^g >= C`` leaves the
server nothing.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import (
    KEY,
    POINT,
    TOKEN,
    BlindReply,
    BlindRequest,
    Bytes2D,
    EvaluateReply,
    EvaluateRequest,
    PublishedTokens,
    UnionRequest,
    Words,
    insert,
)
from flower_graph.secure.channel import KEY_BYTES, framed, pieces, rows_of
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.codec import Message
from flower_graph.wire.fields import split_rows
from flower_graph.wire.keys import ALIGN_STAGE

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
        """Return the pads of one round, ``[s, width]``; ``run_id``: also what the sum is of."""
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
        # Arguments and errors are those of ``pads``.
        if not self.group_key:
            raise ValueError("clients aligned in the clear have no common key, and so no pad")

        def make() -> bytes:
            context = _context(run_id, b"group", server_round, length)
            return hashlib.shake_128(context + self.group_key).digest(8 * length)

        return self._once(b"group", (run_id, server_round, length), make)

    def _once(self, kind: bytes, what: tuple[object, ...], make: Callable[[], bytes]) -> Words:
        """Return the words of a kind that were made last, or make others; read-only."""
        if self._made.get(kind, (None,))[0] != what:
            self._made[kind] = what, np.frombuffer(make(), "<u8")
        return self._made[kind][1]


class AnyAlignmentClient(ABC):
    """What the clients' halves of all forms share: they answer messages of several stages."""

    # What is answered, and by which method
    stages: ClassVar[tuple[tuple[type[Message], str], ...]]
    _identities: Mapping[int, Any]  # in the form's own words

    def answer(self, config: Mapping[str, object]) -> dict[str, object]:
        """Answer the message of any stage; the reply of some stages is empty."""
        for kind, method in self.stages:
            if kind.fixed[ALIGN_STAGE] == config.get(ALIGN_STAGE):
                reply = getattr(self, method)(kind.from_config(config))
                return reply.to_config() if isinstance(reply, Message) else {}
        stage = brief(config.get(ALIGN_STAGE))
        raise RefusedError(f"{ALIGN_STAGE} {stage} is unknown to this alignment")

    def _known(self, clients: IntArray) -> None:
        strange = [client for client in clients.tolist() if client not in self._identities]
        if strange:
            raise RefusedError(f"asked for clients {brief(strange)} that are not hosted here")


class AlignmentClient(AnyAlignmentClient):
    """Aligns the identities of the clients that one SuperNode hosts."""

    # After *union* the caller adds ``sketch`` to the secure sum; after *publish* there are
    # ``slots``.
    stages: ClassVar[tuple[tuple[type[Message], str], ...]] = (
        (BlindRequest, "blind"),
        (EvaluateRequest, "evaluate"),
        (UnionRequest, "finish"),
        (PublishedTokens, "publish"),
    )

    def __init__(self, run_id: bytes, identities: Mapping[int, Iterable[object]]) -> None:
        self._run_id = run_id
        self._identities = {
            int(client): ids.canonical(given, f"client {client}")
            for client, given in identities.items()
        }
        kinds = {texts[0][:1]: client for client, texts in self._identities.items() if texts}
        if len(kinds) > 1:
            a, b = kinds.values()
            raise ValueError(
                f"clients {a} and {b} have identities of different types; use integers or strings "
                "throughout"
            )
        self._epoch = 0
        # From these a client's blinds and its share of the key follow.
        self._secrets = {client: os.urandom(KEY) for client in self._identities}
        self._tokens: dict[int, Bytes2D] = {}
        self._keys: dict[int, Bytes2D] = {}
        self._group_key = b""
        self._order = np.zeros((0, TOKEN), np.uint8)
        self._table: SlotTable | None = None

    @property
    def points(self) -> dict[int, int]:
        """How many points each client's block has."""
        return {c: ids.padded_size(1 + len(named)) for c, named in self._identities.items()}

    def blind(self, request: BlindRequest) -> BlindReply:
        """Blind the identities of the request's clients."""
        self._known(request.clients)
        self._enter(request.epoch)
        points: dict[bytes, bytes] = {}  # clients share identities: each is hashed once
        blocks = []
        for client in request.clients.tolist():
            named = [ids.GROUP_IDENTITY, *self._identities[client]]
            for identity in named:
                if identity not in points:
                    points[identity] = ids.hash_to_group(self._run_id, identity)
            plain = [points[identity] for identity in named]
            blocks.append(ids.blind(plain, self._secrets[client], request.epoch))
        sizes = np.array([len(block) for block in blocks], np.int64)
        return BlindReply(request.epoch, request.clients, sizes, _joined(blocks, POINT))

    def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Multiply points by the shares of the key that the request's key-holders have."""
        self._known(request.holders)
        self._enter(request.epoch)
        if not request.holders.size:
            raise RefusedError("asked for a share of the key of no client")
        secrets = [self._secrets[client] for client in request.holders.tolist()]
        share = ids.key_share(secrets, request.epoch)
        return EvaluateReply(request.epoch, ids.multiply(request.points, share))

    def finish(self, request: UnionRequest) -> None:
        """Take the key-holders' answers: tokens and keys of the clients' identities."""
        self._known(request.clients)
        self._enter(request.epoch)
        names: dict[bytes, tuple[bytes, bytes]] = {}  # the same at all clients: computed once
        blocks = split_rows(request.points, request.sizes)
        for client, block in zip(request.clients.tolist(), blocks, strict=True):
            named, secret = [ids.GROUP_IDENTITY, *self._identities[client]], self._secrets[client]
            if len(block) != ids.padded_size(len(named)):
                raise RefusedError(f"client {client}: {len(block)} answers for its block")
            answers = pieces(block)
            for number, identity in enumerate(named):
                if identity not in names:
                    point = ids.unblind(answers[number], secret, request.epoch, number)
                    names[identity] = ids.names(self._run_id, identity, point)
            local = [names[identity] for identity in named[1:]]
            self._tokens[client] = rows_of([token for token, _ in local], -1, TOKEN)
            self._keys[client] = rows_of([key for _, key in local], -1, KEY)
            self._group_key = names[ids.GROUP_IDENTITY][1]

    def sketch(self, cells: int, clients: Iterable[int]) -> Words:
        """Return the table of tokens of some clients, added up."""
        chosen = [int(client) for client in clients]
        missing = [client for client in chosen if client not in self._tokens]
        if missing:
            raise ValueError(f"clients {missing!s:.60} have no tokens yet")
        return insert(_joined([self._tokens[client] for client in chosen], TOKEN), cells)

    @property
    def order(self) -> Bytes2D:
        """The tokens of the slots, ``[s, 12]``."""
        return self._order

    @property
    def finished(self) -> list[int]:
        """Clients that have their tokens, and so can take part in the sum of tables."""
        return sorted(self._tokens)

    def publish(self, message: PublishedTokens) -> SlotTable:
        """Look up the clients' slots in the published order."""
        if message.epoch != self._epoch:
            raise StateLostError(
                f"slots of alignment {message.epoch}, but the clients are in {self._epoch}"
            )
        before = self._order
        if not np.array_equal(message.tokens[: len(before)], before):
            raise RefusedError("the published tokens change the order of existing slots")
        self._order = message.tokens
        self._table = slot_table(message.tokens, self._tokens, self._keys, self._group_key)
        return self._table

    @property
    def slots(self) -> SlotTable:
        """The clients' slots, once they are published; clients without tokens are not in it."""
        if self._table is None:
            self._table = slot_table(self._order, self._tokens, self._keys, self._group_key)
        return self._table

    def to_bytes(self) -> bytes:
        """Write everything that the next message needs, secrets included."""
        clients = list(self._identities)
        finished = list(self._tokens)
        arrays: dict[str, NDArray[np.generic]] = {
            "clients": np.array(clients, np.int64),
            "secrets": rows_of([self._secrets[client] for client in clients], -1, KEY),
            "digest": self._digest(),
            "finished": np.array(finished, np.int64),
            "tokens": _joined([self._tokens[client] for client in finished], TOKEN),
            "keys": _joined([self._keys[client] for client in finished], KEY),
            "group-key": np.frombuffer(self._group_key, np.uint8),
            "order": np.ascontiguousarray(self._order),
            "epoch": np.array([self._epoch], np.int64),
        }
        return bytes(save(arrays))

    @classmethod
    def from_bytes(
        cls, data: bytes, run_id: bytes, identities: Mapping[int, Iterable[object]]
    ) -> AlignmentClient:
        """Read what ``to_bytes`` wrote; ``StateLostError`` if it is of other identities."""
        host = cls(run_id, identities)
        host.restore(data)
        return host

    def restore(self, data: bytes) -> None:
        """Load what ``to_bytes`` wrote; ``StateLostError`` if it is of other identities."""
        arrays = load(data)
        clients = arrays["clients"].tolist()
        if clients != list(self._identities) or (arrays["digest"] != self._digest()).any():
            raise StateLostError("the alignment's state is of another run or other identities")
        self._secrets = dict(zip(clients, pieces(arrays["secrets"]), strict=True))
        finished = arrays["finished"].tolist()
        sizes = [len(self._identities[client]) for client in finished]
        self._tokens = dict(zip(finished, split_rows(arrays["tokens"], sizes), strict=True))
        self._keys = dict(zip(finished, split_rows(arrays["keys"], sizes), strict=True))
        self._group_key = arrays["group-key"].tobytes()
        self._order = arrays["order"]
        self._epoch = int(arrays["epoch"][0])

    def _enter(self, epoch: int) -> None:
        """Begin a later alignment from scratch; refuse an earlier one."""
        if epoch < self._epoch:
            raise RefusedError(f"alignment {epoch} is over, this is {self._epoch}")
        if epoch > self._epoch:
            self._epoch, self._group_key, self._table = epoch, b"", None
            self._order = self._order[:0]
            self._tokens.clear()
            self._keys.clear()

    def _digest(self) -> Bytes2D:
        """Hash the run and the identities, to recognise whose state it is."""
        whole = hashlib.sha256(self._run_id)
        for client, named in self._identities.items():
            whole.update(b"|%d|%d|" % (client, len(named)))
            whole.update(b"\0".join(named))
        return np.frombuffer(whole.digest(), np.uint8)


def _joined(blocks: list[Bytes2D], width: int) -> Bytes2D:
    return np.concatenate([np.zeros((0, width), np.uint8), *blocks])


def slot_table(
    order: Bytes2D,
    tokens: Mapping[int, Bytes2D],
    keys: Mapping[int, Bytes2D],
    group_key: bytes,
) -> SlotTable:
    """Look up the slots of a SuperNode's clients."""
    # order [s, 12]
    slot_of = {token: slot for slot, token in enumerate(pieces(order))}
    by_client = {
        client: np.array([slot_of.get(token, -1) for token in pieces(rows)], np.int64)
        for client, rows in tokens.items()
    }
    if not by_client:
        return open_table(len(order), {}, group_key)
    slots = np.concatenate(list(by_client.values()))
    held, first = np.unique(slots, return_index=True)
    all_keys = np.concatenate([keys[client] for client in by_client])
    first, held = first[held >= 0], held[held >= 0]
    return SlotTable(len(order), by_client, held, all_keys[first], group_key)


def open_table(
    num_slots: int, by_client: Mapping[int, NDArray[np.int64]], group_key: bytes = b""
) -> SlotTable:
    """Return the table of slots that were agreed on in the clear: without keys."""
    slots: Sequence[NDArray[np.int64]] = [*by_client.values(), np.zeros(0, np.int64)]
    held = np.unique(np.concatenate(slots))
    return SlotTable(
        num_slots, by_client, held[held >= 0], np.zeros((0, KEY_BYTES), np.uint8), group_key
    )


def _context(run_id: bytes, purpose: bytes, server_round: int, numbers: int) -> bytes:
    """Return what a stream is for; the key that follows is always 32 bytes long."""
    # How long it is goes in: of two lengths the shorter would be the beginning of the other.
    ends = server_round.to_bytes(8, "big") + numbers.to_bytes(8, "big")
    return DOMAIN + framed(run_id, purpose) + ends
