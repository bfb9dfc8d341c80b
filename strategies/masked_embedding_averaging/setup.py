"""The embedding-averaging server's set-up: who takes part, keys, alignment, and who comes back.

Set-up is done whenever a SuperNode is new. One that was started anew, under another id if it has no
authentication, keeps its clients' places in alignment and sums as long as it still has its keys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from flower_graph.errors import (
    AlignmentError,
    MalformedReplyError,
    NoClientsError,
)
from flower_graph.messages.keys import CONFIG, METRICS, SUMS, TOTAL, read_array
from flower_graph.messages.resume import read_handled
from flower_graph.secure.align.plaintext_server import (
    PlaintextAlignmentServer,
    PolynomialAlignmentServer,
)
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import KeyReply, MaskedReply, PrepareReply, UnmaskReply
from flower_graph.secure.sum.server import Skipped, SumServer
from flower_graph.server.exchange import Rejected, count_bytes
from flower_graph.server.gathering import hosted_twice
from flower_graph.server.membership import Membership
from flower_graph.server.reply_limits import reply_bytes, setup_bytes, sum_bytes
from flower_graph.server.session import Session
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoSettings
from flower_graph.strategies.masked_embedding_averaging.messages import (
    EgoEnrolment,
)
from flower_graph.strategies.masked_embedding_averaging.secrets import FORMS, NO_SLOTS

LOG = logging.getLogger(__name__)
AGGREGATIONS = ("masked", "plain")
MAX_UNIONS = 6  # tries to read the table of tokens, twice as large each time


class EgoSetup(Session):
    """Who takes part; arguments are those of ``MaskedEmbeddingAveraging``."""

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
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__(
            Membership(),
            min_nodes=min_nodes,
            participation=participation,
            seed=settings.seed,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        for name, value, allowed in (
            ("alignment", alignment, (*FORMS, NO_SLOTS)),
            ("aggregation", aggregation, AGGREGATIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}, must be one of {', '.join(allowed)}")
        Ring.fit(2, limit, resolution, guard=True)  # refuse impossible numbers before the set-up
        self.settings, self.alignment = settings, alignment
        self.is_masked = aggregation == "masked"
        self._limit, self._resolution = limit, resolution
        self.sums = SumServer(dropout=dropout)
        self.aligner = self._new_aligner()
        self.setup_seconds = 0.0
        self.refused: list[Rejected] = []  # while being set up, and not reported yet
        self.num_slots = 0  # identities that are held by two clients or more
        self._publications: dict[int, dict[str, Any]] = {}  # what tells each SuperNode its slots
        self._sum_round = 0  # the newest secure sum
        self._prepared: set[int] = set()  # clients that were asked to prepare it
        self.drawn: set[int] = set()  # clients of this round's sum
        self.unaligned: dict[int, str] = {}  # clients that cannot take part: reason
        self._told: set[int] = set()  # SuperNodes that know the slots
        self._named = 0  # clients that reports have named already
        self._newcomers: dict[int, list[int]] = {}  # SuperNodes with keys, not aligned yet
        self._begun: set[int] = set()  # clients that have taken part in a round

    @property
    def clients(self) -> dict[int, list[int]]:
        """The clients of every SuperNode that is enrolled and aligned."""
        return self.members.clients

    @clients.setter
    def clients(self, clients: dict[int, list[int]]) -> None:
        self.members.clients = clients

    @property
    def everyone(self) -> list[int]:
        """All clients that can take part, by number."""
        known = sorted(client for clients in self.clients.values() for client in clients)
        return [client for client in known if client not in self.sums.excluded]

    @property
    def _most_clients(self) -> int:
        return max((len(clients) for clients in self.clients.values()), default=0)

    def greet(self, server_round: int) -> list[Rejected]:
        """Ask SuperNodes that are new, or have lost their state, who they host."""
        connected = self.exchange.nodes(self.min_nodes, self.timeout)
        for node in self.members.take_lost():
            self._forget(node)
        known = self.clients.keys() | self._newcomers.keys()
        new = [node for node in connected if node not in known]
        if not new:
            return []
        hello = EgoEnrolment(self.settings, self.sums.run_id, self.alignment, self.members.resume)
        replies = self.exchange.send(
            dict.fromkeys(new, hello.to_record()),
            message_type="query",
            server_round=server_round,
            timeout=self.timeout,
            read=partial(self._read_keys, connected=set(connected)),
            max_reply_bytes=setup_bytes(),
        )
        self.refused += replies.rejected
        return list(replies.rejected)

    def rejoin(self) -> list[str]:
        """Have all clients load a checkpoint; return why some cannot."""
        resume = self.members.resume = self.checkpoints.resume
        for node in self._newcomers:  # of a checkpoint that not everybody has
            self.sums.forget(node)
        self._newcomers.clear()
        rejected = self.greet(resume.server_round)
        return [f"node {entry.node_id}: {entry.reason}" for entry in rejected]

    def admit(self, server_round: int) -> bool:
        """Enrol and align SuperNodes that are new; return whether the slots may have changed."""
        started = time.perf_counter()
        rejected = self.greet(server_round)
        new, self._newcomers = self._newcomers, {}
        for node, clients in new.items():
            self.clients[node] = clients
            self.aligner.enroll(node, clients)
        if not self.everyone:
            reasons = "; ".join(sorted({entry.reason for entry in rejected}))
            raise NoClientsError(f"no SuperNode hosts clients of this run: {reasons}")
        if new and self.alignment != NO_SLOTS:
            self._align(server_round)
        if new:
            self._prepared.clear()  # a round that was prepared without them is given up
        self.setup_seconds += time.perf_counter() - started
        return bool(new)

    def _new_aligner(
        self,
    ) -> AlignmentServer | PolynomialAlignmentServer | PlaintextAlignmentServer:
        """Return the alignment's server half; the plain one stays idle where nothing is shared."""
        if self.alignment == "psi":
            return AlignmentServer(self.sums.run_id)
        return (
            PolynomialAlignmentServer()
            if self.alignment == "polynomial"
            else PlaintextAlignmentServer()
        )

    def _read_keys(self, node: int, content: RecordDict, connected: Collection[int]) -> None:
        """Take a SuperNode's keys; one that is back under another id keeps its place."""
        config = entries_of(content)
        reply, handled = KeyReply.from_config(config), read_handled(config)
        known = self.sums.homes
        homes = {known[c] for c in reply.clients.tolist() if c in known} - {node}
        if there := sorted(homes & set(connected)):
            client = next(c for c in reply.clients.tolist() if known.get(c) == there[0])
            raise MalformedReplyError(hosted_twice(client, there[0]))
        if len(homes) == 1 and self.sums.knows(old := next(iter(homes)), reply):
            self._move(old, node)
        else:
            # This refuses what is malformed, before anything changes.
            self.sums.enroll(node, reply, homes)
            for gone in homes:
                self._forget(gone)
            self._newcomers[node] = sorted(reply.clients.tolist())
        if handled == 0 and self._begun & set(reply.clients.tolist()):
            LOG.warning("node %d has lost its state: its clients begin anew", node)

    def _move(self, old: int, node: int) -> None:
        """Know a SuperNode by another id: it is back, with its keys."""
        self.sums.move(old, node)
        self.aligner.move(old, node)
        kept: tuple[dict[int, Any], ...] = (self.clients, self._newcomers, self._publications)
        for by_node in kept:
            entries = list(by_node.items())
            by_node.clear()
            by_node.update({node if at == old else at: entry for at, entry in entries})
        self._told = {node if at == old else at for at in self._told}

    def _forget(self, node: int) -> None:
        """Strike a SuperNode off that has lost its keys; its clients may enrol again."""
        self.sums.forget(node)
        self.aligner.forget(self.clients.pop(node, []))
        self._newcomers.pop(node, None)
        self._told.discard(node)

    def _align(self, server_round: int) -> None:
        """Bring all clients to one order of slots."""
        while requests := self.aligner.requests():
            contents = {node: as_record(request.to_config()) for node, request in requests.items()}
            replies = self.send(
                contents,
                server_round,
                lambda node, content: self.aligner.take(node, entries_of(content)),
                message_type="train.align",
                max_reply_bytes=setup_bytes(self._most_clients)
                + max(count_bytes(content) for content in contents.values()),
            )
            self.refused += replies.rejected
        if isinstance(self.aligner, AlignmentServer):
            self._unite(server_round)
        for client, reason in self.aligner.blamed:
            LOG.warning("client %d takes no part: %s", client, reason)
        published = self.aligner.publications()
        self._publications = {node: message.to_config() for node, message in published.items()}
        self.num_slots = max((message.num_slots for message in published.values()), default=0)
        aligned, blamed = set(self.aligner.aligned), dict(self.aligner.blamed)
        known = [*self.unaligned, *(c for clients in self.clients.values() for c in clients)]
        self.unaligned = {c: blamed.get(c, "not aligned") for c in known if c not in aligned}
        self.clients = {n: [c for c in local if c in aligned] for n, local in self.clients.items()}
        self._told.clear()
        if not self.everyone:
            raise AlignmentError("no client was aligned; the log names the reasons")

    def _unite(self, server_round: int) -> None:
        """Add up the clients' tables of tokens in a secure sum, until the table can be read."""
        assert isinstance(self.aligner, AlignmentServer)
        why = ""
        for _ in range(MAX_UNIONS):
            if self.aligner.settled:
                return
            clients = self.everyone
            self.prepare(server_round, clients)
            unions = self.aligner.union_requests()
            cells = next(iter(unions.values())).cells
            masks = self.sums.mask_requests(self._sum_round, 3 * cells, 64)
            contents = {
                node: as_record(unions[node].to_config() | mask.to_config())
                for node, mask in masks.items()
                if node in unions
            }
            replies = self.send(
                contents,
                server_round,
                partial(self._take_masked, length=3 * cells),
                message_type="train.union",
                max_reply_bytes=reply_bytes(3 * cells, self._most_clients),
            )
            self.refused += replies.rejected
            self._keep_refused(self._reveal(server_round, []))
            result = self.sums.result(self._sum_round)
            if isinstance(result, Skipped):
                why = f"the clients' tables could not be added up: {result.reason}"
                if len(self.everyone) == len(clients):
                    raise AlignmentError(why)
                LOG.warning("%s; tried again without whom it proves guilty", why)
                continue
            why = f"the table of tokens could not be read in {MAX_UNIONS} tries"
            self.aligner.take_union(result.total, result.contributors.tolist())
        raise AlignmentError(why)

    def prepare(self, server_round: int, clients: list[int]) -> None:
        """Let clients make the keys of the next secure sum, in an exchange of its own."""
        self._keep_refused(self._reveal(server_round, clients, reveal=False))

    def _keep_refused(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self.refused += [Rejected(entry["node"], entry["reason"]) for entry in entries]

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
            node: as_record(
                (unmask[node].to_config() if node in unmask else {})
                | (prepare[node].to_config() if node in prepare else {})
            )
            for node in {**unmask, **prepare}
        }

        def read(node: int, content: RecordDict) -> None:
            config = entries_of(content)
            if node in unmask:
                self.sums.take_shares(node, UnmaskReply.from_config(config))
            if node in prepare:
                self.sums.take_prepare(node, PrepareReply.from_config(config))

        if not contents:
            return []
        replies = self.send(
            contents,
            server_round,
            read,
            message_type="train.unmask",
            max_reply_bytes=sum_bytes(unmask.values(), prepare.values()),
        )
        return [{"node": entry.node_id, "reason": entry.reason} for entry in replies.rejected]

    def _take_masked(self, node: int, content: RecordDict, length: int) -> None:
        total = read_array(content, SUMS, TOTAL, (length,), limit=None)
        self.sums.take_masked(node, MaskedReply.from_config(entries_of(content), total=total))


def as_record(config: dict[str, Any]) -> RecordDict:
    """Write entries as a message."""
    return RecordDict({CONFIG: ConfigRecord(config)})


def entries_of(content: RecordDict) -> dict[str, Any]:
    """Return a reply's entries: the adaptor puts numbers and all else into two records."""
    config = content.config_records.get(CONFIG, ConfigRecord())
    return {**content.metric_records.get(METRICS, {}), **config}
