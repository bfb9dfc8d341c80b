"""LocalSage+ and FedSage+ that go on from a checkpoint end where the uninterrupted run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sage_helpers import SETTINGS, SageOutcome, client_app, networks, run_sage

from flower_graph import checkpoint
from flower_graph.errors import CheckpointError
from flower_graph.participation import Participation
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fed_sage import FedSage, LocalSage, SageClient

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


def assert_same(whole: SageOutcome, resumed: SageOutcome, first: int) -> None:
    after = whole.reports[first - 1 :]
    assert torch.equal(whole.figures[first - 1 :].nan_to_num(-1), resumed.figures.nan_to_num(-1))
    for one, other in zip(after, resumed.reports, strict=True):
        assert (one.round, one.bytes) == (other.round, other.bytes)
        assert one.participation == other.participation
    for name, weight in whole.strategy.weights().items():
        assert torch.equal(weight, resumed.strategy.weights()[name])


@BOTH
@pytest.mark.parametrize(("supernodes", "before"), [(1, 2), (3, 3)])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_resumed_is_uninterrupted(
    strategy: type[LocalSage], tmp_path: Path, supernodes: int, before: int, participation: float
) -> None:
    options: dict[str, Any] = {"supernodes": supernodes, "participation": participation}
    whole = run_sage(strategy, rounds=5, **options)
    saving(strategy, tmp_path, before, **options)
    assert checkpoint.complete_rounds(tmp_path)[-1] == before
    assert_same(whole, saving(strategy, tmp_path, 5, resume=True, **options), before + 1)


@BOTH
def test_the_checkpoint_before_where_a_client_has_lost_the_last(
    strategy: type[LocalSage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving(strategy, tmp_path, 4)
    (checkpoint.round_folder(tmp_path, 4) / "client-1.safetensors").unlink()
    resumed = saving(strategy, tmp_path, 5, resume=True)
    assert_same(run_sage(strategy, rounds=5), resumed, 3)
    assert "cannot resume from round 4" in caplog.text


def test_what_does_not_fit(tmp_path: Path) -> None:
    saving(LocalSage, tmp_path, 2)
    with pytest.raises(CheckpointError, match="its strategy is LocalSage, this run's is FedSage"):
        saving(FedSage, tmp_path, 4, resume=True)
    with pytest.raises(CheckpointError, match="its seed is 5, this run's is 6"):
        saving(LocalSage, tmp_path, 4, resume=True, settings=SETTINGS._replace(seed=6))
    with pytest.raises(CheckpointError, match="with as many SuperNodes as before"):
        saving(LocalSage, tmp_path, 4, resume=True, supernodes=3)
    with pytest.raises(CheckpointError, match="a checkpoint_dir is needed"):
        run_sage(LocalSage, resume=True)


def test_a_client_that_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = checkpoint.save_client

    def full(path: Path, *more: Any) -> None:
        if path.parent.name == "round-000002":
            raise OSError(28, "No space left on device", str(path))
        original(path, *more)

    monkeypatch.setattr(checkpoint, "save_client", full)
    outcome = saving(FedSage, tmp_path, 3)
    assert checkpoint.complete_rounds(tmp_path) == [3]
    assert "its checkpoint cannot be written: No space left on device" in caplog.text
    assert torch.equal(outcome.figures, run_sage(FedSage, rounds=3).figures)


@BOTH
def test_a_training_that_failed_changes_nothing(strategy: type[LocalSage]) -> None:
    """In round 2 all clients fail once, half way; asked again, they train as if nothing was."""
    failed: list[int] = []

    class Fails(SageClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            number = int(config["round"])
            if number == 2 and self.host.clients[0] not in failed:
                failed.append(int(self.host.clients[0]))
                with pytest.raises(OSError, match="full"):
                    self._half(config)
            return super().fit(parameters, config)

        def _half(self, config: Any) -> None:
            from flower_graph.records.fed_sage import read_settings

            with self.host.message(read_settings(config)) as cohort:
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


def test_who_took_part() -> None:
    outcome = run_sage(LocalSage, rounds=3, supernodes=3, participation=0.5)
    clients = {network.client for network in networks()}
    for report in outcome.reports:
        who = Participation.from_record(report.participation)
        assert who.answered | who.left_out.keys() == clients
        assert len(who.answered) == report.answered == 3
        assert set(who.left_out.values()) == {"not drawn"}
