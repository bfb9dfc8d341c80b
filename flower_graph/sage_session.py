"""The server's talk with the clients of LocalSage+ and FedSage+: who is there, their generators."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, NoClientsError, says_lost
from flower_graph.exchange import Rejected, Replies
from flower_graph.open_session import OpenSession
from flower_graph.participation import NOT_CONNECTED, Participation, roll_call
from flower_graph.records.fed_sage import (
    Arrays,
    GeneratorRequest,
    Generators,
    Judgement,
    SageHello,
    SageRequest,
    SageScores,
    Shapes,
    write_settings,
)
from flower_graph.records.keys import CONFIG, ROUND, RUN_TOKEN, IntArray
from flower_graph.records.resume import Resume, read_not_saved
from flower_graph.reply_limits import reply_bytes, setup_bytes
from flower_graph.report import RoundReport
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
        self.there: list[int] = []  # SuperNodes that were connected when it began
        self.resume = Resume()
        self._lost: set[int] = set()  # SuperNodes whose clients have lost what they kept

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
            max_reply_bytes=self._reply_bytes(),
        )
        self.rejected += replies.rejected
        self._lost |= {entry.node_id for entry in replies.rejected if says_lost(entry.reason)}
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

    def _reply_bytes(self) -> int:
        """Return the most bytes of any reply: weights of all clients, and what only they know."""
        clients = sum(own.size for own in self.book.nodes.values())
        weights = sum(math.prod(shape) for shape in self.shapes.values())
        return setup_bytes(clients) + reply_bytes(clients * weights)

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
        nodes = self.there = self.exchange.nodes(self.min_nodes, self.timeout)
        is_first = not self.book.nodes and not self.resume.server_round
        for node in self._lost & self.book.nodes.keys():
            del self.book.nodes[node]  # asked again, and its generators trained anew
        self._lost.clear()
        new = [node for node in nodes if node not in self.book.nodes]
        if new:
            self._enrol(new, nodes)
            self._learn([node for node in new if node in self.book.nodes], is_first)
        present = [node for node in nodes if node in self.book.nodes]
        if not present:
            reasons = "; ".join(sorted({entry.reason for entry in self.rejected}))
            raise NoClientsError(f"no SuperNode hosts clients of this run: {reasons}")
        return present

    def reach(self) -> list[str]:
        """Have all clients go on from a checkpoint; return why some cannot."""
        self.book.nodes.clear()
        self.rejected = []
        nodes = self.exchange.nodes(self.min_nodes, self.timeout)
        self._enrol(nodes, nodes)
        return [f"node {entry.node_id}: {entry.reason}" for entry in self.rejected]

    def save(self, server_round: int, run: str) -> dict[int, str]:
        """Have all clients that are there save a round; return who has not, and why."""
        nodes = [node for node in self.exchange.grid.get_node_ids() if node in self.book.nodes]
        record = self._record({ROUND: server_round, RUN_TOKEN: run})
        replies = self.send(
            dict.fromkeys(sorted(nodes), record),
            "train.save",
            server_round,
            lambda _, content: read_not_saved(content),
        )
        missing = {entry.node_id: entry.reason for entry in replies.rejected}
        return missing | {node: why for node, why in replies.values.items() if why}

    def finish(self, server_round: int) -> None:
        """Let the clients forget the run."""
        nodes = [node for node in self.exchange.grid.get_node_ids() if node in self.book.nodes]
        goodbye = {node: RecordDict() for node in nodes}
        self.send(goodbye, "train.finish", server_round, lambda node, _: node)

    def report(
        self, server_round: int, asked: Mapping[int, IntArray], used: Iterable[int]
    ) -> RoundReport:
        """Sum a round up; ``used`` are the SuperNodes whose answers counted."""
        used = list(used)
        return self.book.report(
            server_round,
            asked=sum(clients.size for clients in asked.values()),
            answered=sum(asked[node].size for node in used),
            rejected=self.rejected,
            wire_bytes=self.exchange.ledger.wire,
            participation=self._took_part(asked, used).to_record(),
        )

    def _took_part(self, asked: Mapping[int, IntArray], used: Iterable[int]) -> Participation:
        """Say what became of every client in this round."""
        silent = {entry.node_id: entry.reason for entry in reversed(self.rejected)}
        return roll_call(
            {node: own.tolist() for node, own in self.book.nodes.items()},
            self.there,
            {node: own.tolist() for node, own in asked.items()},
            {client for node in used for client in asked[node].tolist()},
            silent=silent,
            left_out=dict.fromkeys(self.book.absent(), NOT_CONNECTED),
        )

    def _record(self, entries: Mapping[str, Any]) -> RecordDict:
        """Write a message of settings and a few entries besides."""
        return RecordDict({CONFIG: ConfigRecord({**write_settings(self.settings), **entries})})

    def _enrol(self, new: list[int], connected: list[int]) -> None:
        """Ask SuperNodes which clients they host."""
        hellos = self.send(
            dict.fromkeys(new, self._record(self.resume.to_config())),
            "query",
            self.resume.server_round,
            lambda _, content: SageHello.from_record(content),
        )
        for node, hello in sorted(hellos.values.items()):
            if refused := self.book.enrol(node, hello, connected):
                LOG.warning("node %d takes no part: %s", node, refused)
                self.rejected.append(Rejected(node, refused))
            elif hello.handled == 0 and self.book.has_begun(hello.clients):
                LOG.warning("node %d has lost its state: its clients begin anew", node)

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
