import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import save_file

from flower_graph.client.state import CohortState
from flower_graph.errors import CheckpointError, MalformedReplyError
from flower_graph.storage import checkpoint
from flower_graph.wire.codec import Resume

RUN = "0123456789abcdef" * 2


def save(folder: Path, *rounds: int) -> None:
    for number in rounds:
        checkpoint.save_server(folder, number, {"round": number})


def test_what_is_saved_is_read(tmp_path: Path):
    tensors = {"weight": torch.randn(4, 3).T, "users": torch.tensor([2**40])}  # not contiguous
    path = tmp_path / "round-000003" / "client-0.safetensors"
    checkpoint.save_client(path, tensors, RUN)
    loaded = checkpoint.load_client(path)
    assert loaded.keys() == tensors.keys()
    for name, value in loaded.items():
        assert torch.equal(value, tensors[name])
        assert value.dtype == tensors[name].dtype
    w = torch.randn(2)
    state = {"model": {"w": w, "half": w[:1]}, "round": 3, "average": None, "pair": (1, [2.5])}
    state |= {"ledger": {1: {}, 2**63: float("inf")}}
    checkpoint.save_server(tmp_path, 3, state)
    read = checkpoint.load_server(tmp_path, 3)
    model = read.pop("model")
    assert torch.equal(model["w"], w) and torch.equal(model["half"], w[:1])
    assert read == {key: value for key, value in state.items() if key != "model"}


def test_the_last_two_rounds_are_kept_and_those_that_were_never_completed_go(tmp_path: Path):
    with pytest.raises(CheckpointError):
        checkpoint.last_round(tmp_path / "missing")
    for number in (2, 9, 10, 11, 100, 1_000_000):
        save(tmp_path, number)
        if number in (10, 100):
            (tmp_path / f"round-{number:06d}" / "server.safetensors").unlink()
    (tmp_path / "round-old").mkdir()
    (tmp_path / "round-old" / "server.safetensors").touch()
    assert checkpoint.complete_rounds(tmp_path) == [11, 1_000_000]
    assert checkpoint.last_round(tmp_path) == 1_000_000
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["round-000011", "round-000100", "round-1000000", "round-old"]


def test_what_no_checkpoint_can_hold_is_named(tmp_path: Path):
    for value in ({1, 2}, np.array(["x"]), {(1, 2): 3}):
        with pytest.raises(CheckpointError, match=r"^a: "):
            checkpoint.save_server(tmp_path, 1, {"a": value})
    with pytest.raises(CheckpointError, match=r"^a\.b\[1\]: "):
        checkpoint.save_server(tmp_path, 1, {"a": {"b": [0, object()]}})


def test_a_file_of_another_run_or_an_older_version_is_refused(tmp_path: Path):
    path = tmp_path / "client-0.safetensors"
    checkpoint.save_client(path, {"a": torch.ones(1)}, RUN)
    with pytest.raises(CheckpointError, match=r"0123.*ffff"):
        checkpoint.load_client(path, "f" * 32)
    assert checkpoint.load_client(path)["a"].item() == 1  # whoever only wants to read it
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="SHA-256"):
        checkpoint.load_client(path)


def test_half_files_of_dead_processes_go(tmp_path: Path):
    path = tmp_path / "client-0.safetensors"
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, alive = (path.with_name(f".{path.name}.{pid}") for pid in (dead.pid, os.getppid()))
    for part in (left, alive):
        part.write_bytes(b"half")
    checkpoint.save_client(path, {"a": torch.ones(1)}, RUN)
    assert not left.exists() and alive.exists(), "another process is writing it"


def test_a_client_keeps_its_own_last_three_rounds(tmp_path: Path):
    configs = [{"partition-id": k, "state-dir": str(tmp_path)} for k in range(2)]
    contexts = [Context(1, 2, config, RecordDict(), {}) for config in configs]  # type: ignore[arg-type]
    one, other = (
        CohortState(context, [0], None, lambda a: (a or {"a": torch.ones(1)},) * 2)
        for context in contexts
    )
    assert other.save(1, RUN) == ""
    for server_round in range(1, 6):
        assert one.save(server_round, RUN) == ""
    assert len([*(tmp_path / "checkpoints" / RUN).rglob("client-0.safetensors")]) == 3
    for cohort, server_round in ((other, 1), (one, 3)):
        assert cohort.restore(Resume(RUN, server_round, "x"))
    for run in ("../../elsewhere", f"{RUN}0", RUN.upper()):
        with pytest.raises(MalformedReplyError, match="32 hexadecimal"):
            one.save_asked({"server-round": 1, "run-token": run})
