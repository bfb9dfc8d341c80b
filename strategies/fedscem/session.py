"""FedSCem's session with its clients: set-up, requests, secure sums.

Set-up runs whenever a SuperNode is new. A SuperNode that restarts, even under another id, keeps its
clients' part in alignment and sums as long as it has its keys.

A round has two exchanges. The first sends the last round's sums and asks for vectors. The second
asks for shares, which remove the masks, and prepares the next round. Plain sums need only the
first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import RecordDict

from flower_graph.errors import AlignmentError, MalformedReplyError, NoClientsError
from flower_graph.records.participation import NOT_READY, Participation, by_reason
from flower_graph.secure.align.blinded import MAX_CLIENTS
from flower_graph.secure.align.plaintext import PlaintextAlignmentServer
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.secure.node_config import LEAST_HOLDERS, USUAL_DIFFERENCE
from flower_graph.secure.parties.alignment import VerifiedAlignmentServer
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import MaskedReply
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import Keys as SumKeys
from flower_graph.secure.sum.server import SumServer
from flower_graph.secure.sum.service import SumStages, as_record, entries_of
from flower_graph.server.membership import Membership, renamed
from flower_graph.server.session import Session
from flower_graph.strategies.fedscem.cohort import EgoSettings
from flower_graph.strategies.fedscem.messages import (
    NO_SLOTS,
    VERIFIED,
    EgoEnrolment,
    EgoReply,
    EgoRequest,
    Layout,
    PlainEnrolment,
    SumArray,
    round_terms,
    union_terms,
)
from flower_graph.strategies.fedscem.vector import (
    RoundSum,
    check_counts,
    check_measured,
    read_counted,
)
from flower_graph.wire.arrays import largest_size, read_array
from flower_graph.wire.exchange import count_bytes, reasons_of
from flower_graph.wire.fields import Resume, read_handled
from flower_graph.wire.keys import MAX_NUMBER, SUMS, TOTAL
from flower_graph.wire.ledger import reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
ROUNDING = 1e-3  # by which a sum of accuracies may be off
# Client numbers that one SuperNode may claim where identities are blinded: half of all there can be
MOST_CLAIMED = MAX_CLIENTS // 2


class Keys(NamedTuple):
    """A SuperNode's clients and keys."""

    clients: list[int]  # Ascending
    handled: int | None  # How many messages of this run they have handled, if known
    reply: SumKeys


class EgoMembership(Membership):
    """The clients of each SuperNode, their keys, and which slots they know."""

    def __init__(
        self, settings: EgoSettings, alignment: str, sums: SumServer, least_holders: int
    ) -> None:
        super().__init__()
        self.settings, self.alignment, self.sums = settings, alignment, sums
        self.aligner: AlignmentServer | PlaintextAlignmentServer
        self.parties = sums if isinstance(sums, PartySums) else None
        if self.parties is not None:
            self.alignment = VERIFIED
            self.aligner = VerifiedAlignmentServer(
                sums.run_id, self.parties.registry, least_holders
            )
        elif alignment == "psi":
            self.aligner = AlignmentServer(least_holders)
        else:  # idle where nothing is shared
            self.aligner = PlaintextAlignmentServer()
        self.new: list[int] = []  # SuperNodes with keys, not aligned yet
        self.begun: set[int] = set()  # clients that have taken part in a round
        self.unsent: dict[int, dict[str, object]] = {}  # what tells each SuperNode its slots

    def question(self, resume: Resume) -> RecordDict:
        return EgoEnrolment(self.settings, self.sums.run_id, self.alignment, resume).to_record()

    def read(self, node: int, content: RecordDict) -> Keys:
        reply: SumKeys = self.sums.enrolment[-1].from_config(entries_of(content))
        self.sums.check_keys(node, reply)
        if self.alignment == "psi" and reply.clients.size > MOST_CLAIMED:
            raise MalformedReplyError(
                f"{reply.clients.size} clients, at most {MOST_CLAIMED} are taken"
            )
        return Keys(sorted(reply.clients.tolist()), read_handled(entries_of(content)), reply)

    def unasked(self) -> None:
        """Leave out SuperNodes without keys."""

    def replaced(self, old: int, node: int, answer: Keys) -> None:
        """Rename a SuperNode that is back with its keys; forget one without."""
        if not self.sums.knows(old, answer.reply):
            self.forget(old)
            return
        self.sums.move(old, node)
        self.aligner.move(old, node)
        self.move(old, node)
        self.unsent = renamed(self.unsent, old, node)
        self.new = [node if at == old else at for at in self.new]

    def enrolled(self, node: int, answer: Keys) -> None:
        if self.sums.node_of(answer.clients[0]) != node:
            self.sums.enroll(node, answer.reply)
            self.new.append(node)
        if answer.handled == 0 and self.begun & set(answer.clients):
            LOG.warning("node %d has lost its state: its clients begin anew", node)

    def begin_epoch(self) -> None:
        """Let the parties of a new epoch be aligned, and nobody else."""
        parties, aligner = self.parties, self.aligner
        assert parties is not None and parties.epoch is not None
        assert isinstance(aligner, VerifiedAlignmentServer)
        members = parties.epoch_clients()
        aligner.forget(set(aligner.enrolled) - {c for local in members.values() for c in local})
        for party, local in members.items():
            node = parties.node_of_party(party)
            assert node is not None  # the parties of a new epoch are connected
            aligner.enroll(node, local)
        aligner.begin(parties.epoch.digest, members, parties.registry)

    def forget(self, node: int) -> None:
        self.sums.forget(node)
        self.aligner.forget(self.clients[node])
        self.new = [at for at in self.new if at != node]
        super().forget(node)


