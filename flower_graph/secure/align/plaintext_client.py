"""The clients' half of the alignments that hide nothing, with the methods of ``AlignmentClient``.

``PolynomialAlignmentClient`` is the paper's form, ``PlaintextAlignmentClient`` sends the
identities as they are. Neither has slot keys: the server sees the sums of what is added up by
these slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.messages.arrays import IntArray
from flower_graph.messages.keys import ALIGN_STAGE
from flower_graph.secure.align import polynomial
from flower_graph.secure.align.identities import canonical
from flower_graph.secure.align.plaintext_messages import (
    IDENTITIES,
    ORDER,
    PAIRS,
    POLYNOMIALS,
    SECTIONS,
    PairRequest,
    PatternReply,
    PlainOrder,
    PlainReply,
    PlainRequest,
    PolynomialReply,
    PolynomialRequest,
    SectionOrder,
)
from flower_graph.secure.align.slots import SlotTable, open_table


class _PlaintextClient:
    """What both have: slots and their state between messages."""

    _identities: Mapping[int, Any]

    def __init__(self, identities: Mapping[int, Sequence[object]]) -> None:
        self._num_slots = 0
        self._slots: dict[int, NDArray[np.int64]] = {}
        self._patterns: dict[int, NDArray[np.uint8]] = {}

    @property
    def slots(self) -> SlotTable:
        """The clients' slots, once they are agreed on."""
        return open_table(self._num_slots, self._slots)

    def to_bytes(self) -> bytes:
        """Write everything that the next message needs."""
        arrays: dict[str, NDArray[Any]] = {"num-slots": np.array([self._num_slots])}
        arrays |= {f"slots/{client}": slots for client, slots in self._slots.items()}
        arrays |= {f"patterns/{client}": local for client, local in self._patterns.items()}
        return bytes(save(arrays))

    @classmethod
    def from_bytes(cls, data: bytes, identities: Mapping[int, Sequence[object]]) -> Self:
        """Read what ``to_bytes`` wrote."""
        host = cls(identities)
        for name, value in load(data).items():
            kind, _, client = name.partition("/")
            if kind == "num-slots":
                host._num_slots = int(value[0])
            elif int(client) not in host._identities:
                raise StateLostError(f"the alignment's state has client {client}, not hosted here")
            elif kind == "slots":
                host._slots[int(client)] = value
            else:
                host._patterns[int(client)] = value
        return host


class PolynomialAlignmentClient(_PlaintextClient):
    """The paper's alignment, for the clients of one SuperNode; identities are small integers."""

    def __init__(self, identities: Mapping[int, Sequence[object]]) -> None:
        super().__init__(identities)
        for client, local in identities.items():
            canonical(local, f"client {client}")
        self._identities = {
            int(client): polynomial.check_identities(client, local)
            for client, local in identities.items()
        }

    def answer(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the message of any stage."""
        stage = config.get(ALIGN_STAGE)
        if stage == POLYNOMIALS:
            return self.polynomials(PolynomialRequest.from_config(config)).to_config()
        if stage == PAIRS:
            return self.patterns(PairRequest.from_config(config)).to_config()
        if stage != SECTIONS:
            raise RefusedError(f"{ALIGN_STAGE} {stage!r:.60} is unknown to this alignment")
        self.order(SectionOrder.from_config(config))
        return {}

    def polynomials(self, request: PolynomialRequest) -> PolynomialReply:
        """Return the coefficients of the clients' polynomials."""
        _check(request.clients, self._identities)
        rows = [
            polynomial.polynomial(self._identities[client], request.prime)
            for client in request.clients.tolist()
        ]
        sizes = np.array([row.size for row in rows], np.int64)
        return PolynomialReply(request.clients, sizes, np.concatenate(rows))

    def patterns(self, request: PairRequest) -> PatternReply:
        """Find out who shares each identity, and count the identities of each pattern."""
        _check(request.clients, self._identities)
        distinct, counts = [], []
        for client, place, sums in zip(
            request.clients.tolist(), request.places.tolist(), request.sums, strict=True
        ):
            local = polynomial.patterns(self._identities[client], sums, place, request.prime)
            self._patterns[client] = local
            pattern, count = np.unique(local, axis=0, return_counts=True)
            distinct.append(pattern)
            counts.append(count)
        sizes = np.array([len(pattern) for pattern in distinct], np.int64)
        return PatternReply(
            request.clients, sizes, np.concatenate(distinct), np.concatenate(counts)
        )

    def order(self, message: SectionOrder) -> None:
        """Take the common order of sections."""
        first = message.first.tolist()
        start = {p.tobytes(): slot for p, slot in zip(message.patterns, first, strict=True)}
        self._num_slots = message.num_slots
        self._slots = {
            client: polynomial.slots(self._identities[client], local, start)
            for client, local in self._patterns.items()
        }


class PlaintextAlignmentClient(_PlaintextClient):
    """Identities in the clear, for the clients of one SuperNode."""

    def __init__(self, identities: Mapping[int, Sequence[object]]) -> None:
        super().__init__(identities)
        self._identities = {
            int(client): [name.decode() for name in canonical(local, f"client {client}")]
            for client, local in identities.items()
        }

    def answer(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the message of any stage."""
        stage = config.get(ALIGN_STAGE)
        if stage == IDENTITIES:
            request = PlainRequest.from_config(config)
            _check(request.clients, self._identities)
            local = [self._identities[client] for client in request.clients.tolist()]
            return PlainReply(request.clients, local).to_config()
        if stage != ORDER:
            raise RefusedError(f"{ALIGN_STAGE} {stage!r:.60} is unknown to this alignment")
        message = PlainOrder.from_config(config)
        _check(message.clients, self._identities)
        parts = np.split(message.slots, np.cumsum(message.sizes)[:-1])
        self._num_slots = message.num_slots
        self._slots = {
            client: np.asarray(part, np.int64)
            for client, part in zip(message.clients.tolist(), parts, strict=True)
        }
        return {}


def _check(clients: IntArray, hosted: Mapping[int, object]) -> None:
    strange = [client for client in clients.tolist() if client not in hosted]
    if strange or not clients.size:
        raise RefusedError(f"asked for clients {strange!s:.60} that are not hosted here")
