"""Clients that drop out at random for fifty rounds: nothing lost, nothing doubled."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_helpers import CORA, Done, config_of, run

ROUNDS, SHARE = 50, 0.3
# How far a run of 50 rounds without a fault may lie from another with another seed, as measured:
# docs/results/reliability.json
SLACK = 0.06
MORE = {
    "PPFL-GNN": ("judge.every=50", "strategy.absent=last"),
}


def drop_out(seed: int) -> Callable[[int, int, str], str]:
    """Let each client vanish in each round with a chance of 30 %, before or after its work."""

    def word(partition: int, server_round: int, message_type: str) -> str:
        if message_type in ("query", "connect") or server_round < 2:
            return "good"  # it has to be known before it can be missed
        draw = random.Random(f"{seed}-{partition}-{server_round}")
        return draw.choice(["silent", "lost"]) if draw.random() < SHARE else "good"

    return word


def finished(method: str, seed: int, out: Path, **how: object) -> Done:
    more = [*MORE.get(method, ()), f"seed={seed}", f"rounds={ROUNDS}", "strategy.timeout=0.05"]
    return run(config_of(CORA[method], *more), out, supernodes=CORA[method].supernodes, **how)


@pytest.mark.parametrize("method", CORA)
def test_thirty_percent_drop_out_in_each_of_fifty_rounds(
    method: str, tmp_path: Path, outcome: Callable[[str, str, str], None]
) -> None:
    whole = finished(method, 0, tmp_path / "whole")
    done = finished(method, 0, tmp_path / "dropped", faults=drop_out(0))
    assert [report.round for report in done.reports] == list(range(1, ROUNDS + 1))
    missed = [report.asked - report.answered for report in done.reports[1:]]
    share = sum(missed) / sum(report.asked for report in done.reports[1:])
    assert 0.2 < share < 0.4
    with_, without = last(done), last(whole)
    assert with_ > without - SLACK
    skipped = sum(bool(report.skipped) for report in done.reports)
    outcome(
        "30 % of the clients drop out at random in each of 50 rounds",
        method,
        f"test accuracy {with_:.3f}, without the fault {without:.3f}; "
        f"{100 * share:.0f} % of the answers missing, {skipped} rounds skipped",
    )


def last(done: Done) -> float:
    """Return the mean accuracy of the last rounds that have one: single rounds are noisy."""
    known = [value for value in done.accuracies[-5:] if value == value]
    return statistics.mean(known)
