"""A server that is killed between its checkpoint and the next message, and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from federation import ONE_EACH, run

ROUNDS, DIES = 6, 5  # with a checkpoint of round 4


def dies(partition: int, server_round: int, kind: str) -> str:
    if server_round == DIES and kind.startswith("train"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "good"


@pytest.mark.parametrize("method", ONE_EACH)
def test_killed_between_checkpoint_and_send(
    method: str, tmp_path: Path, outcome: Callable[[str, str, str], None]
) -> None:
    config = ONE_EACH[method].load(f"rounds={ROUNDS}", "checkpoint_every=2")
    supernodes = ONE_EACH[method].supernodes
    whole = run(config, tmp_path / "whole", supernodes=supernodes)
    out = tmp_path / "killed"
    process = os.fork()
    if process == 0:
        try:
            run(config, out, supernodes=supernodes, faults=dies)
        finally:
            os._exit(1)  # it is killed before
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not (out / "result.json").exists()
    resumed = run(config, out, supernodes=supernodes, resume=True)
    assert [report.round for report in resumed.reports] == list(range(1, ROUNDS + 1))
    assert resumed.figures == pytest.approx(whole.figures, nan_ok=True, abs=1e-6)
    outcome(
        "the server is killed (SIGKILL) between checkpoint and send",
        method,
        "resumed from the checkpoint: every round is there once, with the figures of a run that "
        "was not stopped",
    )
