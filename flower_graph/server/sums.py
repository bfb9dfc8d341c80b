"""Sums of Flower clients' vectors; the server cannot read a single vector.

``SecureSum`` is the server's half, ``SecureSumClient`` the clients'. This module is only the
transport of the protocol's messages. ``docs/secure-sum.md`` has an example. A sum takes two
exchanges: masked vectors, then shares, and the second also prepares the next sum. All numbers here
are of clients, whichever SuperNode takes part for them.
"""

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
    SECURE_SUM,
    KeyReply,
    ListReply,
    MaskedReply,
    PrepareReply,
    PrepareRequest,
    SumTerms,
    UnmaskReply,
    UnmaskRequest,
    sum_bytes,
)
from flower_graph.secure.sum.server import Cause, Reason, Skipped, SumResult, SumRound, SumServer
from flower_graph.server.session import Membership
from flower_graph.wire.arrays import Config, Scalar, read_array
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.codec import Message, Resume, entries_of
from flower_graph.wire.exchange import Exchange, Rejected, Replies
from flower_graph.wire.keys import ARRAYS, CONFIG, MASKED_SUM
from flower_graph.wire.ledger import reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=Message)
# As ``Session.send``. Any: what is read of a reply
Send = Callable[..., Replies[Any]]


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


class SumMembership(Membership):
    """The clients of each SuperNode, and their keys of secure sums."""

    needs_query, message_type = True, "train.sum_enroll"

    def __init__(self, sums: SumServer) -> None:
        super().__init__()
        self.sums = sums
        # The clients of each SuperNode, if the caller has enrolled them: it may bring no others
        self.hosted: Mapping[int, Iterable[int]] | None = None

    def question(self, resume: Resume) -> RecordDict:
        return self.sums.question().to_record()

    def read(self, node: int, content: RecordDict) -> KeyReply:
        reply = KeyReply.from_config(entries_of(content))
        expected = reply.clients if self.hosted is None else list(self.hosted[node])
        if (strange := np.setdiff1d(reply.clients, expected)).size:
            raise MalformedReplyError(f"client {strange[0]} is not one that it enrolled with")
        self.sums.check_keys(node, reply)
        reply.clients = np.sort(reply.clients)
        return reply

    def is_back(self, olds: Collection[int], answer: KeyReply) -> bool:
        return len(olds) == 1 and all(self.sums.knows(old, answer) for old in olds)

    def replaced(self, old: int, node: int, answer: KeyReply) -> None:
        """Rename a SuperNode that is back with its keys; forget one without."""
        if self.sums.knows(old, answer):
            self.move(old, node)
        else:
            self.forget(old)

    def enrolled(self, node: int, answer: KeyReply) -> None:
        if self.sums.homes.get(answer.clients[0]) != node:
            self.sums.enroll(node, answer)

    def move(self, old: int, node: int) -> None:
        self.sums.move(old, node)
        super().move(old, node)

    def forget(self, node: int) -> None:
        self.sums.forget(node)
        super().forget(node)


