"""The clients' half of the alignment by blinded identities, for all clients of one SuperNode.

Stages, in the order in which ``align_server`` asks for them: *blind* the identities; *evaluate*
everybody's blinded points, if a key-holder is among the clients; take the answers and add up the
table of tokens (*union*); look up the slots in what is *published*. A stage that is asked for twice
gives the same again, except for the random points that fill up a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.messages.arrays import IntArray
from flower_graph.messages.keys import ALIGN_STAGE
from flower_graph.secure.align import identities as ids
from flower_graph.secure.align.identities import KEY
from flower_graph.secure.align.messages import (
    BLIND,
    EVALUATE,
    POINT,
    PUBLISH,
    TOKEN,
    UNION,
    BlindReply,
    BlindRequest,
    Bytes2D,
    EvaluateReply,
    EvaluateRequest,
    PublishedTokens,
    UnionRequest,
)
from flower_graph.secure.align.sketch import Words, insert
from flower_graph.secure.align.slots import SlotTable, slot_table
from flower_graph.secure.channel import pieces, rows_of


class AlignmentClient:
    """Aligns the identities of the clients that one SuperNode hosts."""

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
        self._secrets = {client: ids.new_secret() for client in self._identities}
        self._tokens: dict[int, Bytes2D] = {}
        self._keys: dict[int, Bytes2D] = {}
        self._group_key = b""
        self._order = np.zeros((0, TOKEN), np.uint8)
        self._table: SlotTable | None = None

    def answer(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the message of any stage; for *union* and *publish* there is nothing to say."""
        # After *union* the caller adds ``sketch`` to the secure sum; after *publish* there are
        # ``slots``.
        stage = config.get(ALIGN_STAGE)
        if stage == BLIND:
            return self.blind(BlindRequest.from_config(config)).to_config()
        if stage == EVALUATE:
            return self.evaluate(EvaluateRequest.from_config(config)).to_config()
        if stage == UNION:
            self.finish(UnionRequest.from_config(config))
        elif stage == PUBLISH:
            self.publish(PublishedTokens.from_config(config))
        else:
            raise RefusedError(f"{ALIGN_STAGE} {stage!r:.60} is unknown to this alignment")
        return {}

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
        ends = np.cumsum(request.sizes).tolist()
        for client, size, end in zip(
            request.clients.tolist(), request.sizes.tolist(), ends, strict=True
        ):
            named = [ids.GROUP_IDENTITY, *self._identities[client]]
            if size != ids.padded_size(len(named)):
                raise RefusedError(f"client {client}: {size} answers for its block")
            answers = pieces(request.points[end - size : end])
            for number, identity in enumerate(named):
                if identity not in names:
                    point = ids.unblind(
                        answers[number], self._secrets[client], request.epoch, number
                    )
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
        arrays: dict[str, NDArray[Any]] = {
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
        arrays = load(data)
        clients = arrays["clients"].tolist()
        if clients != list(host._identities) or (arrays["digest"] != host._digest()).any():
            raise StateLostError("the alignment's state is of another run or other identities")
        host._secrets = dict(zip(clients, pieces(arrays["secrets"]), strict=True))
        finished = arrays["finished"].tolist()
        ends = np.cumsum([len(host._identities[client]) for client in finished])[:-1]
        host._tokens = dict(zip(finished, np.split(arrays["tokens"], ends), strict=False))
        host._keys = dict(zip(finished, np.split(arrays["keys"], ends), strict=False))
        host._group_key = arrays["group-key"].tobytes()
        host._order = arrays["order"]
        host._epoch = int(arrays["epoch"][0])
        return host

    def _enter(self, epoch: int) -> None:
        """Start anew for a later alignment; refuse an earlier one."""
        if epoch < self._epoch:
            raise RefusedError(f"alignment {epoch} is over, this is {self._epoch}")
        if epoch > self._epoch:
            self._epoch, self._group_key, self._table = epoch, b"", None
            self._order = self._order[:0]
            self._tokens.clear()
            self._keys.clear()

    def _known(self, clients: IntArray) -> None:
        strange = [client for client in clients.tolist() if client not in self._identities]
        if strange:
            raise RefusedError(f"asked for clients {strange!s:.60} that are not hosted here")

    def _digest(self) -> Bytes2D:
        """Fingerprint of the run and the identities, to know the state's owner again."""
        whole = hashlib.sha256(self._run_id)
        for client, named in self._identities.items():
            whole.update(b"|%d|%d|" % (client, len(named)))
            whole.update(b"\0".join(named))
        return np.frombuffer(whole.digest(), np.uint8)


def _joined(blocks: list[Bytes2D], width: int) -> Bytes2D:
    return np.concatenate([np.zeros((0, width), np.uint8), *blocks])
