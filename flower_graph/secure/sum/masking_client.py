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
from flower_graph.messages.keys import ARRAY_NAMES, ARRAYS, MASKED_SUM, SUM_STATE
from flower_graph.secure.identity import TrustSettings
from flower_graph.secure.ring import encode_sum
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import RING, KeyRequest, MaskedReply, MaskRequest
from flower_graph.secure.sum.party_service import PartyHalf

FloatArray = NDArray[np.floating[Any]]


class MaskingClient(NumPyClient):
    """What clients' halves share: keys, masks and shares. It says not when vectors are sent."""

    # Keys are kept in the context's state.

    actions: tuple[str, ...] = ("sum_enroll", "sum_unmask")  # named actions

    def __init__(self, context: Context, clients: Sequence[int]) -> None:
        self.context, self.clients = context, clients

    def sum_enroll(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Make channel keys, or show those of the run: the SuperNode may be back."""
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
        host, request = self.keys(), replace(MaskRequest.from_config(config), meaning=meaning)
        total, left_out = encode_sum(
            RING.from_config(config), vectors, request.clients.tolist(), request.length
        )
        present = [client for client in request.clients.tolist() if client not in left_out]
        if not present:
            raise ValueError(f"no client can take part: {next(iter(left_out.values()))}")
        reply = host.mask(request, present, total)
        reply.left_out = left_out
        self._keep(host)
        return reply, reply.to_config() | {ARRAY_NAMES: [f"{ARRAYS}/{MASKED_SUM}"]}

    def sum_unmask(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Reveal shares of one sum, prepare the next, or both."""
        host = self.keys()
        entries = host.turn(config)
        self._keep(host)
        return [], len(self.clients), entries

    def keys(self) -> SumClient:
        """Return what the clients keep for the sum; ``StateLostError`` if there is nothing."""
        record = self.context.state.config_records.get(SUM_STATE)
        state = None if record is None else record.get(SUM_STATE)
        if not isinstance(state, bytes):
            raise StateLostError("there are no keys for the secure sum: enrol first")
        return SumClient.from_bytes(state)

    def _keep(self, host: SumClient) -> None:
        self.context.state[SUM_STATE] = ConfigRecord({SUM_STATE: host.to_bytes()})


class SecureSumClient(MaskingClient):
    """The clients' half: a subclass says in ``vectors`` what is to be added up."""

    actions = (
        *MaskingClient.actions,
        "sum_mask",
        "sum_bind",
        "sum_reveal",
        "sum_epoch",
        "sum_list",
    )

    def __init__(self, context: Context, clients: Sequence[int]) -> None:
        super().__init__(context, clients)
        # Of a SuperNode with a key of its own; it takes part in no sum whose server is trusted.
        self.trust = TrustSettings.of(context.node_config)

    @abstractmethod
    def vectors(self, config: dict[str, Any]) -> Mapping[int, FloatArray]:
        """Return the vector of each client; one that is missing is left out of the sum."""

    def sum_mask(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Add up the own clients' vectors and mask the sum."""
        if self.trust is None:
            reply, entries = self.masked(config, self.vectors(config))
            return [reply.total], reply.clients.size, entries
        reply = self._party().masked(config, self.vectors(config))
        entries = reply.to_config() | {ARRAY_NAMES: [f"{ARRAYS}/{MASKED_SUM}"]}
        return [reply.total], len(self.clients), entries

    def sum_enroll(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Make channel keys, unless the SuperNode has a key of its own."""
        if self.trust is None:
            return super().sum_enroll(parameters, config)
        return self._answer("sum_enroll", config)

    def sum_unmask(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Reveal shares of one sum, prepare the next, or both."""
        if self.trust is None:
            return super().sum_unmask(parameters, config)
        return self._answer("sum_unmask", config)

    def sum_bind(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Say who is here, signed."""
        return self._answer("sum_bind", config)

    def sum_reveal(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Show the own part of the seed of the graph of partners."""
        return self._answer("sum_reveal", config)

    def sum_epoch(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Begin an epoch."""
        return self._answer("sum_epoch", config)

    def sum_list(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, int, Any]:
        """Sign who is in a sum."""
        return self._answer("sum_list", config)

    def _answer(self, action: str, config: dict[str, Any]) -> tuple[Any, int, Any]:
        return [], len(self.clients), self._party().answer(action, config)

    def _party(self) -> PartyHalf:
        if self.trust is None:
            raise RefusedError("this SuperNode has no key of its own (identity-key, registry)")
        return PartyHalf(self.context, self.clients, self.trust)
