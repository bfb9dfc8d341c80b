"""FedSCem's server: it carries the rounds of ``algorithm.py`` over Flower.

``MaskedEmbeddingAveraging`` asks for the vectors, opens their sum and reports. ``EgoSession`` has
the run's clients, their alignment and their sums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from flower_graph.config.rules import require
from flower_graph.config.schema import check_settings
from flower_graph.errors import AlignmentError, MalformedReplyError, NoClientsError
from flower_graph.outputs.build import form_of
from flower_graph.outputs.files import NO_CLIENT, Snapshot
from flower_graph.records.participation import NOT_READY, grouped, ranges
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.align.blinded import MAX_CLIENTS
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.sum.messages import KeyReply
from flower_graph.server.membership import renamed
from flower_graph.server.round_loop import RoundStrategy, Session
from flower_graph.server.sums import Opened, PartySums, SecureSum, SumServer
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.fedscem.algorithm import mean_metrics, mean_model
from flower_graph.strategies.fedscem.client import (
    VERIFIED,
    EgoEnrolment,
    EgoReply,
    EgoRequest,
    round_terms,
    union_terms,
)
from flower_graph.strategies.fedscem.config import EgoSettings, StrategyConfig
from flower_graph.strategies.fedscem.modules import EgoGCN, first_model
from flower_graph.strategies.fedscem.vector import (
    SUMMED_NAMES,
    UNREAD,
    SumArray,
    Sums,
    check_plain_sum,
    read_sum,
)
from flower_graph.wire.codec import Resume, entries_of
from flower_graph.wire.counts import counts_size
from flower_graph.wire.exchange import Replies, few, reasons_of
from flower_graph.wire.ledger import count_bytes, reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
FINE = 2.0**-20  # step of fixed-point weights: in a round they change by less than embeddings do
# Client numbers that one SuperNode may claim where identities are blinded: half of all there can be
MOST_CLAIMED = MAX_CLIENTS // 2


class MaskedEmbeddingAveraging(RoundStrategy[EgoRequest, EgoReply]):
    """Server of FedSCem, for clients that answer as ``EgoNetworkClient`` does.

    Parameters
    ----------
    settings : EgoSettings
        The clients' models and training.
    how : StrategyConfig, optional
        The config's section ``strategy``: what clients share, and how it is aligned and summed.
    checkpoint_dir, checkpoint_every : Path or None, int
        Where and every how many rounds to save everything, 0 for never.
    **fields
        In place of ``how`` its fields, such as ``variant``, ``alignment`` and ``aggregation``. With
        ``registry``, the file of the SuperNodes' registered keys, clients need not trust the server
        (their ``trust``).

    Notes
    -----
    A client must answer ``query`` with its keys, ``train.align`` and ``train.union`` with its part
    of the alignment, ``train`` with the vector, ``train.sum_unmask`` with shares and keys,
    ``train.save`` and ``train.finish`` with nothing (``client.py`` beside this file).
    """

    session: EgoSession
    usual_rounds, asks_to_save = 400, ("train.save", {})

    def __init__(
        self,
        settings: EgoSettings,
        how: StrategyConfig | None = None,
        *,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        **fields: Any,
    ) -> None:
        how = StrategyConfig(**fields) if how is None else how
        check_settings(settings)
        check_settings(how, "strategy.")
        for key, why in how.readable().items() if how.registry is not None else ():
            require(False, f"strategy.{key}", getattr(how, key), f"another with a registry: {why}")
        super().__init__(EgoSession(how, settings.seed, checkpoint_dir, checkpoint_every))
        self.settings, self.how, self.num_classes = settings, how, settings.num_classes
        self.model: NDArray[np.float32] | None = None  # [D] the parameters of ``EgoGCN`` in a row
        if how.model_sharing != "none":
            self.model = parameters_to_vector(first_model(settings).parameters()).detach().numpy()
        self.started = self.model  # the model that this round began with
        self.sums: Sums | None = None  # of the last round, for the clients
        # Bytes before this round: a resumed run sends its messages again.
        self._bytes = self.session.ledger.state_dict()
        self._early: list[dict[str, object]] = []  # left out before the first report

    def ask(self, server_round: int) -> dict[int, EgoRequest]:
        """Begin steps 3 to 6: enrol newcomers, and write each SuperNode's request."""
        session, model = self.session, self.model
        if session.admit(server_round):
            self.sums = None  # the slots have changed
        chosen = session.choose(server_round)
        self.started, self._bytes = model, session.ledger.state_dict()
        self.ring = session.sums.ring if session.is_masked else None
        base = EgoRequest(
            server_round,
            np.zeros(0, np.int64),
            self.how.variant,
            sums=self.sums,
            shares_model=model is not None,
            weights=model,
            ring=self.ring,
            is_last=server_round > session.rounds,
            checkpoint=session.is_due(server_round - 1),
            run=session.run,
            counting=self.counting,
        )
        distrusted = session.members.registry is not None
        self.layout = base.vector_layout(self.settings, session.num_slots, checked=distrusted)
        self.entries = session.members.unsent
        return {n: replace(base, clients=np.array(own, np.int64)) for n, own in chosen.items()}

    def exchange(self, server_round: int, contents: Mapping[int, RecordDict]) -> Replies[EgoReply]:
        """Send the requests, and add up the vectors (step 7)."""
        session, sums = self.session, self.session.sums
        if self.ring is None:
            replies = super().exchange(server_round, contents)
            self.found = self._added(server_round, replies.values)
            self.found.silent += session.rejected
            return replies
        aligner, before = session.members.aligner, list(session.rejected)
        order = None if aligner.plain else aligner.order
        terms, is_last = round_terms(server_round, self.ring, order), server_round > session.rounds

        def following() -> list[int] | None:
            # Without any vector the run ends (`learn`): nobody is waited for once more
            is_end = is_last or (bool(contents) and not sums.round.contributed.any())
            return None if is_end else session.sample(server_round + 1)

        what = "train", self.layout.length, terms.purpose, terms.detail
        how: dict[str, Any] = {"read": self.read, "most_bytes": self.reply_bytes()}
        how["following"] = following
        sums.rejected.clear()  # the session has them
        found = sums.add(server_round, contents, *what, padded=True, **how)
        # SuperNodes that fail after this exchange have sent their vector
        session.rejected = before + few(found.replies.rejected)
        found.silent += session.rejected
        self.found, self.requests = found, {n: self.requests[n] for n in found.asked}
        return found.replies

    def read(self, node: int, content: RecordDict) -> EgoReply:
        request, is_plain = self.requests[node], self.ring is None
        known = {"server_round": request.server_round, "L": self.layout.length}
        reply = EgoReply.read(content, **known, asked=request.clients, is_plain=is_plain)
        if reply.total is not None:
            check_plain_sum(reply.total, self.layout, reply.clients.size)
        return reply

    def reply_bytes(self) -> int:
        return reply_bytes(self.layout.length, self.session.most_clients)

    def learn(self, server_round: int, replies: Replies[EgoReply]) -> RoundReport | None:
        """Add up (step 7); return the report of the round before."""
        # A round's measurements come with the next round's vectors.
        session, found = self.session, self.found
        for node in replies.values:  # they know their slots
            session.members.unsent.pop(node, None)
        if self.requests:  # without requests the round is skipped
            session.must_have(server_round, replies.values)
        self._count(found)
        means = mean_metrics(self._take(server_round, found), self.settings.tau)
        loss, contrast = means["cross-entropy"], means["contrast"]
        server, connected = session.sums.server, set(session.connected)
        at = {client: node for node, local in session.clients.items() for client in local}
        undone = {client: NOT_READY for client in session.drawn if at.get(client) in connected}
        blamed = {one.client: str(one) for one in server.blamed if one.client in server.excluded}
        report = self.report(
            server_round - 1,
            session.participation(
                found.contributors,
                failed=found.failed,
                left_out=grouped(session.unaligned | undone | blamed),
                no_use=found.skipped,
            ),
            means,
            loss=loss + self.settings.mu * (0.0 if math.isnan(contrast) else contrast),
            cross_entropy=loss,
            regulariser=contrast,
            skipped=found.skipped,
        )
        if server_round == session.members.resume.server_round + 1:
            self._early = found.rejected
            return None
        named = [(one.get("node"), one.get("client")) for one in found.rejected]
        early = [one for one in self._early if (one.get("node"), one.get("client")) not in named]
        report.rejected, self._early = early + found.rejected, []
        return report

    def finish(self, server_round: int) -> None:
        self.session.tell_all(server_round, {}, "train.finish")

    def weights(self) -> dict[str, NDArray[np.float32]]:
        model = self._module(self.model)
        return {} if model is None else {n: v.numpy() for n, v in model.state_dict().items()}

    def snapshot(self) -> Snapshot | None:
        model = self._module(self.started)
        if model is None:
            return None
        return Snapshot(None, [form_of(model, partial(first_model, self.settings), NO_CLIENT)])

    def _module(self, vector: NDArray[np.float32] | None) -> EgoGCN | None:
        if vector is None:
            return None
        model = first_model(self.settings)
        vector_to_parameters(torch.from_numpy(vector), model.parameters())
        return model

    def fixed_settings(self) -> dict[str, object]:
        local = {"variant": self.how.variant, "shares_model": self.model is not None}
        return {**asdict(self.settings), **local}

    def state(self) -> dict[str, object]:
        state: dict[str, object] = {"wire": self._bytes}
        state["excluded"] = sorted(self.session.sums.server.excluded)
        if self.started is not None:
            # The clients' part was saved within the next round, which began with this model.
            state["model"] = self.started
        return state

    def load_state(self, state: StateDict) -> None:
        if self.model is not None:
            self.model = state["model"]
        self.session.sums.server.exclude(state.get("excluded", ()))

    # What a round's sum is, and what it says

    def _added(self, server_round: int, answers: Mapping[int, EgoReply]) -> Opened:
        """Add up the vectors of a sum in the clear."""
        found = Opened(server_round)
        if not answers:
            found.skipped = "no client sent its vector"
            return found
        totals = [reply.total for reply in answers.values() if reply.total is not None]
        found.total = np.sum(totals, axis=0)
        for node, reply in answers.items():
            local = self.session.clients[node]
            found.contributors += reply.clients.tolist()
            found.failed |= {c: why for c, why in reply.left_out.items() if c in local}
        return found

    def _take(self, server_round: int, found: Opened) -> dict[str, float]:
        self.sums = self.counts = None
        metrics = dict.fromkeys(SUMMED_NAMES, math.nan)
        if found.total is None:
            return metrics
        try:
            metrics = self._read(server_round, found, found.total)
        except ValueError as error:  # nobody knows whose words were wrong
            found.skipped = f"a client's part of the sum was not as agreed: {error}"
            found.contributors = []
            LOG.warning("round %d: %s", server_round, found.skipped)
        if metrics[UNREAD] > 0:
            why = f"{metrics[UNREAD]:.0f} of {len(found.contributors)} clients could not read the "
            why += "means and went on alone: a client's part of the sum was not as agreed"
            found.others.append(why)
            LOG.warning("round %d: %s", server_round - 1, why)
        return metrics

    def _read(self, server_round: int, found: Opened, total: SumArray) -> dict[str, float]:
        layout, ring, count = self.layout, self.ring, len(found.contributors)
        measured, weights, self.counts = read_sum(total, layout, ring, count)
        if layout.weights:
            self.model = mean_model(weights, count)
        if layout.slots:
            words = total[layout.relayed]
            if ring is None:
                # Nobody else may see a single client's embedding.
                many = words[layout.counts] >= LEAST_HOLDERS
                words = words * np.concatenate([many.repeat(layout.hidden), many])
            self.sums = Sums(server_round, [found.number, count], words)
        return measured

    def _count(self, found: Opened) -> None:
        layout, count, up = self.layout, self.session.ledger.count, len(found.contributors)
        asked = sum(map(len, self.session.asked.values()))
        word = 8 if self.ring is None else self.ring.word // 8
        if self.sums is not None:
            # Of the round before: in the last pass this round's vectors have no slots
            slots = asked * self.session.num_slots * (layout.hidden + 1)
            count("down", "embeddings", slots * self.sums.words.itemsize)
        self._bytes["payload"] = self.payload  # the sums are not sent again
        counted = counts_size(layout.classes, layout.counting)
        numbers = {"embeddings": layout.slots * layout.hidden, "activations": layout.slots}
        numbers |= {"metrics": len(SUMMED_NAMES) + counted}
        if self.model is not None:
            numbers["weights"] = layout.weights
            count("down", "weights", asked * self.model.nbytes)
        for kind, size in numbers.items():
            count("up", kind, up * size * word)


