"""The clients' half of sums over Flower messages, where SuperNodes may have keys of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress

from flwr.app import Context
from numpy.typing import ArrayLike

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.flower_compat import NumPyClient
from flower_graph.secure.parties.differences import digest_of
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.messages import BindRequest, Ready
from flower_graph.secure.parties.party import PartyClient
from flower_graph.secure.parties.service import answer, bound
from flower_graph.secure.ring import Ring, RingArray
from flower_graph.secure.sum.masking_client import Holder, MaskingClient
from flower_graph.secure.sum.messages import MaskedReply, MaskRequest
from flower_graph.secure.sum.terms import SumTerms
from flower_graph.wire.numpy_client import Answer, Config, Parameters


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

    def sum_bind(self, parameters: Parameters, config: Config) -> Answer:
        return [], 1, self.as_party("sum_bind", config)

    def sum_reveal(self, parameters: Parameters, config: Config) -> Answer:
        return [], 1, self.as_party("sum_reveal", config)

    def sum_epoch(self, parameters: Parameters, config: Config) -> Answer:
        return [], 1, self.as_party("sum_epoch", config)

    def sum_list(self, parameters: Parameters, config: Config) -> Answer:
        return [], 1, self.as_party("sum_list", config)


class MaskingParty(PartyActions, MaskingClient):
    """A ``MaskingClient`` that, if it has ``trust``, enters no sum of a trusted server.

    With ``trust``, the SuperNode's own settings, the kept keys are a party's; without it, clients'.
    """

    actions = (*MaskingClient.actions, *PartyActions.party_actions)

    def __init__(
        self, context: Context, clients: Sequence[int], trust: TrustSettings | None = None
    ) -> None:
        super().__init__(context, clients)
        self.trust = trust

    def sum_enroll(self, parameters: Parameters, config: Config) -> Answer:
        """Make channel keys, or return those of the run; refused if there is a key of its own."""
        if self.trust is not None:
            raise RefusedError(
                "this SuperNode has a key of its own and takes part in no sum whose server is "
                "trusted"
            )
        return super().sum_enroll(parameters, config)

    def sum_unmask(self, parameters: Parameters, config: Config) -> Answer:
        if self.trust is not None:
            return [], len(self.clients), self.as_party("sum_unmask", config)
        return super().sum_unmask(parameters, config)

    def of_party(self, action: str, config: Config, trust: TrustSettings) -> Config:
        if action == "sum_bind":
            kept = None
            with suppress(StateLostError):
                kept = self._party(trust)
            party = bound(kept, BindRequest.from_config(config).run_id, self.clients, trust)
        else:
            party = self._party(trust)
        entries = answer(party, action, config)
        self._keep(party)
        return entries

    def keys(self) -> Holder:
        """Return the ``SumClient`` or ``PartyClient``; ``StateLostError`` if none is kept."""
        return super().keys() if self.trust is None else self._party(self.trust)

    def _party(self, trust: TrustSettings) -> PartyClient:
        return PartyClient.from_bytes(self._kept(), trust)

    def _asked(self, request: MaskRequest) -> list[int]:
        return super()._asked(request) if self.trust is None else list(self.clients)

    def _receive(self, host: Holder, config: Config, request: MaskRequest, ring: Ring) -> None:
        if isinstance(host, PartyClient):
            host.receive(request, Ready.from_config(config), ring)

    def _masked(
        self,
        host: Holder,
        request: MaskRequest,
        present: list[int],
        total: RingArray,
        terms: SumTerms,
        state: Iterable[ArrayLike],
    ) -> MaskedReply:
        if not isinstance(host, PartyClient):
            return super()._masked(host, request, present, total, terms, state)
        return host.mask(total, terms, digest_of(state))
