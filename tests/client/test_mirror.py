"""What one process of a run makes for others, and files on machines without the run's folders."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flower_graph.client.resident import ray_workers as mirror
from flower_graph.client.resident.ray_workers import Folders, Mirror
from flower_graph.errors import OutputError


class Called:
    """The driver's folders, called as Ray calls an actor."""

    def __init__(self, folders: Folders) -> None:
        for name in ("read", "write"):
            method = getattr(folders, name)
            setattr(self, name, type("Method", (), {"remote": staticmethod(method)}))


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Mirror]:
    """Return the outputs there and here, and the mirror."""
    monkeypatch.setattr(mirror.ray, "get", lambda answer: answer)
    there, here = tmp_path / "there", tmp_path / "here"
    folders = [Folders(root / "out", root / "state") for root in (there, here)]
    return there / "out", here / "out", Mirror(folders[1], Called(folders[0]))


BAD = ["../a", "/etc/a", "x/../../a", "", "link/a"]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("data", [b"x", None])
def test_a_remote_worker_changes_no_other_files(
    tmp_path: Path, name: str, data: bytes | None
) -> None:
    folders = Folders(tmp_path / "out", tmp_path / "state")
    (tmp_path / "out").mkdir()
    (tmp_path / "a").write_text("mine")
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    with pytest.raises(OutputError):
        folders.write([("out", name, data)])
    assert (tmp_path / "a").read_text() == "mine"


def test_files_go_there_as_they_were_written(sides: tuple[Path, Path, Mirror]) -> None:
    there, here, mirrored = sides
    log, gone = Path("clients/3/measured.bin"), Path("clients/3/snapshots/round-000001/a")
    saved, other = Path("checkpoints/round-000002/client-3.safetensors"), Path("embeddings/7.npz")

    def first() -> None:
        for path in (log, gone, saved, other):
            (here / path).parent.mkdir(parents=True, exist_ok=True)
            (here / path).write_bytes(b"one")

    def second() -> None:
        with (here / log).open("ab") as file:
            file.write(b" two")
        (here / gone).unlink()

    mirrored.during("3", first)
    assert (there / other).read_bytes() == b"one"
    assert not (here / "checkpoints").exists() and (there / saved).read_bytes() == b"one"
    mirrored.during("3", second)
    assert (there / log).read_bytes() == b"one two"
    assert not (there / gone).exists() and (there / saved).exists()
    assert (there / log).stat().st_mode & 0o777 == 0o600


def test_a_supernode_that_comes_finds_its_files(sides: tuple[Path, Path, Mirror]) -> None:
    there, here, mirrored = sides
    saved = Path("checkpoints/round-000002/client-3.safetensors")
    (there / saved).parent.mkdir(parents=True)
    (there / saved).write_bytes(b"state")
    key = there.parent / "state" / "parties" / "3"
    key.parent.mkdir(parents=True)
    key.write_bytes(b"key")

    def look() -> tuple[bool, bool]:
        return (here / saved).exists(), (here.parent / "state" / "parties" / "3").exists()

    assert mirrored.during("3", look) == (True, True)
    assert mirrored.during("3", look) == (False, True)  # nobody reads a checkpoint twice ...
    mirrored.forget("3")
    assert mirrored.during("3", look) == (True, True)  # ... but after an error
    assert mirrored.during("13", look) == (False, True)


def test_a_temporary_folder_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from flower_graph.client.resident.ray_workers import TemporaryFolder\n"
        "folder = TemporaryFolder(); (folder.path / 'file').touch()\n"
        "print(folder.path, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "file").exists()
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
