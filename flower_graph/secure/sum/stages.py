"""The stages of secure sums, one after the other, over messages that a caller sends.

A sum takes two exchanges: masked vectors, then shares, and the second also prepares the next sum.
All numbers here are of clients, whichever SuperNode takes part for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from flwr.app import ConfigRecord, RecordDict

from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import (
    MaskedReply,
    PrepareRequest,
    SumTerms,
    UnmaskReply,
    UnmaskRequest,
    sum_bytes,
)
from flower_graph.secure.sum.round import Skipped, SumResult
from flower_graph.secure.sum.server import M, Parts, Send, SumServer
from flower_graph.wire.codec import Message
from flower_graph.wire.exchange import Rejected
from flower_graph.wire.keys import CONFIG, METRICS
from flower_graph.wire.numpy_client import Config, Scalar


class SumStages:
    """Drives every sum: its members, its stage, and its messages.

    Parameters
    ----------
    server : SumServer
        The protocol.
    send : callable
        Sends messages, as ``Session.send`` does.
    limit : float
        Largest absolute value of a single number; a client with a larger one is left out.
    resolution : float
        Step to which numbers are rounded.
    guard : bool
        Whether words have bits to spare for pads that clients add (`flower_graph.secure.ring`).
    first : int
        Number of the first sum.
    unmask : str
        Type of the messages that unmask one sum and prepare the next.
    """

    def __init__(
        self,
        server: SumServer,
        send: Send,
        *,
        limit: float,
        resolution: float,
        guard: bool = False,
        first: int = 0,
        unmask: str = "train.sum_unmask",
    ) -> None:
        self.server, self._send, self._unmask = server, send, unmask
        self.number = first - 1  # of the newest sum
        self._unmasked = self.number  # of the sum that was unmasked last
        self.clients: list[int] = []  # that it was made ready for; none if none is ready
        self._limit = limit
        self.ring_for = partial(Ring.fit, limit=limit, resolution=resolution, guard=guard)
        self._ring = self.ring_for(2)  # of the newest sum; this refuses impossible numbers

    @property
    def ring(self) -> Ring:
        return self._ring

    def at(self, clients: Iterable[int], nodes: Collection[int]) -> list[int]:
        """Return the clients among `clients` that these SuperNodes host."""
        homes = self.server.homes
        return [client for client in clients if homes.get(client) in nodes]

    def begin(self, server_round: int, nodes: Collection[int]) -> bool:
        """Have clients agree on the members, if need be; return whether they began anew."""
        begun = self.server.begin(server_round, self._send, nodes, self._limit)
        if begun:
            self.give_up()
        return begun

    def give_up(self) -> None:
        """Give up a prepared sum, because it needs other members."""
        self.clients = []

    def ready(self, server_round: int, clients: Iterable[int]) -> list[Rejected]:
        """Prepare a sum for some clients, in an exchange of its own; return silent SuperNodes."""
        return self._unmask_and_prepare(server_round, list(clients), {})

    def masks(
        self, length: int, word: int, terms: SumTerms
    ) -> dict[int, tuple[list[int], tuple[Message, ...]]]:
        """Ask for masked vectors: of each SuperNode the clients that may contribute."""
        requests = self.server.mask_requests(self.number, length, word, terms)
        return {
            node: (self.server.hosted(parts[0].clients.tolist()), parts)
            for node, parts in parts_of(requests).items()
        }

    def take_masked(self, node: int, reply: MaskedReply) -> list[int]:
        """Take a SuperNode's masked sum; return the clients in it."""
        self.server.take(node, reply)
        local = self.server.hosted(reply.clients.tolist())
        return [client for client in local if client not in reply.left_out]

    def reveal(self, server_round: int, following: Iterable[int] | None) -> list[Rejected]:
        """Ask for the shares of the newest sum and prepare the next, in one exchange.

        ``following`` are the clients of the next sum; None: no next sum yet. Returns the SuperNodes
        without a usable answer.
        """
        self._unmasked = self.number
        self.server.sign(self.number, server_round, self._send)
        unmask = parts_of(self.server.unmask_requests(self.number))
        return self._unmask_and_prepare(
            server_round, None if following is None else list(following), unmask
        )

    def result(self) -> SumResult | Skipped:
        return self.server.result(self._unmasked)

    def _unmask_and_prepare(
        self,
        server_round: int,
        following: list[int] | None,
        unmask: Mapping[int, Parts[UnmaskRequest]],
    ) -> list[Rejected]:
        prepare: dict[int, Parts[PrepareRequest]] = {}
        self.clients = following or []
        if following is not None:
            self.number += 1
            self._ring = self.ring_for(max(1, len(following)))
            prepare = parts_of(self.server.open_round(self.number, following))
        nodes = {**unmask, **prepare}
        both = {node: (*unmask.get(node, ()), *prepare.get(node, ())) for node in nodes}

        def read(node: int, content: RecordDict) -> None:
            if node in unmask:
                self.server.take(node, UnmaskReply.read(content))
            if node in prepare:
                first, *others = self.server.prepared
                more = (kind.read(content) for kind in others)
                self.server.take(node, first.read(content), *more)

        if not both:
            return []
        replies = self._send(
            {node: as_record(*messages) for node, messages in both.items()},
            server_round,
            read,
            message_type=self._unmask,
            max_reply_bytes=sum_bytes(
                (first for first, *_ in unmask.values()), (first for first, *_ in prepare.values())
            ),
        )
        return replies.rejected


def parts_of(requests: Mapping[int, M | Parts[M]]) -> dict[int, Parts[M]]:
    """Return each SuperNode's request with all that goes beside it."""
    return {node: one if isinstance(one, tuple) else (one,) for node, one in requests.items()}


def as_record(*parts: Message | Mapping[str, Scalar]) -> RecordDict:
    """Write messages and entries as one message."""
    return RecordDict({CONFIG: ConfigRecord({**merged(*parts)})})


def merged(*parts: Message | Mapping[str, Scalar]) -> Config:
    """Write messages and entries as the entries of one."""
    result: Config = {}
    for part in parts:
        result |= part.to_config() if isinstance(part, Message) else part
    return result


def entries_of(content: RecordDict) -> dict[str, object]:
    """Return a reply's entries: the adaptor puts numbers and other values into two records."""
    config = content.config_records.get(CONFIG, ConfigRecord())
    return {**content.metric_records.get(METRICS, {}), **config}
