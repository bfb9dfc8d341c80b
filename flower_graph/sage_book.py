"""What the server of LocalSage+ and FedSage+ keeps: who is where, the last scores, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord
from numpy.typing import NDArray

from flower_graph.exchange import Rejected
from flower_graph.gathering import hosted_twice
from flower_graph.ledger import ByteLedger
from flower_graph.records.fed_sage import Generators, SageHello, SageScores
from flower_graph.records.keys import IntArray
from flower_graph.report import RoundReport
from flower_graph.rng import generator


@dataclass
class SageBook:
    """The server's book.

    Attributes
    ----------
    features, classes : int
        Sizes that every client must have.
    seed : int
        Of the choice of participants.
    participation : float
        Share of the clients that take part in a round.
    nodes : dict of ndarray
        SuperNode to the numbers of its clients.
    scores : dict of ndarray
        Client to its last ``(loss, correct [3], nodes [3])``, flat, ``[7]``.
    ledger : ByteLedger
        What the method sent.
    known : set of int
        All clients that were ever there.
    """

    features: int
    classes: int
    seed: int
    participation: float
    nodes: dict[int, IntArray] = field(default_factory=dict)
    scores: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    ledger: ByteLedger = field(default_factory=ByteLedger)
    known: set[int] = field(default_factory=set)

    def enrol(self, node: int, hello: SageHello, connected: list[int]) -> str:
        """Note a SuperNode's clients; return why it takes no part, or nothing."""
        if (hello.features, hello.classes) != (self.features, self.classes):
            return (
                f"it has {hello.features} features and {hello.classes} classes, "
                f"expected {self.features} and {self.classes}"
            )
        for other, clients in list(self.nodes.items()):
            shared = np.intersect1d(clients, hello.clients)
            if other != node and shared.size:
                if other in connected:
                    return hosted_twice(int(shared[0]), other)
                del self.nodes[other]  # the same clients came back under another id
        self.nodes[node] = hello.clients
        self.known.update(hello.clients.tolist())
        return ""

    def absent(self) -> set[int]:
        """Return the clients that no SuperNode hosts any more."""
        return self.known.difference(*(own.tolist() for own in self.nodes.values()))

    def has_begun(self, clients: IntArray) -> bool:
        """Whether one of these clients has a score already."""
        return not self.scores.keys().isdisjoint(clients.tolist())

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
        """Take over what ``state_dict`` returned; nobody is enrolled then."""
        rows = state["scores"].numpy()
        self.scores = {c: row.copy() for c, row in zip(state["clients"], rows, strict=True)}
        self.known, self.nodes = set(state["known"]), {}
        self.ledger.load_state_dict(state["ledger"])

    def participants(self, server_round: int, connected: list[int]) -> dict[int, IntArray]:
        """Draw the round's clients over the whole run; return those that are connected, by node."""
        everyone = np.sort(np.concatenate(list(self.nodes.values())))
        chosen = everyone
        if self.participation < 1:
            draw = generator(self.seed, "participants", server_round)
            many = max(1, round(self.participation * everyone.size))
            chosen = everyone[torch.randperm(everyone.size, generator=draw)[:many].numpy()]
        present = {node: self.nodes[node] for node in connected if node in self.nodes}
        asked = {node: own[np.isin(own, chosen)] for node, own in present.items()}
        return {node: own for node, own in asked.items() if own.size}

    def keep_scores(self, clients: IntArray, scores: SageScores) -> None:
        """Note the scores of some clients."""
        counts = scores.counts.reshape(-1, 6)
        for client, loss, row in zip(clients.tolist(), scores.losses, counts, strict=True):
            self.scores[client] = np.array([loss, *row])

    def report(
        self,
        server_round: int,
        *,
        asked: int,
        answered: int,
        rejected: list[Rejected],
        wire_bytes: dict[str, int],
        participation: dict[str, Any],
    ) -> RoundReport:
        """Sum a round up from the clients' last scores."""
        found = self.figures()
        return RoundReport(
            round=server_round,
            loss=found["loss"],
            cross_entropy=found["loss"],
            regulariser=0.0,
            train_accuracy=found["train"],
            val_accuracy=found["val"],
            test_accuracy=found["test"],
            asked=asked,
            answered=answered,
            rejected=[{"node": entry.node_id, "reason": entry.reason} for entry in rejected],
            bytes=self.ledger.payload,
            wire_bytes=wire_bytes,
            participation=participation,
        )

    def figures(self) -> dict[str, float]:
        """Average over the clients that have such nodes: ``loss``, ``train``, ``val``, ``test``."""
        table = np.stack([self.scores[client] for client in sorted(self.scores)])
        found = {"loss": _mean(table[table[:, 4] > 0, 0])}
        for place, split in enumerate(("train", "val", "test")):
            own = table[table[:, 4 + place] > 0]
            found[split] = _mean(own[:, 1 + place] / own[:, 4 + place])
        return found

    def count_weights(
        self, asked: Mapping[int, IntArray], answered: Iterable[int], size: int
    ) -> None:
        """Count a round's classifiers of so many bytes, each client's on its own."""
        self.ledger.count("down", "weights", sum(own.size for own in asked.values()) * size)
        self.ledger.count("up", "weights", sum(asked[node].size for node in answered) * size)

    def count_exchange(self, shown: Generators, judges: int, generator_bytes: int) -> None:
        """Count an epoch of FedSage+'s generators: each goes to all others and comes back judged.

        Parameters
        ----------
        shown : Generators
            Of all clients.
        judges : int
            Clients that judged.
        generator_bytes : int
            Size of one ``fGen``, and of its gradient.
        """
        authors, others = shown.clients.size, max(judges - 1, 0)
        size = authors * generator_bytes + shown.encoded.nbytes
        self.ledger.count("up", "generators", size)
        self.ledger.count("down", "generators", size * others)
        self.ledger.count("up", "judgements", authors * generator_bytes * others)
        self.ledger.count("down", "judgements", authors * generator_bytes)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")


def as_metrics(report: RoundReport) -> MetricRecord:
    """Give a round's figures as Flower's own records have them."""
    names = ("loss", "train_accuracy", "val_accuracy", "test_accuracy", "answered")
    return MetricRecord({name.replace("_", "-"): getattr(report, name) for name in names})
