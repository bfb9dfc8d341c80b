"""One round of a strategy that averages, by Flower's verbs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flower_graph.config.common import Robust
from flower_graph.privacy.central import CentralNoise
from flower_graph.records.participation import NOT_CONNECTED
from flower_graph.records.rounds import RoundReport
from flower_graph.server.averaging_replies import (
    ClientReply,
    Combined,
    check_replies,
    client_reasons,
    is_by_client,
    personal_arrays,
    read_replies,
    shared_arrays,
    weight_of,
    with_own_content,
)
from flower_graph.server.membership import Membership
from flower_graph.server.session import Session
from flower_graph.wire.averaging import clients_of
from flower_graph.wire.exchange import ByteLedger, few, log_rejected
from flower_graph.wire.keys import CHECKPOINT, EXTRAS, RUN_TOKEN

LOG = logging.getLogger(__name__)


@dataclass
class SoFar:
    """What a round has come to so far."""

    number: int = 0
    started: float = field(default_factory=time.perf_counter)
    sent: list[Message] = field(default_factory=list)  # of the exchange that runs
    measured: list[Message] = field(default_factory=list)  # the answers to ``evaluate``
    used: set[int] = field(default_factory=set)  # clients whose training counted
    failed: dict[int, str] = field(default_factory=dict)  # single clients: why it did not
    trained: MetricRecord = field(default_factory=MetricRecord)
    evaluated: MetricRecord = field(default_factory=MetricRecord)
    is_averaged: bool = False  # whether Flower's average was asked for
    skipped: str = ""
    saves: bool = False  # whether a checkpoint of it is made
    report: RoundReport | None = None


class CheckedFedAvg(FedAvg):
    """Flower's verbs with checked replies; what a run is, ``ReportedFedAvg`` says."""

    personal: bool = False  # whether ``combine`` answers each client with arrays of its own
    session: Session
    central_noise: CentralNoise | None
    robust: Robust | None
    arrays: ArrayRecord
    own_arrays: dict[int, ArrayRecord]
    _round: SoFar

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

    def prepare(self, server_round: int) -> None:
        """Exchange what comes before a round with those who are there; nothing by default."""

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the largest weight that a SuperNode's reply can have, if that is known."""
        return self.session.members.most_examples(node, training=training)

    def saves(self, server_round: int) -> bool:
        """Whether the clients are to save the round."""
        return False

    # Flower's round, step by step

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's SuperNodes to train."""
        session = self.session
        self._round, self.arrays = SoFar(server_round), arrays
        if server_round == 1:
            self.own_arrays = {}
        session.over(grid)
        session.gather(server_round, "no SuperNode can take part")
        self.prepare(server_round)
        there = session.members.present(session.connected)
        nodes = [there[place] for place in session.draw(len(there), server_round)]
        sent = self._send(super().configure_train(server_round, arrays, config, shown(nodes)))
        asked = [message.metadata.dst_node_id for message in sent]
        session.asked = {node: session.members.clients[node] for node in asked}
        return sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average what can be averaged; without anything, the model stays as it was."""
        replies, members = list(replies), self.session.members
        self.session.ledger.count_messages("up", replies)
        count_payload(self.session.ledger, self._round.sent, replies, members)
        usable = self._usable(server_round, replies, self.arrays)
        for reply in usable:
            self._round.used |= set(members.clients.get(reply.metadata.src_node_id, ()))
            self._round.failed |= client_reasons(reply, members.clients)
        if not usable:
            self._round.skipped = (
                f"none of {len(self._round.sent)} SuperNodes gave a usable answer to train"
            )
            return None, None
        arrays = self._combined(read_replies(usable, members.clients))
        return arrays, self._round.trained

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all SuperNodes to measure the model."""
        self.arrays, session = arrays, self.session
        connected = session.exchange.nodes(session.min_nodes, session.timeout)
        present = session.members.present(connected)
        self._round.saves = self.saves(server_round)
        if not present:  # Flower would wait for one without an end
            return self._send([])
        if self._round.saves:
            config[CHECKPOINT], config[RUN_TOKEN] = True, session.checkpoints.run
        return self._send(super().configure_evaluate(server_round, arrays, config, shown(present)))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the measurements and report the round."""
        now, session, members = self._round, self.session, self.session.members
        now.measured = list(replies)
        session.ledger.count_messages("up", now.measured)
        usable = self._usable(server_round, now.measured, None)
        metrics = super().aggregate_evaluate(server_round, usable) if usable else None
        now.evaluated = metrics or MetricRecord()
        came = {reply.metadata.src_node_id: reply for reply in usable}
        # A SuperNode that does not say whom it hosts counts by its weight.
        hosted = {node: len(members.clients.get(node, ())) for node in came}
        answered = sum(hosted[node] or int(weight_of(reply)) for node, reply in came.items())
        silent = [one.metadata.dst_node_id for one in now.sent]
        gone = dict.fromkeys(members.absent, NOT_CONNECTED)
        who = session.participation(now.used - now.failed.keys(), failed=now.failed, left_out=gone)
        now.report = RoundReport(
            round=server_round,
            asked=answered + sum(members.count(node) for node in silent if node not in came),
            answered=answered,
            rejected=[{"node": one.node_id, "reason": one.reason} for one in few(session.rejected)],
            bytes=session.ledger.payload,
            wire_bytes=session.ledger.wire,
            seconds=time.perf_counter() - now.started,
            skipped=now.skipped,
            participation=who.to_record() if members.everyone() else {},
            **self.report_fields(now.trained, now.evaluated),
        )
        return None if metrics is None else self.measured(now.report)

    def measured(self, report: RoundReport) -> MetricRecord:
        """Give the round's accuracies."""
        raise NotImplementedError

    def _combined(self, replies: list[ClientReply]) -> ArrayRecord | None:
        """Have the replies combined; return the model if it is one for all."""
        combined = self.combine(replies)
        if not self._round.is_averaged:
            unused = "central_noise" if self.central_noise is not None else ""
            if self.robust is not None:
                unused = f"average: {self.robust.name}"
            if unused:
                raise ValueError(
                    f"{type(self).__name__}.combine does not use ReportedFedAvg.combine, so that "
                    f"{unused} has no effect; it can do without only where none is set"
                )
            contents = [reply.message.content for reply in replies]
            self._round.trained = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        if not is_by_client(combined):
            return shared_arrays(combined, self.arrays)
        if not self.personal:
            raise ValueError(
                f"{type(self).__name__}.combine gives arrays by client: it needs personal = True"
            )
        known = self.session.members.everyone()
        self.own_arrays |= personal_arrays(combined, self.arrays, known)
        return None

    def _send(self, messages: Iterable[Message]) -> list[Message]:
        """Put the messages in order: with it, the order of sums is the same each time."""
        members, sent = self.session.members, list[Message]()
        for message in sorted(messages, key=lambda one: members.place(one.metadata.dst_node_id)):
            # The first client of a SuperNode, if it says whom it hosts
            local = members.clients.get(message.metadata.dst_node_id, ())
            own = self.own_arrays.get(local[0]) if local else None
            sent.append(with_own_content(message, self.arrayrecord_key, own))
        self._round.sent = sent
        self.session.ledger.count_messages("down", sent)
        return sent

    def _usable(
        self, server_round: int, replies: Sequence[Message], model: ArrayRecord | None
    ) -> list[Message]:
        """Return the replies to average; note and log every node that is left out."""
        most = partial(self.most_examples, training=model is not None)
        sent, timeout = self._round.sent, self.session.timeout
        usable, rejected = check_replies(sent, replies, model, timeout, most, self.extras())
        if model is not None and self.central_noise is not None:
            usable, several = self.central_noise.sort_out(usable)
            rejected = rejected + several
        where = "evaluate: " if model is None else ""
        named = [replace(entry, reason=where + entry.reason) for entry in rejected]
        self.session.leave_out(named)
        log_rejected(LOG, server_round, "left out", named)
        return usable


def shown(nodes: list[int]) -> Grid:
    """Return a grid that has these SuperNodes and no others: all that Flower asks to choose."""
    return cast(Grid, SimpleNamespace(get_node_ids=lambda: nodes))


# Counting ---------------------------------------------------------------------------------------


def count_payload(
    ledger: ByteLedger, sent: Iterable[Message], replies: Iterable[Message], who: Membership
) -> None:
    """Count every client's arrays both ways, whoever shares its SuperNode."""
    answers = {one.metadata.src_node_id: one for one in replies if one.has_content()}
    for message in sent:
        node = message.metadata.dst_node_id
        answer, clients = answers.get(node), who.count(node)
        if answer is not None and not who.clients.get(node):
            clients = clients_of(answer)
        pairs = (("down", message),) if answer is None else (("down", message), ("up", answer))
        for direction, one in pairs:
            sizes = {n: record.count_bytes() for n, record in one.content.array_records.items()}
            extras = sizes.pop(EXTRAS, 0)
            ledger.count(direction, "weights", clients * sum(sizes.values()))
            if extras:
                ledger.count(direction, EXTRAS, clients * extras)
