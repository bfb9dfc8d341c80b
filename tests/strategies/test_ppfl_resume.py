"""PPFL-GNN's runs go on from a checkpoint and end where the uninterrupted ones do, bit by bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from flwr.client import NumPyClient
from public_helpers import toy_members

from flower_graph import checkpoint
from flower_graph.client import make_client_app
from flower_graph.errors import CheckpointError
from flower_graph.report import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.procrustes_alignment import (
    LocalEmbedding,
    ProcrustesAlignment,
    PublicNodeClient,
)
from flower_graph.strategies.secure_consensus import (
    ACTIONS,
    SecureConsensus,
    SecureConsensusClient,
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
    assert resumed.strategy.judged == whole.strategy.judged


@pytest.mark.parametrize("stop_at", [3, 4, 6])
@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_has_the_bits_of_a_whole_one(form: str, stop_at: int, tmp_path: Path) -> None:
    whole = Ended(form, None, 0).go()
    Ended(form, tmp_path, 2).stopped(stop_at)
    resumed = Ended(form, tmp_path, 2).go(resume=True)
    assert resumed.reports[0].round == 3 if stop_at <= 4 else 5
    assert_same_ending(resumed, whole)
    files = [p.name for p in checkpoint.round_folder(tmp_path, ROUNDS).iterdir()]
    assert sorted(files) == [*(f"client-{k}.safetensors" for k in range(3)), "server.pt"]


@pytest.mark.parametrize("form", ["pairs", "secure"])
def test_resumed_twice_and_at_the_end(form: str, tmp_path: Path) -> None:
    whole = Ended(form, None, 0).go()
    Ended(form, tmp_path, 2).stopped(3)
    Ended(form, tmp_path, 2).stopped(5, resume=True)
    assert_same_ending(Ended(form, tmp_path, 2).go(resume=True), whole)
    again = Ended(form, tmp_path, 2).go(resume=True)
    assert again.reports == []
    assert repr(again.strategy.weights()) == repr(whole.strategy.weights())


def test_who_did_not_answer_saves_in_an_exchange_of_its_own(tmp_path: Path) -> None:
    whole = Ended("pairs", None, 0).go(lost={(1, 4)})
    Ended("pairs", tmp_path, 2).stopped(5, lost={(1, 4)})
    assert checkpoint.complete_rounds(tmp_path) == [2, 4]
    assert_same_ending(Ended("pairs", tmp_path, 2).go(resume=True), whole)


@pytest.mark.parametrize("name", ["server.pt", "client-1.safetensors"])
@pytest.mark.parametrize("form", ["consensus", "secure"])
def test_of_a_damaged_checkpoint_the_one_before_is_taken(
    form: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Ended(form, None, 0).go()
    Ended(form, tmp_path, 2).stopped(5)
    path = tmp_path / "round-000004" / name
    path.write_bytes(path.read_bytes()[:-7])
    resumed = Ended(form, tmp_path, 2).go(resume=True)
    assert resumed.reports[0].round == 3
    assert re.search(rf"cannot resume from round 4: .*{name}: cannot be read", caplog.text)
    assert_same_ending(resumed, whole)


def test_a_full_disk_at_a_client_costs_a_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, real = Ended("pairs", None, 0).go(), checkpoint.save_client

    def full(path: Path, tensors: dict[str, torch.Tensor], run: str) -> None:
        if path.name == "client-1.safetensors" and "000002" in str(path):
            raise OSError(28, "No space left on device")
        real(path, tensors, run)

    monkeypatch.setattr(checkpoint, "save_client", full)
    saved = Ended("pairs", tmp_path, 2).go(rounds=4)
    assert "its checkpoint cannot be written: No space left on device; the next" in caplog.text
    assert checkpoint.complete_rounds(tmp_path) == [3, 4]
    assert saved.figures == whole.figures[:4]


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
        ({"seed": 4}, "its seed is 0, this run's is 4"),
        ({"alignment": "consensus"}, "its alignment is pairs, this run's is consensus"),
        ({"supernodes": 2}, "with as many SuperNodes as before"),
    ):
        with pytest.raises(CheckpointError, match=said):
            Ended("pairs", tmp_path, 2, **changes).go(resume=True)
    with pytest.raises(CheckpointError, match="num_rounds: 1 is less than round 2"):
        Ended("pairs", tmp_path, 2).go(rounds=1, resume=True)
    with pytest.raises(CheckpointError, match="a checkpoint_dir is needed"):
        Ended("pairs", None, 0).go(resume=True)
    with pytest.raises(ValueError, match="checkpoint_every: -1 is not at least 0"):
        Ended("pairs", tmp_path, -1)
