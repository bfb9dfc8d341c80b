"""The embedding-averaging server's talk with its clients: enrolment, alignment, secure sums.

A round is two exchanges: one brings the last round's sums and asks for vectors, one asks for what
takes the masks away and prepares the next round's. Plain sums need the first one only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from flower_graph.ego_book import RoundSum
from flower_graph.ego_cohort import EgoSettings
from flower_graph.ego_secrets import FORMS, NO_SLOTS
from flower_graph.errors import AlignmentError, MalformedReplyError, NoClientsError
from flower_graph.exchange import Rejected
from flower_graph.open_session import OpenSession
from flower_graph.records.ego import (
    EgoHello,
    EgoReply,
    EgoRequest,
    PlainPresence,
    write_save,
)
from flower_graph.records.keys import CONFIG, METRICS, SUMS, TOTAL, read_array
from flower_graph.records.secure_sum import KeyReply, MaskedReply, PrepareReply, UnmaskReply
from flower_graph.rng import generator
from flower_graph.secure.align_server import AlignServer
from flower_graph.secure.open_server import PlainServer, PolynomialServer
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum_server import Skipped, SumResult, SumServer

LOG = logging.getLogger(__name__)
AGGREGATIONS = ("masked", "plain")
MAX_UNIONS = 6  # tries to read the table of tokens, twice as large each time


class EgoSession(OpenSession):
    """One run's exchanges over a grid; arguments are those of ``MaskedEmbeddingAveraging``."""

    def __init__(
        self,
        settings: EgoSettings,
        *,
        alignment: str,
        aggregation: str,
        participation: float,
        limit: float,
        resolution: float,
        dropout: float,
        min_nodes: int,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("alignment", alignment, (*FORMS, NO_SLOTS)),
            ("aggregation", aggregation, AGGREGATIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}, must be one of {', '.join(allowed)}")
        if not 0 < participation <= 1:
            raise ValueError(f"participation is {participation}, must be above 0 and at most 1")
        if min_nodes < 1:
            raise ValueError(f"min_nodes: {min_nodes} is not at least 1")
        Ring.fit(2, limit, resolution, guard=True)  # refuse impossible numbers before the set-up
        self.settings, self.alignment = settings, alignment
        self.is_masked = aggregation == "masked"
        self.participation, self.min_nodes = participation, min_nodes
        self._limit, self._resolution = limit, resolution
        self.sums = SumServer(dropout=dropout)
        self.aligner = self._new_aligner()
        self.clients: dict[int, list[int]] = {}  # of every enrolled SuperNode
        self.resume_round = 0
        self.setup_seconds = 0.0
        self.num_slots = 0  # identities that are held by two clients or more
        self._publications: dict[int, dict[str, Any]] = {}  # what tells each SuperNode its slots
        self._sum_round = 0  # the newest secure sum
        self._prepared: set[int] = set()  # clients that were asked to prepare it
        self._told: set[int] = set()  # SuperNodes that know the slots
        self._named = 0  # clients that reports have named already

    @property
    def everyone(self) -> list[int]:
        """All clients that can take part, by number."""
        known = sorted(client for clients in self.clients.values() for client in clients)
        return [client for client in known if client not in self.sums.excluded]

    def ring(self) -> Ring | None:
        """Return how numbers are written, sized for all clients; None for plain sums.

        Excluded clients count: a round's sums are read with the ring of the next round, so it must
        not shrink in between.
        """
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
        count = max(1, round(self.participation * len(everyone)))
        if self.is_masked:
            count = min(len(everyone), max(2, count))
        if count == len(everyone):
            return everyone
        chance = generator(self.settings.seed, "participants", server_round)
        drawn = torch.randperm(len(everyone), generator=chance)[:count]
        return sorted(everyone[place] for place in drawn.tolist())

    # Set-up

    def admit(self, server_round: int) -> bool:
        """Enrol and align SuperNodes that are new; return whether the slots may have changed."""
        connected = self.exchange.nodes(self.min_nodes, self.timeout)
        new = [node for node in connected if node not in self.clients]
        if not new:
            return False
        started = time.perf_counter()
        hello = EgoHello(self.settings, self.sums.run_id, self.alignment, self.resume_round)
        replies = self.exchange.send(
            dict.fromkeys(new, hello.to_record()),
            message_type="query",
            server_round=server_round,
            timeout=self.timeout,
            read=self._read_keys,
        )
        for node, clients in replies.values.items():
            self.clients[node] = clients
            self.aligner.enroll(node, clients)
        if not self.everyone:
            reasons = "; ".join(sorted({entry.reason for entry in replies.rejected}))
            raise NoClientsError(f"no SuperNode hosts clients of this run: {reasons}")
        if replies.values and self.alignment != NO_SLOTS:
            self._align(server_round)
        if replies.values:
            self._prepared.clear()  # a round that was prepared without them is given up
        self.setup_seconds += time.perf_counter() - started
        return bool(replies.values)

    def _new_aligner(self) -> AlignServer | PolynomialServer | PlainServer:
        """Return the alignment's server half; the plain one stays idle where nothing is shared."""
        if self.alignment == "psi":
            return AlignServer(self.sums.run_id)
        return PolynomialServer() if self.alignment == "polynomial" else PlainServer()

    def _read_keys(self, node: int, content: RecordDict) -> list[int]:
        reply = KeyReply.from_config(_config(content))
        known = {c: at for at, clients in self.clients.items() for c in clients}
        for client in reply.clients.tolist():
            if (at := known.get(client, node)) != node:
                raise MalformedReplyError(f"client {client} is hosted by node {at} already")
        self.sums.enroll(node, reply)
        return sorted(reply.clients.tolist())

    def _align(self, server_round: int) -> None:
        """Bring all clients to one order of slots."""
        while requests := self.aligner.requests():
            self.exchange.send(
                {node: _record(request.to_config()) for node, request in requests.items()},
                message_type="train.align",
                server_round=server_round,
                timeout=self.timeout,
                read=lambda node, content: self.aligner.take(node, _config(content)),
            )
        if isinstance(self.aligner, AlignServer):
            self._unite(server_round)
        for client, reason in self.aligner.blamed:
            LOG.warning("client %d takes no part: %s", client, reason)
        published = self.aligner.publications()
        self._publications = {node: message.to_config() for node, message in published.items()}
        self.num_slots = max((message.num_slots for message in published.values()), default=0)
        aligned = set(self.aligner.aligned)
        self.clients = {n: [c for c in own if c in aligned] for n, own in self.clients.items()}
        self._told.clear()
        if not self.everyone:
            raise AlignmentError("no client was aligned; the log names the reasons")

    def _unite(self, server_round: int) -> None:
        """Add up the clients' tables of tokens in a secure sum, until the table can be read."""
        assert isinstance(self.aligner, AlignServer)
        for _ in range(MAX_UNIONS):
            if self.aligner.settled:
                return
            self.prepare(server_round, self.everyone)
            unions = self.aligner.union_requests()
            cells = next(iter(unions.values())).cells
            masks = self.sums.mask_requests(self._sum_round, 3 * cells, 64)
            contents = {
                node: _record(unions[node].to_config() | mask.to_config())
                for node, mask in masks.items()
                if node in unions
            }
            self.exchange.send(
                contents,
                message_type="train.union",
                server_round=server_round,
                timeout=self.timeout,
                read=partial(self._take_masked, length=3 * cells),
            )
            self._reveal(server_round, [])
            result = self.sums.result(self._sum_round)
            if isinstance(result, Skipped):
                raise AlignmentError(f"the clients' tables could not be added up: {result.reason}")
            self.aligner.take_union(result.total, result.contributors.tolist())
        raise AlignmentError(f"the table of tokens could not be read in {MAX_UNIONS} tries")

    # A round

    def prepare(self, server_round: int, clients: list[int]) -> None:
        """Let clients make the keys of the next secure sum, in an exchange of its own."""
        self._reveal(server_round, clients, reveal=False)

    def ask(
        self, server_round: int, requests: Mapping[int, EgoRequest], length: int
    ) -> tuple[dict[int, EgoReply], list[Rejected]]:
        """Send a round's requests and take the vectors."""
        replies = self.exchange.send(
            {node: request.to_record() for node, request in requests.items()},
            server_round=server_round,
            timeout=self.timeout,
            read=lambda node, content: self._take_vector(node, content, requests[node], length),
        )
        self._told |= replies.values.keys()
        return replies.values, replies.rejected

    def requests(self, server_round: int, base: EgoRequest, length: int) -> dict[int, EgoRequest]:
        """Address a round's request to the SuperNodes of this round's clients."""
        masks = {}
        if self.is_masked:
            word = base.ring.word if base.ring else 64
            masks = self.sums.mask_requests(self._sum_round, length, word)
            chosen = {node: mask.clients for node, mask in masks.items()}
        else:
            drawn = set(self.sample(server_round))
            chosen = {
                node: np.array([c for c in own if c in drawn], np.int64)
                for node, own in self.clients.items()
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
        own, ours = f"round {now}", f"round {server_round}"
        for client, why in self.sums.blamed[self._named :]:
            rejected.append({"client": client, "reason": why.replace(own, ours, 1)})
        self._named = len(self.sums.blamed)
        found = RoundSum(server_round, now, rejected=rejected)
        found.parts = {"unmask": time.perf_counter() - started}
        for entry in rejected:
            LOG.warning("round %d: %s", server_round, entry)
        if isinstance(result, SumResult):
            found.total, found.contributors = result.total, int(result.contributors.size)
        else:
            found.skipped = result.reason.replace(own, ours, 1)
            LOG.warning("%s", found.skipped)
        return found

    def save_others(self, server_round: int, saved: Collection[int]) -> bool:
        """Let SuperNodes save a round, but for those that have; return whether all have then."""
        missing = [n for n in self.exchange.grid.get_node_ids() if n in self.clients.keys() - saved]
        replies = self.exchange.send(
            dict.fromkeys(missing, _record(write_save(self.settings, server_round))),
            message_type="train.save",
            server_round=server_round,
            timeout=self.timeout,
            read=lambda node, content: None,
        )
        return not replies.rejected

    def is_prepared(self) -> bool:
        """Whether a secure sum waits for its vectors."""
        return bool(self._prepared)

    def _plain_sum(self, server_round: int, vectors: Mapping[int, EgoReply]) -> RoundSum:
        if not vectors:
            return RoundSum(server_round, server_round, skipped="no client sent its vector")
        total = np.sum([reply.total for reply in vectors.values()], axis=0)
        rejected: list[dict[str, Any]] = []
        contributors = 0
        for node, reply in vectors.items():
            asked = np.array(self.clients[node], np.int64)
            presence = PlainPresence.from_config(reply.entries, asked)
            contributors += presence.clients.size
            rejected += [{"client": c, "reason": why} for c, why in presence.left_out.items()]
        return RoundSum(server_round, server_round, total, contributors, "", rejected)

    def _reveal(
        self, server_round: int, following: Iterable[int], *, reveal: bool = True
    ) -> list[dict[str, Any]]:
        """Ask for the shares of the current sum, and for the keys of the next one."""
        now = self._sum_round
        unmask = self.sums.unmask_requests(now) if reveal else {}
        wanted, prepare = list(following), {}
        self._prepared = set(wanted)
        if wanted:
            self._sum_round += 1
            prepare = self.sums.open_round(self._sum_round, wanted)
        contents = {
            node: _record(
                (unmask[node].to_config() if node in unmask else {})
                | (prepare[node].to_config() if node in prepare else {})
            )
            for node in {**unmask, **prepare}
        }

        def read(node: int, content: RecordDict) -> None:
            config = _config(content)
            if node in unmask:
                self.sums.take_shares(node, UnmaskReply.from_config(config))
            if node in prepare:
                self.sums.take_prepare(node, PrepareReply.from_config(config))

        if not contents:
            return []
        replies = self.exchange.send(
            contents,
            message_type="train.unmask",
            server_round=server_round,
            timeout=self.timeout,
            read=read,
        )
        return [{"node": entry.node_id, "reason": entry.reason} for entry in replies.rejected]

    def _take_vector(
        self, node: int, content: RecordDict, request: EgoRequest, length: int
    ) -> EgoReply:
        reply = EgoReply.from_record(content, request.server_round, length)
        if request.mask is not None:
            self.sums.take_masked(node, MaskedReply.from_config(reply.entries, reply.total))
        else:
            PlainPresence.from_config(reply.entries, request.clients)
        return reply

    def _take_masked(self, node: int, content: RecordDict, length: int) -> None:
        total = read_array(content, SUMS, TOTAL, (length,))
        self.sums.take_masked(node, MaskedReply.from_config(_config(content), total))


def _record(config: dict[str, Any]) -> RecordDict:
    return RecordDict({CONFIG: ConfigRecord(config)})


def _config(content: RecordDict) -> dict[str, Any]:
    """Return a reply's entries: the adaptor puts numbers and all else into two records."""
    config = content.config_records.get(CONFIG, ConfigRecord())
    return {**content.metric_records.get(METRICS, {}), **config}
