"""Outputs of the clients of one SuperNode, kept on their machine.

The server asks for them with ``query.keep``; before that nothing is written. The folder is the
SuperNode's own, ``<data-folder>/outputs/<run token>``, or ``outputs/<run token>/<SuperNode>`` in
its ``state-dir``; in a simulation ``clients/<SuperNode>`` of the run's output folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flower_graph.config.common import BEST
from flower_graph.errors import MalformedReplyError, OutputError, StateLostError, brief
from flower_graph.outputs.figures import IN_RUN
from flower_graph.outputs.files import Snapshot
from flower_graph.outputs.kept import KeptFolder
from flower_graph.outputs.messages import BEGIN, SNAPSHOT, TYPE, KeepRequest
from flower_graph.storage.files import DATA_FOLDER, node_name, own_place
from flower_graph.wire.ledger import count_bytes

if TYPE_CHECKING:
    from flwr.app import Context, Message

    from flower_graph.flower_compat import ClientAppCallable

__all__ = ["ClientOutputs", "Snapshot", "count_traffic"]

NAME = "outputs"  # in Context.state
FOLDER = "outputs"  # in the SuperNode's own folder
UP, DOWN = "up", "down"


class ClientOutputs:
    """Writes the figures, predictions and models of one SuperNode's clients.

    Parameters
    ----------
    context : Context
        The ClientApp's context.
    output_dir : Path or None
        The run's output folder, for SuperNodes without a folder of their own.
    """

    def __init__(self, context: Context, output_dir: Path | None) -> None:
        self._context, self._shared = context, output_dir

    @property
    def is_on(self) -> bool:
        """Whether the run keeps outputs, so that a snapshot may be asked for."""
        return bool(self._said("run"))

    @property
    def keeps_best(self) -> bool:
        """Whether the run keeps its best round, which may be the one just measured."""
        return self._said("keep") == BEST

    def measured(
        self, server_round: int, clients: object, *, loss: object, accuracy: object, nodes: object
    ) -> None:
        """Record the clients' measurements of a round; a second call replaces them.

        Parameters
        ----------
        server_round : int
            The round that was measured, as ``metrics.jsonl`` counts.
        clients : sequence of int
            ``[c]`` the clients' numbers.
        loss : array
            ``[c]`` each client's loss, as in the server's report.
        accuracy : array
            ``[c, 3]`` of its training, validation and test nodes; NaN where it has none.
        nodes : array
            ``[c]`` numbers of nodes.
        """
        if self._said("run"):
            count = len(np.asarray(accuracy))
            traffic = self._count(UP) / count, self._count(DOWN) / count
            self._context.state.config_records[NAME].update({UP: 0, DOWN: 0})
            figures = {"loss": loss, "accuracy": accuracy, "nodes": nodes}
            self._kept.log.add(server_round, clients, **figures, traffic=traffic)

    def candidate(self, server_round: int, snapshot: Callable[[], Snapshot]) -> None:
        """Keep a snapshot of the round that was just measured, if the run keeps its best round.

        Clients that measure and train in one message call this between the two.
        """
        if self.keeps_best:
            self._kept.candidate(server_round, snapshot)

    def keep(self, request: KeepRequest, snapshot: Callable[[], Snapshot]) -> str:
        """Carry out the server's request; return why it failed, or an empty string."""
        if request.action == BEGIN:
            self._begin(request)
        elif self._said("run") != request.run:
            raise StateLostError("the unfinished outputs of this run are gone")
        elif request.action == SNAPSHOT:
            self._kept.hold(request, snapshot)
        else:
            # Figures first, since they need no model
            self._kept.figures(request, {way: self._count(way) for way in (UP, DOWN)})
            missing = self._kept.finish(request, snapshot)
            self._context.state.pop(NAME)
            return missing
        return ""

    def _begin(self, request: KeepRequest) -> None:
        from flwr.app import ConfigRecord

        settings = {"run": request.run, "keep": request.keep, "save": request.save}
        before = self._context.state.config_records.get(NAME)
        self._context.state[NAME] = ConfigRecord({**settings, UP: 0, DOWN: 0})
        try:
            self._kept.begin(request.server_round)
        except BaseException:
            self._context.state.pop(NAME)
            if before is not None:
                self._context.state[NAME] = before
            raise

    # Helpers

    def _said(self, name: str) -> str:
        record = self._context.state.config_records.get(NAME)
        return "" if record is None else str(record[name])

    def _count(self, way: str) -> int:
        return int(self._context.state.config_records[NAME][way])  # type: ignore[arg-type]

    @property
    def _kept(self) -> KeptFolder:
        folder = own_outputs(self._context, self._said("run"))
        if folder is None:
            if self._shared is None:
                raise OutputError("no data-folder, no state-dir and no output folder for outputs")
            folder = self._shared / IN_RUN / node_name(self._context)
        return KeptFolder(folder, self._said("save"))


def own_outputs(context: Context, run: str) -> Path | None:
    """Return the folder of a run's outputs, if the SuperNode has a folder of its own."""
    # The token comes with a message: it must not lead out of this folder.
    if not re.fullmatch(r"[0-9a-f]{32}", run):
        raise MalformedReplyError(f"run token: {brief(run)} is not 32 hexadecimal digits")
    if data := str(context.node_config.get(DATA_FOLDER, "")):
        return Path(data).expanduser() / FOLDER / run
    own = own_place(context)
    return None if own is None else own / FOLDER / run / node_name(context)


def count_traffic(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Count the bytes of messages while outputs are kept."""
    reply = call_next(message, context)
    record = context.state.config_records.get(NAME)
    if record is not None and message.metadata.message_type != TYPE:
        for way, one in ((DOWN, message), (UP, reply)):
            if one.has_content():
                record[way] = int(record[way]) + count_bytes(one.content)  # type: ignore[arg-type]
    return reply
