"""Clients whose process the kernel ends in the middle of a message."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from federation import ONE_EACH, run

from flower_graph.server.participation import Participation

ROUNDS, LAST_BAD = 9, 6


def killed(partition: int, server_round: int, kind: str) -> str:
    """Kill another client in each round from the second to the sixth."""
    due = 2 <= server_round <= LAST_BAD and kind == "train" and partition == server_round - 2
    return "killed" if due else "good"


def moments(seed: int) -> Iterator[float]:
    """Draw when: from before anything is read to after everything is written."""
    draw = random.Random(seed)
    while True:
        yield 10 ** draw.uniform(-3, -0.7)


@pytest.mark.parametrize("method", ONE_EACH)
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_in_mid_training(
    method: str, seed: int, tmp_path: Path, outcome: Callable[[str, str, str], None]
) -> None:
    config = ONE_EACH[method].load(f"rounds={ROUNDS}", "strategy.timeout=0.3")
    supernodes = ONE_EACH[method].supernodes
    done = run(
        config, tmp_path / "o", supernodes=supernodes, faults=killed, kill_after=moments(seed)
    )
    assert [report.round for report in done.reports] == list(range(1, ROUNDS + 1))
    taken = [Participation.from_record(report.participation) for report in done.reports]
    away = [number for number, one in enumerate(taken, start=1) if one.failed]
    # FedSCem reports a round with the exchange after it.
    first = 1 if method == "FedSCem" else 2
    assert away and set(away) <= set(range(first, LAST_BAD + 2))
    # Whoever was killed is back, with a state that is whole: of before the message or after it.
    assert taken[-1].answered == taken[0].asked == taken[-1].asked
    outcome(
        "a client's process is killed (SIGKILL) in mid-training",
        method,
        f"five clients killed at random moments in {len(away)} rounds: each is missing where it "
        "was killed and answers again afterwards, with its state of before the message or after",
    )
