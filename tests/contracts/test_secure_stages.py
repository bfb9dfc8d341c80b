"""Clients that are killed between the stages of a secure sum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from federation import ALL, METHODS

ROUNDS, BAD = 6, 3
# What a client is busy with when it is killed
STAGES = {
    "FedSCem": (METHODS["fedscem"], ("train", "train.unmask")),
    "PPFL-GNN": (ALL["deepwalk, secure"], ("train", "train.sum_unmask")),
}
FAST = {("FedSCem", "train", 0.001), ("FedSCem", "train.unmask", 0.1)}
CASES = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for method, (_, stages) in STAGES.items()
    for case in itertools.product([method], stages, [0.001, 0.1])
]


# After a millisecond it is at its begin.
@pytest.mark.parametrize(("method", "stage", "after"), CASES)
def test_killed_between_the_stages(
    method: str,
    stage: str,
    after: float,
    tmp_path: Path,
    outcome: Callable[[str, str, str], None],
) -> None:
    setup, seen = STAGES[method][0], set()

    def killed(partition: int, server_round: int, kind: str) -> str:
        seen.add(kind)
        return "killed" if (partition, server_round, kind) == (1, BAD, stage) else "good"

    words = (f"rounds={ROUNDS}", "strategy.timeout=0.5")
    done = setup.run(tmp_path / "o", *words, faults=killed, kill_after=itertools.repeat(after))
    assert stage in seen, f"there is no such stage: {sorted(seen)}"
    taken = done.who
    # Before its vector came it is missing in the sum; after that its masks are taken off with the
    # others' shares. It is named, and part of the last sums again.
    assert any(report.rejected for report in done.reports)
    assert stage != "train" or any(one.failed for one in taken)
    assert taken[-1].answered == taken[0].answered
    assert all(math.isfinite(report.loss) for report in done.reports[-2:])
    outcome(
        "a client is killed between the stages of a secure sum",
        method,
        f"killed in {' or '.join(f'`{one}`' for one in STAGES[method][1])}: before its vector came "
        "the sum is made without it, or skipped whole; later the others' shares take its masks "
        "off. It is named and takes part again",
    )
