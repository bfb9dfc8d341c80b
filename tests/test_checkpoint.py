from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_graph import checkpoint
from flower_graph.errors import CheckpointError
from flower_graph.state import SMALL_BYTES, StateStore, forget_run


def all_files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_client_round_trip(tmp_path: Path):
    tensors = {
        "weight": torch.randn(4, 3).T,  # not contiguous
        "step": torch.tensor([1, 2], dtype=torch.int32),
        "users": torch.tensor([2**40]),
    }
    path = tmp_path / "round-000001" / "client-0.safetensors"
    checkpoint.save_client(path, tensors)
    loaded = checkpoint.load_client(path)
    assert loaded.keys() == tensors.keys()
    for name, value in loaded.items():
        assert torch.equal(value, tensors[name])
        assert value.dtype == tensors[name].dtype
    assert all_files(tmp_path) == ["round-000001/client-0.safetensors"]


def test_tensors_of_one_mapped_file_can_be_saved(tmp_path: Path):
    """They lie in one storage, which safetensors refuses where they overlap."""
    store = StateStore(Context(77, 1, {"state-dir": str(tmp_path)}, RecordDict(), {}), "test")
    mapped = store.create({"a": torch.ones(SMALL_BYTES), "b": torch.arange(5)})
    assert mapped["a"].untyped_storage().data_ptr() == mapped["b"].untyped_storage().data_ptr()
    path = tmp_path / "client.safetensors"
    checkpoint.save_client(path, mapped)
    forget_run(77, tmp_path)
    assert checkpoint.load_client(path)["b"].tolist() == [0, 1, 2, 3, 4]
    assert path.stat().st_size < 4 * SMALL_BYTES + 1000, "the storage was saved twice"


def test_server_round_trip(tmp_path: Path):
    state = {"model": {"w": torch.randn(2)}, "round": 3, "average": None, "ledger": {"up": {}}}
    checkpoint.save_server(tmp_path, 3, state)
    loaded = checkpoint.load_server(tmp_path, 3)
    assert torch.equal(loaded.pop("model")["w"], state.pop("model")["w"])
    assert loaded == state


def test_the_last_two_rounds_are_kept(tmp_path: Path):
    for server_round in (9, 10, 100, 1_000_000):
        folder = checkpoint.round_folder(tmp_path, server_round)
        checkpoint.save_client(folder / "client-0.safetensors", {"a": torch.ones(1)})
        checkpoint.save_server(tmp_path, server_round, {})
    assert checkpoint.complete_rounds(tmp_path) == [100, 1_000_000]
    assert checkpoint.last_round(tmp_path) == 1_000_000
    assert [p.split("/")[0] for p in all_files(tmp_path)][::2] == ["round-000100", "round-1000000"]


def test_a_round_without_its_server_file_does_not_count(tmp_path: Path):
    checkpoint.save_server(tmp_path, 5, {})
    folder = checkpoint.round_folder(tmp_path, 10)
    checkpoint.save_client(folder / "client-0.safetensors", {"a": torch.ones(1)})
    (tmp_path / "round-old").mkdir()
    (tmp_path / "round-old" / "server.pt").touch()
    assert checkpoint.complete_rounds(tmp_path) == [5]
    assert checkpoint.last_round(tmp_path) == 5


def test_nothing_to_resume_from(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="no complete checkpoint is there"):
            checkpoint.last_round(folder)


@pytest.mark.parametrize("content", [None, b"", b"\x10" + bytes(40)])
def test_missing_or_damaged_files_are_named(tmp_path: Path, content: bytes | None):
    folder = checkpoint.round_folder(tmp_path, 1)
    folder.mkdir()
    client = folder / "client-0.safetensors"
    if content is not None:
        client.write_bytes(content)
        (folder / "server.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"client-0\.safetensors: cannot be read"):
        checkpoint.load_client(client)
    with pytest.raises(CheckpointError, match=r"server\.pt: cannot be read"):
        checkpoint.load_server(tmp_path, 1)


def test_a_truncated_file_is_refused(tmp_path: Path):
    path = tmp_path / "client-0.safetensors"
    checkpoint.save_client(path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load_client(path)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code(tmp_path: Path):
    trap = tmp_path / "trap"
    checkpoint.save_server(tmp_path, 1, {"model": Touch(trap)})
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load_server(tmp_path, 1)
    assert not trap.exists()


def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: Any, part: Path) -> None:
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    checkpoint.save_server(tmp_path, 1, {"value": 1})
    path = tmp_path / "client-0.safetensors"
    checkpoint.save_client(path, {"a": torch.ones(1)})
    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(checkpoint, "save_file", full)
    for save in (
        lambda: checkpoint.save_server(tmp_path, 1, {"value": 2}),
        lambda: checkpoint.save_server(tmp_path, 2, {}),
        lambda: checkpoint.save_client(path, {"a": torch.zeros(1)}),
    ):
        with pytest.raises(OSError, match="No space left"):
            save()
    assert checkpoint.load_server(tmp_path, 1) == {"value": 1}
    assert checkpoint.last_round(tmp_path) == 1
    assert checkpoint.load_client(path)["a"].item() == 1
