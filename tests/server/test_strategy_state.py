"""What a strategy keeps in attributes: saved if it changed, put back, refused if it cannot be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flower_graph.config.common import StrategySection
from flower_graph.errors import CheckpointError
from flower_graph.server.averaging import StrategyState
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import RoundStrategy
from flower_graph.server.session import Session, check_same
from flower_graph.storage import checkpoint


class Strategy:
    """Has settings, and things that change."""

    def __init__(self) -> None:
        self.rate, self.mine = 0.5, object()
        self.moments: dict[str, Any] | None = None
        self.history: list[Any] = []


def test_what_changed_comes_back(tmp_path: Path) -> None:
    one, other = Strategy(), Strategy()
    states = [StrategyState(s, {"seen"}) for s in (one, other)]
    one.moments = {"a": np.arange(6, dtype=np.float64).reshape(2, 3), "b": np.float32(2)}
    one.history.append([1, "x", None, True, float("nan")])
    one.record = ArrayRecord({"w": Array(np.ones(2, np.float32))})  # type: ignore[attr-defined]
    one.seen = {1, 2}  # type: ignore[attr-defined]
    checkpoint.save_server(tmp_path, 1, states[0].state_dict())
    saved = checkpoint.load_server(tmp_path, 1)
    assert saved.keys() == {"moments", "history", "record"}
    other.rate, other.history = 0.7, ["old"]
    states[1].load_state_dict(saved)
    assert other.moments is not None
    assert np.array_equal(other.moments["a"], one.moments["a"])
    assert other.moments["a"].dtype == np.float64
    assert other.history[0][:4] == [1, "x", None, True]
    assert other.record["w"].numpy().tolist() == [1, 1]  # type: ignore[attr-defined]
    assert other.rate == 0.5  # it is what it was when the run began
    other.moments["a"][0, 0] = 7  # its own, and writable
    assert one.moments["a"][0, 0] == 0


def test_nothing_changed() -> None:
    strategy = Strategy()
    strategy.moments, strategy.rate = {"a": np.array([np.nan])}, float("nan")
    state = StrategyState(strategy, ())
    strategy.moments = {"a": np.array([np.nan])}  # another object, the same numbers
    assert state.state_dict() == {}


def test_settings_newer_than_a_checkpoint_are_no_other_settings() -> None:
    check_same({"hidden": 16}, {"hidden": 16, "came later": "x"})
    with pytest.raises(ValueError, match=r"hidden.*16.*8"):
        check_same({"hidden": 16}, {"hidden": 8})


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
