"""The aligning server's side of PPFL-GNN: who is there, and what each client last sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from flower_graph.errors import MalformedReplyError, NoClientsError
from flower_graph.exchange import Rejected, Replies
from flower_graph.gathering import no_content
from flower_graph.open_session import OpenSession
from flower_graph.public_nodes import FloatArray, IntArray
from flower_graph.records.public_nodes import PublicHello, PublicReply, PublicRequest
from flower_graph.rng import generator


class PublicSession(OpenSession):
    """One run's exchanges over a grid.

    Parameters
    ----------
    participation : float
        Share of the SuperNodes asked each round, above 0 and at most 1.
    min_nodes : int
        SuperNodes to wait for before a round.
    seed : int
        Seed of the draw of SuperNodes.
    """

    def __init__(self, *, participation: float, min_nodes: int, seed: int) -> None:
        super().__init__()
        if not 0 < participation <= 1:
            raise ValueError(f"participation: {participation} is not above 0 and at most 1")
        if min_nodes < 1:
            raise ValueError(f"min_nodes: {min_nodes} is not at least 1")
        self.participation, self.min_nodes, self.seed = participation, min_nodes, seed
        self.hosted: dict[int, PublicHello] = {}  # by SuperNode
        self.ids: dict[int, IntArray] = {}  # of each client's public nodes
        self.dimension = 0  # of all embeddings; 0 before anybody is there

    def plan(self, server_round: int) -> tuple[dict[int, list[int]], list[Rejected]]:
        """Wait for SuperNodes, ask new ones who is there, and draw the round's.

        Returns
        -------
        tuple
            Clients to ask at each SuperNode; SuperNodes and clients that cannot take part.

        Raises
        ------
        NoClientsError
            If nobody can take part.
        """
        connected = self.exchange.nodes(self.min_nodes, self.timeout)
        rejected = self._enrol(server_round, connected)
        there = [node for node in connected if node in self.hosted]
        if not there:
            reasons = "; ".join(sorted({entry.reason for entry in rejected}))
            raise NoClientsError(f"no SuperNode hosts a client with public nodes: {reasons}")
        count = max(1, round(self.participation * len(there)))
        # In the order of their clients: ids of SuperNodes differ from run to run.
        there.sort(key=lambda node: min(self.hosted[node].clients))
        chance = generator(self.seed, "participants", server_round)
        drawn = sorted(torch.randperm(len(there), generator=chance)[:count].tolist())
        return {there[place]: self.hosted[there[place]].clients for place in drawn}, rejected

    def send(
        self, server_round: int, requests: Mapping[int, PublicRequest]
    ) -> Replies[PublicReply]:
        """Send the round's messages and gather what is usable of the replies."""
        return self.exchange.send(
            {node: request.to_record() for node, request in requests.items()},
            server_round=server_round,
            timeout=self.timeout,
            read=lambda node, content: PublicReply.from_record(content, requests[node]),
        )

    def read(
        self, requests: Mapping[int, PublicRequest], messages: Iterable[Message]
    ) -> Replies[PublicReply]:
        """Read replies that Flower's own round loop gathered."""
        replies: Replies[PublicReply] = Replies()
        for message in messages:
            node = message.metadata.src_node_id
            try:
                if (said := no_content(message)) is not None:
                    raise MalformedReplyError(said)
                if node not in requests:
                    raise MalformedReplyError("it was not asked")
                replies.values[node] = PublicReply.from_record(message.content, requests[node])
            except MalformedReplyError as error:
                replies.rejected.append(Rejected(node, str(error)))
        return replies

    def _enrol(self, server_round: int, connected: Sequence[int]) -> list[Rejected]:
        """Ask SuperNodes that are new who is there; keep those whose clients fit."""
        new = [node for node in connected if node not in self.hosted]
        if not new:
            return []
        replies = self.exchange.send(
            {node: RecordDict() for node in new},
            message_type="query",
            server_round=server_round,
            timeout=self.timeout,
            read=lambda _, content: PublicHello.from_record(content),
        )
        if not self.dimension:
            counts = Counter(d for hello in replies.values.values() for d in hello.dimensions)
            self.dimension = max(counts, key=lambda d: (counts[d], -d), default=0)
        rejected = list(replies.rejected)
        for node, hello in replies.values.items():
            try:
                self._admit(node, hello, connected)
            except MalformedReplyError as error:
                rejected.append(Rejected(node, str(error)))
        return rejected

    def _admit(self, node: int, hello: PublicHello, connected: Sequence[int]) -> None:
        """Note a SuperNode's clients; it may have come back under another id."""
        for client, nodes in zip(hello.clients, hello.nodes, strict=True):
            # What it sent, and what waits for it, is by these nodes in this order.
            if not np.array_equal(self.ids.get(client, nodes), nodes):
                raise MalformedReplyError(
                    f"client {client} has other public nodes than before; the ids must stay the "
                    "same during a run"
                )
        for client, dimension in zip(hello.clients, hello.dimensions, strict=True):
            if dimension != self.dimension:
                raise MalformedReplyError(
                    f"client {client} has embeddings of {dimension} numbers, the others of "
                    f"{self.dimension}; all must have the same"
                )
        for other, known in list(self.hosted.items()):
            shared = sorted(set(known.clients) & set(hello.clients))
            if shared and other in connected:
                raise MalformedReplyError(f"client {shared[0]} is at node {other} already")
            if shared:
                del self.hosted[other]
        self.hosted[node] = hello
        self.ids |= dict(zip(hello.clients, hello.nodes, strict=True))


class PublicBook:
    """The last embeddings of every client, and the means that wait for it."""

    def __init__(self) -> None:
        self.embeddings: dict[int, FloatArray] = {}  # [p, d] by client
        self.targets: dict[int, FloatArray] = {}  # [p, d] by client

    def stacked(
        self, clients: Sequence[int], ids: Mapping[int, IntArray]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Lay the embeddings of some clients over each other, node by node.

        Parameters
        ----------
        clients : sequence of int
            Which, ``m`` of them.
        ids : mapping
            Ids of each client's public nodes, int64 ``[p]``.

        Returns
        -------
        tuple of Tensor
            ``[m, u, d]`` embeddings, zeros where a client lacks a node; bool ``[m, u]`` who has
            which; and for each client where its rows are, ``[p]``.
        """
        every = np.unique(np.concatenate([ids[client] for client in clients]))
        slots = [torch.from_numpy(np.searchsorted(every, ids[client])) for client in clients]
        width = self.embeddings[clients[0]].shape[1]
        x = torch.zeros(len(clients), every.size, width)
        held = torch.zeros(len(clients), every.size, dtype=torch.bool)
        for place, (client, slot) in enumerate(zip(clients, slots, strict=True)):
            x[place, slot] = torch.from_numpy(self.embeddings[client])
            held[place, slot] = True
        return x, held, slots


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of what is a number; NaN where nothing is."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
