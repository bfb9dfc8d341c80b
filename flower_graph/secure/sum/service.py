"""Sums of Flower clients' vectors; the server cannot read a single vector.

``SecureSum`` is the server's half; the clients' is ``flower_graph.secure.client``. This module is
only the transport of the protocol's messages. ``docs/secure-sum.md`` has an example. A sum takes
two exchanges: masked vectors, then shares, and the second also prepares the next sum. All numbers
here are of clients, whichever SuperNode takes part for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, UnreadableSumError, refuse_if
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import (
    RING,
    SECURE_SUM,
    KeyReply,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    SumTerms,
    UnmaskReply,
    UnmaskRequest,
    sum_bytes,
)
from flower_graph.secure.sum.round import Cause, Reason, Skipped, SumResult
from flower_graph.secure.sum.server import Send, SumServer
from flower_graph.wire.arrays import Config, Scalar, decode_array
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.codec import Message
from flower_graph.wire.exchange import Exchange, Rejected, Replies, sorted_out
from flower_graph.wire.keys import ARRAYS, CONFIG, MASKED_SUM, METRICS
from flower_graph.wire.ledger import reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
REMEDY = "if they have, one of them lies: use a registry (PartySums)"
T = TypeVar("T")


@dataclass(frozen=True)
class Summed:
    """A sum."""

    # [L] float64, the sum of the contributors' vectors, each rounded to the resolution
    values: NDArray[np.float64]
    contributors: NDArray[np.int64]  # Numbers of the clients in it


def as_record(*parts: Message | Mapping[str, Scalar]) -> RecordDict:
    """Write messages and entries as one message."""
    entries: Config = {}
    for part in parts:
        entries |= part.to_config() if isinstance(part, Message) else part
    return RecordDict({CONFIG: ConfigRecord({**entries})})


def entries_of(content: RecordDict) -> dict[str, object]:
    """Return a reply's entries: the adaptor puts numbers and other values into two records."""
    config = content.config_records.get(CONFIG, ConfigRecord())
    return {**content.metric_records.get(METRICS, {}), **config}


