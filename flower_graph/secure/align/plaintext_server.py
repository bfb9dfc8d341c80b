"""The server's half of the alignments that hide nothing, driven like ``AlignmentServer``.

Both start again for all clients when some enrol later. There is no union to sum: ``requests`` until
there are none, then ``publications``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from flower_graph.errors import AlignmentError, MalformedReplyError
from flower_graph.messages.arrays import IntArray
from flower_graph.secure.align.plaintext_messages import (
    PairRequest,
    PatternReply,
    PlainOrder,
    PlainReply,
    PlainRequest,
    PolynomialReply,
    PolynomialRequest,
    SectionOrder,
)
from flower_graph.secure.align.polynomial import (
    PRIME_RANGE,
    Residues,
    pair_sums,
    random_prime,
    sections,
)
from flower_graph.secure.channel import rows_of

Request = PolynomialRequest | PairRequest | PlainRequest


class _OpenServer(ABC):
    """Who is where, who was asked, and who did not answer."""

    settled = True  # there is no union to wait for

    def __init__(self) -> None:
        self.blamed: list[tuple[int, str]] = []  # client and reason
        self._node: dict[int, int] = {}
        self._asked: dict[int, Request] = {}
        self._begin()

    def enroll(self, node: int, clients: Iterable[int]) -> None:
        """Note where clients are; if one is new, all begin again."""
        for client in clients:
            if client not in self._node:
                self._begin()
            self._node[client] = node

    def move(self, old: int, node: int) -> None:
        """Know a SuperNode by another id from now on."""
        self._node = {client: node if at == old else at for client, at in self._node.items()}

    def forget(self, clients: Iterable[int]) -> None:
        """Strike off clients who have lost what they kept, so that they can enrol again."""
        self._node = {c: at for c, at in self._node.items() if c not in set(clients)}

    def requests(self) -> dict[int, Request]:
        """Return the messages of the next stage; none when all answers are there."""
        for request in self._asked.values():
            for client in request.clients.tolist():
                del self._node[client]
                self.blamed.append((client, "did not answer the alignment"))
        self._asked = self._next_stage()
        return dict(self._asked)

    def take(self, node: int, config: Mapping[str, Any]) -> None:
        """Take the reply to a request; ``MalformedReplyError`` if it cannot be used."""
        request = self._asked.get(node)
        if request is None:
            raise MalformedReplyError("it was not asked, or has answered already")
        self._take(request, config)
        del self._asked[node]

    @property
    def aligned(self) -> list[int]:
        """Clients that have slots."""
        return sorted(self._node)

    def _by_node(self, clients: Iterable[int]) -> dict[int, list[int]]:
        nodes: dict[int, list[int]] = {}
        for client in clients:
            nodes.setdefault(self._node[client], []).append(client)
        return nodes

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _next_stage(self) -> dict[int, Request]: ...

    @abstractmethod
    def _take(self, request: Request, config: Mapping[str, Any]) -> None: ...


class PolynomialAlignmentServer(_OpenServer):
    """Leads the paper's alignment: polynomials, their pairwise sums, sizes of intersections."""

    def _begin(self) -> None:
        self._prime = random_prime(*PRIME_RANGE)
        self.polynomials: dict[int, Residues] = {}  # what the server sees of each client
        self._everyone: list[int] = []  # clients with polynomials, in the order of the patterns
        self._counts: dict[int, dict[bytes, int]] = {}

    def _next_stage(self) -> dict[int, Request]:
        missing = [client for client in self._node if client not in self.polynomials]
        if missing:
            return {
                node: PolynomialRequest(self._prime, np.array(clients, np.int64))
                for node, clients in self._by_node(missing).items()
            }
        if not self._everyone:
            self._everyone = sorted(self.polynomials)
        waiting = [client for client in self._node if client not in self._counts]
        return {node: self._pairs(clients) for node, clients in self._by_node(waiting).items()}

    def _pairs(self, clients: list[int]) -> PairRequest:
        degree = max(row.size for row in self.polynomials.values())
        table = np.zeros((len(self._everyone), degree), np.uint64)
        for place, client in enumerate(self._everyone):
            table[place, : self.polynomials[client].size] = self.polynomials[client]
        places = [self._everyone.index(client) for client in clients]
        sums = np.stack([pair_sums(table, place, self._prime) for place in places])
        return PairRequest(self._prime, np.array(clients), np.array(places), sums)

    def _take(self, request: Request, config: Mapping[str, Any]) -> None:
        if isinstance(request, PolynomialRequest):
            reply = PolynomialReply.from_config(config, prime=self._prime)
            _check_clients(request.clients, reply.clients)
            rows = np.split(reply.coefficients, np.cumsum(reply.sizes)[:-1])
            self.polynomials |= zip(reply.clients.tolist(), rows, strict=True)
            return
        answer = PatternReply.from_config(config, w=-(-len(self._everyone) // 8))
        _check_clients(request.clients, answer.clients)
        ends = np.cumsum(answer.sizes)[:-1]
        for client, patterns, counts in zip(
            answer.clients.tolist(),
            np.split(answer.patterns, ends),
            np.split(answer.counts, ends),
            strict=True,
        ):
            names = [pattern.tobytes() for pattern in patterns]
            self._counts[client] = dict(zip(names, counts.tolist(), strict=True))

    def publications(self) -> dict[int, SectionOrder]:
        """Return the order of sections; ``AlignmentError`` if clients disagree about one."""
        counts: dict[bytes, int] = {}
        for client, local in self._counts.items():
            for pattern, count in local.items():
                if counts.setdefault(pattern, count) != count:
                    raise AlignmentError(
                        f"client {client} counts {count} identities in an intersection in which "
                        f"others count {counts[pattern]}"
                    )
        start = sections(counts)
        width = max(map(len, counts), default=1)
        message = SectionOrder(
            sum(counts[pattern] for pattern in start),
            rows_of(start, -1, width),
            np.array(list(start.values()), np.int64),
        )
        return dict.fromkeys(self._by_node(self._counts), message)


class PlaintextAlignmentServer(_OpenServer):
    """Sees all identities and numbers those that two clients hold."""

    def _begin(self) -> None:
        self._identities: dict[int, list[str]] = {}

    def _next_stage(self) -> dict[int, Request]:
        missing = [client for client in self._node if client not in self._identities]
        return {
            node: PlainRequest(np.array(clients, np.int64))
            for node, clients in self._by_node(missing).items()
        }

    def _take(self, request: Request, config: Mapping[str, Any]) -> None:
        reply = PlainReply.from_config(config)
        _check_clients(request.clients, reply.clients)
        self._identities |= zip(reply.clients.tolist(), reply.identities, strict=True)

    def publications(self) -> dict[int, PlainOrder]:
        """Return the slots of every node's clients."""
        holders = Counter(chain.from_iterable(self._identities.values()))
        shared = sorted(name for name, count in holders.items() if count >= 2)
        order = {name: slot for slot, name in enumerate(shared)}
        messages = {}
        for node, clients in self._by_node(self._identities).items():
            local = [self._identities[client] for client in clients]
            slots = [order.get(name, -1) for name in chain.from_iterable(local)]
            sizes = np.array([len(names) for names in local], np.int64)
            messages[node] = PlainOrder(
                len(order), np.array(clients, np.int64), sizes, np.array(slots, np.int64)
            )
        return messages


def _check_clients(asked: IntArray, answered: IntArray) -> None:
    if not np.array_equal(asked, answered):
        raise MalformedReplyError(
            f"clients {answered.tolist()!s:.60}, asked for {asked.tolist()!s:.60}"
        )
