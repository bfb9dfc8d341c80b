"""The server's side of a run's outputs: asks the clients for theirs, and writes its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from flower_graph.wire.ledger import reply_bytes

if TYPE_CHECKING:
    from flower_graph.server.session import Session

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """The outputs to keep, and where the server keeps its own."""

    save: str = NOTHING
    keep: str = LAST
    every: int = 0
    folder: Path | None = None

    def __post_init__(self) -> None:
        choice(*SAVE).check("save", self.save)
        choice(*KEEP).check("keep", self.keep)
        at_least(0).check("every", self.every)


class KeptOutputs:
    """Has the clients of a run keep their outputs, and keeps the server's."""

    # These messages do not count in the run's bytes, which say what the method costs.

    def __init__(
        self,
        session: Session,
        wanted: Wanted,
        request: Callable[[str], KeepRequest],  # writes the request of an action
        take: Callable[[], Snapshot | None],  # the server's snapshot
        figures: Callable[
            [], Iterable[Iterable[str]] | None
        ],  # figures of single clients, if it has them
    ) -> None:
        self._session, self._wanted, self._request = session, wanted, request
        self._take, self._figures = take, figures
        self._asked = set[int]()  # SuperNodes that keep outputs
        self._own = None if wanted.folder is None else KeptFolder(wanted.folder, wanted.save)
        session.members.greet = self._begin

    def hold_best(self) -> None:
        """Have clients and server keep this round, the best so far, if the best is wanted."""
        if self._wanted.keep == BEST:
            self._do(SNAPSHOT)

    def finish(self) -> None:
        self._do(FINISH)
        lines = self._figures()
        if self._own is not None and lines is not None:
            write_lines(self._own.folder / CLIENTS, HEAD, lines)

    def _begin(self, nodes: Iterable[int]) -> None:
        nodes = set(nodes)
        self._asked = (self._asked | nodes) - self._ask(nodes, self._request(BEGIN))

    def _do(self, action: str) -> None:
        request = self._request(action)
        self._ask(self._asked, request)
        snapshot = None if self._own is None else self._take()
        if self._own is not None and snapshot is not None:
            does = self._own.hold if action == SNAPSHOT else self._own.finish
            does(request, lambda: snapshot)

    def _ask(self, nodes: Iterable[int], request: KeepRequest) -> set[int]:
        session, connected = self._session, set(self._session.exchange.grid.get_node_ids())
        ledger = session.exchange.ledger
        before = ledger.state_dict()
        replies = session.exchange.send(
            dict.fromkeys(sorted(connected.intersection(nodes)), request.to_record()),
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
