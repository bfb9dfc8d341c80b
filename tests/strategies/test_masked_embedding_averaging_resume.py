"""A run that goes on from a checkpoint ends where the uninterrupted one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ego_helpers import SETTINGS
from ego_strategy_helpers import Outcome, assert_same, faulty, run, seven_egos, three_egos

from flower_graph.errors import CheckpointError, NoClientsError
from flower_graph.storage import checkpoint


def saving(folder: Path, rounds: int, *, every: int = 2, **options: Any) -> Outcome:
    return run(
        options.pop("egos", None) or seven_egos(),
        rounds=rounds,
        client_options={"checkpoint_dir": folder},
        checkpoint_dir=folder,
        checkpoint_every=every,
        **options,
    )


def same_from(whole: Outcome, resumed: Outcome, first: int) -> None:
    """Compare the rounds from ``first`` on, and how the clients ended."""
    assert [r.round for r in resumed.reports] == [r.round for r in whole.reports[first - 1 :]]
    whole.reports = whole.reports[first - 1 :]
    assert_same(whole, resumed)
    assert resumed.strategy.payload == whole.strategy.payload


def test_a_run_that_broke_off(tmp_path: Path) -> None:
    # From round 5 on nobody answers: the last checkpoint is that of round 2, as it is written
    # within round 3, and that of round 4 within round 5.
    egos, script = three_egos(), {(p, "train", 5): "lost" for p in range(3)}
    with pytest.raises(NoClientsError, match="round 5: none of 3 SuperNodes"):
        saving(tmp_path, 8, egos=egos, supernodes=3, make_grid=faulty(script))
    assert checkpoint.complete_rounds(tmp_path) == [2]
    resumed = saving(tmp_path, 8, egos=egos, supernodes=3, resume=True)
    same_from(run(egos, rounds=8, supernodes=3), resumed, 3)


@pytest.mark.parametrize("script", [{}, {(1, "train", 3): "lost"}, {(2, "train", 3): "silent"}])
def test_all_clients_that_are_there_save(tmp_path: Path, script: dict[Any, Any]) -> None:
    # With 3 of 7 clients drawn, most SuperNodes are in no request; others do not answer theirs.
    saving(tmp_path, 4, supernodes=7, participation=0.5, make_grid=faulty(script))
    for number in (2, 4):
        names = [p.name for p in checkpoint.round_folder(tmp_path, number).iterdir()]
        assert sorted(names) == [f"client-{k}.safetensors" for k in range(7)] + ["server.pt"]


def test_a_checkpoint_that_fails_is_tried_again(tmp_path: Path) -> None:
    script = {(1, "train", 3): "lost", (1, "save", 2): "lost"}
    saving(tmp_path, 4, egos=three_egos(), supernodes=3, make_grid=faulty(script), every=2)
    assert checkpoint.complete_rounds(tmp_path) == [3, 4]


def test_what_does_not_fit(tmp_path: Path) -> None:
    egos = three_egos()
    saving(tmp_path, 2, egos=egos)
    with pytest.raises(CheckpointError, match="its variant is full, this run's is minus"):
        saving(tmp_path, 4, egos=egos, resume=True, variant="minus")
    with pytest.raises(CheckpointError, match=r"its tau is 0\.5, this run's is 0\.6"):
        saving(tmp_path, 4, egos=egos, resume=True, settings=SETTINGS._replace(tau=0.6))
    with pytest.raises(CheckpointError, match="its shares_model is False, this run's is True"):
        saving(tmp_path, 4, egos=egos, resume=True, model_sharing="fedavg")
    with pytest.raises(CheckpointError, match="a checkpoint_dir is needed"):
        run(egos, resume=True)
    with pytest.raises(CheckpointError, match="checkpoint_dir is not set"):
        run(egos, resume=True, checkpoint_dir=tmp_path)


def test_a_client_without_a_folder_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoClientsError):
        run(three_egos(), rounds=3, checkpoint_dir=tmp_path, checkpoint_every=1)
    assert "the server wants a checkpoint, but checkpoint_dir is not set" in caplog.text
