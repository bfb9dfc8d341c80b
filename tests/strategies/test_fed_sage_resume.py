"""LocalSage+ and FedSage+ that go on from a checkpoint end where the uninterrupted run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sage_helpers import SageOutcome, client_app, networks, run_sage

from flower_graph.errors import CheckpointError
from flower_graph.server.participation import Participation
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fed_sage.strategy import FedSage, LocalSage, SageClient

BOTH = pytest.mark.parametrize("strategy", [LocalSage, FedSage])


def saving(
    strategy: type[LocalSage], folder: Path, rounds: int, *, supernodes: int = 2, **options: Any
) -> SageOutcome:
    def client(*args: Any, **more: Any) -> SageClient:
        return SageClient(*args, checkpoint_dir=folder, **more)

    app = options.pop("app", None) or client_app(networks(), client)
    grid = InProcessGrid(app, num_supernodes=supernodes)
    own = {"checkpoint_dir": folder, "checkpoint_every": 2}
    return run_sage(strategy, rounds=rounds, grid=grid, **{**own, **options})


def test_what_does_not_fit(tmp_path: Path) -> None:
    saving(LocalSage, tmp_path, 2)
    with pytest.raises(CheckpointError, match="its strategy is LocalSage, this run's is FedSage"):
        saving(FedSage, tmp_path, 4, resume=True)
    with pytest.raises(CheckpointError, match="a checkpoint_dir is needed"):
        run_sage(LocalSage, resume=True)


@BOTH
def test_a_training_that_failed_changes_nothing(strategy: type[LocalSage]) -> None:
    """In round 2 all clients fail once, half way; asked again, they train as if nothing was."""
    failed: list[int] = []

    class Fails(SageClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            number = int(config["server-round"])
            if number == 2 and self.host.clients[0] not in failed:
                failed.append(int(self.host.clients[0]))
                with pytest.raises(OSError, match="full"):
                    self._half(config)
            return super().fit(parameters, config)

        def _half(self, config: Any) -> None:
            from flower_graph.strategies.fed_sage.messages import read_settings

            with self.host._opened(read_settings(config)) as cohort:
                cohort.train(2, torch.arange(len(self.host.clients)))
                raise OSError("the disk is full")

    grid = InProcessGrid(client_app(networks(), Fails), num_supernodes=2)
    outcome = run_sage(strategy, grid=grid)
    assert len(failed) == 2
    assert torch.equal(outcome.figures, run_sage(strategy).figures)


@BOTH
def test_a_supernode_that_has_lost_everything_begins_anew(
    strategy: type[LocalSage], caplog: pytest.LogCaptureFixture
) -> None:
    class Forgets(InProcessGrid):
        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            kinds = {m.metadata.message_type for m in messages}
            if kinds == {"train"} and {m.metadata.group_id for m in messages} == {"2"}:
                next(iter(self.contexts.values())).state.clear()
            return super().push_messages(messages)

    grid = Forgets(client_app(networks()), num_supernodes=2)
    outcome = run_sage(strategy, grid=grid, rounds=4)
    who = [Participation.from_record(report.participation) for report in outcome.reports]
    assert [len(one.answered) for one in who] == [6, 3, 6, 6]
    assert all("StateLostError" in why for why in who[1].failed.values())
    assert "has lost its state: its clients begin anew" in caplog.text
