"""A disk that is full, checkpoints that are damaged, and two runs with one folder."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from federation import METHODS, ONCE

from flower_graph.errors import OutputError
from flower_graph.storage import checkpoint

DUE = 2  # the round whose checkpoint goes wrong


@contextmanager
def full_disk() -> Iterator[None]:
    """Have the kernel refuse whatever makes a file longer than a kilobyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("who", ["save_client", "save_server"])
@pytest.mark.parametrize("name", ONCE)
def test_a_full_disk(name: str, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, words = METHODS[name], ("rounds=5", "checkpoint_every=2")
    whole = setup.run(tmp_path / "whole", *words)
    save = getattr(checkpoint, who)

    def refused(*given: Any) -> Any:
        if f"round-{DUE:06d}" in str(given[0]) or given[1] == DUE:
            with full_disk():
                return save(*given)
        return save(*given)

    monkeypatch.setattr(checkpoint, who, refused)
    out = tmp_path / "full"
    done = setup.run(out, *words)
    assert done.figures == pytest.approx(whole.figures, nan_ok=True, abs=1e-6)
    found = checkpoint.complete_rounds(out / "checkpoints")
    assert DUE not in found and max(found) >= 4


@pytest.mark.parametrize("who", ["server.safetensors", "client-*.safetensors"])
@pytest.mark.parametrize("name", ONCE)
def test_a_corrupt_checkpoint(
    name: str, who: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup, out = METHODS[name], tmp_path / "damaged"
    whole = setup.run(tmp_path / "whole", "rounds=6")
    setup.run(out, "rounds=4", "checkpoint_every=2")
    file = sorted(tmp_path.glob(f"damaged*/**/round-000004/{who}"))[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    resumed = setup.run(out, "rounds=6", "checkpoint_every=2", resume=True)
    assert resumed.figures == pytest.approx(whole.figures, nan_ok=True, abs=1e-6)
    # The server is told what is wrong with a client's file, and not its name.
    assert (
        file.name if who == "server.safetensors" else "checkpoint: damaged: it does not"
    ) in caplog.text


@pytest.mark.parametrize("name", ONCE)
def test_two_runs_with_one_folder(name: str, tmp_path: Path) -> None:
    setup, words = METHODS[name], ("rounds=4", "checkpoint_every=1")
    out, refused = tmp_path / "o", []

    def second(partition: int, server_round: int, kind: str) -> str:
        if server_round == 3 and kind == "train" and not refused:
            for resume in (False, True):
                with pytest.raises(OutputError) as error:
                    setup.run(out, *words, resume=resume)
                refused.append(str(error.value))
        return "good"

    done = setup.run(out, *words, faults=second)
    assert len(refused) == 2 and all(str(out) in said for said in refused)
    assert [report.round for report in done.reports] == [1, 2, 3, 4]
