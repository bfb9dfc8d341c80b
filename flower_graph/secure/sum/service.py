"""Sums of vectors over Flower clients that the server cannot read one by one.

``SecureSum`` is the server's half; the clients' is in ``masking_client.py``. The protocol is in
``flower_graph.secure``; here is only how its messages travel. A sum takes two exchanges: masked
vectors, then shares, and the second also prepares the next sum. ``docs/secure-sum.md`` has an
example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, UnreadableSumError, says_lost
from flower_graph.secure.parties.identity import MOST_BLOCK
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.parties.server import PartyServer
from flower_graph.secure.parties.service import PartySums, Send
from flower_graph.secure.parties.trust import MALICIOUS_SERVER, SEMI_HONEST, TRUST
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.carried import CarriedSum, Keys, as_record, merged, parts_of
from flower_graph.secure.sum.messages import RING, MaskedReply, UnmaskReply, sum_bytes
from flower_graph.secure.sum.server import Skipped, SumResult, SumServer
from flower_graph.wire.arrays import decode_array
from flower_graph.wire.exchange import Exchange, Rejected, Replies
from flower_graph.wire.keys import ARRAYS, MASKED_SUM
from flower_graph.wire.ledger import reply_bytes, setup_bytes

FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Summed:
    """A sum."""

    # [L] float64, the sum of the contributors' vectors, each rounded to the resolution
    values: NDArray[np.float64]
    contributors: NDArray[np.int64]  # Numbers of the clients in it


class SecureSum(CarriedSum):
    """The server's half: asks the clients for masked vectors and adds them up.

    Parameters
    ----------
    exchange : Exchange, optional
        How messages are sent; None for a caller that sends them itself.
    limit : float
        Largest absolute value of a single number; a client with a larger one is left out.
    resolution : float
        Step to which numbers are rounded.
    dropout, corrupt : float
        Shares of the clients that may vanish during a sum, and that may collude with the server.
    timeout : float
        Seconds to wait for replies to one exchange, and for nodes.
    min_nodes : int
        SuperNodes to wait for.
    guard : bool
        Whether words have bits to spare for pads that clients add (`flower_graph.secure.ring`).
    trust : str
        ``semi-honest``, or ``malicious-server``: what clients send is safe from a server that lies,
        too. Then SuperNodes have keys of their own.
    registry : Path or str, optional
        The registry's file, for ``malicious-server``.
    block_cap : int
        Most points that a client may declare for an alignment, where the caller has one.
    """

    def __init__(
        self,
        exchange: Exchange | None,
        *,
        limit: float,
        resolution: float = 2.0**-16,
        dropout: float = 0.3,
        corrupt: float = 0.1,
        timeout: float = 600.0,
        min_nodes: int = 1,
        guard: bool = False,
        trust: str = SEMI_HONEST,
        registry: Path | str | None = None,
        block_cap: int = MOST_BLOCK,
    ) -> None:
        if trust not in TRUST or (registry is None) != (trust == SEMI_HONEST):
            raise ValueError(
                f"trust is {trust!r:.40}, must be {SEMI_HONEST}, or {MALICIOUS_SERVER} with a "
                "registry"
            )
        shares: dict[str, Any] = {"dropout": dropout, "corrupt": corrupt}
        self.parties: PartySums | None = None  # where clients do not trust the server
        self._registry = registry  # read again before each sum
        if registry is not None:
            server = PartyServer(Registry.read(registry), **shares, block_cap=block_cap)
            self.parties = PartySums(server)
            min_nodes = max(server.minimum, min_nodes)
        super().__init__(self.parties or SumServer(**shares))
        self.clients: list[int] = []  # that it was made ready for; none if none is ready
        self.rejected: list[Rejected] = []  # SuperNodes left out of an exchange; for the caller
        self.ring_for = partial(Ring.fit, limit=limit, resolution=resolution, guard=guard)
        self._ring = self.ring_for(2)  # of the newest sum; this refuses impossible numbers
        self._exchange, self._timeout, self.min_nodes = exchange, timeout, min_nodes
        self._enrolled: set[int] = set()

    def sum(
        self, server_round: int, length: int, config: Mapping[str, Any] | None = None
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
        self._send(
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
            Clients that the sum is for, ascending. At most the share ``dropout`` of them may be
            missing from it, else it is skipped.
        """
        if nodes is None:
            assert self._exchange is not None
            nodes = self._exchange.nodes(self.min_nodes, self._timeout)
        there = set(nodes)
        self.renew()
        self._enroll(server_round, there, nodes if isinstance(nodes, Mapping) else None)
        self.begin(server_round, self._send, there)
        if not self.clients:
            self.turn(server_round, self.server.clients, self._send, reveal=False)
        return self.clients

    def requests(self, length: int, meaning: bytes = b"") -> dict[int, dict[str, Any]]:
        """Give the entries with which each SuperNode's ``masked`` masks a vector of this length."""
        ring, masks = RING.to_config(self._ring), self.masks(length, self._ring.word, meaning)
        return {node: merged(*parts, ring) for node, (_, parts) in masks.items()}

    def take(self, node: int, content: RecordDict) -> None:
        """Take a SuperNode's masked vector; ``MalformedReplyError`` if it is not as asked for."""
        arrays = content.array_records.get(ARRAYS)
        if arrays is None or MASKED_SUM not in arrays:
            raise MalformedReplyError(f"the array {ARRAYS}/{MASKED_SUM} is missing")
        total = decode_array(MASKED_SUM, arrays[MASKED_SUM])
        self.take_masked(node, MaskedReply.read(content, total=total))

    def close(self, server_round: int) -> Summed | Skipped:
        """Take the masks away, in an exchange that also makes the next sum ready."""
        number, ring = self.number, self._ring
        self.sign(server_round, self._send)
        self.turn(server_round, self.server.clients, self._send)
        return _read_sum(ring, self.result(number))

    # What these do with ``malicious-server`` besides; with ``semi-honest`` it is nothing

    def renew(self) -> None:
        """Read the registry again, before anybody enrols."""
        if self.parties is not None and self._registry is not None:
            self.parties.renew(self._registry)

    def begin(self, server_round: int, send: Send, nodes: Collection[int]) -> bool:
        """Let parties that have joined agree with all others on who is there; say if they did."""
        if self.parties is None:
            return False
        begun = self.parties.begin(server_round, send, nodes)
        self._enrolled &= set(self.parties.server.homes.values())
        self.clients = [] if begun else self.clients
        return begun

    def sign(self, server_round: int, send: Send) -> None:
        """Let those whose masked vectors came sign who they are, before any mask is opened."""
        if self.parties is not None:
            self.parties.sign(self.number, server_round, send)

    def turn(
        self,
        server_round: int,
        following: Iterable[int] | None,
        send: Callable[..., Replies[None]],
        *,
        reveal: bool = True,
        message_type: str = "train.sum_unmask",
    ) -> list[Rejected]:
        """Unmask the newest sum and make the next ready for some clients, in one exchange.

        Parameters
        ----------
        server_round : int
            The caller's round.
        following : iterable of int, optional
            Clients that the next sum is for; None if there is to be none yet.
        send : callable
            Sends the messages, as ``Session.send`` does.
        reveal : bool
            Whether to unmask the newest sum.
        message_type : str
            Of the messages, which ``SumClient.turn`` answers.

        Returns
        -------
        list of Rejected
            SuperNodes without a usable answer.
        """

        def parts(requests: Mapping[int, Any]) -> dict[int, tuple[Any, ...]]:
            return {node: parts_of(request) for node, request in requests.items()}

        unmask = parts(self.server.unmask_requests(self.number)) if reveal else {}
        prepare: dict[int, tuple[Any, ...]] = {}
        self.clients = [] if following is None else list(following)
        if following is not None:
            self.number += 1
            self._ring = self.ring_for(max(1, len(self.clients)))
            prepare = parts(self.server.open_round(self.number, self.clients))
        both = {node: (*unmask.get(node, ()), *prepare.get(node, ())) for node in unmask | prepare}

        def read(node: int, content: RecordDict) -> None:
            if node in unmask:
                self.server.take(node, UnmaskReply.read(content))
            if node in prepare:
                came: list[Any] = [kind.read(content) for kind in self.server.prepared]
                self.server.take(node, *came)

        if not both:
            return []
        replies = send(
            {node: as_record(*messages) for node, messages in both.items()},
            server_round,
            read,
            message_type=message_type,
            max_reply_bytes=sum_bytes(
                (first for first, *_ in unmask.values()), (first for first, *_ in prepare.values())
            ),
        )
        return replies.rejected

    def forget(self, node: int) -> None:
        """Strike a SuperNode off that has lost its keys; it is asked for new ones."""
        self.server.forget(node)
        self._enrolled.discard(node)

    def _enroll(
        self,
        server_round: int,
        nodes: set[int],
        hosted: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        """Ask SuperNodes that are new for their clients, and forget those that are gone."""
        # One that is back under another id, with its keys, takes the place that it had.
        gone = self._enrolled - nodes
        action, question, kind = self.server.enrolment
        request = question(self.run_id).to_record()
        requests = dict.fromkeys(sorted(nodes - self._enrolled), request)

        def read(node: int, content: RecordDict) -> None:
            reply: Keys = kind.read(content)
            known = reply.clients if hosted is None else list(hosted[node])
            if (strange := np.setdiff1d(reply.clients, known)).size:
                raise MalformedReplyError(f"client {strange[0]} is not one that it enrolled with")
            homes = self.server.homes
            before = {homes[c] for c in reply.clients.tolist() if c in homes} & gone
            if len(before) == 1 and self.server.knows(old := next(iter(before)), reply):
                self.server.move(old, node)
            else:
                self.server.enroll(node, reply, before)
            gone.difference_update(before)
            self._enrolled.add(node)

        if requests:
            self._send(
                requests,
                server_round,
                read,
                message_type=f"train.{action}",
                max_reply_bytes=setup_bytes(),
            )
        for old in gone:
            self.server.forget(old)
        self._enrolled &= nodes

    def _send(
        self,
        requests: Mapping[int, RecordDict],
        server_round: int,
        read: Any,
        *,
        message_type: str,
        max_reply_bytes: int,
    ) -> Replies[None]:
        assert self._exchange is not None
        replies: Replies[None] = self._exchange.send(
            requests,
            message_type=message_type,
            server_round=server_round,
            timeout=self._timeout,
            read=read,
            max_reply_bytes=max_reply_bytes,
        )
        self.rejected += replies.rejected
        for entry in replies.rejected:
            if says_lost(entry.reason):
                self.forget(entry.node_id)
        return replies


def _read_sum(ring: Ring, result: SumResult | Skipped) -> Summed | Skipped:
    """Read a sum's words as numbers."""
    if isinstance(result, Skipped):
        return result
    try:
        values = ring.decode(result.total)
        ring.check_sums(values, result.contributors.size)
    except UnreadableSumError as error:  # nobody can say whose words were wrong
        return Skipped(f"a client's part of the sum was not as agreed: {error}")
    return Summed(values, result.contributors)
