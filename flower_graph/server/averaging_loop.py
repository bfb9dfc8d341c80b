"""The rounds of a strategy that averages: Flower's, begun anywhere, saved and resumed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray

from flower_graph.report.rounds import RoundReport
from flower_graph.report.text import format_round
from flower_graph.server.averaging_checkpoints import AveragingCheckpoints, arrays_like, not_saved
from flower_graph.server.averaging_round import AveragingRound
from flower_graph.server.averaging_session import AveragingSession
from flower_graph.server.ledger import ByteLedger
from flower_graph.server.strategy_state import StrategyState

LOG = logging.getLogger(__name__)
# What a checkpoint has under a name of its own, and what lasts a round only
OWN = {"arrays", "own_arrays", "session", "checkpoints", "central_noise", "robust"}
OWN |= {"_round", "_num_rounds", "_on_round"}


class AveragingLoop(FedAvg):
    """Runs the rounds; what one consists of, ``ReportedFedAvg`` says."""

    personal: bool
    seed: int
    patience: int
    checkpoints: AveragingCheckpoints
    session: AveragingSession
    _round: AveragingRound

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.arrays, self.own_arrays = ArrayRecord(), dict[int, ArrayRecord]()
        self._num_rounds = 0
        self.best_round, self.best_accuracy = 0, -math.inf  # of validation
        self._on_round: Callable[[RoundReport], None] = lambda report: None

    @property
    def hosted(self) -> dict[int, list[int]]:
        """Clients of every SuperNode; none of one that does not say."""
        return self.session.hosted.clients

    @property
    def ledger(self) -> ByteLedger:
        """Bytes so far."""
        # Payload is what the clients would send and get to train if each had a SuperNode of its
        # own. A SuperNode that does not say whom it hosts counts as one client where it is silent.
        return self.session.ledger

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
        self.arrays, self._num_rounds = arrays, num_rounds
        self.best_round, self.best_accuracy = 0, -math.inf
        self._on_round = on_round or (lambda report: LOG.info(format_round(report, num_rounds)))
        self.session.begin(grid, timeout, config or {})
        self.checkpoints.begin(StrategyState(self, OWN))
        self.summary()
        done = self._resume(grid) if resume else 0
        result = Result()
        if done:
            result.arrays = self.arrays
        for server_round in range(done + 1, num_rounds + 1):
            if self._is_hopeless(server_round - 1):
                LOG.info(
                    "the run ends after round %d: since round %d no validation accuracy was better",
                    server_round - 1,
                    self.best_round,
                )
                break
            self._run_round(server_round, grid, result)
        return result

    def _tell(self, report: RoundReport) -> None:
        """Report a round, and note the best one."""
        if report.val_accuracy > self.best_accuracy:  # not where nobody could measure
            self.best_round, self.best_accuracy = report.round, report.val_accuracy
        self._on_round(report)

    def _is_hopeless(self, last_round: int) -> bool:
        """Whether the validation accuracy has not risen for as long as the run is patient."""
        return 0 < self.patience <= last_round - self.best_round

    def _is_saved(self, server_round: int) -> bool:
        """Whether a checkpoint of a round is due; also of one that may be the last."""
        # It is the clients' turn to save before anybody knows how good the round is.
        may_end = server_round if self._is_hopeless(server_round) else self._num_rounds
        return self.checkpoints.is_due(server_round, may_end)

    def _run_round(self, server_round: int, grid: Grid, result: Result) -> None:
        """Run a round as Flower's ``start`` does, which can begin with the first alone."""
        config = ConfigRecord(dict(self.session.question))
        messages = self.configure_train(server_round, self.arrays, config, grid)
        replies = self.session.exchange(messages, server_round, grid)
        arrays, metrics = self.aggregate_train(server_round, replies)
        if arrays is not None:
            result.arrays = self.arrays = arrays
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        config = ConfigRecord(dict(self.session.question))
        messages = self.configure_evaluate(server_round, self.arrays, config, grid)
        replies = self.session.exchange(messages, server_round, grid)
        metrics = self.aggregate_evaluate(server_round, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the model; of a method with personal ones ``"client-<number>.<name>"``."""
        models = {f"client-{client}.": local for client, local in sorted(self.own_arrays.items())}
        if not self.personal:
            models = {"": self.arrays}
        return {start + n: a.numpy() for start, local in models.items() for n, a in local.items()}

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        return self.ledger.payload

    def fixed_settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed; a subclass adds its own."""
        return {"strategy": type(self).__name__, "seed": self.seed}

    # Checkpoints

    def _save(self, server_round: int, asked: list[int], replies: Sequence[Message]) -> None:
        """Complete the round's checkpoint, if one is due and all that were asked saved theirs."""
        if self._round.saves:
            state = {
                "arrays": _values(self.arrays),
                "own-arrays": {client: _values(local) for client, local in self.own_arrays.items()},
                "ledger": self.ledger.state_dict(),
                "settings": self.fixed_settings(),
                "clients": self.session.hosted.everyone(),
            }
            self.checkpoints.save(server_round, state, not_saved(asked, replies))

    def _resume(self, grid: Grid) -> int:
        """Load the newest checkpoint that the server and all clients have; return its round."""
        ledger, known = dict[str, Any](), set[int]()

        def load(state: Mapping[str, Any]) -> None:
            self.arrays = arrays_like(self.arrays, state["arrays"])
            saved = state.get("own-arrays", {})  # not in checkpoints of 0.1.0
            self.own_arrays = {c: arrays_like(self.arrays, local) for c, local in saved.items()}
            known.update(state["clients"])
            ledger.update(state["ledger"])
            self.ledger.load_state_dict(ledger)

        def ask(server_round: int) -> list[str]:
            refused = self.session.resume(grid, self.checkpoints.resume, known)
            # Not counted: the clients were asked who they are in the run's first part already.
            self.ledger.load_state_dict(ledger)
            return refused

        settings = self.fixed_settings()
        return self.checkpoints.go_on(self._num_rounds, settings, load, ask)


def _values(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in record.items()}
