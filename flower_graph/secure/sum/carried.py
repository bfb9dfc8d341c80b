"""The secure sum for a strategy that carries its messages itself, among others of its own.

Everything here is told in numbers of clients, whoever takes part in the protocol for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flower_graph.secure.sum.messages import KeyReply, MaskedReply, MaskRequest
from flower_graph.secure.sum.server import Skipped, SumResult, SumServer


class CarriedSum:
    """Who is in the sums, and what a strategy sends and takes of one."""

    def __init__(self, server: SumServer) -> None:
        self.server = server
        self.number = -1  # of the newest sum

    @property
    def run_id(self) -> bytes:
        """What all messages of the sums name, fresh for the run."""
        return self.server.run_id

    @property
    def blamed(self) -> list[tuple[int, str]]:
        """Clients at fault and what they did, in the order of their deeds."""
        return self.server.blamed

    @property
    def excluded(self) -> set[int]:
        """Clients that are in no sum any more."""
        return self.server.excluded

    def node_of(self, client: int) -> int | None:
        """Return the SuperNode that hosts a client; None if it is not enrolled."""
        return self.server.node_of(client)

    def at(self, clients: Iterable[int], nodes: Collection[int]) -> list[int]:
        """Return those of some clients that these SuperNodes host."""
        return [client for client in clients if self.node_of(client) in nodes]

    @property
    def out(self) -> set[int]:
        """Clients that are excluded, or sit out the next sum."""
        return self.server.out

    def tick(self) -> None:
        """Note that a round without a sum has gone by, for those that must wait for some."""
        self.server.tick()

    def check_keys(self, node: int, reply: KeyReply) -> None:
        """Refuse keys that are not for this run or hide nothing, and who may not begin anew."""
        self.server.check_keys(node, reply)

    def enroll(self, node: int, reply: KeyReply) -> None:
        """Take in a SuperNode's clients; one that enrols again gets its new keys."""
        self.server.enroll(node, reply)

    def knows(self, old: int, reply: KeyReply) -> bool:
        """Whether these are the clients of a SuperNode, with the very keys that it enrolled."""
        return self.server.knows(old, reply)

    def move(self, old: int, node: int) -> None:
        """Go on with a SuperNode under another id: it is back with its keys."""
        self.server.move(old, node)

    def masks(self, length: int, word: int = 64) -> dict[int, tuple[list[int], MaskRequest]]:
        """Ask for masked vectors: of each SuperNode the clients that may contribute."""
        requests = self.server.mask_requests(self.number, length, word)
        return {node: (mask.clients.tolist(), mask) for node, mask in requests.items()}

    def take_masked(self, node: int, reply: MaskedReply) -> None:
        """Take a SuperNode's masked sum."""
        self.server.take(node, reply)

    def result(self, number: int) -> SumResult | Skipped:
        """End a sum: the words, and the numbers of the clients in it; or why there is none."""
        return self.server.result(number)


def missing(local: list[int], mask: MaskRequest, listed: list[int]) -> list[int]:
    """Return those of a SuperNode's clients that it was asked for and whose vectors it left out."""
    out = set(mask.clients.tolist()) - set(listed)
    return local if len(out) == mask.clients.size else [client for client in local if client in out]
