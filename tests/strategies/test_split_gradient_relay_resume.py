"""Checkpoints of nFedGNN: going on gives the bits of the run that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy
from relay_helpers import (
    ChangingGrid,
    FaultyGrid,
    Outcome,
    client_app,
    same_weights,
    small_graph,
    strategy_for,
)
from torch import nn

from flower_graph.errors import CheckpointError, NoClientsError
from flower_graph.report.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint

DATA, ROUNDS, EVERY = small_graph(20), 7, 2


def start(
    folder: Path,
    *,
    stop_at: int | None = None,
    resume: bool = False,
    supernodes: int = 3,
    script: dict[tuple[int, int], str] | None = None,
    data: Any = DATA,
    app_options: dict[str, Any] | None = None,
    rounds: int = ROUNDS,
    **options: Any,
) -> Outcome:
    """Run with checkpoints; `stop_at` presses Ctrl-C once that round is reported."""
    outcome = Outcome(strategy_for(data, checkpoint_dir=folder, checkpoint_every=EVERY, **options))
    app = client_app(data, checkpoint_dir=folder, **(app_options or {}))
    grid = FaultyGrid(app, num_supernodes=supernodes, script=script or {})
    go(outcome, grid, stop_at=stop_at, resume=resume, rounds=rounds)
    return outcome


def go(
    outcome: Outcome,
    grid: InProcessGrid,
    *,
    stop_at: int | None,
    resume: bool,
    rounds: int = ROUNDS,
) -> None:
    def on_round(report: RoundReport) -> None:
        outcome.reports.append(report)
        if report.round == stop_at:
            raise KeyboardInterrupt

    def call() -> None:
        outcome.strategy.start(
            grid, num_rounds=rounds, timeout=0.1, on_round=on_round, resume=resume
        )

    if stop_at is None:
        call()
    else:
        with pytest.raises(KeyboardInterrupt):
            call()


def assert_same_ending(resumed: Outcome, whole: Outcome) -> None:
    first = resumed.reports[0].round
    assert first > 1
    assert resumed.figures == whole.figures[first - 1 :]
    assert same_weights(resumed, whole)
    assert resumed.reports[-1].bytes == whole.reports[-1].bytes
    assert resumed.reports[-1].round == whole.reports[-1].round
    ledger = whole.strategy.users.ledger.payload
    assert resumed.strategy.users.ledger.payload == ledger


def test_own_user_models_are_resumed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 4))
    options = {"app_options": {"user_model": model}, "participation": 0.2, "supernodes": 10}
    whole = start(tmp_path / "whole", **options)
    start(tmp_path / "cut", stop_at=5, **options)
    assert_same_ending(start(tmp_path / "cut", resume=True, **options), whole)


def test_the_same_strategy_can_be_resumed_in_a_notebook(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole")
    app = client_app(DATA, checkpoint_dir=tmp_path / "cut")
    outcome = Outcome(strategy_for(DATA, checkpoint_dir=tmp_path / "cut", checkpoint_every=EVERY))
    grid = InProcessGrid(app, num_supernodes=3)
    go(outcome, grid, stop_at=5, resume=False)
    outcome.reports.clear()
    go(outcome, grid, stop_at=None, resume=True)
    assert_same_ending(outcome, whole)


def test_flowers_own_loop_makes_checkpoints(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole")
    folder = tmp_path / "flower"
    strategy = strategy_for(DATA, checkpoint_dir=folder, checkpoint_every=EVERY)
    grid = InProcessGrid(client_app(DATA, checkpoint_dir=folder), num_supernodes=3)
    Strategy.start(strategy, grid, initial_arrays=ArrayRecord(), num_rounds=5)
    assert checkpoint.complete_rounds(folder) == [2, 4]
    assert start(folder, resume=True).figures == whole.figures[4:]


def test_a_client_that_joins_a_resumed_run_later_loads_its_part(tmp_path: Path) -> None:
    start(tmp_path / "cut", stop_at=5)
    outcome = Outcome(strategy_for(DATA, checkpoint_dir=tmp_path / "cut", checkpoint_every=EVERY))
    app = client_app(DATA, checkpoint_dir=tmp_path / "cut")
    # The first look is the one that resumes; the third SuperNode is there from round 6 on.
    go(outcome, ChangingGrid(app, {2: {3, 4, 5}}, 3), stop_at=None, resume=True)
    assert [(r.round, r.answered) for r in outcome.reports] == [(5, 14), (6, 20), (7, 20)]
    absent = start(tmp_path / "whole", script={(2, 5): "silent"})
    assert outcome.figures[1:] == absent.figures[5:]
    assert outcome.losses == absent.losses[4:]


# What cannot be resumed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "gat"}, "its latent_size is 4, this run's is 8"),
        ({"data": small_graph(24)}, "its num_users is 20, this run's is 24"),
    ],
)
def test_another_run(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    start(tmp_path, stop_at=5)
    with pytest.raises(CheckpointError, match=said):
        start(tmp_path, resume=True, **options)


def test_a_client_without_a_folder_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = Outcome(strategy_for(DATA, checkpoint_dir=tmp_path, checkpoint_every=2))
    grid = InProcessGrid(client_app(DATA), num_supernodes=2)
    with pytest.raises(NoClientsError, match="round 2: none of 2 SuperNodes"):
        outcome.strategy.start(grid, num_rounds=3)
    assert "checkpoint_dir is not set" in caplog.text
