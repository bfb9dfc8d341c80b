"""Flower's FedAvg, with checked replies and a report a round; any strategy that averages.

What is added to Flower's code: nodes are waited for with a limit, asked which clients they host,
and drawn by the run's seed; replies that cannot be averaged are left out and reported; bytes are
counted; a run can be saved and resumed. The averaging is Flower's, and may be that of another
strategy: ``class Mine(ReportedFedAvg, FedProx)``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray

from flower_graph.averaging_checkpoints import AveragingCheckpoints, arrays_like, not_saved
from flower_graph.averaging_round import (
    AveragingRound,
    count_clients,
    count_payload,
    count_wire,
    drawn,
    shown,
)
from flower_graph.central_privacy import CentralNoise
from flower_graph.errors import NoClientsError
from flower_graph.exchange import Exchange
from flower_graph.gathering import Rejected, log_rejected
from flower_graph.hosted import Hosted
from flower_graph.ledger import ByteLedger
from flower_graph.participation import ranges
from flower_graph.records.keys import CHECKPOINT, RUN_TOKEN
from flower_graph.reply_checks import check_replies
from flower_graph.report import RoundReport, format_round
from flower_graph.strategy_state import StrategyState

LOG = logging.getLogger(__name__)
# What a checkpoint has under a name of its own, and what lasts a round only
OWN = {"arrays", "ledger", "checkpoints", "central_noise", "_timeout", "_round", "_num_rounds"}
OWN |= {"_exchange", "_hosted", "_known", "_own", "_on_round"}


class ReportedFedAvg(FedAvg):
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
    **more
        Arguments of another strategy that a subclass puts in the place of ``FedAvg``.

    Attributes
    ----------
    arrays : ArrayRecord
        The model: what was sent last.
    ledger : ByteLedger
        Bytes so far. Payload is what the clients would send and get to train if each had a
        SuperNode of its own. A SuperNode that does not say whom it hosts counts as one client
        where it is silent.

    Raises
    ------
    ValueError
        If an argument is impossible.
    """

    def __init__(
        self,
        *,
        participation: float = 1.0,
        min_nodes: int = 1,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        **more: Any,
    ) -> None:
        if not 0 < participation <= 1:
            raise ValueError(f"participation is {participation}, must be above 0 and at most 1")
        if min_nodes < 1:
            raise ValueError(f"min_nodes is {min_nodes}, must be at least 1")
        # Whom to wait for and whom to ask is decided here; Flower takes all that it is shown.
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **more)
        self.participation, self.min_nodes, self.seed = participation, min_nodes, seed
        self.arrays, self.ledger = ArrayRecord(), ByteLedger()
        self.central_noise: CentralNoise | None = None  # see ``flower_graph.central_privacy``
        self.checkpoints = AveragingCheckpoints(checkpoint_dir, checkpoint_every)
        self.checkpoints.check_measuring(self.fraction_evaluate)
        self._timeout, self._round, self._num_rounds = 600.0, AveragingRound(), 0
        self._exchange: Exchange | None = None
        self._hosted, self._known, self._own = Hosted(), set[int](), dict[str, Any]()
        self._on_round: Callable[[RoundReport], None] = lambda report: None

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

    def fixed_settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed; a subclass adds its own."""
        return {"strategy": type(self).__name__, "seed": self.seed}

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the largest weight that a SuperNode's reply can have, if that is known."""
        return self._hosted.most_examples(node, training=training)

    @property
    def hosted(self) -> dict[int, list[int]]:
        """Clients of every SuperNode; none of one that does not say."""
        return self._hosted.clients

    def run(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        on_round: Callable[[RoundReport], None] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
    ) -> Result:
        """Run Flower's rounds.

        Parameters
        ----------
        grid : Grid
            Flower's grid, of any kind.
        arrays : ArrayRecord
            The model to start from.
        num_rounds : int
            Rounds, at least 1.
        timeout : float
            Seconds that an exchange may take.
        on_round : callable, optional
            Called with every round's report; without it, one line is logged.
        config : mapping, optional
            What every message says besides.
        resume : bool
            Go on from the last checkpoint.

        Returns
        -------
        Result
            Flower's; of a resumed run, with the rounds that were run now.

        Raises
        ------
        CheckpointError
            If there is nothing to resume from, or what the strategy keeps cannot be saved.
        NoClientsError
            If too few SuperNodes connect in time.
        ValueError
            If an argument is impossible.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds: {num_rounds} is not at least 1")
        self.arrays, self._timeout, self._num_rounds = arrays, timeout, num_rounds
        self._on_round = on_round or (lambda report: LOG.info(format_round(report, num_rounds)))
        self._own, self._hosted = dict(config or {}), Hosted(config)
        self._exchange = None
        self._open(grid)
        self.checkpoints.begin(StrategyState(self, OWN))
        self.summary()
        done = self._resume() if resume else 0
        result = Result()
        if done:
            result.arrays = self.arrays
        for server_round in range(done + 1, num_rounds + 1):
            self._run_round(server_round, grid, result)
        return result

    def _run_round(self, server_round: int, grid: Grid, result: Result) -> None:
        """Run a round as Flower's ``start`` does, which can begin with the first alone."""
        config = ConfigRecord(dict(self._own))
        messages = self.configure_train(server_round, self.arrays, config, grid)
        replies = grid.send_and_receive(messages, timeout=self._timeout)
        arrays, metrics = self.aggregate_train(server_round, replies)
        if arrays is not None:
            result.arrays = self.arrays = arrays
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        config = ConfigRecord(dict(self._own))
        messages = self.configure_evaluate(server_round, self.arrays, config, grid)
        replies = grid.send_and_receive(messages, timeout=self._timeout)
        metrics = self.aggregate_evaluate(server_round, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the model."""
        return {name: array.numpy() for name, array in self.arrays.items()}

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        return self.ledger.payload

    # Flower's round, step by step

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's SuperNodes to train."""
        self._round, self.arrays = AveragingRound(), arrays
        there = self._there(server_round, grid)
        nodes = drawn(there, self.participation, self.seed, server_round)
        messages = super().configure_train(server_round, arrays, config, nodes)
        return self._send(messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average what can be averaged; without anything, the model stays as it was."""
        replies = list(replies)
        count_wire(self.ledger, "up", replies)
        count_payload(self.ledger, self._round.sent, replies, self._hosted)
        usable = self._usable(server_round, replies, self.arrays)
        if not usable:
            self._round.skipped = (
                f"none of {len(self._round.sent)} SuperNodes gave a usable answer to train"
            )
            return None, None
        arrays, metrics = self._average(server_round, usable)
        self._round.trained = metrics or MetricRecord()
        return arrays, metrics

    def _average(
        self, server_round: int, usable: list[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average as Flower does, with noise if the strategy has any to add."""
        average = super().aggregate_train
        if self.central_noise is None:
            return average(server_round, usable)
        return self.central_noise.average(server_round, self.arrays, usable, average)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all SuperNodes to measure the model."""
        self.arrays = arrays
        connected = self._open(grid).nodes(self.min_nodes, self._timeout)
        present = self._hosted.present(connected)
        if not present:  # Flower would wait for one without an end
            return self._send([])
        if self.checkpoints.is_due(server_round, self._num_rounds):
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
        answered = sum(count_clients(reply, self._hosted) for reply in usable)
        measured = {reply.metadata.src_node_id for reply in usable}
        nodes = self._round.sent_to
        asked = answered + sum(self._hosted.count(node) for node in nodes if node not in measured)
        self._on_round(self._report(server_round, metrics or MetricRecord(), asked, answered))
        self._save(server_round, nodes, replies)
        return metrics

    def summary(self) -> None:
        """Log the settings, Flower's and the choice of SuperNodes."""
        super().summary()
        how = self.min_nodes, self.participation, self.seed
        LOG.info("SuperNodes: wait for %d, %g of them train, drawn by seed %d", *how)

    def _open(self, grid: Grid) -> Exchange:
        """Return what to wait for SuperNodes with and to ask them; made anew for another grid."""
        if self._exchange is None or self._exchange.grid is not grid:
            self._exchange, self.ledger = Exchange(grid), ByteLedger()
            self._exchange.ledger = self.ledger
        return self._exchange

    def _there(self, server_round: int, grid: Grid) -> list[int]:
        """Wait for SuperNodes, ask new ones whom they host, and return those that take part."""
        exchange = self._open(grid)
        connected = self._round.connected = exchange.nodes(self.min_nodes, self._timeout)
        refused = self._hosted.ask(exchange, connected, server_round, self._timeout)
        self._round.reject(refused)
        present = self._hosted.present(connected)
        if not present:
            reasons = "; ".join(sorted({entry.reason for entry in refused}))
            raise NoClientsError(f"no SuperNode can take part: {reasons}")
        return present

    def _send(self, messages: Iterable[Message]) -> list[Message]:
        """Put the messages in order: with it, the order of sums is the same each time."""
        place = self._hosted.place
        self._round.sent = sorted(messages, key=lambda one: place(one.metadata.dst_node_id))
        count_wire(self.ledger, "down", self._round.sent)
        return self._round.sent

    def _usable(
        self, server_round: int, replies: Sequence[Message], model: ArrayRecord | None
    ) -> list[Message]:
        """Return the replies to average; note and log every node that is left out."""
        most = partial(self.most_examples, training=model is not None)
        found = check_replies(self._round.sent, replies, model, self._timeout, most)
        (usable, rejected), where = found, "evaluate: " if model is None else ""
        if model is not None and self.central_noise is not None:
            usable, several = self.central_noise.sort_out(usable)
            rejected = rejected + several
        named = [Rejected(entry.node_id, where + entry.reason) for entry in rejected]
        self._round.reject(named)
        self._hosted.note(named)
        if model is not None:
            self._round.learn(usable, named, self._hosted)
        log_rejected(LOG, server_round, "left out", named)
        return usable

    def _report(
        self, server_round: int, evaluated: MetricRecord, asked: int, answered: int
    ) -> RoundReport:
        now = self._round
        return RoundReport(
            round=server_round,
            asked=asked,
            answered=answered,
            rejected=now.rejected,
            bytes=self.payload,
            wire_bytes=self.ledger.wire,
            seconds=time.perf_counter() - now.started,
            skipped=now.skipped,
            participation=now.took_part(self._hosted),
            **self.report_fields(now.trained, evaluated),
        )

    # Checkpoints

    def _save(self, server_round: int, asked: list[int], replies: Sequence[Message]) -> None:
        """Complete the round's checkpoint, if one is due and all that were asked saved theirs."""
        if self.checkpoints.is_due(server_round, self._num_rounds):
            state = {
                "arrays": {name: array.numpy() for name, array in self.arrays.items()},
                "ledger": self.ledger.state_dict(),
                "settings": self.fixed_settings(),
                "clients": self._hosted.everyone(),
            }
            self.checkpoints.save(server_round, state, not_saved(asked, replies))

    def _resume(self) -> int:
        """Load the newest checkpoint that the server and all clients have; return its round."""
        ledger: dict[str, Any] = {}

        def load(state: Mapping[str, Any]) -> None:
            self.arrays = arrays_like(self.arrays, state["arrays"])
            self._known, found = set(state["clients"]), state["ledger"]
            self.ledger.load_state_dict(found)
            ledger.update(found)

        def ask(server_round: int) -> list[str]:
            refused = self._reach(server_round)
            # Not counted: the clients were asked who they are in the run's first part already.
            self.ledger.load_state_dict(ledger)
            return refused

        settings = self.fixed_settings()
        return self.checkpoints.go_on(self._num_rounds, settings, load, ask)

    def _reach(self, server_round: int) -> list[str]:
        """Have all clients go on from a checkpoint; return why some cannot."""
        question = self._own | self.checkpoints.resume.to_config()
        self._hosted = Hosted(question, self._known)
        assert self._exchange is not None
        connected = self._exchange.nodes(self.min_nodes, self._timeout)
        refused = self._hosted.ask(self._exchange, connected, server_round, self._timeout)
        if self._hosted.absent and not refused:
            LOG.warning("clients %s are not connected", ranges(self._hosted.absent))
        return [f"node {entry.node_id}: {entry.reason}" for entry in refused]
