"""The clients' half of sums over Flower messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context
from flwr.client import NumPyClient
from numpy.typing import NDArray

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.messages import BindRequest, Ready
from flower_graph.secure.parties.party import Party
from flower_graph.secure.parties.service import answer, bound
from flower_graph.secure.ring import encode_sum
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import RING, KeyRequest, MaskedReply, MaskRequest
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, MASKED_SUM, SUM_STATE

FloatArray = NDArray[np.floating[Any]]
Answer = tuple[list[Any], int, dict[str, Any]]


class PartyActions(NumPyClient):
    """The exchanges in which a SuperNode with a key of its own sends no vector."""

    party_actions = ("sum_bind", "sum_reveal", "sum_epoch", "sum_list")
    trust: TrustSettings | None

    @abstractmethod
    def of_party(self, action: str, config: dict[str, Any], trust: TrustSettings) -> dict[str, Any]:
        """Answer any of them, and ``sum_unmask``."""

    def as_party(self, action: str, config: dict[str, Any]) -> dict[str, Any]:
        """Answer with the key that the SuperNode has, if it has one."""
        if self.trust is None:
            raise RefusedError("this SuperNode has no key of its own (identity-key, registry)")
        return self.of_party(action, config, self.trust)

    def sum_bind(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Say who is here, signed."""
        return [], 1, self.as_party("sum_bind", config)

    def sum_reveal(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Show the own part of the seed of the graph of partners."""
        return [], 1, self.as_party("sum_reveal", config)

    def sum_epoch(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Begin an epoch."""
        return [], 1, self.as_party("sum_epoch", config)

    def sum_list(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Sign who is in a sum."""
        return [], 1, self.as_party("sum_list", config)


class MaskingClient(PartyActions):
    """What clients' halves share: keys, masks and shares. It says not when vectors are sent."""

    # Keys are kept in the context's state. With ``trust`` they are those of a party, which takes
    # part in no sum whose server is trusted; without it, of clients that take part in such alone.

    actions: tuple[str, ...] = ("sum_enroll", "sum_unmask", *PartyActions.party_actions)

    def __init__(
        self, context: Context, clients: Sequence[int], trust: TrustSettings | None = None
    ) -> None:
        self.context, self.clients, self.trust = context, clients, trust

    def sum_enroll(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Make channel keys, or show those of the run: the SuperNode may be back."""
        if self.trust is not None:
            raise RefusedError(
                "this SuperNode has a key of its own and takes part in no sum whose server is "
                "trusted"
            )
        run_id = KeyRequest.from_config(config).run_id
        with suppress(StateLostError):
            known = self.keys()
            if known.run_id == run_id and set(known.clients) == set(self.clients):
                return [], len(self.clients), known.keys().to_config()
        host = SumClient(run_id, self.clients)
        self._keep(host)
        return [], len(self.clients), host.keys().to_config()

    def masked(
        self, config: dict[str, Any], vectors: Mapping[int, FloatArray], meaning: bytes = b""
    ) -> tuple[MaskedReply, dict[str, Any]]:
        """Add up clients' vectors and mask the sum, as the server's ``requests`` says."""
        request = replace(MaskRequest.from_config(config), meaning=meaning)
        host, is_party = self.keys(), self.trust is not None
        clients = self.clients if is_party else request.clients.tolist()
        total, left_out = encode_sum(RING.from_config(config), vectors, clients, request.length)
        present = [client for client in clients if client not in left_out]
        if not present:
            raise ValueError(f"no client can take part: {next(iter(left_out.values()))}")
        how = Ready.from_config(config) if is_party else present
        reply: MaskedReply = host.mask(request, how, total)
        reply.left_out = left_out
        self._keep(host)
        return reply, reply.to_config() | {ARRAY_NAMES: [f"{ARRAYS}/{MASKED_SUM}"]}

    def sum_unmask(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Reveal shares of one sum, prepare the next, or both."""
        if self.trust is not None:
            return [], len(self.clients), self.as_party("sum_unmask", config)
        host = self.keys()
        entries = host.turn(config)
        self._keep(host)
        return [], len(self.clients), entries

    def of_party(self, action: str, config: dict[str, Any], trust: TrustSettings) -> dict[str, Any]:
        """Answer any of them, and ``sum_unmask``."""
        try:
            known = self.keys()
        except StateLostError:
            if action != "sum_bind":
                raise
            known = None
        if action == "sum_bind":
            known = bound(known, BindRequest.from_config(config).run_id, self.clients, trust)
        entries = answer(known, action, config)
        self._keep(known)
        return entries

    def keys(self) -> Any:
        """Return the ``SumClient`` or ``Party`` that is kept; ``StateLostError`` without one."""
        record = self.context.state.config_records.get(SUM_STATE)
        state = None if record is None else record.get(SUM_STATE)
        if not isinstance(state, bytes):
            raise StateLostError("there are no keys for the secure sum: enrol first")
        if self.trust is not None:
            return Party.from_bytes(state, self.trust)
        return SumClient.from_bytes(state)

    def _keep(self, host: SumClient | Party) -> None:
        self.context.state[SUM_STATE] = ConfigRecord({SUM_STATE: host.to_bytes()})


class SecureSumClient(MaskingClient):
    """The clients' half: a subclass says in ``vectors`` what is to be added up."""

    actions = (*MaskingClient.actions, "sum_mask")

    def __init__(self, context: Context, clients: Sequence[int]) -> None:
        trust = TrustSettings.of(context.node_config, context.run_id)
        super().__init__(context, clients, trust)

    @abstractmethod
    def vectors(self, config: dict[str, Any]) -> Mapping[int, FloatArray]:
        """Return the vector of each client; one that is missing is left out of the sum."""

    def sum_mask(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Add up the own clients' vectors and mask the sum."""
        reply, entries = self.masked(config, self.vectors(config))
        return [reply.total], reply.clients.size, entries