# The run's clients, their alignment and their sums -----------------------------------------------


class EgoSession(Session):
    """One run's exchanges over a grid; arguments as of ``MaskedEmbeddingAveraging``."""

    members: EgoMembership

    def __init__(
        self,
        how: StrategyConfig,
        seed: int,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        members = EgoMembership(how, dropout=how.dropout)
        if how.registry is not None:
            trust = {"registry": how.registry, "differ_by": how.differ_by}
            members = EgoParties(how, dropout=how.dropout, **trust)
        super().__init__(members, how, seed, checkpoint_dir, checkpoint_every)
        self.min_nodes = max(members.fewest_nodes, self.min_nodes)
        self.sums = SecureSum(
            self.send,
            server=members,
            limit=how.limit,
            resolution=min(how.resolution, math.inf if how.model_sharing == "none" else FINE),
            guard=True,
        )
        self.sums.number = 0  # the first is number 1, as rounds are
        self.is_masked = how.aggregation == "masked"
        self.drawn = set[int]()  # clients of the round's sum
        self.num_slots = 0  # identities that two clients or more hold
        self.unaligned: dict[int, str] = {}  # clients that cannot take part: reason
        self._told = 0  # clients that the log has named already

    @property
    def clients(self) -> dict[int, list[int]]:
        hosted, out = self.members.clients, self.unaligned
        return {n: [c for c in local if c not in out] for n, local in hosted.items()}

    def everyone(self, nodes: Collection[int] | None = None) -> list[int]:
        """Return the clients that may be in the next sum, of some SuperNodes or of all."""
        hosted = [own for n, own in self.clients.items() if nodes is None or n in nodes]
        return sorted(set(chain.from_iterable(hosted)) - self.members.out)

    # Set-up

    def admit(self, server_round: int) -> bool:
        """Enrol and align SuperNodes that are new; return whether the slots may have changed."""
        members = self.members
        members.renew()
        self.enrol(server_round)
        has_new, members.has_new = members.has_new, False
        if begun := self.sums.begin(server_round, self.connected):
            members.align_epoch()
            self.unaligned.clear()
        if not self.everyone():
            reasons = reasons_of(self.rejected)
            raise NoClientsError(f"no SuperNode hosts clients of this run: {reasons}")
        if members.registry is None:
            begun = has_new or members.aligner.is_behind
        if begun:
            self._align(server_round)
            self.sums.clients = []  # the prepared sum does not have them
        return begun

    def _align(self, server_round: int) -> None:
        members, aligner = self.members, self.members.aligner
        self._ask_stages(server_round)
        while aligner.waits(members.out):
            self._unite(server_round)
            self._ask_stages(server_round)  # after a failed union all are aligned again
        for why, clients in grouped(dict(aligner.blamed[self._told :])).items():
            LOG.warning("client %s takes no part: %s", ranges(clients), why)
        self._told = len(aligner.blamed)
        published = aligner.publications()
        members.unsent = {node: message.to_config() for node, message in published.items()}
        self.num_slots = max((message.num_slots for message in published.values()), default=0)
        aligned, blamed = set(aligner.aligned), dict(aligner.blamed)
        everyone = [*self.unaligned, *(c for local in members.clients.values() for c in local)]
        self.unaligned = {c: blamed.get(c, "not aligned") for c in everyone if c not in aligned}
        if not self.everyone():
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
                max_reply_bytes=setup_bytes(self.most_clients)
                + max(count_bytes(content) for content in contents.values()),
            )

    def _unite(self, server_round: int) -> None:
        aligner, sums = self.members.aligner, self.sums
        clients = aligner.uniting
        sums.rejected.clear()
        sums.ready(server_round, clients)
        unions = aligner.union_requests()
        first = next(iter(unions.values()))
        what = "train.union", 3 * first.cells, union_terms(first.epoch).purpose
        most = reply_bytes(3 * first.cells, self.most_clients)
        how: dict[str, Any] = {"are_numbers": False, "following": lambda: None, "most_bytes": most}
        found = sums.add(server_round, unions, *what, **how)
        if found.total is not None:
            aligner.take_union(found.total, found.contributors)
        elif self.members.out.isdisjoint(clients):  # otherwise the spoiler is known
            silent = {entry.node_id for entry in [*found.replies.rejected, *found.silent]}
            hosted = self.members.clients
            gone = {client for node in silent for client in hosted.get(node, ())}
            absent = [client for client in clients if client in gone]
            for node, listed in found.replies.values.items():
                absent += [client for client in found.asked[node] if client not in listed]
            aligner.union_failed(f"their tables could not be added up: {found.skipped}", absent)

    @property
    def most_clients(self) -> int:
        return max(map(len, self.clients.values()), default=0)

    def sample(self, server_round: int) -> list[int]:
        everyone = self.everyone(set(self.exchange.grid.get_node_ids()))
        if not everyone:
            raise NoClientsError(f"round {server_round}: no client of the run is connected")
        drawn = self.draw(len(everyone), server_round, least=1 + self.is_masked)
        return [everyone[index] for index in drawn]

    def choose(self, server_round: int) -> dict[int, list[int]]:
        """Return the round's clients: those of the sum that is ready, or those that are drawn."""
        sums = self.sums
        if self.is_masked:
            if not sums.clients:
                sums.ready(server_round, self.sample(server_round))
            # Excluded clients count too: a round's sums are read with the next round's ring, which
            # must not be smaller.
            sums.ring = sums.ring_for(sum(map(len, self.clients.values())))
        self.drawn = set(sums.clients if self.is_masked else self.sample(server_round))
        chosen = {n: [c for c in own if c in self.drawn] for n, own in self.clients.items()}
        connected = set(self.exchange.grid.get_node_ids())
        return {n: own for n, own in chosen.items() if own and n in connected}


