"""The four methods on a small federation of the bundled Cora, and a grid that goes wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Message

from flower_graph import state
from flower_graph.apps.common import client_app, run_server
from flower_graph.config import RunConfig, load_config
from flower_graph.records.keys import CONFIG, SERVER_ROUND
from flower_graph.report import read_reports
from flower_graph.simulation import InProcessGrid
from flower_graph.state import forget_run

# (partition, round, message type) -> word; see FaultyGrid
Faults = Callable[[int, int, str], str]


@dataclass(frozen=True)
class Setup:
    """A method on a federation that is small, but not a toy."""

    config: str
    overrides: tuple[str, ...]
    supernodes: int


# Where accuracy counts: the bundled Cora
CORA = {
    "nFedGNN": Setup("quickstart", (), 10),
    "FedSCem": Setup("fedscem/cora-linqs", ("partition.clients=10", "strategy.dropout=0.6"), 10),
    "FedGLS": Setup("fedgls/cora-linqs", (), 8),
    "PPFL-GNN": Setup(
        "ppfl/cora-linqs-gat",
        ("partition.clients=6", "partition.private_share=0.1", "judge.mlp=false", "gat.epochs=5"),
        6,
    ),
}
# Where it is enough that figures are the same: a generated graph of 240 nodes
GENERATED = (
    *(
        "data.name=csbm",
        "data.nodes=240",
        "data.features=64",
        "data.active=8",
        "data.degree=6",
        "data.classes=3",
    ),
    *("data.split=random", "data.ratios=[0.4,0.3,0.3]"),
)
EGOS = ("partition.clients=6", "partition.min_nodes=5", "model.projection=16", "model.hidden=16")
SMALL = {
    "nFedGNN": Setup("quickstart", GENERATED, 6),
    "FedSCem": Setup("fedscem/cora-linqs", (*GENERATED, *EGOS, "strategy.dropout=0.5"), 6),
    "FedGLS": Setup(
        "fedgls/cora-linqs", (*GENERATED, "partition.clients=5", "graph.neighbours=5"), 5
    ),
    "PPFL-GNN": Setup(
        "ppfl/cora-linqs-gat",
        (*GENERATED, "judge.mlp=false", "judge.folds=2", "judge.every=2", "gat.epochs=5"),
        4,
    ),
}


@dataclass(frozen=True)
class Done:
    """A run that ended, and what is left of it."""

    out: Path
    result: dict[str, Any]
    reports: list[Any]

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of every round."""
        return [report.test_accuracy for report in self.reports]

    @property
    def figures(self) -> list[float]:
        """Whatever a fault would change: losses and accuracies of every round."""
        names = ("loss", "regulariser", "val_accuracy", "test_accuracy")
        return [getattr(report, name) for report in self.reports for name in names]


def config_of(setup: Setup, *overrides: str) -> RunConfig:
    """Load a method's settings."""
    return load_config(setup.config, [*setup.overrides, *overrides])


def run(
    config: RunConfig,
    out: Path,
    *,
    supernodes: int,
    faults: Faults | None = None,
    resume: bool = False,
    kill_after: Iterable[float] = (),
) -> Done:
    """Run a config in this process, every output included."""
    app = client_app(config, out)
    grid = FaultyGrid(
        app,
        faults or (lambda *_: "good"),
        num_supernodes=supernodes,
        state_dir=out.with_name(f"{out.name}-state"),
        kill_after=kill_after,
    )
    try:
        result = run_server(config, grid, out, engine="in-process", resume=resume)
    finally:
        forget_run(grid.run.run_id)
    return Done(out, result, read_reports(out / "metrics.jsonl"))


class FaultyGrid(InProcessGrid):
    """Does to each message what a word for (partition, round, message type) says.

    ``silent``: it never reaches the client. ``lost``: the client does its work and the reply never
    arrives. ``late``: the reply comes after the deadline, in the next exchange. ``killed``: the
    client works in a process of its own, which the kernel ends after ``kill_after`` seconds; files
    that it was writing stay as they are. ``gone``: the SuperNode is not connected.
    """

    def __init__(
        self,
        app: Any,
        faults: Faults,
        *,
        num_supernodes: int,
        state_dir: Path,
        kill_after: Iterable[float] = (),
    ) -> None:
        # As in a deployment: what a client keeps is in its context and in files, not in memory.
        super().__init__(
            app, num_supernodes=num_supernodes, node_config={"state-dir": str(state_dir)}
        )
        self.faults, self.killed = faults, 0
        self._kill_after = iter(kill_after)
        self._late: dict[str, Message] = {}
        self._round = 0

    def word(self, node_id: int, server_round: int, message_type: str) -> str:
        """Say what happens to a message."""
        partition = int(self.contexts[node_id].node_config["partition-id"])
        return self.faults(partition, server_round, message_type)

    def get_node_ids(self) -> list[int]:
        """Return the nodes that are connected in the round that comes."""
        connected = super().get_node_ids()
        return [n for n in connected if self.word(n, self._round + 1, "connect") != "gone"]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver the messages, or what is left of them."""
        self._replies.update(self._late)
        self._late, ids = {}, []
        for message in messages:
            meta, server_round = message.metadata, round_of(message)
            self._round = max(self._round, server_round)
            word = self.word(meta.dst_node_id, server_round, meta.message_type)
            if word == "silent":
                ids.append(self._number(message))
                continue
            if word == "killed":
                ids.append(self._number(message))
                self._die(message)
                continue
            (message_id,) = super().push_messages([message])
            ids.append(message_id)
            if word in ("lost", "late"):
                reply = self._replies.pop(message_id)
                if word == "late":
                    self._late[message_id] = reply
        return ids

    def _die(self, message: Message) -> None:
        """Have the client work in a process that is killed; it keeps nothing but its files."""
        forget_live(self.run.run_id)
        process = os.fork()
        if process == 0:  # the client
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, next(self._kill_after))
                super().push_messages([message])
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        next(self._kill_after)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status)
        self.killed += 1


def round_of(message: Message) -> int:
    """Read a message's round: its group, or where Flower's ``FedAvg`` writes it."""
    config = message.content.config_records.get(CONFIG, {})
    return int(message.metadata.group_id or config.get(SERVER_ROUND, 0))  # type: ignore[arg-type]


def forget_live(run_id: int) -> None:
    """Forget what this process keeps of clients, as a process that starts anew has nothing."""
    for kept in (state._LIVE, state._TOKENS, state._FIXED, state._MAPS):
        for key in [key for key in kept if key[0] == run_id]:
            del kept[key]