class SecureSum:
    """The server's half: asks the clients for masked vectors and adds them up.

    Parameters
    ----------
    exchange : Exchange or callable
        How messages are sent. With a callable, such as ``Session.send``, the caller enrols
        SuperNodes in ``members`` and drives the stages: `ready`, `requests`, `reveal`, `result`.
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
    members : SumMembership, optional
        The SuperNodes with their keys, if the caller enrols them; ``server`` is theirs then.
    """

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
        members: SumMembership | None = None,
    ) -> None:
        self.members = members or SumMembership(server or SumServer())
        self.server = server = self.members.sums
        self._exchange, self._timeout = exchange, timeout
        send = exchange if callable(exchange) else partial(exchange.send, timeout=timeout)
        self._send: Send = send
        self.number = -1  # of the newest sum
        self.round: SumRound  # of it, from when it is made ready
        self._done: SumRound  # that was unmasked last
        self.clients: list[int] = []  # that it was made ready for; none if none is ready
        self._limit = limit
        self.ring_for = partial(Ring.fit, limit=limit, resolution=resolution, guard=guard)
        self.ring = self.ring_for(2)  # of the newest sum; this refuses impossible numbers
        self.rejected: list[Rejected] = []  # SuperNodes left out of an exchange; for the caller
        refuse_if(min_nodes < 1, f"min_nodes: {min_nodes} is not at least 1", ValueError)
        self._min_nodes = max(server.fewest_nodes, min_nodes)

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
        members, exchange, timeout = self.members, self._exchange, self._timeout
        assert isinstance(exchange, Exchange)
        if nodes is None:
            nodes = exchange.nodes(self._min_nodes, timeout)
        present = set(nodes)
        self.server.renew()
        members.hosted = nodes if isinstance(nodes, Mapping) else None
        self.rejected += members.ask(exchange, sorted(present), server_round, timeout)
        for gone in members.clients.keys() - present:
            members.forget(gone)
        self.begin(server_round, present)
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
        ring = self.ring.to_config()
        masks = self.round.mask_requests(length, self.ring.word, terms)
        return {node: mask.to_config() | ring for node, mask in masks.items()}

    def take(
        self, node: int, content: RecordDict, record: str = ARRAYS, array: str = MASKED_SUM
    ) -> list[int]:
        """Read a SuperNode's masked sum, and return its clients that are in it.

        ``MalformedReplyError`` if it is not as asked for.
        """
        shape = self.round.total.shape
        total = read_array(content, record, array, shape, limit=None, must_be_finite=False)
        reply = MaskedReply.read(content, total=total)
        self.round.take(node, reply)
        return list(reply.clients.tolist())

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
        rejected, self.rejected = self.rejected, []
        return rejected

    def forget(self, node: int) -> None:
        """Remove a SuperNode that has lost its keys; it is asked for new ones."""
        if node in self.members.clients:
            self.members.forget(node)

    # The stages, over messages that a caller may send

    def at(self, clients: Iterable[int], nodes: Collection[int]) -> list[int]:
        """Return the clients among `clients` that these SuperNodes host."""
        homes = self.server.homes
        return [client for client in clients if homes.get(client) in nodes]

    def begin(self, server_round: int, nodes: Collection[int]) -> bool:
        """Have clients agree on the members, if need be; return whether they began anew."""
        begun = self.server.begin(server_round, self.tell, nodes, self._limit)
        # Parties without a binding for the next epoch are asked again.
        for node in self.members.clients.keys() - self.server.homes.values():
            self.members.forget(node)
        if begun:
            self.give_up()
        return begun

    def give_up(self) -> None:
        self.clients = []

    def ready(self, server_round: int, clients: Iterable[int]) -> list[Rejected]:
        """Prepare a sum for some clients, in an exchange of its own; return silent SuperNodes."""
        return self._unmask_and_prepare(server_round, list(clients), {})

    def reveal(self, server_round: int, following: Iterable[int] | None) -> list[Rejected]:
        """Ask for the shares of the newest sum and prepare the next, in one exchange.

        ``following`` are the clients of the next sum; None: no next sum yet. Returns the SuperNodes
        without a usable answer.
        """
        done = self._done = self.round
        # Parties that do not trust the server settle and sign the list of members
        self.tell(server_round, "sum_list", done.list_requests(), ListReply, done.take)
        return self._unmask_and_prepare(server_round, following, done.unmask_requests())

    def result(self) -> SumResult | Skipped:
        return self._done.result()

    def _unmask_and_prepare(
        self,
        server_round: int,
        following: Iterable[int] | None,
        unmask: Mapping[int, UnmaskRequest],
    ) -> list[Rejected]:
        prepare = dict[int, PrepareRequest]()
        self.clients = list(following or ())
        if following is not None:
            self.number += 1
            self.ring = self.ring_for(max(1, len(self.clients)))
            self.round = self.server.open_round(self.number, self.clients)
            prepare = self.round.prepare_requests()
        shared = self._done.partners.shape[1] if unmask else 0
        prepared = self.round.partners.shape[1] if prepare else 0

        def read(node: int, content: RecordDict) -> None:
            if node in unmask:
                self._done.take(node, UnmaskReply.read(content, k=shared))
            if node in prepare:
                self.round.take(node, PrepareReply.read(content, k=prepared))

        requests = {
            node: as_record(*(asked[node] for asked in (unmask, prepare) if node in asked))
            for node in {**unmask, **prepare}
        }
        if not requests:
            return []
        most, kind = sum_bytes(shared, prepared), "train.sum_unmask"
        replies = self._ask(requests, server_round, read, message_type=kind, max_reply_bytes=most)
        return replies.rejected

    def tell(
        self,
        server_round: int,
        action: str,
        requests: Mapping[int, Message],
        kind: type[M],
        take: Callable[[int, M], object],
    ) -> Replies[object]:
        """Ask SuperNodes for replies of one kind, without vectors; each is taken as it comes."""
        if not requests:
            return Replies()
        return self._ask(
            {node: request.to_record() for node, request in requests.items()},
            server_round,
            lambda node, content: take(node, kind.read(content)),
            message_type=f"train.{action}",
            max_reply_bytes=setup_bytes(),
        )

    def _ask(
        self,
        requests: Mapping[int, RecordDict],
        server_round: int,
        read: Callable[[int, RecordDict], T],
        *,
        message_type: str,
        max_reply_bytes: int,
    ) -> Replies[T]:
        replies = self._send(
            requests,
            message_type=message_type,
            server_round=server_round,
            read=read,
            max_reply_bytes=max_reply_bytes,
        )
        if isinstance(self._exchange, Exchange):
            self.rejected += replies.rejected
            for entry in replies.rejected:
                if entry.kind is Kind.STATE_LOST:
                    self.forget(entry.node_id)
        return replies
