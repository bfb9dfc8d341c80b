from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors import SafetensorError
from safetensors.torch import save_file

from flower_graph.client.state import ClientCheckpoints
from flower_graph.errors import CheckpointError
from flower_graph.storage import checkpoint, tensors

RUN = "0123456789abcdef" * 2


def all_files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def save(folder: Path, *rounds: int, clients: bool = True) -> None:
    """Save rounds; without ``clients`` the server alone."""
    for number in rounds:
        path = checkpoint.round_folder(folder, number) / "client-0.safetensors"
        if clients:
            checkpoint.save_client(path, {"a": torch.ones(1)}, RUN)
        checkpoint.save_server(folder, number, {"round": number})


def test_what_is_saved_is_read(tmp_path: Path):
    tensors = {
        "weight": torch.randn(4, 3).T,  # not contiguous
        "step": torch.tensor([1, 2], dtype=torch.int32),
        "users": torch.tensor([2**40]),
    }
    path = tmp_path / "round-000003" / "client-0.safetensors"
    checkpoint.save_client(path, tensors, RUN)
    assert all_files(tmp_path) == ["round-000003/client-0.safetensors"]
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
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError):
            checkpoint.last_round(folder)
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


@pytest.mark.parametrize("content", [None, b"", b"\x10" + bytes(40)])
def test_missing_or_damaged_files_are_named(tmp_path: Path, content: bytes | None):
    folder = checkpoint.round_folder(tmp_path, 1)
    folder.mkdir()
    client = folder / "client-0.safetensors"
    if content is not None:
        client.write_bytes(content)
        (folder / "server.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"client-0\.safetensors"):
        checkpoint.load_client(client)
    with pytest.raises(CheckpointError, match=r"server\.safetensors"):
        checkpoint.load_server(tmp_path, 1)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({1, 2}, "a"),
        ({"b": [0, object()]}, r"a\.b\[1\]"),
        (np.array(["x"]), "a"),
        ({(1, 2): 3}, "a"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named(tmp_path: Path, value: Any, key: str):
    with pytest.raises(CheckpointError, match=rf"^{key}: "):
        checkpoint.save_server(tmp_path, 1, {"a": value})


def test_a_write_that_fails_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full_file(_: Any, part: str, metadata: Any) -> None:
        Path(part).write_bytes(b"half")
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    path = tmp_path / "client-0.safetensors"
    checkpoint.save_client(path, {"a": torch.ones(1)}, RUN)
    assert checkpoint.save_server(tmp_path, 1, {"value": 1})
    before = all_files(tmp_path)
    monkeypatch.setattr(tensors, "save_file", full_file)
    assert not checkpoint.save_server(tmp_path, 1, {"value": 2})
    assert not checkpoint.save_server(tmp_path, 2, {})
    assert caplog.text.count("no checkpoint: ") == 2
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_client(path, {"a": torch.zeros(1)}, RUN)
    assert checkpoint.load_server(tmp_path, 1) == {"value": 1}
    assert checkpoint.last_round(tmp_path) == 1
    assert checkpoint.load_client(path, RUN)["a"].item() == 1
    assert all_files(tmp_path) == before, "half a file was left"


@pytest.mark.parametrize("name", ["client", "server"])
def test_any_byte_that_changed_is_noticed(tmp_path: Path, name: str):
    client = tmp_path / "round-000001" / "client-0.safetensors"
    checkpoint.save_client(client, {"a": torch.arange(3.0), "b": torch.tensor(2)}, RUN)
    checkpoint.save_server(tmp_path, 1, {"run": RUN, "w": torch.arange(40.0), "n": 3})
    path = client if name == "client" else client.with_name("server.safetensors")
    whole = path.read_bytes()
    load = {
        "client": lambda: checkpoint.load_client(client, RUN),
        "server": lambda: checkpoint.load_server(tmp_path, 1),
    }[name]
    expected = repr(load())
    refused = 0
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = repr(load())
        except CheckpointError:
            refused += 1
        else:
            assert found == expected, f"byte {place}"  # padding and names that nobody reads
    assert refused > 0.8 * len(whole) / 7


def test_a_file_of_another_run_or_an_older_version_is_refused(tmp_path: Path):
    path = tmp_path / "client-0.safetensors"
    checkpoint.save_client(path, {"a": torch.ones(1)}, RUN)
    with pytest.raises(CheckpointError, match=r"0123.*ffff"):
        checkpoint.load_client(path, "f" * 32)
    assert checkpoint.load_client(path)["a"].item() == 1  # whoever only wants to read it
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="SHA-256"):
        checkpoint.load_client(path)


def test_files_are_their_owners_alone_and_leftovers_go(tmp_path: Path):
    path = tmp_path / "client-0.safetensors"
    dead = subprocess.Popen(["true"])
    dead.wait()
    leftover = path.with_name(f".{path.name}.{dead.pid}")
    alive = path.with_name(f".{path.name}.{os.getppid()}")
    for part in (leftover, alive):
        part.write_bytes(b"half")
    checkpoint.save_client(path, {"a": torch.ones(1)}, RUN)
    checkpoint.save_server(tmp_path, 1, {})
    for file in (path, tmp_path / "round-000001" / "server.safetensors"):
        assert file.stat().st_mode & 0o777 == 0o600
    assert not leftover.exists()
    assert alive.exists(), "another process is writing it"


# Going on ----------------------------------------------------------------------------------------


def test_the_newest_checkpoint_that_all_have_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(tmp_path, 4, 6, clients=False)
    (tmp_path / "round-000007").mkdir()
    (tmp_path / "round-000007" / "server.safetensors").write_bytes(b"junk")
    tried = []

    def take(server_round: int, state: dict[str, Any]) -> list[str]:
        tried.append((server_round, state["round"]))
        return ["client 3: it is gone"] if server_round == 6 else []

    assert checkpoint.resume(tmp_path, 9, take) == 4
    assert tried == [(6, 6), (4, 4)]
    assert "round-000007/server.safetensors: " in caplog.text
    assert "round 6: client 3: it is gone" in caplog.text
    # The run now takes another course: what was after round 4 must never be taken for it.
    assert checkpoint.complete_rounds(tmp_path) == [4]


def test_without_any_checkpoint_left_the_reasons_are_named(tmp_path: Path):
    save(tmp_path, 4, 6, clients=False)
    with pytest.raises(CheckpointError, match=r"round 6.*round 4"):
        checkpoint.resume(tmp_path, 9, lambda *_: ["a", "b"])
    assert checkpoint.complete_rounds(tmp_path) == [4, 6], "a client's disk may come back"
    with pytest.raises(CheckpointError, match=r"num_rounds: 5.*round 6"):
        checkpoint.resume(tmp_path, 5, lambda *_: [])
    with pytest.raises(CheckpointError, match="checkpoint_dir"):
        checkpoint.resume(None, 5, lambda *_: [])


# At a client -------------------------------------------------------------------------------------


def context_of(**node: Any) -> Context:
    return Context(1, 2, {name.replace("_", "-"): v for name, v in node.items()}, RecordDict(), {})


def test_where_a_client_saves(tmp_path: Path):
    shared = tmp_path / "out"

    def place(**node: Any) -> str:
        found = ClientCheckpoints(context_of(**node), shared).path(3, RUN)
        return str(found.relative_to(tmp_path))

    assert place(partition_id=4) == "out/round-000003/client-4.safetensors"
    assert place(partition_id=4, state_dir=":memory:") == "out/round-000003/client-4.safetensors"
    own = f"checkpoints/{RUN}/round-000003"
    assert place(partition_id=4, state_dir=f"{tmp_path}/s") == f"s/{own}/client-4.safetensors"
    data = place(data_folder=f"{tmp_path}/client-0007")
    assert data.startswith(f"client-0007/state/{own}/client-client-0007-")
    assert data != place(data_folder=f"{tmp_path}/other/client-0007")


def test_a_client_keeps_its_own_last_three_rounds(tmp_path: Path):
    one, other = (
        ClientCheckpoints(context_of(partition_id=k, state_dir=str(tmp_path)), None)
        for k in range(2)
    )
    assert other.save(1, {"a": torch.ones(1)}, RUN) == ""
    for server_round in range(1, 6):
        assert one.save(server_round, {"a": torch.ones(1)}, RUN) == ""
    kept = sorted(p.name for p in (tmp_path / "checkpoints" / RUN).rglob("client-0.safetensors"))
    assert len(kept) == 3
    assert other.load(1, RUN)["a"].item() == 1
    with pytest.raises(CheckpointError):
        one.load(2, RUN)
    assert one.load(3, RUN)["a"].item() == 1
    with pytest.raises(CheckpointError, match="32 hexadecimal"):
        one.save(1, {"a": torch.ones(1)}, "../../elsewhere")
