"""Flower's FedAvg, with checked replies and a report a round; any strategy that averages.

What is added to Flower's code: nodes are waited for with a limit, asked which clients they host,
and drawn by the run's seed; replies that cannot be averaged are left out and reported; bytes are
counted; a run can be saved and resumed. The averaging is Flower's, and may be that of another
strategy: ``class Mine(ReportedFedAvg, FedProx)``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flower_graph.config.robust import Robust
from flower_graph.messages.keys import CHECKPOINT, RUN_TOKEN
from flower_graph.privacy.central import CentralNoise
from flower_graph.report.rounds import RoundReport
from flower_graph.server.averaging_checkpoints import AveragingCheckpoints
from flower_graph.server.averaging_loop import AveragingLoop
from flower_graph.server.averaging_round import (
    AveragingRound,
    count_clients,
    count_payload,
    count_wire,
    drawn,
    shown,
)
from flower_graph.server.averaging_session import AveragingSession
from flower_graph.server.client_reply import ClientReply, read_replies
from flower_graph.server.combined_arrays import (
    Combined,
    is_by_client,
    personal_arrays,
    shared_arrays,
    with_own_content,
)
from flower_graph.server.exchange import Rejected
from flower_graph.server.gathering import log_rejected
from flower_graph.server.reply_checks import check_replies

LOG = logging.getLogger(__name__)


class ReportedFedAvg(AveragingLoop):
    """Flower's ``FedAvg`` with a report a round.

    A subclass says what a report holds (``report_fields``) and starts the rounds (``run``).

    Parameters
    ----------
    participation : float
        Share of the SuperNodes asked to train each round, above 0 and at most 1. All measure.
    min_nodes : int
        SuperNodes to wait for before an exchange, at least 1.
    seed : int
        Of the choice of SuperNodes.
    checkpoint_dir, checkpoint_every : Path or None, int
        Where and every how many rounds to save everything; 0 for never.
    patience : int
        Rounds without a better validation accuracy after which ``run`` ends; 0 for never. The
        model is then the last one; the reports tell the best round.
    **more
        Arguments of another strategy that a subclass puts in the place of ``FedAvg``.

    Attributes
    ----------
    arrays : ArrayRecord
        The model: what was sent last.
    best_round : int
        The first round of the highest validation accuracy so far.
    own_arrays : dict of int to ArrayRecord
        With ``personal``: what each client was given last.

    Raises
    ------
    ValueError
        If an argument is impossible.
    """

    personal: bool = False  # whether ``combine`` answers each client with arrays of its own

    def __init__(
        self,
        *,
        participation: float = 1.0,
        min_nodes: int = 1,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        patience: int = 0,
        **more: Any,
    ) -> None:
        if not 0 < participation <= 1:
            raise ValueError(f"participation is {participation}, must be above 0 and at most 1")
        if min_nodes < 1:
            raise ValueError(f"min_nodes is {min_nodes}, must be at least 1")
        if patience < 0:
            raise ValueError(f"patience is {patience}, must be at least 0")
        # Whom to wait for and whom to ask is decided here; Flower takes all that it is shown.
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **more)
        self.participation, self.min_nodes, self.seed = participation, min_nodes, seed
        self.patience = patience
        self.central_noise: CentralNoise | None = None  # see ``flower_graph.privacy.central``
        self.robust: Robust | None = None  # see ``flower_graph.server.robust``
        self.checkpoints = AveragingCheckpoints(checkpoint_dir, checkpoint_every)
        self.checkpoints.check_measuring(self.fraction_evaluate)
        self.session = AveragingSession(min_nodes, one_client_each=self.personal)
        self._round = AveragingRound()

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, Any]:
        """Turn Flower's weighted means of the replies' metrics into fields of ``RoundReport``.

        Parameters
        ----------
        trained, evaluated : MetricRecord
            Of the round's two exchanges; empty where no reply was usable.

        Returns
        -------
        dict
            At least losses, regulariser and accuracies.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its reports hold")

    def extras(self) -> Mapping[str, tuple[int, ...]]:
        """Declare what clients send besides the model: name to shape, ``()`` for a number.

        Clients send it as arrays of the record ``extras``: a ``NumPyClient`` names them
        ``"extras/<name>"`` in its metrics' ``array-names``. A reply without it, with another shape
        or with numbers that are not finite is left out.
        """
        return {}

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Make the next model, or one for each client, out of the replies that passed the checks.

        By default Flower's average, or that of the strategy that a subclass puts beside this one.

        Parameters
        ----------
        replies : sequence of ClientReply
            At least one, in the order of the clients' numbers. They are the strategy's own: it may
            change them.

        Returns
        -------
        ArrayRecord, or dict of str to ndarray
            The model for all; with the names and shapes of the model that was sent.
        dict of int to one of these
            With ``personal``, by client: each is sent its own until it is given another, also to
            be measured. Who was never given any has the first model.
        None
            The models stay as they are.
        """
        average, messages = super().aggregate_train, [reply.message for reply in replies]
        self._round.is_averaged = True
        if self.central_noise is None:
            arrays, trained = average(self._round.number, messages)
        else:
            noisy = self.central_noise.average
            arrays, trained = noisy(self._round.number, self.arrays, messages, average)
        self._round.trained = trained or MetricRecord()
        return arrays

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the largest weight that a SuperNode's reply can have, if that is known."""
        return self.session.hosted.most_examples(node, training=training)

    # Flower's round, step by step

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's SuperNodes to train."""
        self._round, self.arrays = AveragingRound(server_round), arrays
        if server_round == 1:
            self.own_arrays = {}
        there = self.session.enrol(self._round, grid)
        nodes = drawn(there, self.participation, self.seed, server_round)
        messages = super().configure_train(server_round, arrays, config, nodes)
        return self._send(messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average what can be averaged; without anything, the model stays as it was."""
        replies = list(replies)
        count_wire(self.ledger, "up", replies)
        count_payload(self.ledger, self._round.sent, replies, self.session.hosted)
        usable = self._usable(server_round, replies, self.arrays)
        if not usable:
            self._round.skipped = (
                f"none of {len(self._round.sent)} SuperNodes gave a usable answer to train"
            )
            return None, None
        arrays = self._combined(read_replies(usable, self.session.hosted.clients))
        return arrays, self._round.trained

    def _combined(self, replies: list[ClientReply]) -> ArrayRecord | None:
        """Have the replies combined; return the model if it is one for all."""
        combined = self.combine(replies)
        if not self._round.is_averaged:
            self._refuse_unused()
            contents = [reply.message.content for reply in replies]
            self._round.trained = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        if not is_by_client(combined):
            return shared_arrays(combined, self.arrays)
        if not self.personal:
            raise ValueError(
                f"{type(self).__name__}.combine gives arrays by client: it needs personal = True"
            )
        known = self.session.hosted.everyone()
        self.own_arrays |= personal_arrays(combined, self.arrays, known)
        return None

    def _refuse_unused(self) -> None:
        """Refuse noise and averages that ``combine`` has not asked for."""
        unused = "central_noise" if self.central_noise is not None else ""
        if self.robust is not None:
            unused = f"average: {self.robust.name}"
        if unused:
            raise ValueError(
                f"{type(self).__name__}.combine does not use ReportedFedAvg.combine, so that "
                f"{unused} has no effect; it can do without only where none is set"
            )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all SuperNodes to measure the model."""
        self.arrays = arrays
        present = self.session.present(grid)
        self._round.saves = self._is_saved(server_round)
        if not present:  # Flower would wait for one without an end
            return self._send([])
        if self._round.saves:
            config[CHECKPOINT], config[RUN_TOKEN] = True, self.checkpoints.run
        messages = super().configure_evaluate(server_round, arrays, config, shown(present))
        return self._send(messages)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the measurements and report the round."""
        replies = list(replies)
        count_wire(self.ledger, "up", replies)
        usable = self._usable(server_round, replies, None)
        metrics = super().aggregate_evaluate(server_round, usable) if usable else None
        answered = sum(count_clients(reply, self.session.hosted) for reply in usable)
        measured = {reply.metadata.src_node_id for reply in usable}
        nodes = self._round.sent_to
        asked = answered + sum(
            self.session.hosted.count(node) for node in nodes if node not in measured
        )
        fields = self.report_fields(self._round.trained, metrics or MetricRecord())
        clients = asked, answered
        told = self._round.report(server_round, clients, self.session.hosted, self.ledger)
        self._tell(RoundReport(**told, **fields))
        self._save(server_round, nodes, replies)
        return metrics

    def summary(self) -> None:
        """Log the settings, Flower's and the choice of SuperNodes."""
        super().summary()
        how = self.min_nodes, self.participation, self.seed
        LOG.info("SuperNodes: wait for %d, %g of them train, drawn by seed %d", *how)

    def _send(self, messages: Iterable[Message]) -> list[Message]:
        """Put the messages in order: with it, the order of sums is the same each time."""
        place, sent = self.session.hosted.place, list[Message]()
        for message in sorted(messages, key=lambda one: place(one.metadata.dst_node_id)):
            client = self.session.client_of(message.metadata.dst_node_id)
            local = None if client is None else self.own_arrays.get(client)
            sent.append(with_own_content(message, self.arrayrecord_key, local))
        self._round.sent = sent
        count_wire(self.ledger, "down", self._round.sent)
        return self._round.sent

    def _usable(
        self, server_round: int, replies: Sequence[Message], model: ArrayRecord | None
    ) -> list[Message]:
        """Return the replies to average; note and log every node that is left out."""
        most = partial(self.most_examples, training=model is not None)
        sent = self._round.sent
        result = check_replies(sent, replies, model, self.session.timeout, most, self.extras())
        (usable, rejected), where = result, "evaluate: " if model is None else ""
        if model is not None and self.central_noise is not None:
            usable, several = self.central_noise.sort_out(usable)
            rejected = rejected + several
        named = [Rejected(entry.node_id, where + entry.reason) for entry in rejected]
        self._round.reject(named)
        self.session.hosted.note(named)
        if model is not None:
            self._round.learn(usable, named, self.session.hosted)
        log_rejected(LOG, server_round, "left out", named)
        return usable
