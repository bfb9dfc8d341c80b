"""What a strategy keeps in attributes: saved if it changed, put back, refused if it cannot be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from averaging_helpers import Run, Simple
from flwr.serverapp.strategy import FedAdam

from flower_graph.config.common import StrategySection
from flower_graph.errors import CheckpointError
from flower_graph.server.averaging import Combined
from flower_graph.server.round_loop import RoundStrategy
from flower_graph.server.session import Membership, Session
from flower_graph.storage import checkpoint


class Remembers(Simple, FedAdam):
    """Keeps its moments, and a list of rounds, in attributes."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.history: list[Any] = []

    def combine(self, replies: Any) -> Combined:
        self.history.append([self._number, "x", None, True])
        return super().combine(replies)


def test_attributes_that_change_come_back(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    whole, _ = Run(Remembers(), rounds=3), Run(Remembers(**saving), rounds=2)
    again = Run(Remembers(**saving), rounds=3, resume=True)
    assert again.model == whole.model
    one, other = (vars(run.strategy) for run in (whole, again))
    assert one["history"] == other["history"] == [[n, "x", None, True] for n in (1, 2, 3)]
    for name in ("m_t", "v_t"):
        np.testing.assert_array_equal(one[name]["w"], other[name]["w"])
        assert one[name]["w"].dtype == other[name]["w"].dtype


class Resumed(RoundStrategy[Any, Any]):
    """A server of nine rounds, with checkpoints of some, which some clients have."""

    def __init__(self, folder: Path | None, kept: list[int], had: list[int]) -> None:
        super().__init__(Session(Membership(), StrategySection(), checkpoint_dir=folder))
        self.session.open(None, 1.0, 9)  # type: ignore[arg-type]
        self.number, self.had, self.tried = 0, had, list[int]()
        self.session.rejoin = self._rejoined  # type: ignore[method-assign]
        for self.number in kept:
            self.session.save(self.number, self._saved(), {})

    def fixed_settings(self) -> dict[str, object]:
        return {}

    def state(self) -> dict[str, object]:
        return {"number": self.number}

    def load_state(self, state: Any) -> None:
        self.tried.append(state["number"])

    def _rejoined(self) -> list[str]:
        return [] if self.tried[-1] in self.had else ["client 3: it is gone"]


def test_the_newest_checkpoint_that_all_have_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Resumed(tmp_path, [4, 6], had=[4])
    (tmp_path / "round-000007").mkdir()
    (tmp_path / "round-000007" / "server.safetensors").write_bytes(b"junk")
    assert server._resume() == server.best.last == 4
    assert server.tried == [6, 4]
    assert "round-000007/server.safetensors: " in caplog.text
    assert "round 6: client 3: it is gone" in caplog.text
    # The run now takes another course: what was after round 4 must never be taken for it.
    assert checkpoint.complete_rounds(tmp_path) == [4]


def test_without_any_checkpoint_left_the_reasons_are_named(tmp_path: Path) -> None:
    server = Resumed(tmp_path, [4, 6], had=[])
    with pytest.raises(CheckpointError, match=r"round 6.*round 4"):
        server._resume()
    assert checkpoint.complete_rounds(tmp_path) == [4, 6], "a client's disk may come back"
    server.session.rounds = 5
    with pytest.raises(CheckpointError, match=r"num_rounds: 5.*round 6"):
        server._resume()
    with pytest.raises(CheckpointError, match="checkpoint_dir"):
        Resumed(None, [], had=[])._resume()