class SecureSum:
    """The server's half: asks the clients for masked vectors and adds them up.

    Parameters
    ----------
    exchange : Exchange or callable
        How messages are sent. With a callable, such as ``Session.send``, the caller enrols
        SuperNodes and drives the stages: `ready`, `masks`, `reveal`, `result`.
    limit : float
        Largest absolute value of a single number; a client with a larger one is left out.
    resolution : float
        Step to which numbers are rounded.
    server : SumServer, optional
        The protocol; by default a ``SumServer``, which clients trust to follow the protocol.
        ``PartySums`` is for SuperNodes with keys of their own, which do not.
    timeout : float
        Seconds to wait for replies to one exchange, and for nodes.
    min_nodes : int
        SuperNodes to wait for.
    guard : bool
        Whether words have bits to spare for pads that clients add (`flower_graph.secure.ring`).
    first : int
        Number of the first sum.
    """

    unmask = "train.sum_unmask"  # type of the messages that unmask one sum and prepare the next

    def __init__(
        self,
        exchange: Exchange | Send,
        *,
        limit: float,
        resolution: float = 2.0**-16,
        server: SumServer | None = None,
        timeout: float = 600.0,
        min_nodes: int = 1,
        guard: bool = False,
        first: int = 0,
    ) -> None:
        self.server = server = SumServer() if server is None else server
        self._exchange, self._timeout = exchange, timeout
        self.number = first - 1  # of the newest sum
        self._unmasked = self.number  # of the sum that was unmasked last
        self.clients: list[int] = []  # that it was made ready for; none if none is ready
        self._limit = limit
        self.ring_for = partial(Ring.fit, limit=limit, resolution=resolution, guard=guard)
        self.ring = self.ring_for(2)  # of the newest sum; this refuses impossible numbers
        self.rejected: list[Rejected] = []  # SuperNodes left out of an exchange; for the caller
        refuse_if(min_nodes < 1, f"min_nodes: {min_nodes} is not at least 1", ValueError)
        self._min_nodes = max(server.fewest_nodes, min_nodes)
        self._enrolled: set[int] = set()

    def sum(
        self, server_round: int, length: int, config: Mapping[str, Scalar] | None = None
    ) -> Summed | Skipped:
        """Add up one vector of each client.

        Parameters
        ----------
        server_round : int
            The caller's round, for messages and logs.
        length : int
            Numbers of a vector.
        config : Mapping or None
            Entries for the clients' ``vectors``.

        Returns
        -------
        Summed or Skipped
            The sum, or why there is none. SuperNodes that joined since the last sum was made
            ready take part from the next one on.
        """
        self.prepare(server_round)
        requests = {
            node: as_record(entries, config or {})
            for node, entries in self.requests(length).items()
        }
        limit = reply_bytes(length, len(self.clients))
        self._ask(
            requests, server_round, self.take, message_type="train.sum_mask", max_reply_bytes=limit
        )
        return self.close(server_round)

    # The same in four steps, for messages of the caller's own that carry the masked vectors

    def prepare(
        self, server_round: int, nodes: Iterable[int] | Mapping[int, Iterable[int]] | None = None
    ) -> list[int]:
        """Make a sum ready, where the last one has not.

        Parameters
        ----------
        server_round : int
            The caller's round.
        nodes : iterable of int, or mapping of int to iterable of int, optional
            SuperNodes that may take part; by default all that are connected. A mapping has the
            clients of each: one that brings others is refused.

        Returns
        -------
        list of int
            Clients that the sum is for, ascending. At most the server's share ``dropout`` of them
            may be missing from it, else it is skipped.
        """
        if nodes is None:
            assert isinstance(self._exchange, Exchange)
            nodes = self._exchange.nodes(self._min_nodes, self._timeout)
        present = set(nodes)
        self.server.renew()
        self._enroll(server_round, present, nodes if isinstance(nodes, Mapping) else None)
        self.begin(server_round, present)
        self._enrolled &= set(self.server.homes.values())
        if not self.clients:
            self.ready(server_round, self.server.clients)
        return self.clients

    def requests(
        self,
        length: int,
        purpose: str = SECURE_SUM,
        detail: bytes = b"",
        *,
        padded: bool = False,
    ) -> dict[int, Config]:
        """Return the entries that each SuperNode's ``masked`` needs for a vector of this length."""
        terms = SumTerms(purpose, self.ring, detail, padded)
        ring, masks = RING.to_config(self.ring), self.masks(length, self.ring.word, terms)
        return {node: mask.to_config() | ring for node, mask in masks.items()}

    def take(self, node: int, content: RecordDict) -> None:
        """Read a SuperNode's masked sum; ``MalformedReplyError`` if it is not as asked for."""
        arrays = content.array_records.get(ARRAYS)
        if arrays is None or MASKED_SUM not in arrays:
            raise MalformedReplyError(f"the array {ARRAYS}/{MASKED_SUM} is missing")
        total = decode_array(MASKED_SUM, arrays[MASKED_SUM])
        self.server.take(node, MaskedReply.read(content, total=total))

    def close(self, server_round: int) -> Summed | Skipped:
        """Remove the masks, in an exchange that also makes the next sum ready."""
        ring, result = self.ring, self.close_padded(server_round)
        if isinstance(result, Skipped):
            return result
        try:
            values = ring.decode(result.total)
            ring.check_sums(values, result.contributors.size)
        except UnreadableSumError as error:  # nobody can say whose words were wrong
            text = f"a client's part of the sum was not as agreed: {error}"
            return Skipped(Reason(Cause.SKIPPED, text))
        return Summed(values, result.contributors)

    def close_padded(self, server_round: int) -> SumResult | Skipped:
        """Remove the masks alone: of a sum under pads, the server has the words."""
        self.reveal(server_round, self.server.clients)
        return self.result()

    def take_rejected(self) -> list[Rejected]:
        """Return the SuperNodes left out of an exchange since the last call."""
        rejected, self.rejected = self.rejected, []
        return rejected

    def forget(self, node: int) -> None:
        """Remove a SuperNode that has lost its keys; it is asked for new ones."""
        self.server.forget(node)
        self._enrolled.discard(node)

    def _enroll(
        self,
        server_round: int,
        nodes: set[int],
        hosted: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        # One that is back under another id, with its keys, takes the place that it had.
        gone = self._enrolled - nodes
        request = self.server.question().to_record()
        requests = dict.fromkeys(sorted(nodes - self._enrolled), request)

        def read(node: int, content: RecordDict) -> KeyReply:
            reply = KeyReply.read(content)
            expected = reply.clients if hosted is None else list(hosted[node])
            if (strange := np.setdiff1d(reply.clients, expected)).size:
                raise MalformedReplyError(f"client {strange[0]} is not one that it enrolled with")
            self.server.check_keys(node, reply)
            return reply

        if requests:
            replies = self._ask(
                requests,
                server_round,
                read,
                message_type="train.sum_enroll",
                max_reply_bytes=setup_bytes(),
            )
            self._admit(replies.values, gone)
        for old in gone:
            self.server.forget(old)
        self._enrolled &= nodes

    def _admit(self, answers: Mapping[int, KeyReply], gone: set[int]) -> None:
        """Enrol SuperNodes that have shown their keys, except those that claim others' clients."""
        server, homes = self.server, self.server.homes
        claims: dict[int, list[int]] = {n: keys.clients.tolist() for n, keys in answers.items()}
        before = {n: {homes[c] for c in local if c in homes} & gone for n, local in claims.items()}
        # Whoever has the keys of one that is gone is that one
        back = {
            node: next(iter(old))
            for node, old in before.items()
            if len(old) == 1 and server.knows(next(iter(old)), answers[node])
        }
        holders = {client: node for client, node in homes.items() if node not in gone}
        holders |= {client: node for node in back for client in claims[node]}
        refused = sorted_out(claims, holders, is_first=not self._enrolled, remedy=REMEDY)
        for node in sorted(answers.keys() - refused.keys()):
            try:
                if node in back:
                    server.move(back[node], node)
                else:
                    server.enroll(node, answers[node], before[node])
            except MalformedReplyError as error:
                refused[node] = str(error)
            else:
                gone -= before[node]
                self._enrolled.add(node)
        for node, reason in refused.items():
            LOG.warning("node %d takes no part in the sum: %s", node, reason)
            self.rejected.append(Rejected(node, reason))

    # The stages, over messages that a caller may send

    def at(self, clients: Iterable[int], nodes: Collection[int]) -> list[int]:
        """Return the clients among `clients` that these SuperNodes host."""
        homes = self.server.homes
        return [client for client in clients if homes.get(client) in nodes]

    def begin(self, server_round: int, nodes: Collection[int]) -> bool:
        """Have clients agree on the members, if need be; return whether they began anew."""
        begun = self.server.begin(server_round, self._ask, nodes, self._limit)
        if begun:
            self.give_up()
        return begun

    def give_up(self) -> None:
        """Give up a prepared sum, because it needs other members."""
        self.clients = []

    def ready(self, server_round: int, clients: Iterable[int]) -> list[Rejected]:
        """Prepare a sum for some clients, in an exchange of its own; return silent SuperNodes."""
        return self._unmask_and_prepare(server_round, list(clients), {})

    def masks(self, length: int, word: int, terms: SumTerms) -> dict[int, MaskRequest]:
        """Ask for masked vectors: of each SuperNode the clients that may contribute."""
        return self.server.mask_requests(self.number, length, word, terms)

    def reveal(self, server_round: int, following: Iterable[int] | None) -> list[Rejected]:
        """Ask for the shares of the newest sum and prepare the next, in one exchange.

        ``following`` are the clients of the next sum; None: no next sum yet. Returns the SuperNodes
        without a usable answer.
        """
        self._unmasked = self.number
        self.server.sign(self.number, server_round, self._ask)
        unmask = self.server.unmask_requests(self.number)
        return self._unmask_and_prepare(
            server_round, None if following is None else list(following), unmask
        )

    def result(self) -> SumResult | Skipped:
        return self.server.result(self._unmasked)

    def _unmask_and_prepare(
        self,
        server_round: int,
        following: list[int] | None,
        unmask: Mapping[int, UnmaskRequest],
    ) -> list[Rejected]:
        prepare: dict[int, PrepareRequest] = {}
        self.clients = following or []
        if following is not None:
            self.number += 1
            self.ring = self.ring_for(max(1, len(following)))
            prepare = self.server.open_round(self.number, following)

        def read(node: int, content: RecordDict) -> None:
            if node in unmask:
                self.server.take(node, UnmaskReply.read(content))
            if node in prepare:
                self.server.take(node, PrepareReply.read(content))

        nodes = {**unmask, **prepare}
        if not nodes:
            return []
        replies = self._ask(
            {
                node: as_record(*(asked[node] for asked in (unmask, prepare) if node in asked))
                for node in nodes
            },
            server_round,
            read,
            message_type=self.unmask,
            max_reply_bytes=sum_bytes(unmask.values(), prepare.values()),
        )
        return replies.rejected

    # Any: further arguments of ``Exchange.send``
    def _ask(
        self,
        requests: Mapping[int, RecordDict],
        server_round: int,
        read: Callable[[int, RecordDict], T],
        max_reply_bytes: int,
        **how: Any,
    ) -> Replies[T]:
        most = max_reply_bytes
        if not isinstance(self._exchange, Exchange):
            return self._exchange(requests, server_round, read, max_reply_bytes=most, **how)
        replies = self._exchange.send(
            requests,
            server_round=server_round,
            timeout=self._timeout,
            read=read,
            max_reply_bytes=most,
            **how,
        )
        self.rejected += replies.rejected
        for entry in replies.rejected:
            if entry.kind is Kind.STATE_LOST:
                self.forget(entry.node_id)
        return replies
