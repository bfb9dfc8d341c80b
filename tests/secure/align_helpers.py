"""One alignment in memory: hosts, a server, and everything that the server receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.server import AlignmentServer

RUN = b"run-1"
Data = Mapping[int, Sequence[object]]
Answer = Callable[[int, dict[str, Any]], dict[str, Any] | None]


class Alignment:
    """Clients assigned to nodes, and a server that leads them.

    ``answer(node, config)`` stands between server and host: it may change what a host says, or
    return None for silence. Hosts are written to bytes and read again between messages.
    """

    def __init__(self, data: Data, nodes: Sequence[Sequence[int]], run_id: bytes = RUN) -> None:
        self.run_id, self.data, self.nodes = run_id, dict(data), dict(enumerate(nodes, 1))
        self.hosts = {
            node: AlignmentClient(run_id, {client: data[client] for client in clients})
            for node, clients in self.nodes.items()
        }
        self.server = AlignmentServer(run_id)
        self.received: list[dict[str, Any]] = []
        self.totals: list[Any] = []

    def reply(self, node: int, config: dict[str, Any]) -> dict[str, Any]:
        """Let a host answer, from its state as bytes."""
        own = {client: self.data[client] for client in self.nodes[node]}
        host = AlignmentClient.from_bytes(self.hosts[node].to_bytes(), self.run_id, own)
        self.hosts[node] = host
        return host.answer(config)

    def exchange(self, answer: Answer | None = None) -> dict[int, Any]:
        """Run one stage; return its requests."""
        requests = self.server.requests()
        for node, request in requests.items():
            reply = (answer or self.reply)(node, request.to_config())
            if reply is not None:
                self.received.append(reply)
                self.server.take(node, reply)
        return requests

    def union(self, absent: Iterable[int] = ()) -> None:
        """Add up the tables of all clients that have tokens, but for the absent."""
        while not self.server.settled:
            total, present = np.uint64(0), []
            for node, request in self.server.union_requests().items():
                assert self.reply(node, request.to_config()) == {}
                clients = sorted(set(self.hosts[node].finished) - set(absent))
                total = total + self.hosts[node].sketch(request.cells, clients)
                present += clients
            self.totals.append(total)
            self.server.take_union(total, present)

    def run(self, answer: Answer | None = None) -> None:
        """Align whoever is enrolled, to the end."""
        while self.exchange(answer):
            pass
        self.union()
        for node, message in self.server.publications().items():
            self.reply(node, message.to_config())

    def enroll(self, *nodes: int) -> None:
        """Enrol nodes; all of them without arguments."""
        for node in nodes or self.nodes:
            self.server.enroll(node, self.nodes[node])

    def slots(self) -> dict[object, int]:
        """Return the slot of every identity, after checking that all holders agree."""
        found: dict[object, int] = {}
        for host in self.hosts.values():
            for client, slots in host.slots.by_client.items():
                for identity, slot in zip(self.data[client], slots.tolist(), strict=True):
                    assert found.setdefault(identity, slot) == slot
        return found


def shared(data: Data) -> set[object]:
    """Return the identities that at least two clients hold."""
    everything = [identity for own in data.values() for identity in own]
    return {identity for identity in everything if everything.count(identity) > 1}
