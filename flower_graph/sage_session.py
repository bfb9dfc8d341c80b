"""The server's talk with the clients of LocalSage+ and FedSage+: who is there, their generators."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, NoClientsError
from flower_graph.exchange import Rejected, Replies
from flower_graph.open_session import OpenSession
from flower_graph.records.fed_sage import (
    Arrays,
    GeneratorRequest,
    Generators,
    Judgement,
    SageHello,
    SageRequest,
    SageScores,
    Shapes,
)
from flower_graph.sage_book import SageBook
from flower_graph.sage_cohort import FEATURE_NAMES, SageSettings

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class SageSession(OpenSession):
    """One run's exchanges over a grid.

    Parameters
    ----------
    book : SageBook
        Who is where.
    settings : SageSettings
        What the clients train with.
    shapes : mapping
        Shapes of one client's weights.
    min_nodes : int
        SuperNodes to wait for before a round.
    together : bool
        Whether the generators are trained together too (FedSage+).
    """

    def __init__(
        self,
        book: SageBook,
        settings: SageSettings,
        shapes: Shapes,
        *,
        min_nodes: int,
        together: bool,
    ) -> None:
        super().__init__()
        self.book, self.settings, self.shapes = book, settings, shapes
        self.min_nodes, self.together = min_nodes, together
        self.rejected: list[Rejected] = []  # of the current round

    def send(
        self,
        contents: Mapping[int, RecordDict],
        message_type: str,
        server_round: int,
        read: Callable[[int, RecordDict], T],
    ) -> Replies[T]:
        """Send messages and gather what is usable of the replies."""
        replies = self.exchange.send(
            contents,
            message_type=message_type,
            server_round=server_round,
            timeout=self.timeout,
            read=read,
        )
        self.rejected += replies.rejected
        return replies

    def read(
        self,
        server_round: int,
        messages: Iterable[Message],
        read: Callable[[int, RecordDict], T],
    ) -> dict[int, T]:
        """Read replies that Flower's own round loop gathered."""
        values: dict[int, T] = {}
        for message in messages:
            node = message.metadata.src_node_id
            try:
                if message.has_error():
                    raise MalformedReplyError(message.error.reason)
                values[node] = read(node, message.content)
            except (ValueError, KeyError) as error:
                LOG.warning("round %d: left out node %d: %s", server_round, node, error)
                self.rejected.append(Rejected(node, str(error)))
        return values

    def must_have(self, server_round: int, answers: Mapping[int, object]) -> None:
        """Refuse to go on when no SuperNode answered."""
        if not answers:
            raise NoClientsError(
                f"round {server_round}: no SuperNode gave a usable answer within "
                f"{self.timeout:g} s; the log names the reasons"
            )

    def evaluate(self, server_round: int, classifier: Arrays) -> None:
        """Have a mean classifier judged by all clients, whether they trained or not."""
        present = set(self.exchange.grid.get_node_ids())
        everyone = {n: own for n, own in sorted(self.book.nodes.items()) if n in present}
        requests = {
            node: SageRequest(server_round, own, self.settings, classifier).to_record()
            for node, own in everyone.items()
        }
        size = sum(value.nbytes for value in classifier.values())
        asked = sum(own.size for own in everyone.values())
        self.book.ledger.count("down", "evaluation", asked * size)

        def read(node: int, content: RecordDict) -> SageScores:
            return SageScores.from_record(content, server_round, everyone[node])

        for node, scores in self.send(requests, "evaluate", server_round, read).values.items():
            self.book.keep_scores(everyone[node], scores)

    def connected(self) -> list[int]:
        """Wait for SuperNodes, enrol new ones and have their generators trained.

        Returns
        -------
        list of int
            The SuperNodes that can take part.
        """
        nodes = self.exchange.nodes(self.min_nodes, self.timeout)
        is_first = not self.book.nodes
        new = [node for node in nodes if node not in self.book.nodes]
        if new:
            self._enrol(new, nodes)
            self._learn([node for node in new if node in self.book.nodes], is_first)
        present = [node for node in nodes if node in self.book.nodes]
        if not present:
            reasons = "; ".join(sorted({entry.reason for entry in self.rejected}))
            raise NoClientsError(f"no SuperNode hosts clients of this run: {reasons}")
        return present

    def _enrol(self, new: list[int], connected: list[int]) -> None:
        """Ask SuperNodes which clients they host."""
        hellos = self.send(
            {node: RecordDict() for node in new},
            "query",
            0,
            lambda _, content: SageHello.from_record(content),
        )
        for node, hello in sorted(hellos.values.items()):
            if refused := self.book.enrol(node, hello, connected):
                LOG.warning("node %d takes no part: %s", node, refused)
                self.rejected.append(Rejected(node, refused))

    def _learn(self, nodes: list[int], is_first: bool) -> None:
        """Have generators trained, alone and, at the start of a run, together (steps 1 and 2)."""
        started = time.perf_counter()
        together = self.together and is_first
        alone = GeneratorRequest(0, self.settings, together, {}).to_record()
        shown = self._generate(dict.fromkeys(nodes, alone), 1 if together else 0)
        for node in set(nodes) - set(shown):
            del self.book.nodes[node]  # asked again when it appears next
        epochs = self.settings.generator_epochs if together else 0
        for epoch in range(1, epochs + 1):
            requests = self._judged(epoch, {n: s for n, s in shown.items() if s is not None})
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
            clients = self.book.nodes[node]
            return Generators.from_record(content, next_epoch, clients, self.shapes)

        return self.send(requests, "train.generate", 0, read).values

    def _judged(self, epoch: int, shown: Mapping[int, Generators]) -> dict[int, RecordDict]:
        """Have all judge all; return the next requests of the authors."""
        if not shown:
            return {}
        everyone = join_generators(epoch, list(shown.values()))
        content = everyone.to_record(self.settings)

        def read(_: int, reply: RecordDict) -> Judgement:
            return Judgement.from_record(reply, epoch, everyone.clients, self.shapes)

        replies = self.send(dict.fromkeys(shown, content), "train.judge", epoch, read)
        if not replies.values:
            return {}
        total = {
            name: np.sum([reply.gradient[name] for reply in replies.values.values()], axis=0)
            for name in FEATURE_NAMES
        }
        judges = sum(self.book.nodes[node].size for node in replies.values)
        size = sum(4 * int(np.prod(self.shapes[name])) for name in FEATURE_NAMES)
        self.book.count_exchange(everyone, judges, size)
        share = epoch < self.settings.generator_epochs
        starts = np.cumsum([0, *(part.clients.size for part in shown.values())])
        requests = {}
        for node, first, last in zip(shown, starts, starts[1:], strict=False):
            own: Arrays = {name: grad[first:last] for name, grad in total.items()}
            others = judges - int(node in replies.values)  # nobody judges itself
            request = GeneratorRequest(epoch, self.settings, share, own, others)
            requests[node] = request.to_record()
        return requests


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
