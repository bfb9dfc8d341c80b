"""What the embedding-averaging server keeps from round to round, and what a sum says."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.ego_cohort import EgoSettings, initial_weights, rest_shapes
from flower_graph.ego_vector import mean_metrics
from flower_graph.ledger import ByteLedger
from flower_graph.records.ego import (
    SUMMED_NAMES,
    UNREAD,
    EgoReply,
    EgoRequest,
    Layout,
    Sums,
)
from flower_graph.records.ego_checks import check_measured
from flower_graph.report import RoundReport
from flower_graph.run_checkpoints import RunCheckpoints
from flower_graph.stacked_weights import ModelWeights

if TYPE_CHECKING:
    from flower_graph.ego_session import EgoSession
    from flower_graph.secure.ring import Ring

LOG = logging.getLogger(__name__)
LEAST_HOLDERS = 2  # a mean over fewer is one client's embedding


@dataclass
class RoundSum:
    """What came of a round's sum.

    Attributes
    ----------
    server_round, sum_round : int
        The round, and the number of its secure sum.
    total : ndarray or None
        ``[L]`` the sum; None if the round was skipped.
    contributors : int
        Clients in it.
    answered, failed : set, dict
        Which these are; and of others what went wrong, by client.
    skipped : str
        Why there is no sum.
    rejected : list
        Clients and SuperNodes that were left out.
    parts : dict
        Seconds of the round's parts.
    """

    server_round: int = 0
    sum_round: int = 0
    total: NDArray[Any] | None = None
    contributors: int = 0
    skipped: str = ""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


class EgoBook:
    """Sums that wait for the clients, the mean model, bytes, checkpoints.

    Parameters
    ----------
    settings : EgoSettings
        The clients' models and training.
    variant : str
        ``full``, ``iter`` or ``minus``.
    shares_model : bool
        Whether every round begins with the mean of the clients' weights.
    checkpoint_dir, checkpoint_every : Path or None, int
        Where and every how many rounds to save everything; 0 for never.
    """

    def __init__(
        self,
        settings: EgoSettings,
        *,
        variant: str,
        shares_model: bool,
        checkpoint_dir: Path | None,
        checkpoint_every: int,
    ) -> None:
        self.checkpoints = RunCheckpoints(checkpoint_dir, checkpoint_every)
        self.settings, self.variant = settings, variant
        self.model = initial_weights(settings) if shares_model else None
        self.ledger = ByteLedger()
        self._sums: Sums | None = None
        self._start = self.model  # what this round began with
        self._due = False  # whether the clients were asked to save the round that is reported next
        # What travelled before this round: if the run is resumed, its messages are sent again.
        self._wire: dict[str, Any] = {}
        self._payload: dict[str, Any] = {}

    def forget_sums(self) -> None:
        """Give up the last round's sums: the slots that they belong to are no more."""
        self._sums = None

    def layout(self, server_round: int, session: EgoSession) -> Layout:
        """Return the parts of this round's vectors; after the last round, measurements alone."""
        if server_round > session.rounds:
            return Layout(0, self.settings.hidden)
        weights = 0 if self.model is None else self.model.first.numel() + self.model.rest.numel()
        return Layout(session.num_slots, self.settings.hidden, weights)

    def request(self, server_round: int, session: EgoSession) -> EgoRequest:
        """Write what is the same for all SuperNodes of a round's request."""
        before = server_round - 1
        rounds = session.rounds
        self._due = self.checkpoints.is_due(before, rounds)
        model = self._start = self.model
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
            checkpoint=self._due,
            run=self.checkpoints.run,
        )

    def take(
        self,
        layout: Layout,
        found: RoundSum,
        ring: Ring | None,
        replies: Iterable[EgoReply],
        asked: int,
    ) -> RoundReport:
        """Keep what a sum brings for the next round; report what it says about the last one."""
        self._count(layout, found, asked, 8 if ring is None else ring.word // 8)
        self._sums = None
        seconds = [(reply.train_seconds, reply.mask_seconds) for reply in replies]
        parts = {
            "train": max((train for train, _ in seconds), default=0.0),
            "mask": max((mask for _, mask in seconds), default=0.0),
            **found.parts,
        }
        metrics = dict.fromkeys(SUMMED_NAMES, math.nan)
        if found.total is not None:
            try:
                metrics = self._read(layout, found, ring)
            except ValueError as error:  # nobody can say whose words were wrong
                self._sums = None
                found.skipped = f"a client's part of the sum was not as agreed: {error}"
                found.contributors, found.answered = 0, set()
                LOG.warning("round %d: %s", found.server_round, found.skipped)
        if metrics[UNREAD] > 0:
            self._name_unread(found, int(metrics[UNREAD]))
        return _report(metrics, asked, found, parts, self.settings, self.payload)

    def _read(self, layout: Layout, found: RoundSum, ring: Ring | None) -> dict[str, float]:
        total = found.total
        assert total is not None
        if layout.slots:
            self._sums = self._keep(layout, found, total, ring)
        numbers = total[layout.metrics]
        if ring is not None:
            # Of a plain sum this was checked reply by reply.
            numbers, step = ring.decode(numbers), 2.0**-ring.fraction_bits
            ring.check_sums(numbers, found.contributors)
            check_measured(numbers, found.contributors, step * found.contributors)
        if layout.weights and self.model is not None:
            words = total[layout.model]
            sums = words if ring is None else ring.decode(words)
            if ring is not None:
                ring.check_sums(sums, found.contributors)
            mean = sums / found.contributors
            first = self.model.first.numel()
            split = np.split(mean.astype(np.float32), [first])
            self.model = ModelWeights(
                torch.from_numpy(split[0]).view_as(self.model.first), torch.from_numpy(split[1])
            )
        return dict(zip(SUMMED_NAMES, map(float, numbers), strict=True))

    def _name_unread(self, found: RoundSum, clients: int) -> None:
        """Report clients that could not read what the server added up in the round before."""
        why = (
            f"{clients} of {found.contributors} clients could not read the means and went on "
            "alone: a client's part of the sum was not as agreed"
        )
        found.rejected.append({"reason": why})
        LOG.warning("round %d: %s", found.server_round - 1, why)

    def _keep(
        self, layout: Layout, found: RoundSum, total: NDArray[Any], ring: Ring | None
    ) -> Sums:
        embeddings, counts = total[layout.embeddings], total[layout.counts]
        if ring is None:
            # Nobody else is to see a single client's embedding.
            few = counts < LEAST_HOLDERS
            embeddings = embeddings.reshape(layout.slots, -1) * ~few[:, None]
            embeddings, counts = embeddings.ravel(), counts * ~few
        return Sums(found.server_round, found.sum_round, found.contributors, embeddings, counts)

    def _count(self, layout: Layout, found: RoundSum, asked: int, word: int) -> None:
        """Count payload as single clients would send and get it."""
        if self._sums is not None:
            down = self._sums.embeddings.nbytes + self._sums.counts.nbytes
            self.ledger.count("down", "embeddings", asked * down)
        self._payload = self.ledger.state_dict()  # the sums are not sent again
        up = found.contributors
        self.ledger.count("up", "embeddings", up * layout.slots * layout.hidden * word)
        self.ledger.count("up", "activations", up * layout.slots * word)
        self.ledger.count("up", "metrics", up * len(SUMMED_NAMES) * word)
        if self.model is not None:
            weights = self.model.first.numel() + self.model.rest.numel()
            self.ledger.count("up", "weights", up * layout.weights * word)
            self.ledger.count("down", "weights", asked * weights * 4)

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        return self.ledger.payload

    def model_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the mean model by name; nothing where models are not shared."""
        if self.model is None:
            return {}
        arrays = {"first": self.model.first.numpy()}
        start = 0
        for name, shape in rest_shapes(self.settings).items():
            size = math.prod(shape)
            arrays[name] = self.model.rest[start : start + size].view(shape).numpy()
            start += size
        return arrays

    # Checkpoints

    def save(self, server_round: int, session: EgoSession, answers: Mapping[int, EgoReply]) -> None:
        """Complete the round's checkpoint, if one is due and all clients that are there saved it.

        Parameters
        ----------
        server_round : int
            The round.
        session : EgoSession
            To ask the SuperNodes that have not been asked with the round's request.
        answers : mapping
            What those answered that were, by SuperNode.
        """
        if not self._due:
            return
        saved = {node: reply.not_saved for node, reply in answers.items()}
        missing = session.save_others(server_round, saved)
        state: dict[str, Any] = {"settings": self._settings(), "ledger": self._payload}
        state["wire"] = self._wire
        if self._start is not None:
            # The clients' part was saved within the next round, which began with this model.
            state |= {"first": self._start.first, "rest": self._start.rest}
        self.checkpoints.save(server_round, state, missing)

    def resume(self, session: EgoSession) -> int:
        """Go on from the newest checkpoint that is here and at the clients; return its round."""
        wire: dict[str, Any] = {}

        def load(state: Mapping[str, Any]) -> None:
            self.ledger.load_state_dict(state["ledger"])
            wire.update(state["wire"])
            if self.model is not None:
                self.model = ModelWeights(state["first"], state["rest"])

        def ask(server_round: int) -> list[str]:
            # What is sent from here on is the set-up of the run that goes on.
            session.exchange.ledger.load_state_dict(wire)
            return session.go_on(self.checkpoints.resume)

        return self.checkpoints.go_on(session.rounds, self._settings(), load, ask)

    def _settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed."""
        own = {"variant": self.variant, "shares_model": self.model is not None}
        return {**self.settings._asdict(), **own}


def _report(
    metrics: dict[str, float],
    asked: int,
    found: RoundSum,
    parts: dict[str, float],
    settings: EgoSettings,
    payload: dict[str, dict[str, int]],
) -> RoundReport:
    """Report means over clients, of what the sums of their measurements say."""
    means = mean_metrics(metrics, settings.tau)
    contrast = 0.0 if math.isnan(means.contrast) else means.contrast
    return RoundReport(
        round=0,
        loss=means.cross_entropy + settings.mu * contrast,
        cross_entropy=means.cross_entropy,
        regulariser=means.contrast,
        train_accuracy=means.train,
        val_accuracy=means.val,
        test_accuracy=means.test,
        asked=asked,
        answered=found.contributors,
        rejected=found.rejected,
        bytes=payload,
        parts=parts,
        skipped=found.skipped,
    )
