"""The loop of every server's rounds, with reports, checkpoints, resuming and early stopping.

A round calls `Session.gather` (wait, enrol newcomers), `draw` if only some clients take part,
`send`, and `participation`, which tells the outcome for every client. Between rounds the session
holds the clients of each SuperNode (`members`) and the exchange with its byte ledger.

Methods that average use the loop with Flower's verbs (``averaging.py``). Other methods subclass
`RoundStrategy`. They write

- ``ask``, ``read`` and ``learn``: a round's requests, the check of a reply, and the use of the
  replies; or `round`, if a round is more than one exchange;
- `weights`: the server's model;
- `fixed_settings`, `state` and `load_state`: the content of a checkpoint;
- a `Membership`: the question to newcomers.
"""

from __future__ import annotations

import copy
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from flower_graph.config.common import (
    BEST,
    LAST,
    NOTHING,
    RunConfig,
    StrategySection,
    counting_of,
)
from flower_graph.config.rules import at_least, require
from flower_graph.config.schema import check_settings
from flower_graph.errors import CheckpointError, LegacyAppError, NoClientsError
from flower_graph.flower_compat import replace_dead_actors
from flower_graph.ops.counts import Counts, Errors
from flower_graph.outputs import client as outputs
from flower_graph.outputs.client import CLIENTS, HEAD, KeepReply, KeepRequest, KeptFolder
from flower_graph.outputs.files import Snapshot, write_table
from flower_graph.records.participation import (
    ANSWERED,
    FAILED,
    LEFT_OUT,
    NOT_CONNECTED,
    NOT_DRAWN,
    Participation,
    grouped,
    ranges,
)
from flower_graph.records.rounds import BestRound, RoundReport, format_round, merit
from flower_graph.rng import generator
from flower_graph.server.membership import Membership
from flower_graph.storage import checkpoint
from flower_graph.storage.checkpoint import SCALARS
from flower_graph.storage.files import move
from flower_graph.storage.reading import StateDict, reading
from flower_graph.wire.codec import NOT_WRITTEN, Resume, SaveRequest, as_record, read_entry
from flower_graph.wire.exchange import Exchange, Rejected, Replies, few, reasons_of
from flower_graph.wire.keys import ACCURACY, ROLES
from flower_graph.wire.ledger import ByteLedger, reply_bytes

LOG = logging.getLogger(__name__)
# Keys of a checkpoint: bytes so far, the best round, and the SuperNode of each client
WIRE, BEST_ROUND, BOUND = "wire", "best", "bound"
# Arguments of ``start`` of which a server may have no use
GIVEN = "initial_arrays", "train_config", "evaluate_config", "evaluate_fn"
# Figures of a round in Flower's result, under the same names for every method
LOSSES = ("loss", "cross_entropy", "regulariser", "answered")
ACCURACIES = ("train_accuracy", "val_accuracy", "test_accuracy")
NOBODY = "no SuperNode hosts clients of this run"
T = TypeVar("T")


