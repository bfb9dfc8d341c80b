"""Checkpoints of nFedGNN beyond the contracts: own models, Flower's loop, who comes later."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy
from relay_helpers import Outcome, client_app, same_weights, small_graph, strategy_for
from torch import nn

from flower_graph.errors import NoClientsError
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint

DATA, ROUNDS, EVERY = small_graph(20), 7, 2


class Run(Outcome):
    """A run with checkpoints every other round, on three SuperNodes."""

    def __init__(
        self, folder: Path, *, supernodes: int = 3, user_model: Any = None, **options: Any
    ):
        saving = {"checkpoint_dir": folder, "checkpoint_every": EVERY}
        super().__init__(strategy_for(options.pop("data", DATA), **saving, **options))
        app = client_app(DATA, checkpoint_dir=folder, user_model=user_model)
        self.grid = InProcessGrid(app, num_supernodes=supernodes)

    def go(self, *, stop_at: int | None = None, resume: bool = False) -> Run:
        """Run to the end; `stop_at` presses Ctrl-C once that round is reported."""

        def on_round(report: RoundReport) -> None:
            self.reports.append(report)
            if report.round == stop_at:
                raise KeyboardInterrupt

        self.reports.clear()
        try:
            self.strategy.start(self.grid, num_rounds=ROUNDS, on_round=on_round, resume=resume)
        except KeyboardInterrupt:
            assert stop_at
        return self


def assert_same_ending(resumed: Run, whole: Run) -> None:
    first = resumed.reports[0].round
    assert first > 1
    assert resumed.figures == whole.figures[first - 1 :]
    assert same_weights(resumed, whole)
    assert resumed.reports[-1].bytes == whole.reports[-1].bytes
    payload = whole.strategy.users.ledger.payload
    assert resumed.strategy.users.ledger.payload == payload


def test_schedule_and_average_go_on_where_they_were(tmp_path: Path) -> None:
    options = {"schedule": "warmup-cosine", "gradient_norm": 0.1, "server_average": 0.8}
    whole = Run(tmp_path / "whole", **options).go()
    Run(tmp_path / "cut", **options).go(stop_at=5)
    assert_same_ending(Run(tmp_path / "cut", **options).go(resume=True), whole)
    assert whole.strategy.learnt().to_torch_state_dict().keys() == (
        whole.strategy.server.model.state_dict().keys()
    )
    # What is kept and told is the average, not what is trained
    server, told = whole.strategy.server, whole.weights
    assert not torch.equal(told["server.bias"], server.model.state_dict()["bias"])
    own = Run(tmp_path / "own", schedule="cosine")
    with pytest.raises(RuntimeError, match=r"'cosine'.*rounds"):
        Strategy.start(own.strategy, own.grid, initial_arrays=ArrayRecord(), num_rounds=3)


def test_own_user_models_are_resumed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 4))
    options: dict[str, Any] = {"user_model": model, "participation": 0.2, "supernodes": 10}
    whole = Run(tmp_path / "whole", **options).go()
    Run(tmp_path / "cut", **options).go(stop_at=5)
    assert_same_ending(Run(tmp_path / "cut", **options).go(resume=True), whole)


def test_the_same_strategy_can_be_resumed_in_a_notebook(tmp_path: Path) -> None:
    whole, outcome = Run(tmp_path / "whole").go(), Run(tmp_path / "cut").go(stop_at=5)
    assert_same_ending(outcome.go(resume=True), whole)


def test_flowers_own_loop_makes_checkpoints(tmp_path: Path) -> None:
    own = Run(tmp_path / "own")
    Strategy.start(own.strategy, own.grid, initial_arrays=ArrayRecord(), num_rounds=5)
    assert checkpoint.complete_rounds(tmp_path / "own") == [2, 4]
    resumed = Run(tmp_path / "own").go(resume=True)
    assert resumed.figures == Run(tmp_path / "whole").go().figures[4:]


def away(run: Run, *looks: int) -> Run:
    """Let the last SuperNode be away at some of the server's looks at who is there."""
    count, there = itertools.count(1), run.grid.get_node_ids
    run.grid.get_node_ids = lambda: there()[: -1 if next(count) in looks else None]
    return run


def test_a_client_that_joins_a_resumed_run_later_loads_its_part(tmp_path: Path) -> None:
    Run(tmp_path / "cut").go(stop_at=5)
    # The first look is the one that resumes; the third SuperNode is there from round 6 on.
    outcome = away(Run(tmp_path / "cut"), 1, 2).go(resume=True)
    assert [(r.round, r.answered) for r in outcome.reports] == [(5, 14), (6, 20), (7, 20)]
    absent = away(Run(tmp_path / "whole"), 5).go()
    assert outcome.figures[1:] == absent.figures[5:]
    assert outcome.losses == absent.losses[4:]


def test_a_client_without_a_folder_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = Run(tmp_path)
    outcome.grid = InProcessGrid(client_app(DATA), num_supernodes=2)
    with pytest.raises(NoClientsError, match=r"round 2.*2"):
        outcome.go()
    assert "checkpoint_dir" in caplog.text
