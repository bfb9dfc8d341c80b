"""Alignment that hides nothing: all identities go to the server as they are.

Its halves are driven like ``AlignmentServer`` and ``AlignmentClient``, without a union to sum:
``requests`` until there are none, then ``publications``; a later enrolment restarts all. There are
no slot keys: the server sees the sums of these slots.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Self

import numpy as np

from flower_graph.errors import StateLostError
from flower_graph.secure.align.blinded import canonical
from flower_graph.secure.align.client import AnyAlignmentClient
from flower_graph.secure.align.server import AnyAlignmentServer
from flower_graph.secure.align.slots import SlotTable, open_table
from flower_graph.storage.checkpoint import read_state, write_state
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.codec import Field, Message, Reading
from flower_graph.wire.fields import Clients, Exact, Integers, Sizes, Whole, split_rows
from flower_graph.wire.keys import ALIGN_STAGE

IDENTITIES, ORDER = "identities", "order"
CLIENTS = Clients("align-clients", "clients, all hosted there", shape="c")
SIZES = Sizes("align-sizes", "rows of each client in what follows", shape="c")


@dataclass(frozen=True)
class Names(Field[list[list[str]]]):
    """A list of different words for each client, as JSON."""

    type = "str"

    def encode(self, value: list[list[str]]) -> str:
        return json.dumps(value)

    def decode(self, value: object, name: str, reading: Reading) -> list[list[str]]:
        names: object = None
        with suppress(ValueError, RecursionError):
            names = json.loads(value) if isinstance(value, str) else None
        if not isinstance(names, list) or len(names) != len(reading.values["clients"]):
            raise self.refuse("a list for each client", value)
        for local in names:
            is_text = isinstance(local, list) and all(isinstance(one, str) for one in local)
            if not is_text or len(set(local)) < len(local):
                raise self.refuse("different words of each client", local)
        return names


class PlainRequest(Message, down="train.align", fixed={ALIGN_STAGE: IDENTITIES}):
    """Server to client: the identities of these clients, as they are."""

    clients: Annotated[IntArray, CLIENTS]


class PlainReply(Message, up="train.align"):
    """Client to server: each client's identities, written as ``i:5`` or ``s:abc``."""

    clients: Annotated[IntArray, CLIENTS]
    identities: Annotated[
        list[list[str]],
        Names("align-identities", "`identities`: JSON, a list of strings for each client"),
    ]


class PlainOrder(Message, down="train", fixed={ALIGN_STAGE: ORDER}):
    """Server to client: the slots of the clients' nodes, and the number of slots."""

    num_slots: Annotated[int, Whole("align-counts")]  # `order`: how many slots
    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]
    slots: Annotated[Integers, Exact("align-slots")]  # `order`: slot of each of the clients' nodes


class PlaintextAlignmentClient(AnyAlignmentClient):
    """Identities in the clear, for the clients of one SuperNode."""

    stages = ((PlainRequest, "identities"), (PlainOrder, "order"))

    def __init__(self, identities: Mapping[int, Sequence[object]]) -> None:
        self._num_slots = 0
        self._slots: dict[int, Integers] = {}
        self._identities = {
            int(client): [name.decode() for name in canonical(local, f"client {client}")]
            for client, local in identities.items()
        }

    def identities(self, request: PlainRequest) -> PlainReply:
        self._known(request.clients)
        local = [self._identities[client] for client in request.clients.tolist()]
        return PlainReply(request.clients, local)

    def order(self, message: PlainOrder) -> None:
        self._known(message.clients)
        parts = split_rows(message.slots, message.sizes)
        self._num_slots = message.num_slots
        self._slots = dict(zip(message.clients.tolist(), parts, strict=True))

    @property
    def slots(self) -> SlotTable:
        """The clients' slots, after they are agreed on."""
        return open_table(self._num_slots, self._slots)

    def to_bytes(self) -> bytes:
        return write_state([self._num_slots, self._slots])

    @classmethod
    def from_bytes(cls, data: bytes, identities: Mapping[int, Sequence[object]]) -> Self:
        host = cls(identities)
        host._num_slots, host._slots = read_state(data)
        if strange := host._slots.keys() - host._identities.keys():
            raise StateLostError(f"the alignment's state has clients {strange}, not hosted here")
        return host


class PlaintextAlignmentServer(AnyAlignmentServer[PlainRequest]):
    """Sees all identities, and numbers those that at least two clients hold."""

    def __init__(self) -> None:
        super().__init__()
        self._identities: dict[int, list[str]] = {}

    def enroll(self, node: int, clients: Iterable[int]) -> None:
        """Record the clients' SuperNode; if a client is new, restart all."""
        for client in clients:
            if client not in self._node:
                self._identities = {}
            self._node[client] = node

    def forget(self, clients: Iterable[int]) -> None:
        self._node = {c: at for c, at in self._node.items() if c not in set(clients)}

    @property
    def aligned(self) -> list[int]:
        return sorted(self._node)

    def _drop(self, unanswered: Mapping[int, PlainRequest]) -> None:
        for request in unanswered.values():
            for client in request.clients.tolist():
                del self._node[client]
                self.blamed.append((client, "did not answer the alignment"))

    def _next_stage(self) -> dict[int, PlainRequest]:
        missing = [client for client in self._node if client not in self._identities]
        return {
            node: PlainRequest(np.array(clients, np.int64))
            for node, clients in self._by_node(missing).items()
        }

    def _take(self, request: PlainRequest, config: Mapping[str, object]) -> None:
        reply = PlainReply.from_config(config, clients=request.clients)
        self._identities |= zip(reply.clients.tolist(), reply.identities, strict=True)

    def publications(self) -> dict[int, PlainOrder]:
        holders = Counter(chain.from_iterable(self._identities.values()))
        shared = sorted(name for name, count in holders.items() if count >= 2)
        order = {name: slot for slot, name in enumerate(shared)}
        messages = {}
        for node, clients in self._by_node(self._identities).items():
            local = [self._identities[client] for client in clients]
            slots = [order.get(name, -1) for name in chain.from_iterable(local)]
            sizes = np.array([len(names) for names in local], np.int64)
            messages[node] = PlainOrder(
                len(order), np.array(clients, np.int64), sizes, np.array(slots, np.int64)
            )
        return messages
