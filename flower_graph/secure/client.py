"""The clients' half of secure sums over Flower messages, with or without a trusted server."""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partialmethod

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import ArrayLike, NDArray

from flower_graph.errors import OutOfRangeError, StateLostError
from flower_graph.flower_compat import NumPyClient
from flower_graph.secure.node_config import least_clients
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.ring import Ring, RingArray
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import (
    SECURE_SUM,
    KeyRequest,
    MaskedReply,
    MaskRequest,
    SumTerms,
)
from flower_graph.wire.arrays import Answer, Config, Parameters
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, MASKED_SUM, SUM_STATE

LOG = logging.getLogger(__name__)
FloatArray = NDArray[np.floating]


class MaskingClient(NumPyClient):
    """Common parts of all clients' halves: keys, masks and shares. Subclasses send the vectors.

    With ``trust``, the SuperNode's own settings, it enters no sum of a trusted server.
    """

    # The keys are kept in the context's state: a party's with ``trust``, clients' without.
    party_actions = ("sum_enroll", "sum_reveal", "sum_epoch", "sum_list")
    actions: tuple[str, ...] = ("sum_unmask", *party_actions)

    def __init__(
        self, context: Context, clients: Sequence[int], trust: TrustSettings | None = None
    ) -> None:
        self.context, self.clients, self.trust = context, clients, trust

    def _answer(self, parameters: Parameters, config: Config, action: str) -> Answer:
        return [], 1, self.exchange(action, config)

    sum_unmask = partialmethod(_answer, action="sum_unmask")
    sum_enroll = partialmethod(_answer, action="sum_enroll")
    sum_reveal = partialmethod(_answer, action="sum_reveal")
    sum_epoch = partialmethod(_answer, action="sum_epoch")
    sum_list = partialmethod(_answer, action="sum_list")

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
        request, ring, host = MaskRequest.from_config(config), Ring.from_config(config), self.keys()
        host.receive(request, ring)
        clients = request.clients.tolist()
        total, left_out = np.zeros(request.length, ring.dtype), dict[int, str]()
        for client in clients:
            vector = vectors.get(client)
            if vector is None or np.shape(vector) != total.shape:
                got = "no vector" if vector is None else f"a vector of shape {np.shape(vector)}"
                left_out[client] = f"{got}, expected {total.shape}"
                continue
            try:
                total += ring.encode(vector)
            except OutOfRangeError as error:
                most = f"-{ring.limit:g} to {ring.limit:g}"
                left_out[client] = f"a number is outside the ring's range of {most}"
                # For the client's own log: the server is not told how large.
                LOG.warning("client %d: %s", client, error)
        present = [client for client in clients if client not in left_out]
        if not present:
            raise ValueError(f"no client can take part: {next(iter(left_out.values()))}")
        if pad is not None:
            total += pad.astype(ring.dtype) * ring.dtype.type(len(present))
        terms = SumTerms(purpose, ring, detail, padded=pad is not None)
        made_of = [vectors[client] for client in sorted(vectors)] if state is None else state
        reply = host.mask(request, present, total, terms, made_of)
        reply.left_out = left_out
        self._keep(host)
        return reply, reply.to_config() | {ARRAY_NAMES: [f"{ARRAYS}/{MASKED_SUM}"]}

    def exchange(self, action: str, config: Config) -> Config:
        """Answer any exchange without a vector."""
        host = self._enrolled(config) if action == "sum_enroll" else self.keys()
        entries = host.answer(action, config)
        self._keep(host)
        return entries

    def _enrolled(self, config: Config) -> SumClient:
        run_id = KeyRequest.from_config(config).run_id
        with suppress(StateLostError):  # the secrets of another run are of no more use
            if (host := self.keys()).run_id == run_id:
                return host
        return SumClient(run_id, self.clients, self.trust, least=self._fewest())

    def keys(self) -> SumClient:
        """Return the secrets that are kept; ``StateLostError`` without any."""
        record = self.context.state.config_records.get(SUM_STATE)
        state = None if record is None else record.get(SUM_STATE)
        if not isinstance(state, bytes):
            raise StateLostError("there are no keys for the secure sum: enrol first")
        host = SumClient.from_bytes(state, self.trust, least=self._fewest())
        if host.clients != sorted(self.clients):
            raise StateLostError("the keys that were kept belong to other clients")
        return host

    def _fewest(self) -> int:
        return 1 if self.trust else least_clients(self.context.node_config)

    def _keep(self, host: SumClient) -> None:
        self.context.state[SUM_STATE] = ConfigRecord({SUM_STATE: host.to_bytes()})


class SecureSumClient(MaskingClient):
    """The clients' half: a subclass returns in ``vectors`` the vectors to add up."""

    actions = (*MaskingClient.actions, "sum_mask")

    def __init__(self, context: Context, clients: Sequence[int]) -> None:
        trust = TrustSettings.of(context.node_config, context.run_id)
        super().__init__(context, clients, trust)

    @abstractmethod
    def vectors(self, config: Config) -> Mapping[int, FloatArray]:
        """Return the vector of each client; a missing client is left out of the sum."""

    def sum_mask(self, parameters: Parameters, config: Config) -> Answer:
        """Add up the own clients' vectors and mask the sum."""
        reply, entries = self.masked(config, self.vectors(config), SECURE_SUM)
        return [reply.total], reply.clients.size, entries
