"""A server that is killed between its checkpoint and the next message, and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from federation import METHODS, ONCE

ROUNDS, DIES = 6, 5  # with a checkpoint of round 4


def dies(partition: int, server_round: int, kind: str) -> str:
    if server_round == DIES and kind.startswith("train"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "good"


@pytest.mark.parametrize("name", ONCE)
def test_killed_between_checkpoint_and_send(
    name: str, tmp_path: Path, outcome: Callable[[str, str, str], None]
) -> None:
    setup = METHODS[name].with_(f"rounds={ROUNDS}", "checkpoint_every=2")
    whole = setup.run(tmp_path / "whole")
    out = tmp_path / "killed"
    process = os.fork()
    if process == 0:
        try:
            setup.run(out, faults=dies)
        finally:
            os._exit(1)  # it is killed before
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not (out / "result.json").exists()
    resumed = setup.run(out, resume=True)
    assert [report.round for report in resumed.reports] == list(range(1, ROUNDS + 1))
    assert resumed.figures == pytest.approx(whole.figures, nan_ok=True, abs=1e-6)
    outcome(
        "the server is killed (SIGKILL) between checkpoint and send",
        setup.name,
        "resumed from the checkpoint: every round is there once, with the figures of a run that "
        "was not stopped",
    )
