"""The aligning server's side of PPFL-GNN: who is there, and what each client last sent."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from flower_graph.errors import MalformedReplyError, NoClientsError, says_lost
from flower_graph.exchange import Rejected, Replies
from flower_graph.gathering import hosted_twice, no_content
from flower_graph.open_session import OpenSession
from flower_graph.participation import NOT_DRAWN, Participation, roll_call
from flower_graph.public_nodes import FloatArray, IntArray
from flower_graph.records.keys import CHECKPOINT, CONFIG, RUN_TOKEN, SERVER_ROUND
from flower_graph.records.public_nodes import PublicHello, PublicReply, PublicRequest
from flower_graph.records.resume import Resume, read_not_saved
from flower_graph.reply_limits import reply_bytes, setup_bytes
from flower_graph.rng import generator

LOG = logging.getLogger(__name__)


def public_bytes(requests: Iterable[PublicRequest], numbers: int = 0) -> int:
    """Return the most bytes of a reply to one of these requests, with so many numbers besides."""
    found = list(requests)
    rows = max((sum(ids.size for ids in one.nodes) * one.dimension for one in found), default=0)
    clients = max((len(one.clients) for one in found), default=0)
    return reply_bytes(rows + numbers, clients)


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

    not_asked = NOT_DRAWN  # why a client that is there may not have been asked

    def __init__(self, *, participation: float, min_nodes: int, seed: int) -> None:
        super().__init__()
        if not 0 < participation <= 1:
            raise ValueError(f"participation: {participation} is not above 0 and at most 1")
        if min_nodes < 1:
            raise ValueError(f"min_nodes: {min_nodes} is not at least 1")
        self.participation, self.min_nodes, self.seed = participation, min_nodes, seed
        self.hosted: dict[int, PublicHello] = {}  # by SuperNode
        self.ids: dict[int, IntArray] = {}  # of each client's public nodes
        self.connected: list[int] = []  # SuperNodes at the beginning of the round
        self.resume = Resume()  # what clients are told of the run, and where it goes on from
        self.begun: set[int] = set()  # clients that have answered a round
        self.anew: set[int] = set()  # of these, those that have lost their state since
        self._lost: set[int] = set()  # SuperNodes that said so
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
        connected = self.connected = self.exchange.nodes(self.min_nodes, self.timeout)
        for node in self._lost:
            self.hosted.pop(node, None)  # asked again who it is
        self._lost.clear()
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
        return self._noted(
            self.exchange.send(
                {node: request.to_record() for node, request in requests.items()},
                server_round=server_round,
                timeout=self.timeout,
                read=lambda node, content: PublicReply.from_record(content, requests[node]),
                max_reply_bytes=public_bytes(requests.values()),
            )
        )

    def save_others(self, server_round: int, saved: Mapping[int, str]) -> dict[int, str]:
        """Let SuperNodes save a round, but for those that have with its request.

        Parameters
        ----------
        server_round : int
            The round.
        saved : mapping
            Those that answered it, and why they could not save; empty where they could.

        Returns
        -------
        dict
            SuperNodes that have not saved it, with the reason.
        """
        left = [n for n in self.exchange.grid.get_node_ids() if n in self.hosted.keys() - saved]
        order: dict[str, Any] = {
            CHECKPOINT: True,
            SERVER_ROUND: server_round,
            RUN_TOKEN: self.resume.run,
        }
        replies = self.exchange.send(
            dict.fromkeys(left, RecordDict({CONFIG: ConfigRecord(order)})),
            message_type="query",
            server_round=server_round,
            timeout=self.timeout,
            read=lambda _, content: read_not_saved(content),
            max_reply_bytes=setup_bytes(),
        )
        missing = {node: why for node, why in {**saved, **replies.values}.items() if why}
        return missing | {entry.node_id: entry.reason for entry in replies.rejected}

    def go_on(self, resume: Resume) -> list[str]:
        """Have all clients load a checkpoint; return why some cannot."""
        self.resume = resume
        self.hosted.clear()
        connected = self.exchange.nodes(self.min_nodes, self.timeout)
        rejected = self._enrol(resume.server_round, connected)
        return [f"node {entry.node_id}: {entry.reason}" for entry in rejected]

    def state_dict(self) -> dict[str, Any]:
        """Return what of the clients lasts, but for where they are."""
        ids = {client: torch.from_numpy(nodes) for client, nodes in self.ids.items()}
        return {"ids": ids, "dimension": self.dimension, "begun": sorted(self.begun)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.ids = {int(client): nodes.numpy() for client, nodes in state["ids"].items()}
        self.dimension, self.begun = int(state["dimension"]), set(state["begun"])

    def _noted(self, replies: Replies[PublicReply]) -> Replies[PublicReply]:
        """Note SuperNodes that say that they have lost their state."""
        self._lost |= {entry.node_id for entry in replies.rejected if says_lost(entry.reason)}
        return replies

    def roll(
        self,
        requests: Mapping[int, PublicRequest],
        replies: Replies[PublicReply],
        answered: Collection[int],
        failed: Mapping[int, str],
    ) -> Participation:
        """Say what became of every client in a round; ``failed`` has the reasons of single ones."""
        return roll_call(
            {node: hello.clients for node, hello in self.hosted.items()},
            self.connected,
            {node: request.clients for node, request in requests.items()},
            answered,
            silent={entry.node_id: entry.reason for entry in replies.rejected},
            failed=failed,
            idle=self.not_asked,
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
        return self._noted(replies)

    def _enrol(self, server_round: int, connected: Sequence[int]) -> list[Rejected]:
        """Ask SuperNodes that are new who is there; keep those whose clients fit."""
        new = [node for node in connected if node not in self.hosted]
        if not new:
            return []
        replies = self.exchange.send(
            dict.fromkeys(new, RecordDict({CONFIG: ConfigRecord(self.resume.to_config())})),
            message_type="query",
            server_round=server_round,
            timeout=self.timeout,
            read=lambda _, content: PublicHello.from_record(content),
            max_reply_bytes=setup_bytes(),
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
                raise MalformedReplyError(hosted_twice(shared[0], other))
            if shared:
                del self.hosted[other]
        self.hosted[node] = hello
        if hello.handled == 0 and (lost := self.begun & set(hello.clients)):
            LOG.warning("node %d has lost its state: clients %s begin anew", node, sorted(lost))
            self.begun -= lost
            self.anew |= lost
        self.ids |= dict(zip(hello.clients, hello.nodes, strict=True))


class PublicBook:
    """The last embeddings of every client, and the means that wait for it."""

    def __init__(self) -> None:
        self.embeddings: dict[int, FloatArray] = {}  # [p, d] by client
        self.targets: dict[int, FloatArray] = {}  # [p, d] by client

    def forget(self, client: int) -> None:
        """Forget a client that begins anew."""
        self.embeddings.pop(client, None)
        self.targets.pop(client, None)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that lasts between rounds."""
        return {
            name: {client: torch.from_numpy(rows) for client, rows in kept.items()}
            for name, kept in (("embeddings", self.embeddings), ("targets", self.targets))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.embeddings, self.targets = (
            {int(client): rows.numpy() for client, rows in state[name].items()}
            for name in ("embeddings", "targets")
        )

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
