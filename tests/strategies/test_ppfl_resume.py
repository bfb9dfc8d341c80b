"""PPFL-GNN's runs go on from a checkpoint and end where the uninterrupted ones do, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import NumPyClient
from public_helpers import toy_members

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import CheckpointError
from flower_graph.report.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.strategies.procrustes_alignment.secure_consensus import (
    ACTIONS,
    SecureConsensus,
    SecureConsensusClient,
)
from flower_graph.strategies.procrustes_alignment.strategy import (
    LocalEmbedding,
    ProcrustesAlignment,
    PublicNodeClient,
)

MEMBERS, ROUNDS = toy_members(6), 7
FORMS: dict[str, tuple[type[ProcrustesAlignment], dict[str, Any]]] = {
    "pairs": (ProcrustesAlignment, {}),
    "consensus": (ProcrustesAlignment, {"alignment": "consensus"}),
    "some": (ProcrustesAlignment, {"participation": 0.5}),
    "last": (ProcrustesAlignment, {"participation": 0.5, "absent": "last"}),
    "local": (LocalEmbedding, {}),
    "secure": (SecureConsensus, {}),
}


class Silent(InProcessGrid):
    """Loses replies: (partition, round) of ``train`` messages."""

    lost: frozenset[tuple[int, int]] = frozenset()

    def push_messages(self, messages: Any) -> list[str]:
        ids = []
        for message in messages:
            ids += super().push_messages([message])
            node = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
            at = (int(node), int(message.metadata.group_id))
            if message.metadata.message_type == "train" and at in self.lost:
                self._replies.pop(ids[-1])
        return ids


class Ended:
    """A run: what it said and what it left."""

    def __init__(self, form: str, folder: Path | None, every: int, **changes: Any) -> None:
        kind, options = FORMS[form]
        self.folder, self.supernodes = folder, int(changes.pop("supernodes", 3))
        saving = {"checkpoint_dir": folder, "checkpoint_every": every}
        self.strategy = kind(**{**options, **saving, **changes})
        self.reports: list[RoundReport] = []

    def client(self, context: Context) -> NumPyClient:
        kind = PublicNodeClient
        if isinstance(self.strategy, SecureConsensus):
            kind = SecureConsensusClient  # type: ignore[assignment]
        size = len(MEMBERS) // self.supernodes
        part = int(context.node_config["partition-id"])
        return kind(context, MEMBERS[part * size :][:size], checkpoint_dir=self.folder)

    def go(self, *, rounds: int = ROUNDS, lost: Any = (), **more: Any) -> Ended:
        app = make_client_app(self.client, actions=ACTIONS)
        grid = Silent(app, num_supernodes=self.supernodes)
        grid.lost = frozenset(lost)
        self.strategy.start(grid, num_rounds=rounds, timeout=0.2, on_round=self.take, **more)
        return self

    def stopped(self, at: int, **more: Any) -> Ended:
        """Press Ctrl-C once a round is reported."""
        self.stop_at = at
        with pytest.raises(KeyboardInterrupt):
            self.go(**more)
        return self

    stop_at = 0

    def take(self, report: RoundReport) -> None:
        self.reports.append(report)
        if report.round == self.stop_at:
            raise KeyboardInterrupt

    @property
    def figures(self) -> list[list[Any]]:
        return [
            [r.round, r.loss, repr(r.regulariser), r.test_accuracy, r.alignment, r.bytes]
            for r in self.reports
        ]


def assert_same_ending(resumed: Ended, whole: Ended) -> None:
    first = resumed.reports[0].round
    assert first > 1
    assert resumed.figures == whole.figures[first - 1 :]
    left, right = resumed.strategy.weights(), whole.strategy.weights()
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name])
    assert resumed.strategy.clients.measured == whole.strategy.clients.measured


def test_who_did_not_answer_saves_in_an_exchange_of_its_own(tmp_path: Path) -> None:
    whole = Ended("pairs", None, 0).go(lost={(1, 4)})
    Ended("pairs", tmp_path, 2).stopped(5, lost={(1, 4)})
    assert checkpoint.complete_rounds(tmp_path) == [2, 4]
    assert_same_ending(Ended("pairs", tmp_path, 2).go(resume=True), whole)


def test_keys_are_in_no_checkpoint(tmp_path: Path) -> None:
    Ended("secure", tmp_path, 2).go()
    names = {
        name
        for path in tmp_path.rglob("client-*.safetensors")
        for name in checkpoint.load_client(path)
    }
    kept = {f"model.{k}.{name}" for k in range(6) for name in ("vectors", "rounds")}
    assert names == kept | {"clients"} | {str(k) for k in range(6)}


def test_what_does_not_fit(tmp_path: Path) -> None:
    Ended("pairs", tmp_path, 2).go(rounds=2)
    for changes, said in (
        ({"alignment": "consensus"}, "its alignment is pairs, this run's is consensus"),
    ):
        with pytest.raises(CheckpointError, match=said):
            Ended("pairs", tmp_path, 2, **changes).go(resume=True)
    with pytest.raises(CheckpointError, match="a checkpoint_dir is needed"):
        Ended("pairs", None, 0).go(resume=True)
    with pytest.raises(ValueError, match="checkpoint_every: -1 is not at least 0"):
        Ended("pairs", tmp_path, -1)