class EgoMembership(SumServer):
    """The clients of each SuperNode, their keys, and which slots they know."""

    message_type = "query"
    has_new = False  # whether SuperNodes have enrolled since clients were aligned

    def __init__(self, how: StrategyConfig, **sums: Any) -> None:  # the sums' settings
        super().__init__(**sums)
        # The form of the alignment
        self.alignment = how.alignment if self.registry is None else VERIFIED
        about, is_plain = (self.registry, self.run_id), how.alignment == "plain"
        self.aligner = AlignmentServer(how.least_holders, *about, plain=is_plain)
        self.unsent: dict[int, dict[str, object]] = {}  # what tells each SuperNode its slots

    def question(self, resume: Resume) -> RecordDict:
        return EgoEnrolment(self.run_id, self.alignment, resume).to_record()

    def read(self, node: int, content: RecordDict) -> KeyReply:
        keys = super().read(node, content)
        if self.alignment == "psi" and len(keys.clients) > MOST_CLAIMED:
            raise MalformedReplyError(f"{len(keys.clients)} clients, at most {MOST_CLAIMED}")
        return keys

    def move(self, old: int, node: int) -> None:
        super().move(old, node)
        self.aligner.move(old, node)
        self.unsent = renamed(self.unsent, old, node)

    def enrolled(self, node: int, answer: KeyReply) -> None:
        is_renamed = node in self.nodes
        super().enrolled(node, answer)
        if not is_renamed:
            self.aligner.enroll(node, answer.clients.tolist())
            self.has_new = True

    def forget(self, node: int) -> None:
        self.aligner.forget(self.clients[node])
        super().forget(node)

    def align_epoch(self) -> None:
        """Let the parties of a new epoch be aligned, and nobody else."""


class EgoParties(EgoMembership, PartySums):
    """The same of SuperNodes that do not trust the server."""

    def align_epoch(self) -> None:
        assert self.epoch is not None
        members, aligner = self.epoch_clients(), self.aligner
        aligner.forget(set(aligner.members) - {c for own in members.values() for c in own})
        for party, local in members.items():
            node = self.node_of_party(party)
            assert node is not None  # the parties of a new epoch are connected
            aligner.enroll(node, local)
        aligner.begin(self.epoch.digest, members, self.registry)
