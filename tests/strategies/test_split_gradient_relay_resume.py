"""Checkpoints of nFedGNN beyond the contracts: own models, Flower's loop, who comes later."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy
from relay_helpers import Outcome, client_app, run, same_weights, small_graph, strategy_for
from torch import nn

from flower_graph.errors import NoClientsError
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint

DATA, ROUNDS, EVERY = small_graph(20), 7, 2


def grid_of(folder: Path | None, supernodes: int = 3, user_model: Any = None) -> InProcessGrid:
    app = client_app(DATA, checkpoint_dir=folder, user_model=user_model)
    return InProcessGrid(app, num_supernodes=supernodes)


def go(folder: Path, grid: InProcessGrid | None = None, **options: Any) -> Outcome:
    """Run with checkpoints every other round."""
    saving = {"checkpoint_dir": folder, "checkpoint_every": EVERY}
    return run(DATA, rounds=ROUNDS, grid=grid or grid_of(folder), **saving, **options)


def assert_same_ending(resumed: Outcome, whole: Outcome) -> None:
    first = resumed.reports[0].round
    assert first > 1
    assert resumed.figures == whole.figures[first - 1 :]
    assert same_weights(resumed, whole)
    assert resumed.reports[-1].bytes == whole.reports[-1].bytes
    payload = whole.strategy.users.ledger.payload
    assert resumed.strategy.users.ledger.payload == payload


def test_schedule_and_average_go_on_where_they_were(tmp_path: Path) -> None:
    options = {"schedule": "warmup-cosine", "gradient_norm": 0.1, "server_average": 0.8}
    whole = go(tmp_path / "whole", **options)
    go(tmp_path / "cut", stop_at=5, **options)
    assert_same_ending(go(tmp_path / "cut", resume=True, **options), whole)
    # What is kept and told is the average, not what is trained
    server, told = whole.strategy.server, whole.weights
    assert whole.strategy.learnt().to_torch_state_dict().keys() == server.model.state_dict().keys()
    assert not torch.equal(told["server.bias"], server.model.state_dict()["bias"])


def test_own_user_models_are_resumed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 4))

    def part(name: str, **how: Any) -> Outcome:
        grid = grid_of(tmp_path / name, 10, model)
        return go(tmp_path / name, grid, participation=0.2, **how)

    whole = part("whole")
    part("cut", stop_at=5)
    assert_same_ending(part("cut", resume=True), whole)


def test_flowers_own_loop_makes_checkpoints_and_has_no_schedule(tmp_path: Path) -> None:
    how: dict[str, Any] = {"checkpoint_dir": tmp_path / "own", "checkpoint_every": EVERY}
    start = partial(Strategy.start, initial_arrays=ArrayRecord(), num_rounds=5)
    start(strategy_for(DATA, **how), grid_of(tmp_path / "own"))
    assert checkpoint.complete_rounds(tmp_path / "own") == [2, 4]
    resumed = go(tmp_path / "own", resume=True)
    assert resumed.figures == go(tmp_path / "whole").figures[4:]
    with pytest.raises(RuntimeError, match=r"'cosine'.*rounds"):
        start(strategy_for(DATA, schedule="cosine"), grid_of(None))


def test_a_client_without_a_folder_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoClientsError, match=r"round 2.*2"):
        go(tmp_path, grid_of(None, 2))
    assert "checkpoint_dir" in caplog.text
