"""The embedding-averaging server's rounds: whom it asks, secure sums, checkpoints.

A round is two exchanges: one brings the last round's sums and asks for vectors, one asks for what
takes the masks away and prepares the next round's. Plain sums need the first one only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import RecordDict

from flower_graph.errors import NoClientsError
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import MaskedReply
from flower_graph.secure.sum.server import SumResult
from flower_graph.server.exchange import Rejected
from flower_graph.server.participation import NOT_READY, Participation, account_for
from flower_graph.server.reply_limits import reply_bytes
from flower_graph.strategies.masked_embedding_averaging.message_checks import check_plain_sum
from flower_graph.strategies.masked_embedding_averaging.messages import (
    EgoReply,
    EgoRequest,
    Layout,
    PlainEnrolment,
    RoundSum,
)
from flower_graph.strategies.masked_embedding_averaging.setup import EgoSetup

LOG = logging.getLogger(__name__)


class EgoSession(EgoSetup):
    """One run's exchanges over a grid; arguments are those of ``MaskedEmbeddingAveraging``."""

    def ring(self) -> Ring | None:
        """Return how numbers are written, sized for all clients; None for plain sums."""
        # Excluded clients count: a round's sums are read with the ring of the next round, so it
        # must not shrink in between.
        if not self.is_masked:
            return None
        known = sum(len(clients) for clients in self.clients.values())
        return Ring.fit(known, self._limit, self._resolution, guard=True)

    def sample(self, server_round: int) -> list[int]:
        """Draw the clients of a round; depends on the seed, the round and who is there."""
        connected = set(self.exchange.grid.get_node_ids())
        everyone = [c for c in self.everyone if self.sums.node_of(c) in connected]
        if not everyone:
            raise NoClientsError(f"round {server_round}: no client of the run is connected")
        drawn = self.draw(len(everyone), server_round, least=2 if self.is_masked else 1)
        return [everyone[index] for index in drawn]

    def ask(
        self, server_round: int, requests: Mapping[int, EgoRequest], length: int
    ) -> tuple[dict[int, EgoReply], list[Rejected]]:
        """Send a round's requests and take the vectors."""
        replies = self.send(
            {node: request.to_record() for node, request in requests.items()},
            server_round,
            lambda node, content: self._take_vector(node, content, requests[node], length),
            max_reply_bytes=reply_bytes(length, self._most_clients),
        )
        self._told |= replies.values.keys()
        self._begun |= {c for node in replies.values for c in requests[node].clients.tolist()}
        return replies.values, replies.rejected

    def requests(self, server_round: int, base: EgoRequest, length: int) -> dict[int, EgoRequest]:
        """Address a round's request to the SuperNodes of this round's clients."""
        masks = {}
        if self.is_masked:
            word = base.ring.word if base.ring else 64
            masks = self.sums.mask_requests(self._sum_round, length, word)
            chosen = {node: mask.clients for node, mask in masks.items()}
            self.drawn = self._prepared
        else:
            self.drawn = set(self.sample(server_round))
            chosen = {
                node: np.array([c for c in local if c in self.drawn], np.int64)
                for node, local in self.clients.items()
            }
        connected = set(self.exchange.grid.get_node_ids())
        return {
            node: EgoRequest(
                server_round,
                clients,
                base.settings,
                base.variant,
                base.sums,
                base.model,
                base.ring,
                masks.get(node),
                base.is_last,
                base.checkpoint,
                base.run,
                {} if node in self._told else self._publications.get(node, {}),
            )
            for node, clients in chosen.items()
            if clients.size and node in connected
        }

    def close(self, server_round: int, vectors: Mapping[int, EgoReply]) -> RoundSum:
        """Take the masks away, and prepare the next round in the same exchange."""
        if not self.is_masked:
            return self._plain_sum(server_round, vectors)
        now = self._sum_round
        following = [] if server_round > self.rounds else self.sample(server_round + 1)
        rejected = self._reveal(server_round, following)
        started = time.perf_counter()
        result = self.sums.result(now)
        # The secure sum has a number of its own.
        local, ours = f"round {now}", f"round {server_round}"
        for client, why in self.sums.blamed[self._named :]:
            rejected.append({"client": client, "reason": why.replace(local, ours, 1)})
        self._named = len(self.sums.blamed)
        found = RoundSum(server_round, now, rejected=rejected)
        found.failed = {one["client"]: one["reason"] for one in rejected if "client" in one}
        found.parts = {"unmask": time.perf_counter() - started}
        for entry in rejected:
            LOG.warning("round %d: %s", server_round, entry)
        if isinstance(result, SumResult):
            found.total, found.answered = result.total, set(result.contributors.tolist())
            found.contributors = len(found.answered)
        else:
            found.skipped = result.reason.replace(local, ours, 1)
            LOG.warning("%s", found.skipped)
        return found

    def is_prepared(self) -> bool:
        """Whether a secure sum waits for its vectors."""
        return bool(self._prepared)

    def _plain_sum(self, server_round: int, vectors: Mapping[int, EgoReply]) -> RoundSum:
        if not vectors:
            return RoundSum(server_round, server_round, skipped="no client sent its vector")
        total = np.sum([reply.total for reply in vectors.values()], axis=0)
        result = RoundSum(server_round, server_round, total)
        for node, reply in vectors.items():
            asked = np.array(self.clients[node], np.int64)
            presence = PlainEnrolment.from_config(reply.entries, asked=asked)
            result.answered |= set(presence.clients.tolist())
            result.failed |= {c: why for c, why in presence.left_out.items() if c in asked}
        result.contributors = len(result.answered)
        result.rejected = [{"client": c, "reason": why} for c, why in result.failed.items()]
        return result

    def _take_vector(
        self, node: int, content: RecordDict, request: EgoRequest, length: int
    ) -> EgoReply:
        reply = EgoReply.from_record(content, request.server_round, length)
        if request.mask is not None:
            self.sums.take_masked(node, MaskedReply.from_config(reply.entries, total=reply.total))
        else:
            presence = PlainEnrolment.from_config(reply.entries, asked=request.clients)
            slots = 0 if request.is_last else self.num_slots
            layout = Layout(slots, self.settings.hidden)
            layout = layout._replace(weights=length - layout.length)
            check_plain_sum(reply.total, layout, presence.clients.size)
        return reply


def participation_of(
    session: EgoSession,
    requests: Mapping[int, EgoRequest],
    found: RoundSum,
    silent: Sequence[Rejected],
) -> Participation:
    """Say what became of every client in the exchanges of a round's sum."""
    at = {client: node for node, clients in session.clients.items() for client in clients}
    there = set(session.exchange.grid.get_node_ids())
    undone = {client: NOT_READY for client in session.drawn if at.get(client) in there}
    blamed = session.sums.blamed
    excluded = {client: why for client, why in blamed if client in session.sums.excluded}
    return account_for(
        session.clients,
        there,
        {node: request.clients.tolist() for node, request in requests.items()},
        found.answered,
        silent={entry.node_id: entry.reason for entry in silent},
        failed=found.failed,
        left_out=session.unaligned | undone | excluded,
        no_use=found.skipped,
    )
