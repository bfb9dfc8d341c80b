"""What the server of LocalSage+ and FedSage+ keeps: who is where, the last scores, bytes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.messages.arrays import IntArray
from flower_graph.messages.fields import Resume
from flower_graph.messages.keys import CONFIG
from flower_graph.server.ledger import ByteLedger
from flower_graph.server.membership import Membership
from flower_graph.strategies.fed_sage.cohort import SageSettings
from flower_graph.strategies.fed_sage.messages import (
    Generators,
    SageEnrolment,
    SageScores,
    write_settings,
)

LOG = logging.getLogger(__name__)


class SageServerState:
    """The clients' last scores, and bytes."""

    def __init__(self) -> None:
        # Client to its last (loss, correct [3], nodes [3]), flat, [7]
        self.scores: dict[int, NDArray[np.float64]] = {}
        self.ledger = ByteLedger()  # what the method sent
        self.known: set[int] = set()  # all clients that were ever there

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        clients = sorted(self.scores)
        rows = [self.scores[client] for client in clients]
        return {
            "clients": clients,
            "scores": torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, 7),
            "known": sorted(self.known),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        rows = state["scores"].numpy()
        self.scores = {c: row.copy() for c, row in zip(state["clients"], rows, strict=True)}
        self.known = set(state["known"])
        self.ledger.load_state_dict(state["ledger"])

    def keep_scores(self, clients: IntArray, scores: SageScores) -> None:
        """Note the scores of some clients."""
        counts = scores.counts.reshape(-1, 6)
        for client, loss, row in zip(clients.tolist(), scores.losses, counts, strict=True):
            self.scores[client] = np.array([loss, *row])

    def figures(self) -> dict[str, float]:
        """Average over the clients that have such nodes: ``loss``, ``train``, ``val``, ``test``."""
        table = np.stack([self.scores[client] for client in sorted(self.scores)])
        result = {"loss": _mean(table[table[:, 4] > 0, 0])}
        for place, split in enumerate(("train", "val", "test")):
            local = table[table[:, 4 + place] > 0]
            result[split] = _mean(local[:, 1 + place] / local[:, 4 + place])
        return result

    def count_weights(
        self, asked: Mapping[int, Collection[int]], answered: Iterable[int], size: int
    ) -> None:
        """Count a round's classifiers of so many bytes, each client's on its own."""
        self.ledger.count("down", "weights", sum(map(len, asked.values())) * size)
        self.ledger.count("up", "weights", sum(len(asked[node]) for node in answered) * size)

    def count_exchange(self, shown: Generators, judges: int, generator_bytes: int) -> None:
        """Count an epoch of FedSage+'s generators: each goes to all others and comes back."""
        authors, others = shown.clients.size, max(judges - 1, 0)
        size = authors * generator_bytes + shown.encoded.nbytes
        self.ledger.count("up", "generators", size)
        self.ledger.count("down", "generators", size * others)
        self.ledger.count("up", "judgements", authors * generator_bytes * others)
        self.ledger.count("down", "judgements", authors * generator_bytes)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")


class SageMembership(Membership):
    """Which clients each SuperNode hosts; their data are of the sizes of the run."""

    outside_rounds = True

    def __init__(
        self, state: SageServerState, settings: SageSettings, features: int, classes: int
    ) -> None:
        super().__init__()
        self.state, self.settings, self.features, self.classes = state, settings, features, classes
        self.new: list[int] = []  # SuperNodes whose generators have not been trained

    def question(self) -> RecordDict:
        """Ask who is there, under the run's settings."""
        resume = self.resume if self.resume.server_round else Resume()
        config = {**write_settings(self.settings), **resume.to_config()}
        return RecordDict({CONFIG: ConfigRecord(config)})

    def read(self, node: int, content: RecordDict) -> SageEnrolment:
        """Read a reply."""
        return SageEnrolment.read(content)

    def unasked(self) -> None:
        """Let nobody take part who does not say which clients it hosts."""

    def refusal(self, answer: SageEnrolment) -> str:
        """Refuse data of other sizes."""
        if (answer.features, answer.classes) == (self.features, self.classes):
            return ""
        return (
            f"it has {answer.features} features and {answer.classes} classes, "
            f"expected {self.features} and {self.classes}"
        )

    def enrolled(self, node: int, answer: SageEnrolment) -> None:
        """Note who is new, and who has lost what it had."""
        local = answer.clients.tolist()
        self.new.append(node)
        self.state.known.update(local)
        if answer.handled == 0 and not self.state.scores.keys().isdisjoint(local):
            LOG.warning("node %d has lost its state: its clients begin anew", node)
