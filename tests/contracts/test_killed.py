"""A client or the server whose process the kernel ends, wherever it is."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import ALL, METHODS, ONCE, at

# In the middle of a message -----------------------------------------------------------------------

ROUNDS, LAST_BAD = 9, 6


def killed(partition: int, server_round: int, kind: str) -> str:
    """Kill another client in each round from the second to the sixth."""
    due = 2 <= server_round <= LAST_BAD and kind == "train" and partition == server_round - 2
    return "killed" if due else "good"


def moments() -> Iterator[float]:
    """Draw when: from before anything is read to after everything is written."""
    draw = random.Random(0)
    while True:
        yield 10 ** draw.uniform(-3, -0.7)


@pytest.mark.parametrize("name", ONCE)
def test_killed_in_mid_training(name: str, tmp_path: Path) -> None:
    setup = METHODS[name].with_(f"rounds={ROUNDS}", "strategy.timeout=0.3")
    done = setup.run(tmp_path / "o", faults=killed, kill_after=moments())
    assert [report.round for report in done.reports] == list(range(1, ROUNDS + 1))
    taken = done.who
    away = [number for number, one in enumerate(taken, start=1) if one.failed]
    assert away and set(away) <= set(range(2 - setup.late, LAST_BAD + 2))
    # Whoever was killed is back, with a state that is whole: of before the message or after it.
    everyone = taken[0].answered | taken[0].failed.keys()
    assert taken[-1].answered == everyone and not taken[-1].failed


# Between the stages of a secure sum ---------------------------------------------------------------

SUM_ROUNDS, BAD = 6, 3
# What a client is busy with when it is killed
STAGES = {
    "FedSCem": (METHODS["fedscem"], ("train", "train.unmask")),
    "PPFL-GNN": (ALL["deepwalk, secure"], ("train", "train.sum_unmask")),
}
FAST = {("FedSCem", "train.unmask", 0.1)}
CASES = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for method, (_, stages) in STAGES.items()
    for case in itertools.product([method], stages, [0.001, 0.1])
]


# After a millisecond it is at its begin.
@pytest.mark.parametrize(("method", "stage", "after"), CASES)
def test_killed_between_the_stages(method: str, stage: str, after: float, tmp_path: Path) -> None:
    setup, faults = STAGES[method][0], at("killed", {BAD}, stage)
    words = (f"rounds={SUM_ROUNDS}", "strategy.timeout=0.5")
    done = setup.run(tmp_path / "o", *words, faults=faults, kill_after=itertools.repeat(after))
    assert done.grid.killed, f"there is no such stage: {sorted(done.grid.kinds)}"
    taken = done.who
    # Before its vector came it is missing in the sum; after that its masks are taken off with the
    # others' shares. It is named, and part of the last sums again.
    assert any(report.rejected for report in done.reports)
    assert stage != "train" or any(one.failed for one in taken)
    assert taken[-1].answered == taken[0].answered
    assert all(math.isfinite(report.loss) for report in done.reports[-2:])


# The server, between its checkpoint and the next message ------------------------------------------

DIES = 5  # with a checkpoint of round 4


def dies(partition: int, server_round: int, kind: str) -> str:
    if server_round == DIES and kind.startswith("train"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "good"


@pytest.mark.parametrize("name", ONCE)
def test_killed_between_checkpoint_and_send(name: str, tmp_path: Path) -> None:
    setup = METHODS[name].with_("rounds=6", "checkpoint_every=2")
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
    assert [report.round for report in resumed.reports] == list(range(1, 7))
    assert resumed.figures == pytest.approx(whole.figures, nan_ok=True, abs=1e-6)
