"""The clients' half of secure sums over Flower messages, with or without a trusted server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partialmethod

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import ArrayLike, NDArray

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.flower_compat import NumPyClient
from flower_graph.secure.node_config import least_clients
from flower_graph.secure.parties.differences import digest_of
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.messages import BindRequest, Ready
from flower_graph.secure.parties.party import PartyClient
from flower_graph.secure.ring import RingArray, encode_sum
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import (
    RING,
    SECURE_SUM,
    KeyRequest,
    MaskedReply,
    MaskRequest,
    SumTerms,
)
from flower_graph.wire.arrays import Answer, Config, Parameters
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, MASKED_SUM, SUM_STATE

FloatArray = NDArray[np.floating]


class PartyActions(NumPyClient):
    """The exchanges without a vector, of a SuperNode with a key of its own."""

    party_actions = ("sum_bind", "sum_reveal", "sum_epoch", "sum_list")
    trust: TrustSettings | None

    @abstractmethod
    def of_party(self, action: str, config: Config, trust: TrustSettings) -> Config:
        """Answer any of these exchanges, and ``sum_unmask``."""

    def as_party(self, action: str, config: Config) -> Config:
        """Answer with the SuperNode's key; refuse if it has none."""
        if self.trust is None:
            raise RefusedError("this SuperNode has no key of its own (identity-key, registry)")
        return self.of_party(action, config, self.trust)

    def _party_answer(self, parameters: Parameters, config: Config, action: str) -> Answer:
        return [], 1, self.as_party(action, config)

    sum_bind = partialmethod(_party_answer, action="sum_bind")
    sum_reveal = partialmethod(_party_answer, action="sum_reveal")
    sum_epoch = partialmethod(_party_answer, action="sum_epoch")
    sum_list = partialmethod(_party_answer, action="sum_list")


class MaskingClient(PartyActions):
    """Common parts of all clients' halves: keys, masks and shares. Subclasses send the vectors.

    With ``trust``, the SuperNode's own settings, it enters no sum of a trusted server.
    """

    # The keys are kept in the context's state: a party's with ``trust``, clients' without.
    actions: tuple[str, ...] = ("sum_enroll", "sum_unmask", *PartyActions.party_actions)

    def __init__(
        self, context: Context, clients: Sequence[int], trust: TrustSettings | None = None
    ) -> None:
        self.context, self.clients, self.trust = context, clients, trust

    def sum_enroll(self, parameters: Parameters, config: Config) -> Answer:
        """Make channel keys, or return those of the run; refused if there is a key of its own."""
        if self.trust is not None:
            raise RefusedError(
                "a SuperNode with a key of its own takes part in no trusted server's sum"
            )
        run_id, host = KeyRequest.from_config(config).run_id, None
        with suppress(StateLostError):
            host = self._sum_client()
        if host is None or host.run_id != run_id or set(host.clients) != set(self.clients):
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
        host, clients = self.keys(), request.clients.tolist()
        if isinstance(host, PartyClient):
            clients = list(self.clients)
            host.receive(request, Ready.from_config(config), ring)
        total, left_out = encode_sum(ring, vectors, clients, request.length)
        present = [client for client in clients if client not in left_out]
        if not present:
            raise ValueError(f"no client can take part: {next(iter(left_out.values()))}")
        if pad is not None:
            total += pad.astype(ring.dtype) * ring.dtype.type(len(present))
        terms = SumTerms(purpose, ring, detail, padded=pad is not None)
        if isinstance(host, PartyClient):
            made_of = [vectors[client] for client in sorted(vectors)] if state is None else state
            reply = host.mask(total, terms, digest_of(made_of))
        else:
            reply = host.mask(request, present, total, terms)
        reply.left_out = left_out
        self._keep(host)
        return reply, reply.to_config() | {ARRAY_NAMES: [f"{ARRAYS}/{MASKED_SUM}"]}

    def sum_unmask(self, parameters: Parameters, config: Config) -> Answer:
        return [], len(self.clients), self._answer(self.keys(), "sum_unmask", config)

    def of_party(self, action: str, config: Config, trust: TrustSettings) -> Config:
        if action != "sum_bind":
            return self._answer(self._party(trust), action, config)
        run_id, party = BindRequest.from_config(config).run_id, None
        with suppress(StateLostError):
            party = self._party(trust)
        own = run_id, sorted(self.clients), dict[int, int]()
        if party is None or (party.run_id, party.clients, party.points) != own:
            party = PartyClient(run_id, self.clients, trust)
        return self._answer(party, action, config)

    def _answer(self, host: SumClient | PartyClient, action: str, config: Config) -> Config:
        entries = host.answer(action, config)
        self._keep(host)
        return entries

    def keys(self) -> SumClient | PartyClient:
        """Return the secrets that are kept; ``StateLostError`` without any."""
        return self._sum_client() if self.trust is None else self._party(self.trust)

    def _sum_client(self) -> SumClient:
        return SumClient.from_bytes(self._kept(), least_clients(self.context.node_config))

    def _party(self, trust: TrustSettings) -> PartyClient:
        return PartyClient.from_bytes(self._kept(), trust)

    def _kept(self) -> bytes:
        record = self.context.state.config_records.get(SUM_STATE)
        state = None if record is None else record.get(SUM_STATE)
        if not isinstance(state, bytes):
            raise StateLostError("there are no keys for the secure sum: enrol first")
        return state

    def _keep(self, host: SumClient | PartyClient) -> None:
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
