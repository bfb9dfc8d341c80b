"""Alignment that hides nothing: the server learns a hash of every identity, and can try them out.

Its halves are driven like ``AlignmentServer`` and ``AlignmentClient``, without key-holders and
without a union to sum: ``requests`` until there are none, then ``publications``. There are no slot
keys: the server sees the sums of these slots.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Self

import numpy as np

from flower_graph.secure.align.blinded import TOKEN, Bytes2D, PublishedTokens, canonical
from flower_graph.secure.align.client import AnyAlignmentClient
from flower_graph.secure.align.server import AnyAlignmentServer
from flower_graph.secure.align.slots import SlotTable, find_slots, open_table
from flower_graph.secure.channel import pieces, rows_of
from flower_graph.storage.checkpoint import read_state, write_state
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.codec import Block, Clients, Message, Sizes, split_rows
from flower_graph.wire.keys import ALIGN_STAGE

IDENTITIES, EPOCH = "identities", 1
CLIENTS = Clients("align-clients", "clients, all hosted there", shape="c")
SIZES = Sizes("align-sizes", "rows of each client in what follows", shape="c")


class PlainRequest(Message, down="train.align", fixed={ALIGN_STAGE: IDENTITIES}):
    """Server to client: the identities of these clients."""

    clients: Annotated[IntArray, CLIENTS]


class PlainReply(Message, up="train.align"):
    """Client to server: the hashes of each client's identities, which are its tokens."""

    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]
    tokens: Annotated[Bytes2D, Block("align-tokens", shape=f"n {TOKEN}")]


def plain_token(identity: bytes) -> bytes:
    """Return the token of an identity, written as ``i:5`` or ``s:abc``."""
    return hashlib.sha256(identity).digest()[:TOKEN]


class PlaintextAlignmentClient(AnyAlignmentClient):
    """Identities in the clear, for the clients of one SuperNode."""

    stages: ClassVar[tuple[tuple[type[Message], str], ...]] = (
        (PlainRequest, "identities"),
        (PublishedTokens, "publish"),
    )

    def __init__(self, identities: Mapping[int, Sequence[object]]) -> None:
        self.order = np.zeros((0, TOKEN), np.uint8)
        self._identities = {
            int(client): rows_of(map(plain_token, canonical(local, f"client {client}")), -1, TOKEN)
            for client, local in identities.items()
        }

    def identities(self, request: PlainRequest) -> PlainReply:
        self._known(request.clients)
        local = [self._identities[client] for client in request.clients.tolist()]
        sizes = np.array([len(tokens) for tokens in local], np.int64)
        return PlainReply(request.clients, sizes, np.concatenate(local))

    def publish(self, message: PublishedTokens) -> None:
        self.order = message.tokens

    @property
    def slots(self) -> SlotTable:
        """The clients' slots, after they are agreed on."""
        return open_table(len(self.order), find_slots(self.order, self._identities))

    def to_bytes(self) -> bytes:
        return write_state(self.order)

    @classmethod
    def from_bytes(cls, data: bytes, identities: Mapping[int, Sequence[object]]) -> Self:
        host = cls(identities)
        host.order = read_state(data)
        return host


class PlaintextAlignmentServer(AnyAlignmentServer[PlainRequest]):
    """Sees all tokens, and orders those that at least two clients hold."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: dict[int, Bytes2D] = {}

    def enroll(self, node: int, clients: Iterable[int]) -> None:
        self._node |= dict.fromkeys(clients, node)

    def forget(self, clients: Iterable[int]) -> None:
        for client in clients:
            self._node.pop(client, None)
            self._tokens.pop(client, None)

    @property
    def aligned(self) -> list[int]:
        return sorted(self._node)

    def _drop(self, unanswered: Mapping[int, PlainRequest]) -> None:
        for request in unanswered.values():
            for client in request.clients.tolist():
                del self._node[client]
                self.blamed.append((client, "did not answer the alignment"))

    def _next_stage(self) -> dict[int, PlainRequest]:
        missing = [client for client in self._node if client not in self._tokens]
        return {
            node: PlainRequest(np.array(clients, np.int64))
            for node, clients in self._by_node(missing).items()
        }

    def _take(self, request: PlainRequest, config: Mapping[str, object]) -> None:
        reply = PlainReply.from_config(config, clients=request.clients)
        parts = split_rows(reply.tokens, reply.sizes)
        self._tokens |= dict(zip(reply.clients.tolist(), parts, strict=True))

    def publications(self) -> dict[int, PublishedTokens]:
        # A client counts once for a token, however often it sends it
        each = [np.unique(rows, axis=0) for rows in self._tokens.values()]
        every = np.concatenate([np.zeros((0, TOKEN), np.uint8), *each])
        tokens, counts = np.unique(every, axis=0, return_counts=True)
        shared, result = tokens[counts >= 2], dict[int, PublishedTokens]()
        for node, clients in self._by_node(self._tokens).items():
            own = {token for client in clients for token in pieces(self._tokens[client])}
            is_own = np.array([token in own for token in pieces(shared)], bool)
            # Zeros in the place of others' tokens, whose identities a client could try out
            result[node] = PublishedTokens(EPOCH, shared * is_own[:, None])
        return result
