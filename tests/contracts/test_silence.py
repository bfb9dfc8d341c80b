"""A client that never answers, and one that answers after the deadline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from federation import METHODS, ONCE

ROUNDS, BAD = 6, 3
Outcome = Callable[[str, str, str], None]
RUN = (f"rounds={ROUNDS}", "strategy.timeout=0.1")


def always(word: str) -> Callable[[int, int, str], str]:
    return lambda partition, server_round, kind: word if partition == 1 else "good"


def once(word: str) -> Callable[[int, int, str], str]:
    def fault(partition: int, server_round: int, kind: str) -> str:
        return word if (partition, server_round, kind) == (1, BAD, "train") else "good"

    return fault


@pytest.mark.parametrize("name", ONCE)
def test_a_client_that_never_answers(name: str, tmp_path: Path, outcome: Outcome) -> None:
    # Whether it takes messages and says nothing or is not there at all: the same figures.
    setup = METHODS[name]
    silent = setup.run(tmp_path / "silent", *RUN, faults=always("silent"))
    gone = setup.run(tmp_path / "gone", *RUN, faults=always("gone"))
    assert silent.figures == pytest.approx(gone.figures, nan_ok=True, abs=1e-6)
    assert all("no reply within 0.1 s" in str(r.rejected) for r in silent.reports[1:-1])
    outcome(
        "a client never answers",
        setup.name,
        f"the run of {ROUNDS} rounds ends, with the figures of the run without that client; "
        "it is named each round",
    )


@pytest.mark.parametrize("name", ONCE)
def test_an_answer_after_the_deadline(name: str, tmp_path: Path, outcome: Outcome) -> None:
    setup = METHODS[name]
    late = setup.run(tmp_path / "late", *RUN, faults=once("late"))
    lost = setup.run(tmp_path / "lost", *RUN, faults=once("lost"))
    assert late.figures == pytest.approx(lost.figures, nan_ok=True, abs=1e-6)
    missed = [number for number, one in enumerate(late.who, start=1) if one.failed]
    assert missed == [BAD - setup.late]
    outcome(
        "a client answers after the deadline",
        setup.name,
        "left out of that round and named; what comes late is refused, and the figures are those "
        "of a lost answer",
    )
