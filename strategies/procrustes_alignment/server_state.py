"""What PPFL-GNN's server keeps: each client's public nodes, last embeddings, and waiting means."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from flower_graph.messages.keys import CONFIG
from flower_graph.server.membership import Membership
from flower_graph.server.reply_limits import reply_bytes
from flower_graph.strategies.procrustes_alignment.embedding_models import FloatArray, IntArray
from flower_graph.strategies.procrustes_alignment.messages import EmbeddingEnrolment, PublicRequest

LOG = logging.getLogger(__name__)


class PublicServerState:
    """The last embeddings of every client, and the means that wait for it."""

    def __init__(self) -> None:
        self.embeddings: dict[int, FloatArray] = {}  # [p, d] by client
        self.targets: dict[int, FloatArray] = {}  # [p, d] by client
        self.ids: dict[int, IntArray] = {}  # of each client's public nodes
        self.dimension = 0  # of all embeddings; 0 before anybody is there
        self.begun: set[int] = set()  # clients that have answered a round
        self.measured: dict[str, dict[int, float]] = {}  # last measurements, by name and client

    def begin_anew(self, clients: Iterable[int]) -> list[int]:
        """Forget clients that have lost their state; return which had any."""
        lost = sorted(self.begun & set(clients))
        self.begun -= set(lost)
        for client in lost:
            self.embeddings.pop(client, None)
            self.targets.pop(client, None)
        return lost

    def state_dict(self) -> dict[str, Any]:
        """Return everything that lasts between rounds."""
        book = {
            name: {client: torch.from_numpy(rows) for client, rows in kept.items()}
            for name, kept in (("embeddings", self.embeddings), ("targets", self.targets))
        }
        ids = {client: torch.from_numpy(nodes) for client, nodes in self.ids.items()}
        session = {"ids": ids, "dimension": self.dimension, "begun": sorted(self.begun)}
        return {"strategy": {"book": book, "judged": self.measured}, "session": session}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        book, session = state["strategy"]["book"], state["session"]
        self.embeddings, self.targets = (
            {int(client): rows.numpy() for client, rows in book[name].items()}
            for name in ("embeddings", "targets")
        )
        self.measured = dict(state["strategy"]["judged"])
        self.ids = {int(client): nodes.numpy() for client, nodes in session["ids"].items()}
        self.dimension, self.begun = int(session["dimension"]), set(session["begun"])

    def stacked(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Lay the embeddings of some clients over each other, node by node."""
        ids = [self.ids[client] for client in clients]
        every = np.unique(np.concatenate(ids))
        slots = [torch.from_numpy(np.searchsorted(every, nodes)) for nodes in ids]
        width = self.embeddings[clients[0]].shape[1]
        x = torch.zeros(len(clients), every.size, width)
        held = torch.zeros(len(clients), every.size, dtype=torch.bool)
        for index, (client, slot) in enumerate(zip(clients, slots, strict=True)):
            x[index, slot] = torch.from_numpy(self.embeddings[client])
            held[index, slot] = True
        return x, held, slots


class PublicMembership(Membership):
    """Which clients each SuperNode hosts, and which nodes each of them can share."""

    def __init__(self, state: PublicServerState) -> None:
        super().__init__()
        self.state = state

    def question(self) -> RecordDict:
        """Ask who is there, and tell where the run goes on from."""
        return RecordDict({CONFIG: ConfigRecord(self.resume.to_config())})

    def read(self, node: int, content: RecordDict) -> EmbeddingEnrolment:
        """Read a reply."""
        return EmbeddingEnrolment.read(content)

    def unasked(self) -> None:
        """Let nobody take part who does not say which nodes it shares."""

    def in_order(
        self, answers: Mapping[int, EmbeddingEnrolment]
    ) -> list[tuple[int, EmbeddingEnrolment]]:
        """Choose the commonest length of embeddings where none is known yet."""
        if not self.state.dimension:
            counts = Counter(d for answer in answers.values() for d in answer.dimensions)
            self.state.dimension = max(counts, key=lambda d: (counts[d], -d), default=0)
        return super().in_order(answers)

    def refusal(self, answer: EmbeddingEnrolment) -> str:
        """Refuse other nodes than before, and embeddings of another length."""
        for client, nodes in zip(answer.clients, answer.nodes, strict=True):
            # What it sent, and what waits for it, is by these nodes in this order.
            if not np.array_equal(self.state.ids.get(client, nodes), nodes):
                return (
                    f"client {client} has other public nodes than before; the ids must stay the "
                    "same during a run"
                )
        for client, dimension in zip(answer.clients, answer.dimensions, strict=True):
            if dimension != self.state.dimension:
                return (
                    f"client {client} has embeddings of {dimension} numbers, the others of "
                    f"{self.state.dimension}; all must have the same"
                )
        return ""

    def enrolled(self, node: int, answer: EmbeddingEnrolment) -> None:
        """Note the clients' nodes, and who has lost what it had."""
        if answer.handled == 0 and (lost := self.state.begin_anew(answer.clients)):
            LOG.warning("node %d has lost its state: clients %s begin anew", node, lost)
        self.state.ids |= dict(zip(answer.clients, answer.nodes, strict=True))


def public_bytes(requests: Iterable[PublicRequest], numbers: int = 0) -> int:
    """Return the most bytes of a reply to one of these requests, with so many numbers besides."""
    result = list(requests)
    rows = max((sum(ids.size for ids in one.nodes) * one.dimension for one in result), default=0)
    clients = max((len(one.clients) for one in result), default=0)
    return reply_bytes(rows + numbers, clients)


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of what is a number; NaN where nothing is."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
