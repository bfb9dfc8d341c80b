"""The clients' half of sums over Flower messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import ArrayLike, NDArray

from flower_graph.errors import StateLostError
from flower_graph.flower_compat import NumPyClient
from flower_graph.secure.ring import Ring, RingArray, encode_sum
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import RING, KeyRequest, MaskedReply, MaskRequest
from flower_graph.secure.sum.partners import least_clients
from flower_graph.secure.sum.terms import SECURE_SUM, SumTerms
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, MASKED_SUM, SUM_STATE
from flower_graph.wire.numpy_client import Answer, Config, Parameters

FloatArray = NDArray[np.floating]


class Holder(Protocol):
    """The secrets of a SuperNode's clients, whether they trust the server or not."""

    run_id: bytes

    def to_bytes(self) -> bytes: ...


class MaskingClient(NumPyClient):
    """Common parts of all clients' halves: keys, masks and shares. Subclasses send the vectors."""

    # Keys are kept in the context's state.

    actions: tuple[str, ...] = ("sum_enroll", "sum_unmask")

    def __init__(self, context: Context, clients: Sequence[int]) -> None:
        self.context, self.clients = context, clients

    def sum_enroll(self, parameters: Parameters, config: Config) -> Answer:
        """Make channel keys, or return those of this run, if the SuperNode was restarted."""
        run_id = KeyRequest.from_config(config).run_id
        with suppress(StateLostError):
            host = self._sum_client()
            if host.run_id == run_id and set(host.clients) == set(self.clients):
                return [], len(self.clients), host.keys().to_config()
        host = SumClient(run_id, self.clients, least=least_clients(self.context.node_config))
        self._keep(host)
        return [], len(self.clients), host.keys().to_config()

    def masked(
        self,
        config: Config,
        vectors: Mapping[int, FloatArray],
        purpose: str = SECURE_SUM,
        detail: bytes = b"",
        state: Iterable[ArrayLike] | None = None,
        pad: RingArray | None = None,
    ) -> tuple[MaskedReply, Config]:
        """Add up clients' vectors and mask the sum, as the request's entries say."""
        # state: what the vectors were made of, if not the vectors: it enters one sum
        # pad: words that each client adds, so that the server cannot read the sum either
        request, ring = MaskRequest.from_config(config), RING.from_config(config)
        host, clients = self.keys(), self._asked(request)
        self._receive(host, config, request, ring)
        total, left_out = encode_sum(ring, vectors, clients, request.length)
        present = [client for client in clients if client not in left_out]
        if not present:
            raise ValueError(f"no client can take part: {next(iter(left_out.values()))}")
        state = (vectors[client] for client in sorted(vectors)) if state is None else state
        if pad is not None:
            total += pad.astype(ring.dtype) * ring.dtype.type(len(present))
        terms = SumTerms(purpose, ring, detail, padded=pad is not None)
        reply = self._masked(host, request, present, total, terms, state)
        reply.left_out = left_out
        self._keep(host)
        return reply, reply.to_config() | {ARRAY_NAMES: [f"{ARRAYS}/{MASKED_SUM}"]}

    def _asked(self, request: MaskRequest) -> list[int]:
        return [int(client) for client in request.clients]

    def _receive(self, host: Holder, config: Config, request: MaskRequest, ring: Ring) -> None:
        """Check a request before there is a vector; a trusted server's needs no check."""

    def _masked(
        self,
        host: Holder,
        request: MaskRequest,
        present: list[int],
        total: RingArray,
        terms: SumTerms,
        state: Iterable[ArrayLike],
    ) -> MaskedReply:
        assert isinstance(host, SumClient)
        return host.mask(request, present, total, terms)

    def sum_unmask(self, parameters: Parameters, config: Config) -> Answer:
        host = self._sum_client()
        entries = host.unmask_and_prepare(config)
        self._keep(host)
        return [], len(self.clients), entries

    def keys(self) -> Holder:
        """Return the secrets that are kept; ``StateLostError`` without any."""
        return self._sum_client()

    def _sum_client(self) -> SumClient:
        return SumClient.from_bytes(self._kept(), least_clients(self.context.node_config))

    def _kept(self) -> bytes:
        record = self.context.state.config_records.get(SUM_STATE)
        state = None if record is None else record.get(SUM_STATE)
        if not isinstance(state, bytes):
            raise StateLostError("there are no keys for the secure sum: enrol first")
        return state

    def _keep(self, host: Holder) -> None:
        self.context.state[SUM_STATE] = ConfigRecord({SUM_STATE: host.to_bytes()})
