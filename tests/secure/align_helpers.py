"""One alignment in memory: hosts, a server, and everything that the server receives."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.plaintext import PlaintextAlignmentClient, PlaintextAlignmentServer
from flower_graph.secure.align.server import AlignmentServer

RUN = b"run-1"
DATA = {0: [1, 2, 3], 5: [3, 4], 2: [7, 2, 3, 9]}
FORMS: dict[str, tuple[Any, Any]] = {
    "psi": (AlignmentClient, AlignmentServer),
    "plain": (PlaintextAlignmentClient, PlaintextAlignmentServer),
}
Data = Mapping[int, Sequence[object]]
Answer = Callable[[int, dict[str, Any]], dict[str, Any] | None]


class Alignment:
    """Clients assigned to nodes, and a server that leads them.

    ``answer(node, config)`` stands between server and host: it may change what a host says, or
    return None for silence. Hosts are written to bytes and read again between messages.
    """

    def __init__(
        self, data: Data, nodes: Sequence[Sequence[int]], run_id: bytes = RUN, form: str = "psi"
    ) -> None:
        self.kind, server = FORMS[form]
        self.run = (run_id,) if form == "psi" else ()
        self.data, self.nodes = dict(data), dict(enumerate(nodes, 1))
        self.hosts = {node: self.host(node) for node in self.nodes}
        self.server = server()
        self.received: list[dict[str, Any]] = []
        self.totals: list[Any] = []

    def own(self, node: int) -> dict[int, Sequence[object]]:
        """Return the identities of a node's clients."""
        return {client: self.data[client] for client in self.nodes[node]}

    def host(self, node: int, state: bytes | None = None) -> Any:
        """Make a node's host, new or from its state."""
        own = (*self.run, self.own(node))
        return self.kind(*own) if state is None else self.kind.from_bytes(state, *own)

    def reply(self, node: int, config: dict[str, Any]) -> dict[str, Any]:
        """Let a host answer, from its state as bytes."""
        self.hosts[node] = self.host(node, self.hosts[node].to_bytes())
        return self.hosts[node].answer(config)

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
        while isinstance(self.server, AlignmentServer) and self.server.waits():
            total, present = np.uint64(0), []
            for node, request in self.server.union_requests().items():
                assert self.reply(node, request.to_config()) == {}
                clients = sorted(set(self.hosts[node].finished) - set(absent))
                total = total + self.hosts[node].sketch(request.cells, clients)
                present += clients
            self.totals.append(total)
            self.server.take_union(total, present)

    def align(self, answer: Answer | None = None, *nodes: int, absent: Iterable[int] = ()) -> None:
        """Enrol some nodes, by default all, and align whoever is enrolled, to the end."""
        for node in nodes or self.nodes:
            self.server.enroll(node, self.nodes[node])
        while self.exchange(answer):
            pass
        self.union(absent)
        for node, message in self.server.publications().items():
            self.reply(node, message.to_config())

    def slots(self) -> dict[object, int]:
        """Return the slot of every identity, after checking that all holders agree."""
        found: dict[object, int] = {}
        for host in self.hosts.values():
            for client, slots in host.slots.by_client.items():
                for identity, slot in zip(self.data[client], slots.tolist(), strict=True):
                    assert found.setdefault(identity, slot) == slot
        return found

    def agree(self, clients: Iterable[int]) -> bool:
        """Whether slots are numbered through, and are those that these clients share."""
        present = {client: self.data[client] for client in clients}
        placed = {identity: slot for identity, slot in self.slots().items() if slot >= 0}
        numbered = sorted(placed.values()) == list(range(len(placed)))
        aligned = self.server.aligned == sorted(present)
        return numbered and aligned and placed.keys() == shared(present)


def aligned(data: Data, nodes: Sequence[Sequence[int]], run_id: bytes = RUN) -> Alignment:
    """Align all."""
    alignment = Alignment(data, nodes, run_id)
    alignment.align()
    return alignment


def shared(data: Data) -> set[object]:
    """Return the identities that at least two clients hold."""
    everything = [identity for own in data.values() for identity in own]
    return {identity for identity in everything if everything.count(identity) > 1}
