"""FedSCem: node classification over ego-networks by averaging embeddings that nobody sees.

Xie, Xiong and Yang, "Federated Node Classification over Distributed Ego-Networks with Secure
Contrastive Embedding Sharing", CIKM 2024. Every client holds an ego-network, its own GNN and
classifier, and a projection head ``f``. Ego-networks overlap: of the same node, one
client may know neighbours that another client lacks.

Once, before the first round:

1. clients make keys, and the server hands the public ones on;
2. *secure alignment* (section 4.3.1): all clients agree on one order of the *slots*, the nodes
   that at least two clients hold; the server learns neither nodes nor holders.

Round ``t``, in two exchanges. The first brings the sums of round ``t - 1``:

3. client: takes the sums' pads off, ``h~_v = sum / count`` (equation 7), for its own slots;
4. client: *contrastive fusion*, a step on ``L_nc + mu L_ct``, NT-Xent between ``f(h)`` and
   ``f(h~)`` (equations 8 to 11);
5. client: a step on ``L_nc`` (equation 3), then ``H = GNN(X, A)`` (equation 1);
6. client -> server: embeddings by slot and a one for each slot that it holds, under pads and masks
   (*secure aggregation*, section 4.3.2), and its measurements after step 4;
7. server: adds up, and in the second exchange takes the masks away; clients prepare the keys of
   round ``t + 1`` in the same message.

After the last round one more pass does steps 3, 4 and 6; step 6 then sends measurements alone.

*Variants.* ``full`` is FedSCem. ``minus`` (FedSCem−) has no step 5. ``iter`` (FedSCem_iter) steps
on ``mu L_ct`` alone in step 4, so that the two losses alternate. *Model sharing*: with ``fedavg``
or ``fedprox`` the clients' weights are added up as well, and every round begins with their mean.

*Absent clients* keep their weights. A round in which too few clients answer is skipped: nothing of
it is revealed, and step 4 goes on without ``L_ct``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.config.rules import refuse_with
from flower_graph.config.schema import check_settings
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import AlignmentError, MalformedReplyError, NoClientsError
from flower_graph.outputs.files import NO_CLIENT, Snapshot
from flower_graph.records.participation import NOT_READY, Participation, by_reason, grouped
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.align.blinded import MAX_CLIENTS
from flower_graph.secure.align.plaintext import PlaintextAlignmentServer
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import KeyReply, MaskedReply, MaskRequest
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import PartySums, SumServer
from flower_graph.secure.sum.service import SumStages, as_record, entries_of
from flower_graph.server.membership import Membership, renamed
from flower_graph.server.round_loop import RoundStrategy
from flower_graph.server.session import Session
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.fedscem.cohort import common_model, initial_weights, state_of
from flower_graph.strategies.fedscem.config import EgoSettings, StrategyConfig
from flower_graph.strategies.fedscem.messages import (
    SUMMED_NAMES,
    UNREAD,
    VERIFIED,
    EgoEnrolment,
    EgoReply,
    EgoRequest,
    Layout,
    PlainEnrolment,
    RoundSum,
    SumArray,
    Sums,
    check_counts,
    check_measured,
    mean_metrics,
    read_counted,
    round_terms,
    union_terms,
)
from flower_graph.wire.arrays import Config, largest_size, read_array
from flower_graph.wire.counts import counts_size
from flower_graph.wire.exchange import count_bytes, reasons_of
from flower_graph.wire.fields import Resume, read_handled
from flower_graph.wire.keys import MAX_NUMBER, RUN_TOKEN, SERVER_ROUND, SUMS, TOTAL
from flower_graph.wire.ledger import ByteLedger, Traffic, reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
FINE = 2.0**-20  # step of fixed-point weights: in a round they change by less than embeddings do
ROUNDING = 1e-3  # by which a sum of accuracies may be off
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
    of the alignment, ``train`` with the vector, ``train.unmask`` with shares and keys,
    ``train.save`` and ``train.finish`` with nothing (``messages.py`` beside this file).
    """

    session: EgoSession
    usual_rounds = 400

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
            refuse_with(f"strategy.{key}", getattr(how, key), "a registry", why)
        super().__init__(
            EgoSession(
                how,
                seed=settings.seed,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
            )
        )
        self.settings, self.how, self.num_classes = settings, how, settings.num_classes
        self.model = initial_weights(settings) if how.model_sharing != "none" else None
        self.started = self.model  # the model that this round began with
        self.sums: Sums | None = None  # of the last round, for the clients
        self.ledger = ByteLedger()
        # Bytes before this round: a resumed run sends its messages again.
        self._wire: Traffic = self.ledger.state_dict()
        self._payload: Traffic = self.ledger.state_dict()
        self._early: list[dict[str, object]] = []  # left out before the first report

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        return self.ledger.payload

    def round(self, server_round: int) -> RoundReport | None:
        """Do steps 3 to 7; return the report of the round before."""
        # A round's measurements come with the next round's vectors.
        session = self.session
        if session.admit(server_round):
            self.sums = None  # the slots have changed
        if session.is_masked and not session.sums.clients:
            session.sums.ready(server_round, session.sample(server_round))
        base = self.request(server_round)
        layout = self.layout(base)
        self._layout, self.requests = layout, session.requests(server_round, base, layout.length)
        self.answers = self.send(server_round, "train").values
        session.members.note_answers(session.clients_of(self.answers).tolist(), self.answers)
        if self.requests and not self.answers:  # without requests the round is skipped
            raise NoClientsError(
                f"round {server_round}: none of {len(self.requests)} SuperNodes gave a usable "
                f"answer within {session.timeout:g} s; the log names the reasons"
            )
        silent = list(session.rejected)  # clients that fail after this have sent their vector
        result = session.close(server_round, self.answers)
        session.rejected = silent
        result.rejected += [{"node": one.node_id, "reason": one.reason} for one in silent]
        asked = sum(map(len, session.asked.values()))
        means = self.take(layout, result, base.ring, self.answers.values(), asked)
        loss, contrast = means["cross-entropy"], means["contrast"]
        report = self.report(
            server_round - 1,
            session.became_of(result),
            means,
            loss=loss + self.settings.mu * (0.0 if math.isnan(contrast) else contrast),
            cross_entropy=loss,
            regulariser=contrast,
            bytes=self.payload,
            parts=result.parts,
            skipped=result.skipped,
        )
        report.rejected = result.rejected
        if server_round == session.members.resume.server_round + 1:
            self._early = report.rejected
            return None
        named = [(entry.get("node"), entry.get("client")) for entry in report.rejected]
        early = [one for one in self._early if (one.get("node"), one.get("client")) not in named]
        report.rejected[:0], self._early = early, []
        return report

    def read(self, node: int, content: RecordDict) -> EgoReply:
        return self.session.take_vector(node, content, self.requests[node], self._layout)

    def reply_bytes(self) -> int:
        return reply_bytes(self._layout.length, self.session.most_clients)

    def rejoin(self) -> list[str]:
        """Have the clients load a checkpoint, and count its bytes, since it sets up a new run."""
        return self.session.rejoin()

    def finish(self, server_round: int) -> None:
        self.session.tell_all(server_round, as_record({}), "train.finish")

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the mean model by the names of ``EgoGCN``; empty if models are not shared."""
        if self.model is None:
            return {}
        state = state_of(self.model, self.settings).items()
        return {name: value.contiguous().numpy() for name, value in state}

    def snapshot(self) -> Snapshot | None:
        if self.started is None:
            return None
        return Snapshot(None, [common_model(self.started, self.settings, NO_CLIENT)])

    def clients_save(self, server_round: int) -> dict[int, str]:
        saved = {node: reply.not_saved for node, reply in self.answers.items()}
        order: Config = {SERVER_ROUND: server_round, RUN_TOKEN: self.session.checkpoints.run}
        return self.session.have_saved(server_round, as_record(order), saved)

    def fixed_settings(self) -> dict[str, object]:
        local = {"variant": self.how.variant, "shares_model": self.model is not None}
        return {**asdict(self.settings), **local}

    def state(self) -> dict[str, object]:
        state: dict[str, object] = {"ledger": self._payload, "wire": self._wire}
        state["excluded"] = sorted(self.session.sums.server.excluded)
        if self.started is not None:
            # The clients' part was saved within the next round, which began with this model.
            state |= {"first": self.started.first, "rest": self.started.rest}
        return state

    def load_state(self, state: StateDict) -> None:
        self.ledger.load_state_dict(state["ledger"])
        if self.model is not None:
            self.model = ModelWeights(state["first"], state["rest"])
        self.session.sums.server.exclude(state.get("excluded", ()))

    # What is sent and what a sum says

    def request(self, server_round: int) -> EgoRequest:
        """Return a round's request, without the parts that differ by SuperNode."""
        session, model = self.session, self.model
        self.started, self._wire = model, session.exchange.ledger.state_dict()
        return EgoRequest(
            server_round,
            np.zeros(0, np.int64),
            self.how.variant,
            sums=self.sums,
            shares_model=model is not None,
            first=None if model is None else model.first.numpy(),
            rest=None if model is None else model.rest.numpy(),
            ring=session.ring(),
            is_last=server_round > session.rounds,
            checkpoint=session.is_due(server_round - 1),
            run=session.checkpoints.run,
            counting=self.counting,
        )

    def layout(self, base: EgoRequest) -> Layout:
        distrusted = self.session.members.parties is not None
        return base.vector_layout(self.settings, self.session.num_slots, checked=distrusted)

    def take(
        self,
        layout: Layout,
        found: RoundSum,
        ring: Ring | None,
        replies: Iterable[EgoReply],
        asked: int,
    ) -> dict[str, float]:
        """Keep a sum's embeddings for the next round; return its figures of the last one."""
        self._count(layout, found, asked, 8 if ring is None else ring.word // 8)
        self.sums = self.counts = None
        seconds = [(reply.train_seconds, reply.mask_seconds) for reply in replies]
        found.parts = {
            "train": max((train for train, _ in seconds), default=0.0),
            "mask": max((mask for _, mask in seconds), default=0.0),
            **found.parts,
        }
        metrics = dict.fromkeys(SUMMED_NAMES, math.nan)
        if found.total is not None:
            try:
                metrics = self._read(layout, found, found.total, ring)
            except ValueError as error:  # nobody knows whose words were wrong
                self.sums = self.counts = None
                found.skipped = f"a client's part of the sum was not as agreed: {error}"
                found.answered = ()
                LOG.warning("round %d: %s", found.server_round, found.skipped)
        if metrics[UNREAD] > 0:
            why = (
                f"{metrics[UNREAD]:.0f} of {len(found.answered)} clients could not read the means "
                "and went on alone: a client's part of the sum was not as agreed"
            )
            found.rejected.append({"reason": why})
            LOG.warning("round %d: %s", found.server_round - 1, why)
        return mean_metrics(metrics, self.settings.tau)

    def _read(
        self, layout: Layout, found: RoundSum, total: SumArray, ring: Ring | None
    ) -> dict[str, float]:
        if layout.slots:
            self.sums = self._kept_sums(layout, found, total, ring)
        count, numbers, sums = len(found.answered), total[layout.metrics], total[layout.model]
        if ring is not None:
            # For a plain sum this was checked reply by reply.
            numbers, sums = ring.decode(numbers), ring.decode(sums)
            ring.check_sums(numbers, count)
            ring.check_sums(sums, count)
            check_measured(numbers, count, 2.0**-ring.fraction_bits * count)
        self.counts = read_counted(total, layout, ring)
        if layout.weights and self.model is not None:
            mean = torch.from_numpy((sums / count).astype(np.float32))
            first, rest = mean.tensor_split([self.model.first.numel()])
            self.model = ModelWeights(first.view_as(self.model.first), rest)
        return dict(zip(SUMMED_NAMES, map(float, numbers), strict=True))

    def _kept_sums(
        self, layout: Layout, found: RoundSum, total: SumArray, ring: Ring | None
    ) -> Sums:
        embeddings, counts = total[layout.embeddings], total[layout.counts]
        if ring is None:
            # Nobody else may see a single client's embedding.
            few = counts < LEAST_HOLDERS
            embeddings = embeddings.reshape(layout.slots, -1) * ~few[:, None]
            embeddings, counts = embeddings.ravel(), counts * ~few
        origin = [found.sum_round, len(found.answered)]
        sums = Sums(found.server_round, origin, embeddings, counts)
        if not layout.checks:
            return sums
        tags = total[layout.tags].astype("<u8").view(np.uint8).reshape(layout.checks, -1)
        return sums._replace(members=np.array(sorted(found.answered)), checks=tags)

    def _count(self, layout: Layout, found: RoundSum, asked: int, word: int) -> None:
        """Count payload as single clients would send and get it."""
        if self.sums is not None:
            down = self.sums.embeddings.nbytes + self.sums.counts.nbytes
            self.ledger.count("down", "embeddings", asked * down)
        self._payload = self.ledger.state_dict()  # the sums are not sent again
        up = len(found.answered)
        self.ledger.count("up", "embeddings", up * layout.slots * layout.hidden * word)
        self.ledger.count("up", "activations", up * layout.slots * word)
        counted = counts_size(layout.classes, layout.counting)
        self.ledger.count("up", "metrics", up * (len(SUMMED_NAMES) + counted) * word)
        if self.model is not None:
            weights = self.model.first.numel() + self.model.rest.numel()
            self.ledger.count("up", "weights", up * layout.weights * word)
            self.ledger.count("down", "weights", asked * weights * 4)


# The run's clients, their alignment and their sums -----------------------------------------------


class EgoSession(Session):
    """One run's exchanges over a grid; arguments as of ``MaskedEmbeddingAveraging``."""

    members: EgoMembership

    def __init__(
        self,
        how: StrategyConfig,
        *,
        seed: int,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        server = SumServer(dropout=how.dropout)
        if how.registry is not None:
            server = PartySums(how.registry, dropout=how.dropout, differ_by=how.differ_by)
        super().__init__(
            EgoMembership(how.alignment, server, how.least_holders),
            min_nodes=max(server.fewest_nodes, how.fewest_nodes),
            participation=how.participation,
            seed=seed,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        resolution = how.resolution
        if how.model_sharing != "none":
            resolution = min(resolution, FINE)
        self.sums = SumStages(
            server,
            self.send,
            limit=how.limit,
            resolution=resolution,
            guard=True,
            first=1,  # as rounds do
            unmask="train.unmask",
        )
        self.is_masked = how.aggregation == "masked"
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
        for entry in by_reason(grouped(dict(aligner.blamed[self._told :]))):
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
                max_reply_bytes=setup_bytes(self.most_clients)
                + max(count_bytes(content) for content in contents.values()),
            )

    def _unite(self, server_round: int, aligner: AlignmentServer) -> None:
        clients = aligner.uniting
        silent = self.sums.ready(server_round, clients)
        unions = aligner.union_requests()
        first = next(iter(unions.values()))
        length = 3 * first.cells
        masks = self.sums.masks(length, 64, union_terms(first.epoch))
        asked = {n: as_record(unions[n], mask) for n, mask in masks.items() if n in unions}
        replies = self.send(
            asked,
            server_round,
            partial(self._take_masked, length=length),
            message_type="train.union",
            max_reply_bytes=reply_bytes(length, self.most_clients),
        )
        silent += [*replies.rejected, *self.sums.reveal(server_round, None)]
        result = self.sums.result()
        if not isinstance(result, Skipped):
            aligner.take_union(result.total, result.contributors.tolist())
        elif self.sums.server.out.isdisjoint(clients):  # otherwise the spoiler is known
            absent = self.sums.at(clients, {entry.node_id for entry in silent})
            for node, listed in replies.values.items():
                absent += [c for c in masks[node].clients.tolist() if c not in listed]
            aligner.union_failed(f"their tables could not be added up: {result.reason}", absent)

    def _take_masked(self, node: int, content: RecordDict, length: int) -> list[int]:
        total = read_array(content, SUMS, TOTAL, (length,), limit=None)
        reply = MaskedReply.read(content, total=total)
        self.sums.server.take(node, reply)
        return list(reply.clients.tolist())

    @property
    def most_clients(self) -> int:
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
        masks: dict[int, MaskRequest] = {}
        if self.is_masked:
            word = base.ring.word if base.ring else 64
            aligner = self.members.aligner
            order = aligner.order if isinstance(aligner, AlignmentServer) else None
            masks = self.sums.masks(length, word, round_terms(server_round, base.ring, order))
            chosen = {node: mask.clients.tolist() for node, mask in masks.items()}
            self.drawn = set(self.sums.clients)
        else:
            self.drawn = set(self.sample(server_round))
            chosen = {n: [c for c in local if c in self.drawn] for n, local in self.clients.items()}
        connected, unsent = set(self.exchange.grid.get_node_ids()), self.members.unsent
        requests = {
            node: replace(
                base,
                clients=np.array(clients, np.int64),
                mask=masks.get(node),
                slots=unsent.get(node, {}),
            )
            for node, clients in chosen.items()
            if clients and node in connected
        }
        return requests

    def take_vector(
        self, node: int, content: RecordDict, request: EgoRequest, layout: Layout
    ) -> EgoReply:
        reply = EgoReply.read(content, server_round=request.server_round, L=layout.length)
        if request.mask is not None:
            masked = MaskedReply.from_config(reply.entries, total=reply.total)
            self.sums.server.take(node, masked)
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
            summed.total, summed.answered = result.total, result.contributors.tolist()
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
        present, failed = list[int](), dict[int, str]()
        for node, reply in vectors.items():
            asked = np.array(self.clients[node], np.int64)
            presence = PlainEnrolment.from_config(reply.entries, asked=asked)
            present += presence.clients.tolist()
            failed |= {c: why for c, why in presence.left_out.items() if c in asked}
        rejected: list[dict[str, object]] = [{"client": c, "reason": w} for c, w in failed.items()]
        return RoundSum(server_round, server_round, total, present, "", rejected, failed)

    def became_of(self, summed: RoundSum) -> Participation:
        connected, server = set(self.connected), self.sums.server
        at = {client: node for node, clients in self.clients.items() for client in clients}
        undone = {client: NOT_READY for client in self.drawn if at.get(client) in connected}
        blamed = {one.client: str(one) for one in server.blamed if one.client is not None}
        excluded = {client: why for client, why in blamed.items() if client in server.excluded}
        return self.participation(
            summed.answered,
            failed=summed.failed,
            left_out=grouped(self.unaligned | undone | excluded),
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


class Keys(NamedTuple):
    """A SuperNode's clients and keys."""

    clients: list[int]  # Ascending
    handled: int | None  # How many messages of this run they have handled, if known
    reply: KeyReply


class EgoMembership(Membership):
    """The clients of each SuperNode, their keys, and which slots they know."""

    needs_query = True

    def __init__(self, alignment: str, sums: SumServer, least_holders: int) -> None:
        super().__init__()
        self.alignment, self.sums = alignment, sums
        self.aligner: AlignmentServer | PlaintextAlignmentServer
        self.parties = sums if isinstance(sums, PartySums) else None
        registry = None if self.parties is None else self.parties.registry
        if alignment == "plain":
            self.aligner = PlaintextAlignmentServer()
        else:
            self.aligner = AlignmentServer(least_holders, registry, sums.run_id)
        if registry is not None:
            self.alignment = VERIFIED
        self.new: list[int] = []  # SuperNodes with keys, not aligned yet
        self.begun: set[int] = set()  # clients that have taken part in a round
        self.unsent: dict[int, dict[str, object]] = {}  # what tells each SuperNode its slots

    def question(self, resume: Resume) -> RecordDict:
        return EgoEnrolment(self.sums.run_id, self.alignment, resume).to_record()

    def read(self, node: int, content: RecordDict) -> Keys:
        reply = KeyReply.from_config(entries_of(content))
        self.sums.check_keys(node, reply)
        if self.alignment == "psi" and reply.clients.size > MOST_CLAIMED:
            raise MalformedReplyError(
                f"{reply.clients.size} clients, at most {MOST_CLAIMED} are taken"
            )
        return Keys(sorted(reply.clients.tolist()), read_handled(entries_of(content)), reply)

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

    def note_answers(self, clients: Iterable[int], nodes: Iterable[int]) -> None:
        """Note who has taken part, and that its SuperNode knows its slots."""
        self.begun |= set(clients)
        for node in nodes:
            self.unsent.pop(node, None)

    def begin_epoch(self) -> None:
        """Let the parties of a new epoch be aligned, and nobody else."""
        parties, aligner = self.parties, self.aligner
        assert parties is not None and parties.epoch is not None
        assert isinstance(aligner, AlignmentServer)
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
