"""Users' rows in files: the same bits as in memory, and a resumed run. Contracts have the rest."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from relay_helpers import Outcome, run, same_weights, small_graph
from torch import nn

from flower_graph import NodeClient
from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.storage import checkpoint, row_file

MANY, NINE = small_graph(24), 9
SOME: dict[str, Any] = {"participation": 0.5, "learning_rate": 0.3}


def stored(folder: Path, *, every: int = 0, **how: Any) -> Outcome:
    """Run with rows in files, on two SuperNodes."""
    saved = {"folder": folder / "saved", "checkpoint_every": every} if every else {}
    of_client = {"rows_dir": folder / "rows"}
    return run(MANY, rounds=NINE, of_client=of_client, **(SOME | saved | how))


@pytest.mark.parametrize("options", [{}, {"user_bias": True}, {"participation": 1.0}])
def test_rows_in_a_file_give_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    # With half of the users a round, some wait several rounds for their gradient.
    in_memory = run(MANY, rounds=NINE, **(SOME | options))
    in_file = stored(tmp_path, **options)
    assert in_file.figures == in_memory.figures
    assert same_weights(in_file, in_memory)
    assert not (tmp_path / "rows").exists()  # the run is over, and nothing goes on from it


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run(MANY, rounds=NINE, **SOME)
    # Rows have changed since the checkpoint of round 6, some of them twice: they must go back.
    stored(tmp_path, every=3, stop_at=8)
    resumed = stored(tmp_path, every=3, resume=True)
    assert [report.round for report in resumed.reports] == [7, 8, 9]
    assert resumed.figures == whole.figures[6:]
    assert same_weights(resumed, whole)


def test_a_run_does_not_go_on_without_its_rows(tmp_path: Path) -> None:
    stored(tmp_path, every=3, stop_at=8)
    for path in (tmp_path / "saved").glob("round-*/*.rows"):
        path.unlink()
    with pytest.raises(CheckpointError):
        stored(tmp_path, every=3, resume=True)


def test_a_file_and_its_copy_have_no_room_for_zeros(tmp_path: Path) -> None:
    """A user that was never asked takes no room."""
    path, count = tmp_path / "numbers", 1 << 20
    row_file.create(path, count)
    row_file.mapped(path, count)[count // 2] = 3
    row_file.copy(path, tmp_path / "copy")
    for file in tmp_path.iterdir():
        assert file.stat().st_size == 4 * count and file.stat().st_blocks * 512 <= row_file.PIECE
        again = row_file.mapped(file, count)
        assert again[count // 2] == again.sum() == 3
    with pytest.raises(StateLostError):
        row_file.mapped(path, count + 1)
    row_file.create(path, 0)
    assert not row_file.mapped(path, 0).numel()


def test_copies_that_cannot_be_made_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_file, "copy", full)
    outcome = stored(tmp_path, every=3, stop_at=8)
    assert not checkpoint.complete_rounds(tmp_path / "saved") and len(outcome.reports) == 8


@pytest.mark.parametrize("more", [{"user_model": nn.Linear(8, 4)}, {"state-key": "x"}])
def test_rows_in_a_file_are_plain_linear_maps(tmp_path: Path, more: dict[str, Any]) -> None:
    sealed = {"state-key": more.pop("state-key")} if "state-key" in more else {}
    context = Context(1, 2, {"state-dir": str(tmp_path), **sealed}, RecordDict(), {})
    with pytest.raises(ValueError):
        NodeClient(context, MANY.x, MANY.y, rows_dir=tmp_path, **more)


def test_a_full_disk_is_an_error_before_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "numbers"
    row_file.create(path, 1 << 20)
    row_file.check_room(path, 1 << 20)
    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(row_file.os, "statvfs", lambda path: full)
    row_file.check_room(path, 1 << 10)
    with pytest.raises(OSError, match="numbers") as caught:
        row_file.check_room(path, 1 << 20)
    assert caught.value.errno == errno.ENOSPC