class EgoSession(Session):
    """One run's exchanges over a grid; arguments are those of ``MaskedEmbeddingAveraging``."""

    members: EgoMembership

    def __init__(
        self,
        settings: EgoSettings,
        *,
        alignment: str,
        aggregation: str,
        limit: float,
        resolution: float,
        dropout: float,
        least_holders: int = LEAST_HOLDERS,
        registry: Path | str | None = None,
        differ_by: int = USUAL_DIFFERENCE,
        **more: Any,  # arguments of ``Session``
    ) -> None:
        server = SumServer(dropout=dropout)
        if registry is not None:
            server = PartySums(registry, dropout=dropout, differ_by=differ_by)
        members = EgoMembership(settings, alignment, server, least_holders)
        super().__init__(members, seed=settings.seed, **more)
        self.min_nodes = max(server.fewest_nodes, self.min_nodes)
        self.sums = SumStages(
            server,
            self.send,
            limit=limit,
            resolution=resolution,
            guard=True,
            first=1,  # as rounds do
            unmask="train.unmask",
        )
        self.is_masked = aggregation == "masked"
        self.setup_seconds = 0.0
        self.num_slots = 0  # identities that two clients or more hold
        self.unaligned: dict[int, str] = {}  # clients that cannot take part: reason
        self.drawn: set[int] = set()  # clients of this round's sum
        self._named = self._told = 0  # clients that reports, and the log, have named already

    @property
    def clients(self) -> dict[int, list[int]]:
        hosted, out = self.members.clients, self.unaligned
        return {n: [c for c in local if c not in out] for n, local in hosted.items()}

    @property
    def everyone(self) -> list[int]:
        known = {client for clients in self.clients.values() for client in clients}
        return sorted(known - self.sums.server.out)

    # Set-up

    def admit(self, server_round: int) -> bool:
        """Enrol and align SuperNodes that are new; return whether the slots may have changed."""
        started, members = time.perf_counter(), self.members
        self.sums.server.renew()
        self.enrol(server_round)
        new, members.new = members.new, []
        for node in new:
            members.aligner.enroll(node, members.clients[node])
            for client in members.clients[node]:
                self.unaligned.pop(client, None)
        begun = self.sums.begin(server_round, self.connected)
        if members.parties is not None:
            # Parties without a binding for the next epoch are asked again.
            for node in members.clients.keys() - members.parties.homes.values():
                members.forget(node)
        if begun:
            members.begin_epoch()
            self.unaligned.clear()
        if not self.everyone:
            reasons = reasons_of(self.rejected)
            raise NoClientsError(f"no SuperNode hosts clients of this run: {reasons}")
        if members.parties is None:
            aligner = members.aligner
            begun = bool(new) or (isinstance(aligner, AlignmentServer) and aligner.is_behind)
        if begun:
            if members.alignment != NO_SLOTS:
                self._align(server_round)
            self.sums.give_up()  # the prepared sum does not have them
        self.setup_seconds += time.perf_counter() - started
        return begun

    def _align(self, server_round: int) -> None:
        members, aligner = self.members, self.members.aligner
        self._ask_stages(server_round)
        while isinstance(aligner, AlignmentServer) and aligner.waits(self.sums.server.out):
            self._unite(server_round, aligner)
            self._ask_stages(server_round)  # after a failed union all are aligned again
        for entry in by_reason(dict(aligner.blamed[self._told :])):
            LOG.warning("client %s takes no part: %s", entry["clients"], entry["reason"])
        self._told = len(aligner.blamed)
        published = aligner.publications()
        members.unsent = {node: message.to_config() for node, message in published.items()}
        self.num_slots = max((message.num_slots for message in published.values()), default=0)
        aligned, blamed = set(aligner.aligned), dict(aligner.blamed)
        everyone = [*self.unaligned, *(c for local in members.clients.values() for c in local)]
        self.unaligned = {c: blamed.get(c, "not aligned") for c in everyone if c not in aligned}
        if not self.everyone:
            raise AlignmentError("no client was aligned; the log names the reasons")

    def _ask_stages(self, server_round: int) -> None:
        aligner = self.members.aligner
        while requests := aligner.requests():
            contents = {node: request.to_record() for node, request in requests.items()}
            self.send(
                contents,
                server_round,
                lambda node, content: aligner.take(node, entries_of(content)),
                message_type="train.align",
                max_reply_bytes=setup_bytes(self._most_clients)
                + max(count_bytes(content) for content in contents.values()),
            )

    def _unite(self, server_round: int, aligner: AlignmentServer) -> None:
        clients = aligner.uniting
        silent = self.sums.ready(server_round, clients)
        unions = aligner.union_requests()
        first = next(iter(unions.values()))
        length = 3 * first.cells
        masks = self.sums.masks(length, 64, union_terms(first.epoch))
        asked = {n: as_record(unions[n], *parts) for n, (_, parts) in masks.items() if n in unions}
        replies = self.send(
            asked,
            server_round,
            partial(self._take_masked, length=length),
            message_type="train.union",
            max_reply_bytes=reply_bytes(length, self._most_clients),
        )
        silent += [*replies.rejected, *self.sums.reveal(server_round, None)]
        result = self.sums.result()
        if not isinstance(result, Skipped):
            aligner.take_union(result.total, result.contributors.tolist())
        elif self.sums.server.out.isdisjoint(clients):  # otherwise the spoiler is known
            absent = self.sums.at(clients, {entry.node_id for entry in silent})
            for node, listed in replies.values.items():
                absent += [client for client in masks[node][0] if client not in listed]
            aligner.union_failed(f"their tables could not be added up: {result.reason}", absent)

    def _take_masked(self, node: int, content: RecordDict, length: int) -> list[int]:
        total = read_array(content, SUMS, TOTAL, (length,), limit=None)
        reply = MaskedReply.read(content, total=total)
        return self.sums.take_masked(node, reply)

    @property
    def _most_clients(self) -> int:
        return max(map(len, self.clients.values()), default=0)

    # A round

    def ring(self) -> Ring | None:
        """Return how numbers are written, for sums over all clients; None for plain sums."""
        # Excluded clients count too: a round's sums are read with the next round's ring, which must
        # not be smaller.
        return self.sums.ring_for(sum(map(len, self.clients.values()))) if self.is_masked else None

    def sample(self, server_round: int) -> list[int]:
        everyone = self.sums.at(self.everyone, set(self.exchange.grid.get_node_ids()))
        if not everyone:
            raise NoClientsError(f"round {server_round}: no client of the run is connected")
        drawn = self.draw(len(everyone), server_round, least=2 if self.is_masked else 1)
        return [everyone[index] for index in drawn]

    def requests(self, server_round: int, base: EgoRequest, length: int) -> dict[int, EgoRequest]:
        # The mask requests; if the server may lie, also which parties are ready
        masks: dict[int, Any] = {}
        if self.is_masked:
            word = base.ring.word if base.ring else 64
            aligner = self.members.aligner
            order = aligner.order if isinstance(aligner, AlignmentServer) else None
            asked = self.sums.masks(length, word, round_terms(server_round, base.ring, order))
            masks = {node: parts for node, (_, parts) in asked.items()}
            chosen = {node: local for node, (local, _) in asked.items()}
            self.drawn = set(self.sums.clients)
        else:
            self.drawn = set(self.sample(server_round))
            chosen = {n: [c for c in local if c in self.drawn] for n, local in self.clients.items()}
        connected, unsent = set(self.exchange.grid.get_node_ids()), self.members.unsent
        requests = {
            node: replace(
                base,
                clients=np.array(clients, np.int64),
                **dict(zip(("mask", "ready"), masks.get(node, ()), strict=False)),
                slots=unsent.get(node, {}),
            )
            for node, clients in chosen.items()
            if clients and node in connected
        }
        self.asked = {node: request.clients.tolist() for node, request in requests.items()}
        return requests

    def ask(
        self, server_round: int, requests: Mapping[int, EgoRequest], layout: Layout
    ) -> dict[int, EgoReply]:
        replies = self.send(
            {node: request.to_record() for node, request in requests.items()},
            server_round,
            lambda node, content: self._take_vector(node, content, requests[node], layout),
            max_reply_bytes=reply_bytes(layout.length, self._most_clients),
        ).values
        for node in replies:
            self.members.unsent.pop(node, None)
        self.members.begun |= set(self.clients_of(replies).tolist())
        return replies

    def _take_vector(
        self, node: int, content: RecordDict, request: EgoRequest, layout: Layout
    ) -> EgoReply:
        reply = EgoReply.read(content, server_round=request.server_round, L=layout.length)
        if request.mask is not None:
            masked = MaskedReply.from_config(reply.entries, total=reply.total)
            self.sums.take_masked(node, masked)
        else:
            presence = PlainEnrolment.from_config(reply.entries, asked=request.clients)
            check_plain_sum(reply.total, layout, presence.clients.size)
        return reply

    def close(self, server_round: int, vectors: Mapping[int, EgoReply]) -> RoundSum:
        if not self.is_masked:
            return self._plain_sum(server_round, vectors)
        now = self.sums.number
        following = None if server_round > self.rounds else self.sample(server_round + 1)
        revealed = self.sums.reveal(server_round, following)
        started = time.perf_counter()
        result = self.sums.result()
        blamed = self._new_blames(now, server_round)
        summed = RoundSum(server_round, now, failed=dict(blamed))
        summed.rejected = [{"node": one.node_id, "reason": one.reason} for one in revealed]
        summed.rejected += [{"client": client, "reason": why} for client, why in blamed]
        summed.parts = {"unmask": time.perf_counter() - started}
        for entry in summed.rejected:
            LOG.warning("round %d: %s", server_round, entry)
        if isinstance(result, Skipped):
            summed.skipped = str(replace(result.reason, round=server_round))
            LOG.warning("%s", summed.skipped)
        else:
            summed.total, summed.answered = result.total, set(result.contributors.tolist())
            summed.contributors = len(summed.answered)
        return summed

    def _new_blames(self, number: int, server_round: int) -> list[tuple[int, str]]:
        blamed = self.sums.server.blamed
        new, self._named = blamed[self._named :], len(blamed)
        return [
            (one.client, str(replace(one, round=server_round) if one.round == number else one))
            for one in new
            if one.client is not None
        ]

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

    def became_of(self, summed: RoundSum) -> Participation:
        connected, server = set(self.connected), self.sums.server
        at = {client: node for node, clients in self.clients.items() for client in clients}
        undone = {client: NOT_READY for client in self.drawn if at.get(client) in connected}
        blamed = {one.client: str(one) for one in server.blamed if one.client is not None}
        excluded = {client: why for client, why in blamed.items() if client in server.excluded}
        return self.participation(
            summed.answered,
            failed=summed.failed,
            left_out=self.unaligned | undone | excluded,
            no_use=summed.skipped,
        )


def check_plain_sum(total: SumArray, layout: Layout, clients: int) -> None:
    """Refuse a plain sum that is impossible for its number of clients."""
    # total [L]
    if total.dtype != np.float64:
        raise MalformedReplyError(f"{TOTAL} has type {total.dtype}, expected float64")
    if total.size and (largest := largest_size(total)) > clients * MAX_NUMBER:
        raise MalformedReplyError(
            f"{TOTAL} has a number of size {largest:g}, {clients} clients can make "
            f"{clients * MAX_NUMBER:g} at most"
        )
    check_counts(total[layout.counts], clients)
    check_measured(total[layout.metrics], clients, ROUNDING)
    read_counted(total, layout, None)
