"""The secure sum for a strategy that carries its messages itself, among others of its own.

Everything here is told in numbers of clients, whoever takes part in the protocol for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from flower_graph.secure.parties.service import PartySums
from flower_graph.secure.sum.messages import MaskedReply
from flower_graph.secure.sum.server import Skipped, SumResult, SumServer
from flower_graph.wire.codec import Message
from flower_graph.wire.keys import CONFIG, METRICS

Keys = Any  # a KeyReply, or a BindReply where clients do not trust the server


class CarriedSum:
    """Who is in the sums, and what a strategy sends and takes of one."""

    def __init__(self, server: SumServer | PartySums) -> None:
        self.server = server  # the two answer alike, each to messages of its own
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

    def exclude(self, clients: Iterable[int]) -> None:
        """Exclude clients whose fault is proven: a run that goes on knows them."""
        self.server.exclude(clients)

    def node_of(self, client: int) -> int | None:
        """Return the SuperNode that hosts a client; None if it is not enrolled."""
        return self.server.node_of(client)

    def at(self, clients: Iterable[int], nodes: Collection[int]) -> list[int]:
        """Return those of some clients that these SuperNodes host."""
        homes = self.server.homes
        return [client for client in clients if homes.get(client) in nodes]

    @property
    def out(self) -> set[int]:
        """Clients that are excluded, or cannot be in the next sum."""
        return self.server.out

    def tick(self) -> None:
        """Note that a round without a sum has gone by, for those that must wait for some."""
        self.server.tick()

    def read_keys(self, node: int, content: RecordDict) -> Keys:
        """Read what a SuperNode enrols with; refuse what hides nothing or is not signed."""
        reply: Keys = self.server.enrolment[-1].from_config(entries_of(content))
        self.server.check_keys(node, reply)
        return reply

    def enroll(self, node: int, reply: Keys) -> None:
        """Take in a SuperNode's clients; one that enrols again gets its new keys."""
        self.server.enroll(node, reply)

    def knows(self, old: int, reply: Keys) -> bool:
        """Whether these are the clients of a SuperNode, with the very keys that it enrolled."""
        return self.server.knows(old, reply)

    def move(self, old: int, node: int) -> None:
        """Go on with a SuperNode under another id: it is back with its keys."""
        self.server.move(old, node)

    def masks(
        self, length: int, word: int = 64, meaning: bytes = b""
    ) -> dict[int, tuple[list[int], tuple[Any, ...]]]:
        """Ask for masked vectors: of each SuperNode the clients that may contribute."""
        requests = self.server.mask_requests(self.number, length, word, meaning)
        result = {}
        for node, request in requests.items():
            parts = parts_of(request)
            result[node] = self.server.hosted(parts[0].clients.tolist()), parts
        return result

    def take_masked(self, node: int, reply: MaskedReply) -> list[int]:
        """Take a SuperNode's masked sum; return the clients in it."""
        self.server.take(node, reply)
        local = self.server.hosted(reply.clients.tolist())
        return [client for client in local if client not in reply.left_out]

    def result(self, number: int) -> SumResult | Skipped:
        """End a sum: the words, and the numbers of the clients in it; or why there is none."""
        return self.server.result(number)


def parts_of(request: Any) -> tuple[Any, ...]:
    """Return a request with all that goes beside it."""
    return request if isinstance(request, tuple) else (request,)


def as_record(*parts: Message | Mapping[str, Any]) -> RecordDict:
    """Write messages and entries as one message."""
    return RecordDict({CONFIG: ConfigRecord(merged(*parts))})


def merged(*parts: Message | Mapping[str, Any]) -> dict[str, Any]:
    """Write messages and entries as the entries of one."""
    result: dict[str, Any] = {}
    for part in parts:
        result |= part.to_config() if isinstance(part, Message) else part
    return result


def entries_of(content: RecordDict) -> dict[str, Any]:
    """Return a reply's entries: the adaptor puts numbers and all else into two records."""
    config = content.config_records.get(CONFIG, ConfigRecord())
    return {**content.metric_records.get(METRICS, {}), **config}
