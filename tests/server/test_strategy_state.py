"""What a strategy keeps in attributes: saved if it changed, put back, refused if it cannot be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flower_graph.server.averaging import StrategyState
from flower_graph.server.session import check_same
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
