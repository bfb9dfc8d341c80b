"""FedSCem, masked: a client whose part of the sum makes the means unreadable for all.

Nobody can say who it was. What can be asked for: no run ends, each client goes on alone in that
round, the report says so, and the next round has everybody again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, RecordDict
from hostile_grid import FEDSCEM, PSI, SECURE, Attacked
from mutations import Mutation

from flower_graph.strategies.fedscem.messages import SUMMED_NAMES

ROUNDS, CLIENTS, HIDDEN = 5, 6, 6
READERS = 5  # clients that share a node with another


def poison(content: RecordDict, change: Any) -> None:
    """Change the embeddings alone: what was measured stays as it is."""
    words = content["sums"]["total"].numpy().copy()  # type: ignore[union-attr]
    change(words)
    content["sums"]["total"] = Array(words)  # type: ignore[index]


def embeddings(words: np.ndarray[Any, Any]) -> int:
    """How many words of a vector are embeddings, of all slots."""
    slots = (words.size - len(SUMMED_NAMES)) // (HIDDEN + 1)
    return slots * HIDDEN


def odd_words(words: np.ndarray[Any, Any]) -> None:
    words[: embeddings(words)] += 1  # a bit that no number has: noticed by whoever holds the slot


def large_words(words: np.ndarray[Any, Any]) -> None:
    words[: embeddings(words)] += words.dtype.type(1 << (8 * words.itemsize - 3))


def attacked(method: Any, change: Any, rounds: list[int]) -> Attacked:
    attack = Mutation("sums/total", "poisoned", partial(poison, change=change))
    # The vector of round t comes with the t-th message.
    found: Attacked = method.run({("train", number): attack for number in rounds}, ROUNDS)
    assert found.error is None
    assert found.grid.failed == []
    return found


def alone(outcome: Attacked) -> dict[int, list[str]]:
    return {
        report.round: said
        for report in outcome.reports
        if (said := [one["reason"] for one in report.rejected if "went on alone" in one["reason"]])
    }


@pytest.mark.parametrize(
    ("method", "change"), [(FEDSCEM, odd_words), (PSI, large_words)], ids=["in the clear", "pads"]
)
def test_one_poisoned_round(method: Any, change: Any) -> None:
    found, clean = attacked(method, change, [2]), method.run({}, ROUNDS)
    assert alone(found).keys() == {2}
    (why,) = alone(found)[2]
    assert why.startswith(f"{READERS} of {CLIENTS} clients could not read the means")
    assert found.named == {}  # nobody is named: it cannot be known who it was
    # The round before is as ever, and afterwards everybody is there and fuses again.
    assert np.allclose(found.figures[0], clean.figures[0], atol=method.atol)
    assert [report.answered for report in found.reports] == [CLIENTS] * ROUNDS
    assert np.isnan(found.reports[1].regulariser)
    assert all(np.isfinite(report.regulariser) for report in found.reports if report.round != 2)
    # The log of every SuperNode says it, and that of the server.
    said = [line for line in found.log if line.startswith("round 2: ")]
    assert sum("cannot be read and are not used" in line for line in said) == READERS
    assert sum("could not read the means" in line for line in said) == 1


@pytest.mark.parametrize("method", [FEDSCEM, PSI], ids=["in the clear", "pads"])
def test_every_round_poisoned_is_self_training(method: Any) -> None:
    found = attacked(method, odd_words, list(range(1, ROUNDS + 1)))
    assert alone(found).keys() == set(range(1, ROUNDS + 1))
    assert np.isnan([report.regulariser for report in found.reports]).all()
    losses = [report.cross_entropy for report in found.reports]
    assert losses == sorted(losses, reverse=True)  # they train all the same


def test_a_wholly_wrong_vector_skips_the_round_and_no_more() -> None:
    def all_words(words: np.ndarray[Any, Any]) -> None:
        words += 1

    found = attacked(FEDSCEM, all_words, [3])
    # What round 3's vectors say of round 2 is lost, and so are the means of round 3.
    assert [bool(report.skipped) for report in found.reports] == [False, True, False, False, False]
    assert "a client's part of the sum was not as agreed" in found.reports[1].skipped
    assert [report.answered for report in found.reports] == [6, 0, 6, 6, 6]
    assert np.isnan(found.reports[2].regulariser)
    assert np.isfinite([report.cross_entropy for report in found.reports[2:]]).all()


def test_a_poisoned_consensus_skips_the_round_and_no_more() -> None:
    # Once a mean of millions had been handed out, no client's embeddings fitted any more.
    words = Mutation("arrays/masked-sum", "other words", spoil_consensus)
    found = SECURE.run({("train", 2): words}, ROUNDS)
    assert found.error is None
    assert [bool(report.skipped) for report in found.reports] == [False, True, False, False, False]
    assert "a client's part of the sum was not as agreed" in found.reports[1].skipped
    assert not any(report.rejected for report in found.reports)
    assert np.abs(found.weights["mean"]).max() < 10


def spoil_consensus(content: RecordDict) -> None:
    words = content["arrays"]["masked-sum"].numpy()  # type: ignore[union-attr]
    content["arrays"]["masked-sum"] = Array(~words)  # type: ignore[index]
