"""A client that never answers, and one that answers after the deadline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from federation import ONE_EACH, Done, run

from flower_graph.server.participation import Participation

ROUNDS, BAD = 6, 3
Outcome = Callable[[str, str, str], None]


def finished(method: str, out: Path, faults: Callable[[int, int, str], str]) -> Done:
    config = ONE_EACH[method].load(f"rounds={ROUNDS}", "strategy.timeout=0.1")
    return run(config, out, supernodes=ONE_EACH[method].supernodes, faults=faults)


def always(word: str) -> Callable[[int, int, str], str]:
    return lambda partition, server_round, kind: word if partition == 1 else "good"


def once(word: str) -> Callable[[int, int, str], str]:
    def fault(partition: int, server_round: int, kind: str) -> str:
        return word if (partition, server_round, kind) == (1, BAD, "train") else "good"

    return fault


@pytest.mark.parametrize("method", ONE_EACH)
def test_a_client_that_never_answers(method: str, tmp_path: Path, outcome: Outcome) -> None:
    # Whether it takes messages and says nothing or is not there at all: the same figures.
    silent = finished(method, tmp_path / "silent", always("silent"))
    gone = finished(method, tmp_path / "gone", always("gone"))
    assert silent.figures == pytest.approx(gone.figures, nan_ok=True, abs=1e-6)
    assert all("no reply within 0.1 s" in str(r.rejected) for r in silent.reports[1:-1])
    outcome(
        "a client never answers",
        method,
        f"the run of {ROUNDS} rounds ends, with the figures of the run without that client; "
        "it is named each round",
    )


@pytest.mark.parametrize("method", ONE_EACH)
def test_an_answer_after_the_deadline(method: str, tmp_path: Path, outcome: Outcome) -> None:
    late = finished(method, tmp_path / "late", once("late"))
    lost = finished(method, tmp_path / "lost", once("lost"))
    assert late.figures == pytest.approx(lost.figures, nan_ok=True, abs=1e-6)
    taken = [Participation.from_record(r.participation) for r in late.reports]
    missed = [number for number, one in enumerate(taken, start=1) if one.failed]
    # FedSCem reports a round with the exchange after it, which brings its measurements.
    assert missed == [BAD - 1 if method == "FedSCem" else BAD]
    outcome(
        "a client answers after the deadline",
        method,
        "left out of that round and named; what comes late is refused, and the figures are those "
        "of a lost answer",
    )
