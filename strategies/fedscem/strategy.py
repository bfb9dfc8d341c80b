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
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.config.rules import ABOVE_ZERO, choice
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import NoClientsError
from flower_graph.outputs.files import NO_CLIENT, Snapshot
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.node_config import LEAST_HOLDERS, USUAL_DIFFERENCE
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.service import as_record
from flower_graph.server.round_strategy import RoundStrategy
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.fedscem.cohort import (
    EgoSettings,
    common_model,
    initial_weights,
    split_rest,
)
from flower_graph.strategies.fedscem.config import AGGREGATIONS, ALIGNMENTS, MODEL_SHARING, VARIANTS
from flower_graph.strategies.fedscem.messages import (
    NO_SLOTS,
    SUMMED_NAMES,
    UNREAD,
    EgoReply,
    EgoRequest,
    Layout,
    SumArray,
    Sums,
    write_save,
)
from flower_graph.strategies.fedscem.session import EgoSession
from flower_graph.strategies.fedscem.vector import (
    Means,
    RoundSum,
    check_measured,
    mean_metrics,
    read_counted,
)
from flower_graph.wire.counts import counts_size
from flower_graph.wire.ledger import ByteLedger, Traffic

LOG = logging.getLogger(__name__)
FINE = 2.0**-20  # step of fixed-point weights: in a round they change by less than embeddings do
# Aggregation, alignment and model sharing with which a lying server learns no client's data
READ_BY_NOBODY = ("masked", "psi", "none")


