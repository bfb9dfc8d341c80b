"""The server of LocalSage+ and FedSage+: the last scores, who is where, training of generators."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.server.membership import Membership
from flower_graph.server.session import Session
from flower_graph.strategies.fed_sage.cohort import FEATURE_NAMES, SageSettings
from flower_graph.strategies.fed_sage.messages import (
    Arrays,
    GeneratorRequest,
    Generators,
    PeerGradients,
    SageEnrolment,
    SageRequest,
    SageScores,
    Shapes,
    write_settings,
)
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.exchange import Replies
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import CONFIG
from flower_graph.wire.ledger import ByteLedger, reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
T = TypeVar("T")


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
        super().__init__(write_settings(settings) | Resume().to_config())
        self.state, self.features, self.classes = state, features, classes
        self.new: list[int] = []  # SuperNodes whose generators have not been trained

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


class SageExchanges:
    """The exchanges besides a round's own: before a SuperNode's first round, and after each."""

    def __init__(
        self, session: Session, state: SageServerState, settings: SageSettings, shapes: Shapes
    ) -> None:
        self.session, self.state, self.settings, self.shapes = session, state, settings, shapes

    def train(self, nodes: list[int], *, together: bool) -> None:
        """Have generators trained, alone and, at the start of a run, together (steps 1 and 2)."""
        started = time.perf_counter()
        alone = GeneratorRequest(0, self.settings, together, {}).to_record()
        shown = self._generate(dict.fromkeys(nodes, alone), 1 if together else 0)
        for node in set(nodes) - set(shown):
            self.session.members.forget(node)  # asked again when it appears next
        epochs = self.settings.generator_epochs if together else 0
        for epoch in range(1, epochs + 1):
            requests = self._compared(epoch, {n: s for n, s in shown.items() if s is not None})
            if not requests:
                LOG.warning("epoch %d: no generator was judged; the rounds begin", epoch)
                break
            shown = self._generate(requests, epoch + 1 if epoch < epochs else 0)
        LOG.info(
            "generators trained at %d SuperNodes in %.1f s (%d epochs alone, %d together)",
            len(nodes),
            time.perf_counter() - started,
            self.settings.generator_epochs,
            epochs,
        )

    def _generate(
        self, requests: Mapping[int, RecordDict], next_epoch: int
    ) -> dict[int, Generators | None]:
        """Have generators trained; return what SuperNodes show for the next epoch, if there is."""

        def read(node: int, content: RecordDict) -> Generators | None:
            if not next_epoch:
                return None
            clients = np.array(self.session.members.clients[node])
            return Generators.read(content, epoch=next_epoch, clients=clients, shapes=self.shapes)

        return self._send(requests, "train.generate", 0, read).values

    def _compared(self, epoch: int, shown: Mapping[int, Generators]) -> dict[int, RecordDict]:
        """Have all judge all; return the next requests of the authors."""
        if not shown:
            return {}
        everyone = join_generators(epoch, list(shown.values()))
        content = everyone.to_record()
        content.config_records[CONFIG].update(write_settings(self.settings))

        def read(_: int, reply: RecordDict) -> PeerGradients:
            a = everyone.clients.size
            return PeerGradients.read(reply, epoch=epoch, a=a, shapes=self.shapes)

        replies = self._send(dict.fromkeys(shown, content), "train.judge", epoch, read)
        if not replies.values:
            return {}
        total = {
            name: np.sum([reply.gradient[name] for reply in replies.values.values()], axis=0)
            for name in FEATURE_NAMES
        }
        judges = sum(len(self.session.members.clients[node]) for node in replies.values)
        size = sum(4 * int(np.prod(self.shapes[name])) for name in FEATURE_NAMES)
        self.state.count_exchange(everyone, judges, size)
        share = epoch < self.settings.generator_epochs
        starts = np.cumsum([0, *(part.clients.size for part in shown.values())])
        requests = {}
        for node, first, last in zip(shown, starts, starts[1:], strict=False):
            local: Arrays = {name: grad[first:last] for name, grad in total.items()}
            others = judges - int(node in replies.values)  # nobody judges itself
            request = GeneratorRequest(epoch, self.settings, share, local, others)
            requests[node] = request.to_record()
        return requests

    def _send(
        self,
        requests: Mapping[int, RecordDict],
        message_type: str,
        number: int,
        read: Callable[[int, RecordDict], T],
    ) -> Replies[T]:
        most = self.reply_bytes()
        return self.session.send(
            requests, number, read, message_type=message_type, max_reply_bytes=most
        )

    def evaluate(self, server_round: int, classifier: Arrays) -> None:
        """Have the mean classifier evaluated by all clients, whether they trained or not."""
        requests = {
            node: SageRequest(server_round, np.array(local), self.settings, classifier)
            for node, local in self.session.present().items()
        }
        asked = sum(request.clients.size for request in requests.values())
        size = sum(value.nbytes for value in classifier.values())
        self.state.ledger.count("down", "evaluation", asked * size)

        def read(node: int, content: RecordDict) -> SageScores:
            return SageScores.of_request(content, requests[node])

        contents = {node: request.to_record() for node, request in requests.items()}
        replies = self._send(contents, "evaluate", server_round, read)
        for node, scores in replies.values.items():
            self.state.keep_scores(requests[node].clients, scores)

    def reply_bytes(self) -> int:
        """Return the most bytes of any reply: weights of all clients, and what only they know."""
        clients = sum(map(len, self.session.members.clients.values()))
        weights = sum(math.prod(shape) for shape in self.shapes.values())
        return setup_bytes(clients) + reply_bytes(clients * weights)


def join_generators(epoch: int, parts: list[Generators]) -> Generators:
    """Put what several SuperNodes show behind each other."""
    clients: NDArray[np.int64] = np.concatenate([part.clients for part in parts])
    return Generators(
        epoch,
        clients,
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.missing for part in parts]),
        np.concatenate([part.encoded for part in parts]),
        {name: np.concatenate([part.weights[name] for part in parts]) for name in FEATURE_NAMES},
    )
