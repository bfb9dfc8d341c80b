"""The server's part in training neighbour generators, alone and together (steps 1 and 2)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.server.exchange import Replies
from flower_graph.server.reply_limits import reply_bytes, setup_bytes
from flower_graph.server.session import Session
from flower_graph.strategies.fed_sage.cohort import FEATURE_NAMES, SageSettings
from flower_graph.strategies.fed_sage.messages import (
    Arrays,
    GeneratorRequest,
    Generators,
    PeerGradients,
    Shapes,
)
from flower_graph.strategies.fed_sage.server_state import SageServerState

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class GeneratorTraining:
    """The exchanges before a SuperNode's first round."""

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
            return Generators.from_record(content, next_epoch, clients, self.shapes)

        return self._send(requests, "train.generate", 0, read).values

    def _compared(self, epoch: int, shown: Mapping[int, Generators]) -> dict[int, RecordDict]:
        """Have all judge all; return the next requests of the authors."""
        if not shown:
            return {}
        everyone = join_generators(epoch, list(shown.values()))
        content = everyone.to_record(self.settings)

        def read(_: int, reply: RecordDict) -> PeerGradients:
            return PeerGradients.from_record(reply, epoch, everyone.clients, self.shapes)

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
        epoch: int,
        read: Callable[[int, RecordDict], T],
    ) -> Replies[T]:
        most = sage_bytes(self.session, self.shapes)
        return self.session.send(
            requests, epoch, read, message_type=message_type, max_reply_bytes=most
        )


def sage_bytes(session: Session, shapes: Shapes) -> int:
    """Return the most bytes of any reply: weights of all clients, and what only they know."""
    clients = sum(map(len, session.members.clients.values()))
    weights = sum(math.prod(shape) for shape in shapes.values())
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
