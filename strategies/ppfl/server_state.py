"""PPFL-GNN's server state, and the precision of the alignment."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.server.membership import Membership
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.ppfl.claims import SignedClaims
from flower_graph.strategies.ppfl.messages import (
    EmbeddingEnrolment,
    FloatArray,
    IntArray,
    PublicReply,
    PublicRequest,
)
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import CONFIG, LOSS

LOG = logging.getLogger(__name__)
MEASURED_PAIRS = 12  # ordered pairs whose alignment is measured in a round: all, up to 4 clients
TRIED_PAIRS = 1000  # of these some may share no node; all, up to 32 clients
NEAREST = (1, 5, 10)
PRECISIONS = {f"precision-{k}": k for k in NEAREST}
DISAGREEMENT = "disagreement"
ByClient = dict[str, dict[int, float]]  # measurements by name and client


class PublicServerState:
    """The last embeddings of every client, and its next means."""

    def __init__(self) -> None:
        self.embeddings: dict[int, FloatArray] = {}  # [p, d] by client
        self.targets: dict[int, FloatArray] = {}  # [p, d] by client
        self.ids: dict[int, IntArray] = {}  # of each client's public nodes
        self.dimension = 0  # dimension of all embeddings; 0 before the first enrolment
        self.begun: set[int] = set()  # clients that have answered a round
        self.measured: ByClient = {}  # of the last round with an answer
        self.claims: SignedClaims | None = None  # where clients do not trust the server

    def take(
        self,
        requests: Mapping[int, PublicRequest],
        replies: Mapping[int, PublicReply],
        wants_embeddings: bool,
    ) -> tuple[ByClient, dict[int, str]]:
        """Return what clients measured, and the clients that are left out, with the reason."""
        measured, failed = ByClient(), dict[int, str]()
        for node, reply in replies.items():
            failed |= reply.left_out
            figures = {**reply.judged, LOSS: reply.loss, DISAGREEMENT: reply.disagreement}
            for index, client in enumerate(requests[node].clients):
                x = reply.embeddings[index]
                if client in failed or (x is None and wants_embeddings):
                    continue
                for name, values in figures.items():
                    measured.setdefault(name, {})[client] = values[index]
                if x is not None:
                    self.embeddings[client] = x
        self.begun |= measured.get(LOSS, {}).keys()
        self.measured = measured or self.measured
        return measured, failed

    def state_dict(self) -> dict[str, object]:
        book = {
            name: {client: torch.from_numpy(rows) for client, rows in kept.items()}
            for name, kept in (("embeddings", self.embeddings), ("targets", self.targets))
        }
        ids = {client: torch.from_numpy(nodes) for client, nodes in self.ids.items()}
        session = {"ids": ids, "dimension": self.dimension, "begun": sorted(self.begun)}
        return {"strategy": {"book": book, "judged": self.measured}, "session": session}

    def load_state_dict(self, state: StateDict) -> None:
        book, session = state["strategy"]["book"], state["session"]
        self.embeddings, self.targets = (
            {int(client): rows.numpy() for client, rows in book[name].items()}
            for name in ("embeddings", "targets")
        )
        self.measured = dict(state["strategy"]["judged"])
        self.ids = {int(client): nodes.numpy() for client, nodes in session["ids"].items()}
        self.dimension, self.begun = int(session["dimension"]), set(session["begun"])

    def stacked(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Stack the embeddings of some clients, node by node."""
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
    """The clients of each SuperNode, and their public nodes."""

    def __init__(self, state: PublicServerState) -> None:
        super().__init__()
        self.state = state

    def question(self, resume: Resume) -> RecordDict:
        return RecordDict({CONFIG: ConfigRecord(resume.to_config())})

    def read(self, node: int, content: RecordDict) -> EmbeddingEnrolment:
        return EmbeddingEnrolment.read(content)

    def unasked(self) -> None:
        """Leave out SuperNodes that do not name their public nodes."""

    def in_order(
        self, answers: Mapping[int, EmbeddingEnrolment]
    ) -> list[tuple[int, EmbeddingEnrolment]]:
        """Choose the commonest dimension of embeddings if none is known yet."""
        if not self.state.dimension:
            counts = Counter(d for answer in answers.values() for d in answer.dimensions)
            self.state.dimension = max(counts, key=lambda d: (counts[d], -d), default=0)
        return super().in_order(answers)

    def refusal(self, answer: EmbeddingEnrolment) -> str:
        if self.state.claims is not None and (why := self.state.claims.take(answer)):
            return why
        claims = zip(answer.clients, answer.nodes, answer.dimensions, strict=True)
        for client, nodes, dimension in claims:
            # Its embeddings and means are in the order of these nodes.
            if not np.array_equal(self.state.ids.get(client, nodes), nodes):
                return (
                    f"client {client} has other public nodes than before; the ids must stay the "
                    "same during a run"
                )
            if dimension != self.state.dimension:
                return (
                    f"client {client} has embeddings of {dimension} numbers, the others of "
                    f"{self.state.dimension}; all must have the same"
                )
        return ""

    def enrolled(self, node: int, answer: EmbeddingEnrolment) -> None:
        lost = sorted(self.state.begun & set(answer.clients)) if answer.handled == 0 else []
        for client in lost:
            self.state.begun.remove(client)
            self.state.embeddings.pop(client, None)
            self.state.targets.pop(client, None)
        if lost:
            LOG.warning("node %d has lost its state: clients %s begin anew", node, lost)
        self.state.ids |= dict(zip(answer.clients, answer.nodes, strict=True))


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of all numbers that are not NaN; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def measure_alignment(
    x: Tensor, held: Tensor, rotations_only: bool, rng: torch.Generator
) -> dict[str, float]:
    """Return how often aligned embeddings of the same node are near (Figures 3 to 6)."""
    # x, held [m, u, d]
    result: list[Mapping[int, float]] = []
    for source, target in islice(draw_pairs(x.shape[0], rng), TRIED_PAIRS):
        common = held[source] & held[target]
        if not common.any():
            continue
        a, b = x[source, common], x[target, common]
        turn = orthogonal_procrustes(a, b, rotations_only=rotations_only)
        result.append(alignment_precision(a, b, turn, NEAREST))
        if len(result) == MEASURED_PAIRS:
            break
    return {name: mean_of([one[k] for one in result]) for name, k in PRECISIONS.items() if result}


def draw_pairs(count: int, rng: torch.Generator) -> Iterator[tuple[int, int]]:
    """Draw the ordered pairs of different numbers below ``count``, each once, one at a time."""
    # Thousands of clients have more pairs than fit into memory.
    for distance in (1 + torch.randperm(max(count - 1, 0), generator=rng)).tolist():
        for source in torch.randperm(count, generator=rng).tolist():
            yield source, (source + distance) % count
