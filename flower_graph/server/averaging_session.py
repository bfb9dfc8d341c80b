"""Whom a strategy that averages talks to: who is there, who takes part, who goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flower_graph.errors import NoClientsError
from flower_graph.messages.resume import Resume
from flower_graph.server.averaging_round import AveragingRound
from flower_graph.server.exchange import Exchange, Rejected
from flower_graph.server.gathering import log_rejected
from flower_graph.server.ledger import ByteLedger
from flower_graph.server.membership import Membership
from flower_graph.server.participation import ranges

LOG = logging.getLogger(__name__)


class AveragingSession:
    """The SuperNodes of a run, over whatever grid it has."""

    def __init__(self, min_nodes: int, *, one_client_each: bool) -> None:
        self.min_nodes, self.timeout, self.one_client_each = min_nodes, 600.0, one_client_each
        self.question: dict[str, Any] = {}  # what every message says besides
        self.hosted, self.ledger = Membership(), ByteLedger()
        self._exchange: Exchange | None = None

    def begin(self, grid: Grid, timeout: float, question: Mapping[str, Any]) -> None:
        """Begin a run."""
        self.timeout, self.question, self.hosted = timeout, dict(question), Membership(question)
        self._exchange = None
        self.open(grid)

    def open(self, grid: Grid) -> Exchange:
        """Return what to wait for SuperNodes with and to ask them; made anew for another grid."""
        if self._exchange is None or self._exchange.grid is not grid:
            self._exchange, self.ledger = Exchange(grid), ByteLedger()
            self._exchange.ledger = self.ledger
        return self._exchange

    def present(self, grid: Grid) -> list[int]:
        """Wait for SuperNodes and return those that can take part."""
        connected = self.open(grid).nodes(self.min_nodes, self.timeout)
        return [node for node in self.hosted.present(connected) if not self._problem(node)]

    def enrol(self, now: AveragingRound, grid: Grid) -> list[int]:
        """Wait for SuperNodes, ask new ones whom they host, and return those that take part."""
        exchange = self.open(grid)
        connected = now.connected = exchange.nodes(self.min_nodes, self.timeout)
        refused = self.hosted.ask(exchange, connected, now.number, self.timeout)
        there = {node: self._problem(node) for node in self.hosted.present(connected)}
        unfit = [Rejected(node, why) for node, why in there.items() if why]
        log_rejected(LOG, now.number, "left out", unfit)
        now.reject(refused + unfit)
        present = [node for node, why in there.items() if not why]
        if not present:
            reasons = "; ".join(sorted({entry.reason for entry in refused + unfit}))
            raise NoClientsError(f"no SuperNode can take part: {reasons}")
        return present

    def exchange(self, messages: Iterable[Message], server_round: int, grid: Grid) -> list[Message]:
        """Send Flower's messages and return what answers them."""
        relay = self.open(grid).relay
        return relay(messages, server_round=server_round, timeout=self.timeout)

    def client_of(self, node: int) -> int | None:
        """Return the first client of a SuperNode, if it says whom it hosts."""
        return next(iter(self.hosted.clients.get(node, ())), None)

    def resume(self, grid: Grid, resume: Resume, known: Iterable[int]) -> list[str]:
        """Have all clients go on from a checkpoint; return why some cannot."""
        self.hosted = Membership(self.question | resume.to_config(), known)
        exchange = self.open(grid)
        connected = exchange.nodes(self.min_nodes, self.timeout)
        refused = self.hosted.ask(exchange, connected, resume.server_round, self.timeout)
        if self.hosted.absent and not refused:
            LOG.warning("clients %s are not connected", ranges(self.hosted.absent))
        return [f"node {entry.node_id}: {entry.reason}" for entry in refused]

    def _problem(self, node: int) -> str:
        """Say why a SuperNode cannot be answered with its client's own model, or nothing."""
        clients = self.hosted.clients.get(node, [])
        if not self.one_client_each or len(clients) == 1:
            return ""
        hosts = f"hosts {len(clients)} clients" if clients else "does not say which client it hosts"
        return f"it {hosts}, and each is answered with its own model: it needs a SuperNode for each"
