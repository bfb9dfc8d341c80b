"""The server's side of what a run keeps: it asks the clients, and keeps what it has itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_graph.config.common import BEST, KEEP, LAST, NOTHING, SAVE
from flower_graph.config.rules import at_least, choice
from flower_graph.outputs.figures import CLIENTS, HEAD
from flower_graph.outputs.files import Snapshot, write_lines
from flower_graph.outputs.kept import KeptFolder
from flower_graph.outputs.messages import (
    BEGIN,
    FINISH,
    SNAPSHOT,
    TYPE,
    KeepReply,
    KeepRequest,
)
from flower_graph.storage.checkpoint import KEPT
from flower_graph.wire.ledger import reply_bytes

if TYPE_CHECKING:
    from flower_graph.records.rounds import RoundReport
    from flower_graph.server.session import Session

__all__ = ["BestRound", "KeptOutputs", "Wanted"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What of a run is to be kept, and where the server keeps its part."""

    save: str = NOTHING
    keep: str = LAST
    every: int = 0
    folder: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        choice(*SAVE).check("save", self.save)
        choice(*KEEP).check("keep", self.keep)
        at_least(0).check("every", self.every)


@dataclass
class BestRound:
    """The first round of the highest validation accuracy, and what of it a checkpoint needs."""

    number: int = 0
    accuracy: float = -math.inf
    last: int = 0  # round that was reported
    any_used: bool = False  # whether in any round something was aggregated
    # What was the best as of each checkpoint that may be gone on from
    protected: list[int] = field(default_factory=list)

    def see(self, server_round: int, accuracy: float) -> bool:
        """Take a round; return whether it is the best. NaN, where nobody measured, never is."""
        self.last = server_round
        if not accuracy > self.accuracy:
            return False
        self.number, self.accuracy = server_round, accuracy
        return True

    def saving(self) -> dict[str, Any]:
        """Return what a checkpoint holds that is about to be completed."""
        best = {"number": self.number, "accuracy": self.accuracy, "protected": self._saved()}
        return {**best, "any-used": self.any_used}

    def saved(self) -> None:
        """Note that it was."""
        self.protected = self._saved()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.number = int(state["number"])
        self.accuracy = float(state["accuracy"])
        self.protected = list(state["protected"])
        self.any_used = bool(state["any-used"])

    def forget(self) -> None:
        """Let a later round be the best: those so far are of other clients."""
        self.number, self.accuracy, self.protected = 0, -math.inf, []

    def _saved(self) -> list[int]:
        held = [one for one in self.protected if one != self.number]
        return [*held, self.number][-KEPT:]


class KeptOutputs:
    """Asks the clients of a run to keep what they have, and keeps what the server has."""

    # What it costs is no part of the run's bytes: these say what the method costs.

    def __init__(
        self,
        session: Session,
        best: BestRound,
        wanted: Wanted,
        take: Callable[[], Snapshot | None],  # what the server has
        figures: Callable[[], Iterable[Iterable[str]] | None],  # of single clients, if it has them
    ) -> None:
        self._figures = figures
        self._session, self._best, self._wanted, self._take = session, best, wanted, take
        self._asked = set[int]()  # SuperNodes that keep something
        self._is_on = wanted.save != NOTHING
        self._own = None
        if self._is_on and wanted.folder is not None:
            self._own = KeptFolder(wanted.folder, wanted.save)
        session.members.greet = self._begin if self._is_on else None

    def reported(self, report: RoundReport) -> None:
        """Take note of a round, and have the best one held."""
        is_best = self._best.see(report.round, report.val_accuracy)
        if is_best and self._is_on and self._wanted.keep == BEST:
            self._do(SNAPSHOT)

    def finish(self) -> None:
        """Have everybody write what stays."""
        if self._is_on and self._best.last:
            if self._wanted.keep == BEST and not self._best.number:
                LOG.warning("no round has a validation accuracy: what is kept is the last round's")
            self._do(FINISH)
            lines = self._figures()
            if self._own is not None and lines is not None:
                write_lines(self._own.folder / CLIENTS, HEAD, lines)

    def _begin(self, nodes: Iterable[int]) -> None:
        """Tell SuperNodes that have just been enrolled what the run keeps."""
        nodes = set(nodes)
        self._asked = (self._asked | nodes) - self._ask(nodes, self._request(BEGIN))

    def _do(self, action: str) -> None:
        request = self._request(action)
        self._ask(self._asked, request)
        found = None if self._own is None else self._take()
        if self._own is not None and found is not None:
            does = self._own.hold if action == SNAPSHOT else self._own.finish
            does(request, lambda: found)

    def _request(self, action: str) -> KeepRequest:
        wanted, best = self._wanted, self._best
        return KeepRequest(
            self._session.checkpoints.run,
            best.last,
            best.number,
            action,
            wanted.save,
            wanted.keep,
            wanted.every,
            best.protected,
        )

    def _ask(self, nodes: Iterable[int], request: KeepRequest) -> set[int]:
        """Send a request to those that are there; return who cannot do it."""
        session, there = self._session, set(self._session.exchange.grid.get_node_ids())
        ledger = session.exchange.ledger
        before = ledger.state_dict()
        replies = session.exchange.send(
            dict.fromkeys(sorted(there.intersection(nodes)), request.to_record()),
            message_type=TYPE,
            server_round=request.server_round,
            timeout=session.timeout,
            read=lambda _, content: KeepReply.read(content).not_kept,
            max_reply_bytes=reply_bytes(),
            called="no outputs of",
        )
        ledger.load_state_dict(before)
        for node, why in replies.values.items():
            if why:
                LOG.warning("outputs of node %d: %s", node, why)
        return {entry.node_id for entry in replies.rejected}