class Session:
    """Members, exchange, and the current round.

    The section says how many SuperNodes to wait for, and which share of the clients to ask. With
    checkpoints, every ``checkpoint_every`` rounds and the last round are saved.
    """

    exchange: Exchange  # once the session is open

    def __init__(
        self,
        members: Membership,
        section: StrategySection,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        check_settings(section)
        self.members, self.min_nodes = members, section.fewest_nodes
        self.share, self.seed = section.participation, seed
        at_least(0).check("checkpoint_every", checkpoint_every)
        has_folder = not checkpoint_every or checkpoint_dir is not None
        require(has_folder, "checkpoint_every", checkpoint_every, "0 without checkpoint_dir")
        self.folder, self.every = checkpoint_dir, checkpoint_every  # of checkpoints
        self.is_late = False  # whether a checkpoint is overdue
        self.timeout, self.rounds = 600.0, 0
        self.early_stop_at = 0  # the round after which the run ends unless accuracy improves
        self.connected: list[int] = []  # SuperNodes at the beginning of the round
        # SuperNode to the clients this round asks
        self.asked: dict[int, Collection[int] | NDArray[np.int64]] = {}
        self.rejected: list[Rejected] = []  # SuperNodes left out in this round
        self.is_open, self.ledger = False, ByteLedger()

    def open(self, grid: Grid, timeout: float, rounds: int = 0) -> None:
        """Set the grid, the seconds that an exchange may take, and the rounds if known."""
        self.exchange, self.timeout, self.rounds = Exchange(grid), timeout, rounds
        self.ledger, self.is_open = self.exchange.ledger, True
        replace_dead_actors()

    @property
    def run(self) -> str:
        return self.members.resume.run

    # Whom to ask

    def gather(self, server_round: int, nobody: str = NOBODY) -> dict[int, list[int]]:
        self.enrol(server_round)
        return self.hosted(nobody)

    def enrol(self, server_round: int) -> None:
        self.connected = self.exchange.nodes(self.min_nodes, self.timeout)
        members, timeout = self.members, self.timeout
        self.rejected = members.ask(self.exchange, self.connected, server_round, timeout)

    def hosted(self, nobody: str = NOBODY) -> dict[int, list[int]]:
        """Return the clients of the SuperNodes that were connected when the round began."""
        if not (hosted := self.members.present(self.connected)):
            raise NoClientsError(f"{nobody}: {reasons_of(self.rejected)}")
        return hosted

    def present(self) -> dict[int, list[int]]:
        """Return the clients of the SuperNodes that are connected now."""
        return self.members.present(self.exchange.grid.get_node_ids())

    def draw(self, size: int, server_round: int, least: int = 1) -> NDArray[np.int64]:
        count = min(size, max(least, round(self.share * size)))
        if count == size:
            return np.arange(size)
        rng = generator(self.seed, "participants", server_round)
        return np.sort(torch.randperm(size, generator=rng)[:count].numpy())

    def participants(
        self, server_round: int, hosted: Mapping[int, Sequence[int]]
    ) -> dict[int, list[int]]:
        """Draw a round's clients, independently of their SuperNodes; return each SuperNode's."""
        # In the order of the clients; a SuperNode that names none is one, at the end
        everyone = [(False, client, node) for node, local in hosted.items() for client in local]
        everyone += [(True, node, node) for node, local in hosted.items() if not local]
        everyone.sort()
        result = dict[int, list[int]]()
        for index in self.draw(len(everyone), server_round):
            is_unnamed, client, node = everyone[index]
            result.setdefault(node, []).extend([] if is_unnamed else [client])
        return result

    def is_due(self, server_round: int) -> bool:
        """Whether the round's checkpoint is to be saved."""
        if not self.every or server_round < 1:
            return False
        # Clients save before the round's accuracy is known
        is_last = server_round == self.rounds or self.stops_early(server_round)
        return self.is_late or server_round % self.every == 0 or is_last

    def stops_early(self, server_round: int) -> bool:
        """Whether the run ends after this round unless it is the best so far."""
        return 0 < self.early_stop_at <= server_round

    # Messages

    def send(
        self,
        requests: Mapping[int, RecordDict],
        server_round: int,
        read: Callable[[int, RecordDict], T],
        *,
        max_reply_bytes: int,
        message_type: str = "train",
    ) -> Replies[T]:
        """Send one message to each SuperNode; leave out those without a good reply."""
        replies = self.exchange.send(
            requests,
            message_type=message_type,
            server_round=server_round,
            timeout=self.timeout,
            read=read,
            max_reply_bytes=max_reply_bytes,
        )
        self.leave_out(replies.rejected)
        return replies

    def leave_out(self, rejected: Collection[Rejected]) -> None:
        """Record the SuperNodes that are left out, and those that have lost their state."""
        self.rejected += few(rejected)
        self.members.note(rejected)

    def must_have(self, server_round: int, answered: Collection[int]) -> None:
        if not answered:
            none = f"none of {len(self.asked)} SuperNodes gave a usable answer"
            raise NoClientsError(f"round {server_round}: {none}: {reasons_of(self.rejected)}")

    # Any: entries of a record
    def tell_all(
        self,
        server_round: int,
        entries: Mapping[str, Any],
        message_type: str,
        but: Collection[int] = (),
    ) -> Replies[str]:
        """Send one message to all connected clients; return why those that say so did not save."""
        return self.send(
            dict.fromkeys([n for n in self.present() if n not in but], as_record(entries)),
            server_round,
            lambda _, reply: read_entry(NOT_WRITTEN, reply),
            message_type=message_type,
            max_reply_bytes=reply_bytes(),
        )

    # What became of the clients

    def participation(
        self,
        answered: Collection[int] | NDArray[np.int64],
        *,
        failed: Mapping[int, str] | None = None,
        left_out: Mapping[str, NDArray[np.int64]] | None = None,
        idle: str = NOT_DRAWN,
        no_use: str = "",
    ) -> Participation:
        """Return each client's outcome in this round; ``failed`` has reasons by client."""
        hosted, left_out = self.members.numbers(), left_out or {}
        asked = {node: np.asarray(local, np.int64) for node, local in self.asked.items()}
        result = Participation([*hosted.values(), *left_out.values(), *asked.values()])
        is_online = set(self.connected).__contains__
        for node in sorted(hosted, key=is_online):  # a client may be back at another SuperNode
            result.mark(hosted[node], LEFT_OUT, idle if is_online(node) else NOT_CONNECTED)
        for why, clients in left_out.items():
            result.mark(clients, LEFT_OUT, why)
        silent = {entry.node_id: entry.reason for entry in reversed(self.rejected)}
        for node, clients in asked.items():
            result.mark(clients, FAILED, silent.get(node) or no_use or "its answer was not used")
        asked_ones = set(result.of(FAILED).tolist()) if failed else set[int]()
        own = {client: why for client, why in (failed or {}).items() if client in asked_ones}
        for why, clients in grouped(own).items():  # may be as many reasons as clients
            result.mark(clients, FAILED, why)
        listed = answered if isinstance(answered, np.ndarray) else [*answered]
        result.mark(np.asarray(listed, np.int64), ANSWERED, asked=True)
        return result


def unsaved(asked: Iterable[int], said: Mapping[int, str]) -> dict[int, str]:
    """Return the SuperNodes that have not saved a checkpoint, and why; ``said`` is "" if done."""
    reasons = {node: said.get(node, "it did not answer") for node in asked}
    return {node: why for node, why in reasons.items() if why}


# The loop -----------------------------------------------------------------------------------------


class RoundLoop(Strategy):
    """The rounds of a server, reported, saved and resumed."""

    session: Session
    best: BestRound
    usual_rounds: ClassVar = 100
    refused: ClassVar[Sequence[str]] = ()  # of ``GIVEN``
    metrics: Sequence[str] = (ACCURACY,)  # that are reported; the first decides what is best
    counting = ""  # the kind of counts that clients send; none for the accuracy alone
    num_classes: int = 0  # that clients predict, where predictions can be counted
    counts: Counts | Errors | None = None  # of predictions, in the round that was reported last
    # Of training and of measuring: Flower's means of the clients' metrics in the last round
    means = (MetricRecord(), MetricRecord())
    _config = ConfigRecord()  # further entries of ``train`` messages
    _evaluate_config = ConfigRecord()  # ... and of ``evaluate`` messages
    _kept: KeepRequest  # the outputs that clients and server keep
    _own_outputs: KeptFolder | None = None  # of the server
    _keeping: set[int]  # SuperNodes that keep outputs

    @property
    def counted(self) -> tuple[int, str]:
        """Number of classes, and the kind of counts that clients send."""
        return self.num_classes, self.counting

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        # What the clients would send and get to train if each had a SuperNode of its own
        return copy.deepcopy(self.session.ledger.payload)

    def initialize_parameters(self, *_: object, **__: object) -> NoReturn:
        """Refuse Flower's older server, which calls this first."""
        remedy = "call its start in an @app.main() (`flower-graph docs existing-app`)"
        raise LegacyAppError(f"{type(self).__name__} is for Flower's Message API: {remedy}")

    # What a server says

    def begin(self, initial_arrays: ArrayRecord | None) -> None: ...

    def round(self, server_round: int) -> RoundReport | None:
        """Run a round; return its report, or None if the report comes later."""
        raise NotImplementedError

    # Any: NumPy arrays or tensors
    def weights(self) -> dict[str, Any]:
        """Return the weights of the last report; ``docs/reference/outputs.md`` names them."""
        raise NotImplementedError

    def learnt(self) -> ArrayRecord:
        return ArrayRecord({name: Array(value) for name, value in self.weights().items()})

    def fixed_settings(self) -> dict[str, object]:
        raise NotImplementedError

    def state(self) -> dict[str, object]:
        raise NotImplementedError

    def load_state(self, state: Mapping[str, object]) -> None:
        raise NotImplementedError

    def clients_save(self, server_round: int) -> dict[int, str]:
        """Have the clients save a checkpoint; return the SuperNodes that did not, and why."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot | None:
        """Return the server's own predictions and models of the last report, if it has any.

        ``start`` writes it to ``output_dir``, where clients write theirs in a simulation.
        """
        return None

    def figures(self) -> Iterable[Iterable[str]] | None:
        """Return the lines of ``clients.csv`` if the server measures for the clients."""
        return None

    def saw_best(self) -> None:
        """Keep the data of the best round so far that later steps need."""

    def finish(self, server_round: int) -> None:
        """Send the last message, after the last round."""

    # The loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
        *,
        on_round: Callable[[RoundReport], None] | None = None,
        resume: bool = False,
        patience: int = 0,
        save: str = NOTHING,
        keep: str = LAST,
        every: int = 0,
        metrics: Sequence[str] = (ACCURACY,),
        output_dir: Path | None = None,
    ) -> Result:
        """Run the method.

        Parameters
        ----------
        grid : Grid
            Flower's grid, or ``flower_graph.simulation.InProcessGrid``.
        initial_arrays : ArrayRecord, optional
            The server's first model; by default the method's own. Methods without a server model
            refuse it, and ``train_config`` and ``evaluate_fn`` too.
        num_rounds : int, optional
            Rounds to run, including those before a checkpoint; by default as many as the method's
            paper runs.
        timeout : float
            Seconds that an exchange may take.
        train_config, evaluate_config : ConfigRecord, optional
            Further entries of every ``train`` or ``evaluate`` message.
        evaluate_fn, should_stop : callable, optional
            Called after every round, the first with its number and the server model's arrays, the
            second with its number and the result so far, which it must not change. True ends the
            run; if the next round measures this one, that round is the last.
        on_round : callable, optional
            Called with every round's report; without it, one line is logged.
        resume : bool
            Continue from the last complete checkpoint in ``checkpoint_dir``.
        patience : int
            Rounds without a better validation after which the run ends; 0 for never.
        save, keep : str
            The outputs that clients and server keep, each on its own machine: ``"all"``,
            ``"predictions"`` without models, or ``"none"``; and of which round: the ``"last"``, or
            the ``"best"`` by validation.
        every : int
            Rounds between two points of each client's curves; 0 for none.
        metrics : sequence of str
            Reported metrics: ``"accuracy"``, ``"macro-f1"``, ``"balanced-accuracy"``, ``"auc"``;
            docs/links.md has those of links and numbers. The first decides the best round.
        output_dir : Path, optional
            Folder of the server's outputs; without it, the server keeps none.

        Returns
        -------
        Result
            The server's model, as ``weights`` names it, and every round's figures, named as in
            ``metrics.jsonl``: ``loss``, ``cross-entropy``, ``regulariser`` and ``answered`` in
            ``train_metrics_clientapp[round]``, accuracies in ``evaluate_metrics_clientapp[round]``.

        Raises
        ------
        NoClientsError
            If no client is there, none gives a usable answer before the deadline, or all rounds
            were skipped; ``ClientBugError`` if all clients fail with the same error.
        AlignmentError, DivergedError
            If clients cannot agree on the nodes that they share; if the loss is no number any more.
        CheckpointError
            If there is no checkpoint to resume from, or it does not fit.
        ValueError
            If an argument is impossible.
        """
        session, rounds = self.session, self.usual_rounds if num_rounds is None else num_rounds
        at_least(1).check("num_rounds", rounds)
        kept: dict[str, Any] = {"save": save, "keep": keep, "every": every}
        check_settings(RunConfig(patience=patience, metrics=[*metrics], **kept))
        self.metrics, self.counting = tuple(metrics), counting_of(metrics)
        if self.counting and not self.num_classes:
            raise ValueError(f"metrics: {[*metrics]}: {type(self).__name__} counts no predictions")
        values = initial_arrays, train_config, evaluate_config, evaluate_fn
        given = [name for name, value in zip(GIVEN, values, strict=True) if value is not None]
        if unused := [name for name in given if name in self.refused]:
            raise ValueError(f"{', '.join(unused)}: the server has no use for it; leave it out")
        if session.is_open and not resume:
            raise ValueError("this strategy has run already: build a new one, or resume the run")
        self.best = best = BestRound()
        self._config = train_config or ConfigRecord()
        self._evaluate_config = evaluate_config or ConfigRecord()
        self._kept, self._keeping = KeepRequest("", 0, 0, outputs.BEGIN, **kept), set()
        keeps = save != NOTHING
        self._own_outputs = KeptFolder(output_dir, save) if keeps and output_dir else None
        session.members.greet = partial(self._ask_to_keep, outputs.BEGIN) if keeps else None
        self.begin(initial_arrays)
        session.open(grid, timeout, rounds)
        done, result, effects = self._resume() if resume else 0, Result(), list[str]()
        while True:
            session.early_stop_at = best.number + patience if patience else 0
            if done < session.rounds and session.stops_early(best.last):
                why = "the run ends after round %d: since round %d no validation %s was better"
                LOG.info(why, done, best.number, self.metrics[0])
                session.rounds = done  # the last round is still measured
            if best.last >= session.rounds:
                break
            done += 1
            report = self._reported(done, result, evaluate_fn)
            if report is None:
                continue
            # This order lets a run be stopped anywhere: a checkpoint's rounds are reported, and its
            # best round has a snapshot.
            if on_round is None:
                LOG.info(format_round(report, session.rounds))
            else:
                on_round(report)
            effects.append(report.skipped)
            best.any_used |= not report.skipped
            validation = report.score(self.metrics[0], "val")
            if best.see(report.round, merit(self.metrics[0], validation)):
                self.saw_best()
                if keep == BEST:
                    self._keep_outputs(outputs.SNAPSHOT)
            self._save(report.round)
            if should_stop is not None and should_stop(report.round, result):
                session.rounds = min(session.rounds, done)
        if best.last:
            if keep == BEST and keeps and not best.number:
                LOG.warning("no round has a validation %s: the last is kept", metrics[0])
            self._keep_outputs(outputs.FINISH)
        self.finish(session.rounds)
        if not best.any_used:
            why = effects[-1] if effects else "no round was reported"
            raise NoClientsError(f"all rounds were skipped, so nothing was learnt: {why}")
        if skipped := [*filter(None, effects)]:
            last = len(skipped), len(effects), skipped[-1]
            LOG.warning("%d of %d rounds were skipped: nothing was learnt in them; last: %s", *last)
        result.arrays = self.learnt()
        return result

    def _reported(
        self,
        server_round: int,
        result: Result,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> RoundReport | None:
        started = time.perf_counter()
        report = self.round(server_round)
        if report is None:
            return None
        if self.counting:
            report.note_counts(self.counts, self.metrics)
        if evaluate_fn and (found := evaluate_fn(report.round, self.learnt())) is not None:
            result.evaluate_metrics_serverapp[report.round] = found
        trained, measured = self.means
        own = {**_entries(report, ACCURACIES), **report.alignment}
        result.train_metrics_clientapp[report.round] = MetricRecord(
            {**trained, **_entries(report, LOSSES)}
        )
        result.evaluate_metrics_clientapp[report.round] = MetricRecord({**measured, **own})
        report.seconds = time.perf_counter() - started
        return report

    # Any: fields of ``RoundReport``
    def report(
        self,
        server_round: int,
        who: Participation,
        accuracy: Mapping[str, float] = MappingProxyType({}),
        **figures: Any,
    ) -> RoundReport:
        """Make a round's report; ``accuracy`` is by role."""
        session, clients = self.session, self.session.members.clients.values()
        named = {f"{role}_accuracy": accuracy[role] for role in ROLES if role in accuracy}
        counts = {"asked": sum(map(len, session.asked.values())), "answered": who.of(ANSWERED).size}
        return RoundReport(
            round=server_round,
            rejected=[{"node": one.node_id, "reason": one.reason} for one in few(session.rejected)],
            bytes=self.payload,
            wire_bytes={**session.ledger.wire},
            participation=who.to_record() if session.members.absent or any(clients) else {},
            **{**counts, **named, **figures},
        )

    # Outputs: these messages do not count in the run's bytes, which say what the method costs

    def _keep_outputs(self, action: str) -> None:
        """Keep the best round so far, or what stays at the end."""
        if self._kept.save == NOTHING:
            return
        request, own = self._ask_to_keep(action, self._keeping), self._own_outputs
        if own is not None and (snapshot := self.snapshot()) is not None:
            (own.hold if action == outputs.SNAPSHOT else own.finish)(request, lambda: snapshot)
        if own is not None and action == outputs.FINISH and (lines := self.figures()) is not None:
            import pandas as pd

            write_table(own.folder / CLIENTS, pd.DataFrame(lines, columns=[*HEAD]))

    def _ask_to_keep(self, action: str, nodes: Collection[int]) -> KeepRequest:
        """Ask SuperNodes to keep outputs; who cannot begin is asked no more."""
        exchange, run, best = self.session.exchange, self.session.run, self.best
        request = replace(self._kept, run=run, server_round=best.last, best_round=best.number)
        request = replace(request, action=action, protected=best.protected)
        connected = sorted(set(exchange.grid.get_node_ids()).intersection(nodes))
        with exchange.uncounted():
            replies = exchange.send(
                dict.fromkeys(connected, request.to_record()),
                message_type=outputs.TYPE,
                server_round=request.server_round,
                timeout=self.session.timeout,
                read=lambda _, content: KeepReply.read(content).not_kept,
                max_reply_bytes=reply_bytes(),
            )
        for node, why in replies.values.items():
            if why:
                LOG.warning("outputs of node %d: %s", node, why)
        if action == outputs.BEGIN:
            self._keeping = self._keeping.union(nodes) - {one.node_id for one in replies.rejected}
        return request

    # Checkpoints

    def _save(self, server_round: int) -> None:
        session = self.session
        if not session.is_due(server_round):
            return
        missing = self.clients_save(server_round)
        for node, why in missing.items():
            LOG.warning("round %d: no checkpoint: node %d: %s", server_round, node, why)
        session.is_late = bool(missing) or not self._complete(server_round)
        if not session.is_late:
            # SuperNodes that lose their state from now on resume from this checkpoint
            session.members.saved = Resume(session.run, server_round, secrets.token_hex(8))
            self.best.saved()

    def _complete(self, server_round: int) -> bool:
        """Write the server's part of a checkpoint; return whether that succeeded."""
        assert self.session.folder is not None
        return checkpoint.save_server(self.session.folder, server_round, self._saved())

    def _rewrite(self, server_round: int) -> None:
        """Replace the checkpoint that the run resumes from, and remove earlier ones."""
        assert self.session.folder is not None
        self.session.is_late = not self._complete(server_round)
        checkpoint.keep_rounds(self.session.folder, (server_round,))

    def _saved(self) -> dict[str, object]:
        return {
            "run": self.session.run,
            "settings": self._fixed_settings(),
            WIRE: self.session.ledger.state_dict(),
            BEST_ROUND: self.best.state_dict(),
            BOUND: dict(self.session.members.bound),
            **self.state(),
        }

    def _fixed_settings(self) -> dict[str, object]:
        """Return the settings that must not change, and the metric that chose the best round."""
        chosen = {"metrics": list(self.metrics)} if self.counting else {}
        fixed = (self.fixed_settings() | chosen).items()
        return {n: value if type(value) in SCALARS else repr(value) for n, value in fixed}

    def _resume(self) -> int:
        """Resume from the newest checkpoint that the server can read and every client has."""
        rounds, folder, refused = self.session.rounds, self.session.folder, list[str]()
        if folder is None:
            raise CheckpointError("resume: a checkpoint_dir is needed")
        if (newest := checkpoint.last_round(folder)) > rounds:
            words = f"{rounds} is less than round {newest} of the checkpoint"
            raise CheckpointError(f"num_rounds: {words}")
        for server_round in reversed(complete := checkpoint.complete_rounds(folder)):
            if not (reasons := self._go_on_from(folder, server_round)):
                # The resumed run takes another course, so checkpoints after this round are void
                for later in complete[complete.index(server_round) + 1 :]:
                    path = checkpoint.round_folder(folder, later) / checkpoint.SERVER_FILE
                    move(path, path.with_name(checkpoint.REFUSED_FILE))
                return server_round
            refused.append(f"cannot resume from round {server_round}: {'; '.join(reasons)}")
            LOG.warning("%s; trying the checkpoint before it", refused[-1])
        raise CheckpointError(f"{folder}: {'. '.join(refused)}. No earlier checkpoint is left")

    def _go_on_from(self, folder: Path, server_round: int) -> list[str]:
        """Load a checkpoint here and at the clients; return why that is not possible."""
        session, members = self.session, self.session.members
        try:
            state: StateDict = checkpoint.load_server(folder, server_round)
        except CheckpointError as error:
            return [str(error)]
        with reading(f"{folder}, round {server_round}", CheckpointError, "does not fit this run"):
            saved = state["settings"]
            for name, value in self._fixed_settings().items():
                if saved[name] != value:
                    raise ValueError(f"its {name} is {saved[name]}, this run's is {value}")
            self.load_state(state)
            self.best.load_state_dict(state[BEST_ROUND])
            session.ledger.load_state_dict(state[WIRE])
            members.bound, self.best.last = dict(state[BOUND]), server_round
            members.resume = Resume(str(state["run"]), server_round, secrets.token_hex(8))
        for node in [*members.clients]:
            members.forget(node)
        # The clients' enrolment was counted in the first part of the run.
        with session.exchange.uncounted():
            session.enrol(server_round)
        if members.absent and not session.rejected:
            LOG.warning("clients %s are not connected", ranges(members.absent))
        lacking = [entry for entry in session.rejected if entry.node_id not in members.strangers]
        return [f"node {entry.node_id}: {entry.reason}" for entry in lacking]


def _entries(report: RoundReport, names: Iterable[str]) -> dict[str, float]:
    return {name.replace("_", "-"): getattr(report, name) for name in names}


# Rounds of another kind than Flower's -------------------------------------------------------------


Q = TypeVar("Q", bound=Any)  # a round's request to a SuperNode: a message with ``clients``
A = TypeVar("A", bound=Any)  # a reply, after it is read; ``not_saved`` says why no checkpoint


class RoundStrategy(RoundLoop, Generic[Q, A]):
    """A server with rounds of its own, in which clients or the server measure during ``train``."""

    refused: ClassVar[Sequence[str]] = GIVEN
    # The message, and its entries, that asks SuperNodes to save which have answered no request of
    # the round; None: the requests ask all of them
    asks_to_save: ClassVar[tuple[str, Mapping[str, bool]] | None] = None

    def __init__(self, session: Session) -> None:
        self.session, self.best = session, BestRound()
        self.requests: dict[int, Q] = {}  # of the current round, by SuperNode
        self.answers: dict[int, A] = {}  # their replies
        self.entries: Mapping[int, Mapping[str, Any]] = {}  # sent with the requests

    # What a method writes; requests and replies are messages of its own

    def ask(self, server_round: int) -> Mapping[int, Q]:
        raise NotImplementedError

    def read(self, node: int, content: RecordDict) -> A:
        raise NotImplementedError

    def reply_bytes(self) -> int:  # the most of a reply
        raise NotImplementedError

    def learn(self, server_round: int, replies: Replies[A]) -> RoundReport | None:
        raise NotImplementedError

    def round(self, server_round: int) -> RoundReport | None:
        self.requests = dict(self.ask(server_round))
        contents = {n: as_record(one, self.entries.get(n, {})) for n, one in self.requests.items()}
        replies = self.exchange(server_round, contents)
        self.session.asked = {
            node: np.asarray(one.clients, np.int64) for node, one in self.requests.items()
        }
        self.answers = replies.values
        return self.learn(server_round, replies)

    def exchange(self, server_round: int, contents: Mapping[int, RecordDict]) -> Replies[A]:
        """Send the requests with their entries, and read the replies."""
        most = self.reply_bytes()
        return self.session.send(contents, server_round, self.read, max_reply_bytes=most)

    def clients_save(self, server_round: int) -> dict[int, str]:
        said, session = {n: one.not_saved for n, one in self.answers.items()}, self.session
        if self.asks_to_save is None:
            return unsaved(self.requests, said)
        message_type, entries = self.asks_to_save
        order = {**SaveRequest(server_round, session.run).to_config(), **entries}
        replies = session.tell_all(server_round, order, message_type, said)
        said |= replies.values | {one.node_id: one.reason for one in replies.rejected}
        return {node: why for node, why in said.items() if why}

    def summary(self) -> None:
        LOG.info("%s: %s", type(self).__name__, self.fixed_settings())

    def configure_train(self, *_: object, **__: object) -> NoReturn:
        """Refuse Flower's own round loop: rounds of this kind are not its two exchanges."""
        raise RuntimeError("call start, not Flower's round loop")

    aggregate_train = configure_evaluate = aggregate_evaluate = configure_train
