"""Carries rounds of the secure sum from hosts to server and back, and loses what a test says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import MaskedReply, MaskRequest, SumTerms
from flower_graph.secure.sum.server import SumServer

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


@dataclass
class World:
    """A server, its hosts, and every client's vector."""

    server: Any  # SumServer, or PartySums
    hosts: dict[int, SumClient]
    words: np.ndarray
    # Changes a message on its way; for hostile parties
    tamper: Callable[[int, Any], Any] = field(default=lambda node, message: message)

    @classmethod
    def make(cls, m: int, per_host: int = 1, *, ring: Ring = RING, **shares: float) -> World:
        """Make hosts of ``per_host`` clients; the last may have fewer."""
        server, hosts = SumServer(**shares), {}
        for start in range(0, m, per_host):
            node = 1000 + start
            hosts[node] = SumClient(server.run_id, range(start, min(m, start + per_host)))
            server.enroll(node, wire(hosts[node].keys()))
        values = np.random.default_rng(m).uniform(-60, 60, (m, LENGTH))
        return cls(server, hosts, ring.encode(values))

    def send(self, node: int, message: Any) -> Any:
        return wire(self.tamper(node, message))

    def restart(self, node: int) -> SumClient:
        """Save and load a host, as between two messages."""
        old = self.hosts[node]
        self.hosts[node] = SumClient.from_bytes(old.to_bytes(), old.trust)
        return self.hosts[node]

    def prepare(self, number: int, clients=None, lost: Collection[int] = ()) -> None:
        chosen = self.server.clients if clients is None else clients
        for node, request in self.server.open_round(number, chosen).items():
            reply = self.restart(node).prepare(self.send(node, request))
            if node not in lost:
                self.server.take(node, self.send(node, reply))

    def mask_reply(
        self, node: int, request: MaskRequest, without=(), terms: SumTerms | None = None
    ) -> MaskedReply | None:
        present = [client for client in request.clients.tolist() if client not in without]
        if not present:
            return None
        total = self.words[present].sum(0, dtype=self.words.dtype)
        sent = self.send(node, request)
        return mask(self.restart(node), sent, present, total, terms or TERMS)

    def mask(self, number: int, lost: Collection[int] = (), without=()) -> None:
        word = self.words.dtype.itemsize * 8
        for node, request in self.server.mask_requests(number, LENGTH, word, TERMS).items():
            reply = self.mask_reply(node, request, without)
            if reply is not None and node not in lost:
                self.server.take(node, self.send(node, reply))

    def sign(self, number: int, lost: Collection[int] = ()) -> None:
        """Have the list signed, where the server is not trusted."""
        for node, request in self.server.list_requests(number).items():
            if node not in lost:
                reply = self.restart(node).sign_list(self.send(node, request))
                self.server.take(node, wire(reply))

    def unmask(self, number: int, lost: Collection[int] = ()) -> None:
        for node, request in self.server.unmask_requests(number).items():
            reply = self.restart(node).unmask(self.send(node, request))
            if node not in lost:
                self.server.take(node, self.send(node, reply))

    def round(self, number: int, clients=None, without=(), **lost: Collection[int]) -> Any:
        """Run a whole round and return its result; ``lost``: whose reply to a stage is lost."""
        self.prepare(number, clients, lost.get("prepare", ()))
        self.mask(number, lost.get("mask", ()), without)
        self.sign(number, lost.get("sign", ()))
        self.unmask(number, lost.get("unmask", ()))
        return self.server.result(number)

    def plain_sum(self, contributors) -> np.ndarray:
        return self.words[np.asarray(contributors)].sum(0, dtype=self.words.dtype)

    def check(self, result, contributors) -> None:
        assert result.contributors.tolist() == sorted(contributors)
        assert (result.total == self.plain_sum(result.contributors)).all()
