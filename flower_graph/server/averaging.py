"""Flower's FedAvg, or another averaging strategy, with checked replies and a report a round.

What is added to Flower's code: nodes are waited for with a limit and asked which clients they host,
of which the run's seed draws some; replies that cannot be averaged are left out and reported; bytes
are counted; a run can be saved and resumed. The averaging is Flower's, and may be that of another
strategy: ``class Mine(ReportedFedAvg, FedProx)``.

The server asks clients: it draws them, whoever hosts them, and combines an answer of each. A
SuperNode sends their weighted mean instead where nothing else is needed, which
`ReportedFedAvg.weighted_sum` says.

All clients measure a round's model, and save then; the server reports the round and completes the
checkpoint, if all clients have saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Strategy
from numpy.typing import NDArray

from flower_graph.config.common import Robust
from flower_graph.privacy.central import CentralNoise
from flower_graph.records.rounds import BestRound, RoundReport
from flower_graph.server.averaging_replies import (
    Checked,
    Combined,
    RoundSoFar,
    check_replies,
    is_by_client,
    personal_arrays,
    refuse_unused,
    shared_arrays,
)
from flower_graph.server.membership import Membership, NamedClients
from flower_graph.server.round_loop import RoundLoop
from flower_graph.server.session import Session
from flower_graph.server.strategy_state import StrategyState, packed_models, unpacked_models
from flower_graph.storage.reading import StateDict
from flower_graph.wire.arrays import pack_integers
from flower_graph.wire.averaging import (
    ClientReply,
    count_payload,
    grid_of,
    read_reply,
    with_own_content,
)
from flower_graph.wire.counts import added, read_counts
from flower_graph.wire.exchange import log_rejected
from flower_graph.wire.keys import CHECKPOINT, CLIENTS, OWN_ARRAYS, ROW_EACH, RUN_TOKEN
from flower_graph.wire.rows import stacked

LOG = logging.getLogger(__name__)
# Flower's, of which the next model depends on nothing but the clients' weighted mean
OF_THE_MEAN = {Strategy, FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi}


class ReportedFedAvg(RoundLoop, FedAvg):
    """Flower's ``FedAvg`` with a report a round.

    A subclass defines the entries of a report (``report_fields``) and may define the first model
    (``first_arrays``). ``start`` runs the rounds; Flower's own loop can too, without reports.

    Parameters
    ----------
    participation : float
        Share of the clients asked to train each round, above 0 and at most 1. All measure.
    min_nodes : int
        SuperNodes to wait for before an exchange, at least 1.
    seed : int
        Of the choice of clients.
    checkpoint_dir, checkpoint_every : Path or None, int
        Where to save, and after how many rounds each; 0 for never.
    **more
        Arguments of another strategy that a subclass puts in the place of ``FedAvg``.

    Attributes
    ----------
    weighted_sum : bool
        A class that writes ``combine`` sets it, in its own body, if the weighted sum of what
        clients send is all that it needs: each SuperNode then answers with its clients' mean.
    arrays : ArrayRecord
        The model: what was sent last.
    best : BestRound
        The first round of the highest validation accuracy so far.
    own_arrays : dict of int to ArrayRecord
        With ``personal``: what each client was given last.

    Raises
    ------
    ValueError
        If an argument is impossible.
    """

    personal: bool = False  # whether ``combine`` gives each client arrays of its own
    weighted_sum: bool = True  # of ``combine`` as it is here; a class with another says it anew

    def __init__(
        self,
        *,
        participation: float = 1.0,
        min_nodes: int = 1,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        **more: Any,  # arguments of the Flower strategy that a subclass adds
    ) -> None:
        # This class decides whom to wait for and whom to ask; Flower takes all that it is given.
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **more)
        if checkpoint_every and self.fraction_evaluate < 1:
            raise ValueError(
                f"fraction_evaluate is {self.fraction_evaluate:g}: clients save a checkpoint when "
                "they measure, so all must be asked to; set it to 1, or checkpoint_every to 0"
            )
        self.session = Session(
            NamedClients() if self.personal else Membership(),
            min_nodes=min_nodes,
            participation=participation,
            seed=seed,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        self.central_noise: CentralNoise | None = None  # see ``flower_graph.privacy.central``
        self.robust: Robust | None = None  # see ``flower_graph.server.robust``
        self.arrays, self.own_arrays = ArrayRecord(), dict[int, ArrayRecord]()
        self.best = BestRound()
        self._round = RoundSoFar()
        self._kept: StrategyState | None = None  # while ``start`` runs

    # What a method says

    def first_arrays(self) -> ArrayRecord:
        """Return the initial model if ``start`` is given none."""
        raise ValueError("initial_arrays: a run needs a model to start from")

    def question(self) -> Mapping[str, Any]:  # of types that Flower's records take
        """Return further entries of every message."""
        return {}

    def fixed_settings(self) -> dict[str, object]:
        """Return what may not change when a run is resumed; a subclass adds its own."""
        return {"strategy": type(self).__name__, "seed": self.session.seed}

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, object]:
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
            One of each client, at least one, in the order of their numbers; with ``weighted_sum``
            a mean of each SuperNode. They are the strategy's own: it may change them.

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
        """Exchange messages with the connected SuperNodes before a round; none by default."""

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the largest weight that a SuperNode's reply can have, if that is known."""
        return self.session.members.most_examples(node, training=training)

    # What a run leaves

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        # What the clients would send and get to train if each had a SuperNode of its own
        return self.session.ledger.payload

    def weights(self) -> dict[str, NDArray[Any]]:  # of the model's types
        """Return what the server holds after the last round.

        Returns
        -------
        dict of str to ndarray
            The model's arrays, named and shaped as ``first_arrays`` gives them; of a method with
            personal models those of each client, as ``"client-<number>.<name>"``.
        """
        own = {f"client-{one}.": arrays for one, arrays in sorted(self.own_arrays.items())}
        models = own if self.personal else {"": self.arrays}
        return {start + n: a.numpy() for start, one in models.items() for n, a in one.items()}

    def learnt(self) -> ArrayRecord:
        """Return the model."""
        return self.arrays

    # The loop

    def begin(self, initial_arrays: ArrayRecord | None) -> None:
        """Begin anew, as often as one likes."""
        self.arrays = self.first_arrays() if initial_arrays is None else initial_arrays
        self.own_arrays = {}
        self.session.renew(type(self.session.members)(self.question()))
        self._kept = StrategyState(self)
        self.summary()

    def round(self, server_round: int) -> RoundReport:
        """Run a round as Flower's ``start`` does, which can begin with the first alone."""
        session, entries = self.session, self.question()
        grid, config = session.exchange.grid, ConfigRecord({**entries, **self._config})
        messages = self.configure_train(server_round, self.arrays, config, grid)
        replies = session.relay(messages, server_round)
        self.arrays = self.aggregate_train(server_round, replies)[0] or self.arrays
        config = ConfigRecord({**entries, **self.count_entry, **self._evaluate_config})
        messages = self.configure_evaluate(server_round, self.arrays, config, grid)
        self.aggregate_evaluate(server_round, session.relay(messages, server_round))
        report = self._round.report
        assert report is not None
        return report

    def trained(self, report: RoundReport) -> MetricRecord:
        """Give the round's losses beside Flower's means of what clients said."""
        return MetricRecord({**self._round.trained, **super().trained(report)})

    def measured(self, report: RoundReport) -> MetricRecord:
        """Give its accuracies beside Flower's means of what clients measured."""
        return MetricRecord({**self._round.evaluated, **super().measured(report)})

    def finish(self, server_round: int) -> None:
        """End: Flower's own loop saves nothing."""
        self._kept = None

    def summary(self) -> None:
        """Log the settings, Flower's and the choice of clients."""
        super().summary()
        how = self.session.min_nodes, self.session.share, self.session.seed
        LOG.info("wait for %d SuperNodes; %g of the clients train, drawn by seed %d", *how)

    # Flower's round, step by step

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's SuperNodes to train."""
        session = self.session
        self._round, self.arrays = RoundSoFar(server_round), arrays
        if server_round == 1:
            self.own_arrays = {}
        session.over(grid)
        session.gather(server_round, "no SuperNode can take part")
        self.prepare(server_round)
        hosted = {n: session.members.clients[n] for n in session.members.present(session.connected)}
        drawn = session.participants(server_round, hosted)
        messages = super().configure_train(server_round, arrays, config, grid_of(list(drawn)))
        sent = self._send(messages, drawn, wants_rows=not self.is_weighted_sum)
        session.asked = {node: drawn[node] for node in (m.metadata.dst_node_id for m in sent)}
        return sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average what can be averaged; without anything, the model stays as it was."""
        replies, session = list(replies), self.session
        asked = {node: list(session.asked[node]) for node in session.asked}
        session.ledger.count_messages("up", replies)
        count_payload(session.ledger, self._round.sent, replies, asked)
        checked = self._checked(server_round, replies, self.arrays, asked)
        self._round.note_training(checked, asked)
        if not checked.usable:
            return None, None
        answers = [
            read_reply(message, asked.get(node, ()) if client is None else [client])
            for message, (node, client) in zip(checked.usable, checked.places, strict=True)
        ]
        return self._combined(answers), self._round.trained

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all SuperNodes to measure the model."""
        self.arrays, session = arrays, self.session
        connected = session.exchange.nodes(session.min_nodes, session.timeout)
        present = session.members.present(connected)
        # Where Flower's own loop runs the round, nothing is saved
        self._round.saves = self._kept is not None and session.is_due(server_round)
        if not present:  # Flower would wait for one without an end
            return self._send([], {})
        if self._round.saves:
            config[CHECKPOINT], config[RUN_TOKEN] = True, session.checkpoints.run
        messages = super().configure_evaluate(server_round, arrays, config, grid_of(present))
        return self._send(messages, {node: session.members.clients[node] for node in present})

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the measurements and report the round."""
        self._round.measured = list(replies)
        self.session.ledger.count_messages("up", self._round.measured)
        usable = self._checked(server_round, self._round.measured, None).usable
        metrics = super().aggregate_evaluate(server_round, usable) if usable else None
        self._round.evaluated = metrics or MetricRecord()
        self.counts = added(read_counts(reply.content, *self.counted) for reply in usable)
        figures = self.report_fields(self._round.trained, self._round.evaluated)
        self._round.report = report = self._round.to_report(self.session, figures)
        return None if metrics is None else self.measured(report)

    # Checkpoints

    def is_due(self, server_round: int) -> bool:
        """Whether the clients were asked to save the round."""
        return self._round.saves

    def clients_save(self, server_round: int) -> dict[int, str]:
        """Say which SuperNodes have not written their part, and why."""
        return self._round.not_saved()

    def state(self) -> dict[str, object]:
        """Return the models, who is known, and what the strategy keeps besides."""
        assert self._kept is not None
        kept = {"strategy": self._kept.state_dict(), "clients": self.session.members.everyone()}
        return kept | packed_models(self.arrays, self.own_arrays)

    def load_state(self, state: StateDict) -> None:
        """Go on from what ``state`` returned."""
        assert self._kept is not None
        self._kept.load_state_dict(state["strategy"])
        self.arrays, self.own_arrays = unpacked_models(state, self.arrays)
        self.session.members.absent |= set(state["clients"])

    # Helpers

    def _combined(self, replies: list[ClientReply]) -> ArrayRecord | None:
        """Combine the replies; return the model if it is one for all."""
        combined = self.combine(replies)
        if not self._round.is_averaged:
            refuse_unused(type(self).__name__, self.central_noise, self.robust)
            contents = [reply.message.content for reply in replies]
            self._round.trained = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        if not is_by_client(combined):
            return shared_arrays(combined, self.arrays)
        if not self.personal:
            raise ValueError(
                f"{type(self).__name__}.combine gives arrays by client: it needs personal = True"
            )
        everyone = self.session.members.everyone()
        self.own_arrays |= personal_arrays(combined, self.arrays, everyone)
        return None

    @property
    def is_weighted_sum(self) -> bool:
        """Whether the weighted sum of what clients send is all that is needed."""
        # Each class on the way must say so: what a subclass overrides needs what its author says
        makers = [c for c in type(self).__mro__ if vars(c).keys() & {"combine", "aggregate_train"}]
        sums = all(vars(c).get("weighted_sum", c in OF_THE_MEAN) for c in makers)
        return sums and not self.personal and self.central_noise is None

    def _send(
        self,
        messages: Iterable[Message],
        asked: Mapping[int, Sequence[int]],
        *,
        wants_rows: bool = False,
    ) -> list[Message]:
        """Say whom each message is for, and put them in order: that of sums is then the same."""
        members, sent = self.session.members, list[Message]()
        for message in sorted(messages, key=lambda one: members.place(one.metadata.dst_node_id)):
            node = message.metadata.dst_node_id
            clients = asked.get(node, ())
            has_own = any(client in self.own_arrays for client in clients)
            has_rows = has_own and len(clients) > 1
            own = [self.own_arrays.get(client, self.arrays) for client in clients if has_own]
            arrays = stacked(own) if has_rows else own[0] if own else None
            with_own_content(message, self.arrayrecord_key, arrays)
            if len(clients) < len(members.clients.get(node, ())):
                self._note(message, CLIENTS, pack_integers(np.array(clients, np.int64)))
            if has_rows:
                self._note(message, OWN_ARRAYS, True)
            if wants_rows and len(clients) > 1:
                self._note(message, ROW_EACH, True)
            sent.append(message)
        self._round.sent = sent
        self.session.ledger.count_messages("down", sent)
        return sent

    def _note(self, message: Message, key: str, value: bool | bytes) -> None:
        message.content.config_records[self.configrecord_key][key] = value

    def _checked(
        self,
        server_round: int,
        replies: Sequence[Message],
        model: ArrayRecord | None,
        asked: Mapping[int, Sequence[int]] | None = None,
    ) -> Checked:
        """Check the replies; note and log every node, and every client, that is left out."""
        most = partial(self.most_examples, training=model is not None)
        rows = None if asked is None or self.is_weighted_sum else asked
        about = model, self.session.timeout, most, self.extras(), self.counted, rows
        checked = check_replies(self._round.sent, replies, *about)
        where = "evaluate: " if model is None else ""
        named = [replace(entry, reason=where + entry.reason) for entry in checked.rejected]
        self.session.leave_out(named)
        log_rejected(LOG, server_round, "left out", named)
        return checked
