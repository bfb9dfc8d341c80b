"""Carries rounds of the secure sum from hosts to server and back, and loses what a test says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partialmethod
from typing import Any, Self

import numpy as np

from benchmarks import parties
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import MaskedReply, MaskRequest, SumTerms

LENGTH = 6
RING = Ring.fit(10_000, 64, 2.0**-16)
TERMS = SumTerms("test", RING)


def wire(message: Any) -> Any:
    """Send a message through its config entries."""
    total = {"total": message.total} if isinstance(message, MaskedReply) else {}
    return type(message).from_config(message.to_config(), **total)


def mask(host: SumClient, request: MaskRequest, *given: Any) -> MaskedReply:
    """Have a host receive a request and mask a sum: clients, words, terms."""
    return host.mask(host.receive(request, RING), *given)


class World(parties.World):
    """Messages that travel, and vectors of numbers up to 60.

    ``tamper`` changes a message on its way; for hostile parties.
    """

    first = 1000
    tamper: Callable[[int, Any], Any] = staticmethod(lambda node, message: message)

    @classmethod
    def make(cls, m: int, per_host: int = 1, *, ring: Ring = RING, **shares: float) -> Self:
        """Make hosts of ``per_host`` clients; the last may have fewer."""
        hosted = [range(start, min(m, start + per_host)) for start in range(0, m, per_host)]
        values = np.random.default_rng(m).uniform(-60, 60, (m, LENGTH))
        return cls.trusting(hosted, ring.encode(values), TERMS, **shares)

    def send(self, node: int, message: Any) -> Any:
        return wire(self.tamper(node, message))

    def mask_reply(
        self, node: int, request: MaskRequest, without=(), terms: SumTerms | None = None
    ) -> MaskedReply | None:
        present = [client for client in request.clients.tolist() if client not in without]
        if not present:
            return None
        sent = self.send(node, request)
        return mask(self.host(node), sent, present, self.total(present), terms or TERMS)

    def play(
        self, stage: str, number: int, lost: Collection[int] = (), clients=None, without=()
    ) -> None:
        """Play a stage; the replies of those in ``lost`` are lost."""
        is_mask = stage == "mask"
        for node, request in self.requests(stage, number, clients).items():
            reply = (
                self.mask_reply(node, request, without)
                if is_mask
                else self.answer(stage, node, request)
            )
            if reply is not None and node not in lost:
                self.server.take(node, self.send(node, reply))

    prepare, mask = partialmethod(play, "prepare"), partialmethod(play, "mask")
    sign, unmask = partialmethod(play, "sign"), partialmethod(play, "unmask")

    def round(self, number: int, clients=None, without=(), **lost: Collection[int]) -> Any:
        """Run a whole round and return its result; ``lost``: whose reply to a stage is lost."""
        for stage in parties.STAGES:
            self.play(stage, number, lost.get(stage, ()), clients, without)
        return self.server.result(number)

    def check(self, result, contributors) -> None:
        assert result.contributors.tolist() == sorted(contributors)
        assert (result.total == self.total(result.contributors)).all()