class MaskedEmbeddingAveraging(RoundStrategy[EgoRequest, EgoReply]):
    """Server of FedSCem, for clients that answer as ``EgoNetworkClient`` does.

    Parameters
    ----------
    settings : EgoSettings
        The clients' models and training.
    variant : str
        ``"full"``, ``"iter"`` or ``"minus"``.
    model_sharing : str
        ``"none"``, ``"fedavg"`` or ``"fedprox"`` (with ``settings.proximal``).
    alignment : str
        ``"psi"``: blinded identities. ``"plain"``: in the clear.
    aggregation : str
        ``"masked"`` or ``"plain"``.
    limit, resolution : float
        Largest size of a number in an embedding, and step of the fixed-point numbers; where models
        are shared, a step of 2^-20 at most.
    dropout : float
        Share of a round's clients that may vanish.
    least_holders : int
        Least number of clients that hold a summed node; 2 or more, above 2 with the alignments
        ``"psi"`` and ``"plain"``.
    registry : Path or str, optional
        File of the SuperNodes' registered keys, for clients that do not trust the server (their
        ``trust``): masked sums and ``"psi"`` with proofs, from five SuperNodes on.
    differ_by : int
        Least number of SuperNodes by which two of these sums differ; see ``PartySums``.
    **more
        ``participation``, the share of the clients asked each round, above 0 and at most 1;
        ``min_nodes``, SuperNodes to wait for before a round; ``checkpoint_dir`` and
        ``checkpoint_every``, where and every how many rounds to save everything, 0 for never.

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
        *,
        variant: str = "full",
        model_sharing: str = "none",
        alignment: str = "psi",
        aggregation: str = "masked",
        limit: float = 32.0,
        resolution: float = 2.0**-12,
        dropout: float = 0.3,
        least_holders: int = LEAST_HOLDERS,
        registry: Path | str | None = None,
        differ_by: int = USUAL_DIFFERENCE,
        **more: object,
    ) -> None:
        for name, value, allowed in (
            ("variant", variant, VARIANTS),
            ("model_sharing", model_sharing, MODEL_SHARING),
            ("alignment", alignment, (*ALIGNMENTS, NO_SLOTS)),
            ("aggregation", aggregation, AGGREGATIONS),
        ):
            choice(*allowed).check(name, value)
        ABOVE_ZERO.check("tau", settings.tau)
        if registry is not None and (aggregation, alignment, model_sharing) != READ_BY_NOBODY:
            raise ValueError(
                f"aggregation={aggregation!r}, alignment={alignment!r}, model_sharing="
                f"{model_sharing!r}: with a registry they are {READ_BY_NOBODY}"
            )
        shares_model = model_sharing != "none"
        super().__init__(
            EgoSession(
                settings,
                alignment=alignment,
                aggregation=aggregation,
                limit=limit,
                resolution=min(resolution, FINE) if shares_model else resolution,
                dropout=dropout,
                least_holders=least_holders,
                registry=registry,
                differ_by=differ_by,
                **more,
            )
        )
        self.settings, self.variant, self.num_classes = settings, variant, settings.num_classes
        self.model = initial_weights(settings) if shares_model else None
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
        requests = session.requests(server_round, base, layout.length)
        self.answers = session.ask(server_round, requests, layout)
        if requests and not self.answers:  # without requests the round is skipped
            raise NoClientsError(
                f"round {server_round}: none of {len(requests)} SuperNodes gave a usable answer "
                f"within {session.timeout:g} s; the log names the reasons"
            )
        silent = list(session.rejected)  # clients that fail after this have sent their vector
        result = session.close(server_round, self.answers)
        session.rejected = silent
        result.rejected += [{"node": one.node_id, "reason": one.reason} for one in silent]
        asked = sum(map(len, session.asked.values()))
        means = self.take(layout, result, base.ring, self.answers.values(), asked)
        contrast = 0.0 if math.isnan(means.contrast) else means.contrast
        report = self.report(
            server_round - 1,
            session.became_of(result),
            means._asdict(),
            loss=means.cross_entropy + self.settings.mu * contrast,
            cross_entropy=means.cross_entropy,
            regulariser=means.contrast,
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

    def rejoin(self) -> list[str]:
        """Have the clients load a checkpoint, and count its bytes, since it sets up a new run."""
        return self.session.rejoin()

    def finish(self, server_round: int) -> None:
        self.session.tell_all(server_round, as_record({}), "train.finish")

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the mean model; empty if models are not shared.

        ``first`` ``[f, h]``, ``bias-1`` ``[h]``, ``weight-2``, ``bias-2``, ``classifier``,
        ``classifier-bias``, ``projection`` and ``projection-bias``.
        """
        if self.model is None:
            return {}
        parts = split_rest(self.model.rest[None], self.settings)
        rest = {name: part[0].numpy() for name, part in parts.items()}
        return {"first": self.model.first.numpy()} | rest

    def snapshot(self) -> Snapshot | None:
        if self.started is None:
            return None
        return Snapshot(None, [common_model(self.started, self.settings, [NO_CLIENT])])

    def clients_save(self, server_round: int) -> dict[int, str]:
        saved = {node: reply.not_saved for node, reply in self.answers.items()}
        order = write_save(self.settings, server_round, self.session.checkpoints.run)
        return self.session.have_saved(server_round, as_record(order), saved)

    def fixed_settings(self) -> dict[str, object]:
        local = {"variant": self.variant, "shares_model": self.model is not None}
        return {**self.settings._asdict(), **local}

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
            self.settings,
            self.variant,
            sums=self.sums,
            model=None if model is None else (model.first.numpy(), model.rest.numpy()),
            ring=session.ring(),
            is_last=server_round > session.rounds,
            checkpoint=session.is_due(server_round - 1),
            run=session.checkpoints.run,
            counting=self.counting,
        )

    def layout(self, base: EgoRequest) -> Layout:
        distrusted = self.session.members.parties is not None
        return base.vector_layout(self.session.num_slots, checked=distrusted)

    def take(
        self,
        layout: Layout,
        found: RoundSum,
        ring: Ring | None,
        replies: Iterable[EgoReply],
        asked: int,
    ) -> Means:
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
                found.contributors, found.answered = 0, set()
                LOG.warning("round %d: %s", found.server_round, found.skipped)
        if metrics[UNREAD] > 0:
            why = (
                f"{metrics[UNREAD]:.0f} of {found.contributors} clients could not read the means "
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
        numbers = total[layout.metrics]
        if ring is not None:
            # For a plain sum this was checked reply by reply.
            numbers, step = ring.decode(numbers), 2.0**-ring.fraction_bits
            ring.check_sums(numbers, found.contributors)
            check_measured(numbers, found.contributors, step * found.contributors)
        self.counts = read_counted(total, layout, ring)
        if layout.weights and self.model is not None:
            sums = total[layout.model]
            if ring is not None:
                sums = ring.decode(sums)
                ring.check_sums(sums, found.contributors)
            mean = torch.from_numpy((sums / found.contributors).astype(np.float32))
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
        sums = Sums(found.server_round, found.sum_round, found.contributors, embeddings, counts)
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
        up = found.contributors
        self.ledger.count("up", "embeddings", up * layout.slots * layout.hidden * word)
        self.ledger.count("up", "activations", up * layout.slots * word)
        counted = counts_size(layout.classes, layout.counting)
        self.ledger.count("up", "metrics", up * (len(SUMMED_NAMES) + counted) * word)
        if self.model is not None:
            weights = self.model.first.numel() + self.model.rest.numel()
            self.ledger.count("up", "weights", up * layout.weights * word)
            self.ledger.count("down", "weights", asked * weights * 4)
