"""The clients' half of ``SecureSum``, with or without a trusted server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from flwr.app import Context

from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.masking_client import MaskingParty
from flower_graph.secure.sum.masking_client import FloatArray
from flower_graph.secure.sum.terms import SECURE_SUM
from flower_graph.wire.numpy_client import Answer, Config, Parameters


class SecureSumClient(MaskingParty):
    """The clients' half: a subclass returns in ``vectors`` the vectors to add up."""

    actions = (*MaskingParty.actions, "sum_mask")

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
