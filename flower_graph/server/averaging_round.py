"""What one round of a strategy that averages has come to: who was asked, who answered."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid

from flower_graph.messages.keys import EXTRAS
from flower_graph.rng import generator
from flower_graph.server.exchange import Rejected
from flower_graph.server.ledger import ByteLedger, count_bytes
from flower_graph.server.membership import Membership
from flower_graph.server.participation import NOT_CONNECTED, account_for
from flower_graph.server.reply_checks import client_reasons, clients_of, weight_of


@dataclass
class AveragingRound:
    """A round so far."""

    number: int = 0
    started: float = field(default_factory=time.perf_counter)
    sent: list[Message] = field(default_factory=list)  # of the exchange that runs
    rejected: list[dict[str, Any]] = field(default_factory=list)
    connected: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # to train
    used: list[int] = field(default_factory=list)  # whose training counted
    silent: dict[int, str] = field(default_factory=dict)  # of those asked: why it did not
    failed: dict[int, str] = field(default_factory=dict)  # the same, of single clients
    trained: MetricRecord = field(default_factory=MetricRecord)
    is_averaged: bool = False  # whether Flower's average was asked for
    skipped: str = ""
    saves: bool = False  # whether a checkpoint of it is made

    @property
    def sent_to(self) -> list[int]:
        """The SuperNodes of the exchange that runs."""
        return [message.metadata.dst_node_id for message in self.sent]

    def reject(self, entries: Iterable[Rejected]) -> None:
        """Note who is left out, for the report."""
        self.rejected += [{"node": one.node_id, "reason": one.reason} for one in entries]

    def learn(
        self, usable: Iterable[Message], rejected: Iterable[Rejected], who: Membership
    ) -> None:
        """Note whose training counts."""
        self.asked = self.sent_to
        self.silent = {one.node_id: one.reason for one in rejected}
        for reply in usable:
            self.used.append(reply.metadata.src_node_id)
            self.failed |= client_reasons(reply, who.clients)

    def report(
        self, server_round: int, clients: tuple[int, int], who: Membership, ledger: ByteLedger
    ) -> dict[str, Any]:
        """Give what a round's report says of every method; ``clients``: asked, answered."""
        return {
            "round": server_round,
            "asked": clients[0],
            "answered": clients[1],
            "rejected": self.rejected,
            "bytes": ledger.payload,
            "wire_bytes": ledger.wire,
            "seconds": time.perf_counter() - self.started,
            "skipped": self.skipped,
            "participation": self.took_part(who),
        }

    def took_part(self, who: Membership) -> dict[str, Any]:
        """Say what became of every client that is known by its number."""
        if not who.everyone():
            return {}
        used = {client for node in self.used for client in who.clients.get(node, ())}
        result = account_for(
            who.clients,
            self.connected,
            {node: who.clients.get(node, []) for node in self.asked},
            used - self.failed.keys(),
            silent=self.silent,
            failed=self.failed,
            left_out=dict.fromkeys(who.absent, NOT_CONNECTED),
        )
        return result.to_record()


# Whom to ask -------------------------------------------------------------------------------------


class _Nodes:
    """Stands for a grid where Flower chooses nodes: all that it asks is which there are."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes

    def get_node_ids(self) -> list[int]:
        return self._nodes


def shown(nodes: list[int]) -> Grid:
    """Return a grid that has these SuperNodes and no others."""
    return cast(Grid, _Nodes(nodes))


def drawn(nodes: list[int], participation: float, seed: int, server_round: int) -> Grid:
    """Draw a share of the SuperNodes, one at least; return a grid that has them alone."""
    count = max(1, round(participation * len(nodes)))
    rng = generator(seed, "participants", server_round)
    places = torch.randperm(len(nodes), generator=rng)[:count].tolist()
    return shown([nodes[place] for place in places])


# Counting ----------------------------------------------------------------------------------------


def count_clients(measured: Message, who: Membership) -> int:
    """Return how many clients a measurement is of."""
    return len(who.clients.get(measured.metadata.src_node_id, ())) or int(weight_of(measured))


def count_wire(ledger: ByteLedger, direction: str, messages: Iterable[Message]) -> None:
    """Count what messages hold."""
    for message in messages:
        if message.has_content():
            ledger.count_wire(direction, count_bytes(message.content))


def count_payload(
    ledger: ByteLedger, sent: Iterable[Message], replies: Iterable[Message], who: Membership
) -> None:
    """Count every client's arrays both ways, whoever shares its SuperNode."""
    answers = {one.metadata.src_node_id: one for one in replies if one.has_content()}
    for message in sent:
        node = message.metadata.dst_node_id
        answer, clients = answers.get(node), who.count(node)
        if answer is not None and not who.clients.get(node):
            clients = clients_of(answer)
        pairs = (("down", message),) if answer is None else (("down", message), ("up", answer))
        for direction, one in pairs:
            sizes = {n: record.count_bytes() for n, record in one.content.array_records.items()}
            extras = sizes.pop(EXTRAS, 0)
            ledger.count(direction, "weights", clients * sum(sizes.values()))
            if extras:
                ledger.count(direction, EXTRAS, clients * extras)
