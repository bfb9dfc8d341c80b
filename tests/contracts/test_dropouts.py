"""Clients that drop out at random for many rounds: nothing lost, nothing doubled."""

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from federation import Done, Setup, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# The bundled Cora: accuracy counts here
CORA = {
    "nFedGNN": Setup("nfedgnn/cora-linqs", (), 10),
    "FedSCem": Setup("fedscem/cora-linqs", ("partition.clients=20", "strategy.dropout=0.4"), 20),
    "FedGLS": Setup("fedgls/cora-linqs", (), 8),
    "PPFL-GNN": Setup(
        "ppfl/cora-linqs-gat",
        ("partition.clients=6", "partition.private_share=0.1", "judge.mlp=false", "gat.epochs=5"),
        6,
    ),
}
# A secure sum lives through two rounds, and less than half of its clients may be missing in both
SHARES = {"FedSCem": 0.15}
SHARE = 0.3
# nFedGNN is half way through its training after 50 rounds, and behind, since who is missing takes
# fewer steps.
ROUNDS = {"nFedGNN": 100, "FedSCem": 50, "FedGLS": 20, "PPFL-GNN": 20}
SLACK = 0.06  # single runs of 50 rounds on another seed differ by about as much
MORE = {
    "PPFL-GNN": ("judge.every=20", "strategy.absent=last"),
}


def drop_out(share: float) -> Callable[[int, int, str], str]:
    """Let each client vanish in each round with a chance, before or after its work."""

    def word(partition: int, server_round: int, message_type: str) -> str:
        if message_type in ("query", "connect") or server_round < 2:
            return "good"  # it has to be known before it can be missed
        draw = random.Random(f"0-{partition}-{server_round}")
        return draw.choice(["silent", "lost"]) if draw.random() < share else "good"

    return word


def finished(method: str, out: Path, **how: object) -> Done:
    words = (f"rounds={ROUNDS[method]}", "strategy.timeout=0.05", "seed=0")
    config = CORA[method].load(*MORE.get(method, ()), *words)
    return run(config, out, supernodes=CORA[method].supernodes, **how)


# FedSCem's sums with clients that drop out at random: tests/secure, and
# tests/strategies/test_masked_embedding_averaging.py
@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.release] * (m != "nFedGNN")) for m in CORA],
)
def test_clients_drop_out_at_random_in_each_round(method: str, tmp_path: Path) -> None:
    rounds, share = ROUNDS[method], SHARES.get(method, SHARE)
    whole = finished(method, tmp_path / "whole")
    done = finished(method, tmp_path / "dropped", faults=drop_out(share))
    assert [report.round for report in done.reports] == list(range(1, rounds + 1))
    counted = [report for report in done.reports[1:] if not report.skipped]
    assert len(counted) > rounds / 2
    missed = sum(report.asked - report.answered for report in counted)
    assert 2 / 3 < missed / sum(report.asked for report in counted) / share < 4 / 3
    assert last(done) > last(whole) - SLACK


def last(done: Done) -> float:
    """Return the mean accuracy of the last rounds that have one: single rounds are noisy."""
    known = [value for value in done.accuracies[-5:] if value == value]
    return statistics.mean(known)
