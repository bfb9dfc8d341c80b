"""Flower's FedAvg, with checked replies and a report a round; any strategy that averages.

What is added to Flower's code: nodes are waited for with a limit and drawn by the run's seed,
replies that cannot be averaged are left out and reported, bytes are counted. The averaging is
Flower's, and may be that of another strategy: ``class Mine(ReportedFedAvg, FedProx)``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray

from flower_graph.exchange import Exchange
from flower_graph.gathering import Rejected, log_rejected
from flower_graph.ledger import ByteLedger, count_bytes
from flower_graph.reply_checks import check_replies, clients_of, weight_of
from flower_graph.report import RoundReport, format_round
from flower_graph.rng import generator

LOG = logging.getLogger(__name__)


@dataclass
class _Round:
    """What a round has come to so far."""

    started: float = field(default_factory=time.perf_counter)
    sent: list[Message] = field(default_factory=list)  # of the exchange that runs
    rejected: list[dict[str, Any]] = field(default_factory=list)
    trained: MetricRecord = field(default_factory=MetricRecord)
    skipped: str = ""


class _Nodes:
    """Stands for a grid where Flower chooses nodes: all that it asks is which there are."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes

    def get_node_ids(self) -> list[int]:
        return self._nodes


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
    **more
        Arguments of another strategy that a subclass puts in the place of ``FedAvg``.

    Attributes
    ----------
    arrays : ArrayRecord
        The model: what was sent last.
    ledger : ByteLedger
        Bytes so far. Payload is what the clients would send and get to train if each had a
        SuperNode of its own; a SuperNode that is silent counts as one client.

    Raises
    ------
    ValueError
        If an argument is impossible.
    """

    def __init__(
        self, *, participation: float = 1.0, min_nodes: int = 1, seed: int = 0, **more: Any
    ) -> None:
        if not 0 < participation <= 1:
            raise ValueError(f"participation is {participation}, must be above 0 and at most 1")
        if min_nodes < 1:
            raise ValueError(f"min_nodes is {min_nodes}, must be at least 1")
        # Whom to wait for and whom to ask is decided here; Flower takes all that it is shown.
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **more)
        self.participation, self.min_nodes, self.seed = participation, min_nodes, seed
        self.arrays, self.ledger = ArrayRecord(), ByteLedger()
        self._timeout, self._round = 600.0, _Round()
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

    def run(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        on_round: Callable[[RoundReport], None] | None = None,
        config: Mapping[str, Any] | None = None,
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

        Returns
        -------
        Result
            Flower's.

        Raises
        ------
        NoClientsError
            If too few SuperNodes connect in time.
        ValueError
            If an argument is impossible.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds: {num_rounds} is not at least 1")
        self.arrays, self.ledger, self._timeout = arrays, ByteLedger(), timeout
        self._on_round = on_round or (lambda report: LOG.info(format_round(report, num_rounds)))
        own = dict(config or {})
        return super().start(
            grid,
            arrays,
            num_rounds,
            timeout,
            train_config=ConfigRecord(own),
            evaluate_config=ConfigRecord(own),
        )

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
        self._round, self.arrays = _Round(), arrays
        nodes = self._drawn(server_round, self._connected(grid))
        messages = super().configure_train(server_round, arrays, config, nodes)
        return self._send(messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average what can be averaged; without anything, the model stays as it was."""
        replies = list(replies)
        self._count_wire("up", replies)
        self._count_payload(replies)
        usable = self._usable(server_round, replies, self.arrays)
        if not usable:
            self._round.skipped = (
                f"none of {len(self._round.sent)} SuperNodes gave a usable answer to train"
            )
            return None, None
        arrays, metrics = super().aggregate_train(server_round, usable)
        self._round.trained = metrics or MetricRecord()
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all SuperNodes to measure the model."""
        self.arrays = arrays
        nodes = cast(Grid, _Nodes(self._connected(grid)))
        messages = super().configure_evaluate(server_round, arrays, config, nodes)
        return self._send(messages)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the measurements and report the round."""
        replies = list(replies)
        self._count_wire("up", replies)
        usable = self._usable(server_round, replies, None)
        metrics = super().aggregate_evaluate(server_round, usable) if usable else None
        answered = int(sum(weight_of(reply) for reply in usable))
        # Clients of a SuperNode that is silent are unknown; it counts as one.
        asked = answered + len(self._round.sent) - len(usable)
        self._on_round(self._report(server_round, metrics or MetricRecord(), asked, answered))
        return metrics

    def summary(self) -> None:
        """Log the settings, Flower's and the choice of SuperNodes."""
        super().summary()
        LOG.info(
            "SuperNodes: wait for %d, %g of them train, drawn by seed %d",
            self.min_nodes,
            self.participation,
            self.seed,
        )

    def _connected(self, grid: Grid) -> list[int]:
        return Exchange(grid).nodes(self.min_nodes, self._timeout)

    def _drawn(self, server_round: int, nodes: list[int]) -> Grid:
        """Draw the SuperNodes that train in a round."""
        count = max(1, round(self.participation * len(nodes)))
        chance = generator(self.seed, "participants", server_round)
        places = torch.randperm(len(nodes), generator=chance)[:count].tolist()
        return cast(Grid, _Nodes([nodes[place] for place in places]))

    def _send(self, messages: Iterable[Message]) -> list[Message]:
        """Put the messages in order: with it, the order of sums is the same each time."""
        self._round.sent = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        self._count_wire("down", self._round.sent)
        return self._round.sent

    def _usable(
        self, server_round: int, replies: Sequence[Message], model: ArrayRecord | None
    ) -> list[Message]:
        """Return the replies to average; note and log every node that is left out."""
        checked = check_replies(self._round.sent, replies, model, self._timeout)
        where = "evaluate: " if model is None else ""
        named = [Rejected(entry.node_id, where + entry.reason) for entry in checked.rejected]
        self._round.rejected += [{"node": one.node_id, "reason": one.reason} for one in named]
        log_rejected(LOG, server_round, "left out", named)
        return checked.usable

    def _count_wire(self, direction: str, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.has_content():
                self.ledger.count_wire(direction, count_bytes(message.content))

    def _count_payload(self, replies: Iterable[Message]) -> None:
        """Count every client's arrays both ways, whoever shares its SuperNode."""
        answers = {one.metadata.src_node_id: one for one in replies if one.has_content()}
        for message in self._round.sent:
            answer = answers.get(message.metadata.dst_node_id)
            clients = 1 if answer is None else clients_of(answer)
            pairs = (("down", message),) if answer is None else (("down", message), ("up", answer))
            for direction, one in pairs:
                size = sum(record.count_bytes() for record in one.content.array_records.values())
                self.ledger.count(direction, "weights", clients * size)

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
            **self.report_fields(now.trained, evaluated),
        )
