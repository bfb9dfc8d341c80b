"""FedSCem's server state from round to round, and how the server reads sums."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.ops.counts import Counts
from flower_graph.secure.relayed import CHECKS
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.fedscem.cohort import EgoSettings, initial_weights, split_rest
from flower_graph.strategies.fedscem.messages import (
    SUMMED_NAMES,
    UNREAD,
    EgoReply,
    EgoRequest,
    Layout,
    Sums,
)
from flower_graph.strategies.fedscem.vector import (
    Means,
    RoundSum,
    check_measured,
    mean_metrics,
    read_counted,
)
from flower_graph.wire.counts import counts_size
from flower_graph.wire.ledger import ByteLedger, Traffic

if TYPE_CHECKING:
    from flower_graph.secure.ring import Ring
    from flower_graph.strategies.fedscem.session import EgoSession

LOG = logging.getLogger(__name__)
LEAST_HOLDERS = 2  # a mean over fewer is one client's embedding


class EgoServerState:
    """The sums to send to the clients, the mean model, bytes."""

    def __init__(self, settings: EgoSettings, *, variant: str, shares_model: bool) -> None:
        self.settings, self.variant = settings, variant
        self.model = initial_weights(settings) if shares_model else None
        self.ledger = ByteLedger()
        self.counting = ""  # what of their predictions clients count
        self.counts: Counts | None = None  # of the last sum
        self._sums: Sums | None = None
        self.started = self.model  # the model that this round began with
        # Bytes before this round: a resumed run sends its messages again.
        self._wire: Traffic = self.ledger.state_dict()
        self._payload: Traffic = self.ledger.state_dict()

    def forget_sums(self) -> None:
        """Drop the last round's sums, because the slots have changed."""
        self._sums = None

    def layout(self, server_round: int, session: EgoSession) -> Layout:
        """Return the parts of this round's vectors; after the last round, measurements alone."""
        about = self.settings.num_classes, self.counting
        if server_round > session.rounds:
            return Layout(0, self.settings.hidden, 0, *about)
        weights = 0 if self.model is None else self.model.first.numel() + self.model.rest.numel()
        slots, distrusted = session.num_slots, session.members.parties is not None
        tags = CHECKS if distrusted and slots else 0
        return Layout(slots, self.settings.hidden, weights, *about, tags)

    def request(self, server_round: int, session: EgoSession) -> EgoRequest:
        before = server_round - 1
        rounds = session.rounds
        model = self.started = self.model
        self._wire = session.exchange.ledger.state_dict()
        return EgoRequest(
            server_round,
            np.zeros(0, np.int64),
            self.settings,
            self.variant,
            sums=self._sums,
            model=None if model is None else (model.first.numpy(), model.rest.numpy()),
            ring=session.ring(),
            is_last=server_round > rounds,
            checkpoint=session.is_due(before),
            run=session.checkpoints.run,
            counting=self.counting,
        )

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
        self._sums = self.counts = None
        seconds = [(reply.train_seconds, reply.mask_seconds) for reply in replies]
        found.parts = {
            "train": max((train for train, _ in seconds), default=0.0),
            "mask": max((mask for _, mask in seconds), default=0.0),
            **found.parts,
        }
        metrics = dict.fromkeys(SUMMED_NAMES, math.nan)
        if found.total is not None:
            try:
                metrics = self._read(layout, found, ring)
            except ValueError as error:  # nobody knows whose words were wrong
                self._sums = self.counts = None
                found.skipped = f"a client's part of the sum was not as agreed: {error}"
                found.contributors, found.answered = 0, set()
                LOG.warning("round %d: %s", found.server_round, found.skipped)
        if metrics[UNREAD] > 0:
            self._name_unread(found, int(metrics[UNREAD]))
        return mean_metrics(metrics, self.settings.tau)

    def _read(self, layout: Layout, found: RoundSum, ring: Ring | None) -> dict[str, float]:
        total = found.total
        assert total is not None
        if layout.slots:
            self._sums = self._keep(layout, found, total, ring)
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

    def _name_unread(self, found: RoundSum, clients: int) -> None:
        why = (
            f"{clients} of {found.contributors} clients could not read the means and went on "
            "alone: a client's part of the sum was not as agreed"
        )
        found.rejected.append({"reason": why})
        LOG.warning("round %d: %s", found.server_round - 1, why)

    def _keep(
        self, layout: Layout, found: RoundSum, total: NDArray[np.number], ring: Ring | None
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
        if self._sums is not None:
            down = self._sums.embeddings.nbytes + self._sums.counts.nbytes
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

    def model_arrays(self) -> dict[str, NDArray[np.float32]]:
        if self.model is None:
            return {}
        parts = split_rest(self.model.rest[None], self.settings)
        rest = {name: part[0].numpy() for name, part in parts.items()}
        return {"first": self.model.first.numpy()} | rest

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = {"ledger": self._payload, "wire": self._wire}
        if self.started is not None:
            # The clients' part was saved within the next round, which began with this model.
            state |= {"first": self.started.first, "rest": self.started.rest}
        return state

    def load_state_dict(self, state: StateDict) -> None:
        self.ledger.load_state_dict(state["ledger"])
        if self.model is not None:
            self.model = ModelWeights(state["first"], state["rest"])
