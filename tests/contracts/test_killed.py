"""Clients whose process the kernel ends in the middle of a message."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from federation import METHODS, ONCE

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
def test_killed_in_mid_training(
    name: str, tmp_path: Path, outcome: Callable[[str, str, str], None]
) -> None:
    setup = METHODS[name].with_(f"rounds={ROUNDS}", "strategy.timeout=0.3")
    done = setup.run(tmp_path / "o", faults=killed, kill_after=moments())
    assert [report.round for report in done.reports] == list(range(1, ROUNDS + 1))
    taken = done.who
    away = [number for number, one in enumerate(taken, start=1) if one.failed]
    assert away and set(away) <= set(range(2 - setup.late, LAST_BAD + 2))
    # Whoever was killed is back, with a state that is whole: of before the message or after it.
    assert taken[-1].answered == taken[0].asked == taken[-1].asked
    outcome(
        "a client's process is killed (SIGKILL) in mid-training",
        setup.name,
        f"five clients killed at random moments in {len(away)} rounds: each is missing where it "
        "was killed and answers again afterwards, with its state of before the message or after",
    )
