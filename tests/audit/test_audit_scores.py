"""How attacks are judged."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from flower_graph.audit.scores import auc, auc_deviation, cosines, guesses, ranking, top


def test_the_area_is_scikit_learns_ties_included() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.integers(0, 5, 200).astype(float), rng.random(200) < 0.3
    assert auc(scores, truth) == pytest.approx(roc_auc_score(truth, scores))


def test_scores_that_are_all_equal_are_a_guess() -> None:
    assert auc(np.zeros(10), np.arange(10) < 3) == 0.5


@pytest.mark.parametrize(
    ("scores", "truth", "words"),
    [
        ([1.0, 2.0], [True, True], "2.*2 cases"),
        ([1.0, 2.0], [False, False], "0.*2 cases"),
        ([1.0, np.nan], [True, False], "1 scores"),
        ([1.0], [True, False], "1 scores.*2"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    scores: list[float], truth: list[bool], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        auc(scores, truth)


def test_a_guess_strays_as_far_as_it_is_said_to() -> None:
    rng = np.random.default_rng(1)
    truth = np.arange(60) < 20
    drawn = [auc(rng.random(60), truth) for _ in range(2000)]
    assert np.std(drawn) == pytest.approx(auc_deviation(20, 40), rel=0.06)


def test_findings_count_their_cases() -> None:
    found = ranking("a", [3, 1, 2], [True, False, False], more=0.5)
    assert (found.success, found.chance, found.n, found.true) == (1.0, 0.5, 3, 1)
    assert found.detail == {"more": 0.5}
    guessed = guesses("b", [True, False, True, True], 0.1)
    assert (guessed.success, guessed.chance, guessed.n) == (0.75, 0.1, 4)
    with pytest.raises(ValueError, match="guessed"):
        guesses("b", [], 0.1)


def test_cosines_and_places() -> None:
    rows = np.array([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0], [0.0, 0.0]])
    half = np.sqrt(0.5)
    expected = [[1, 0, half, 0], [0, 1, half, 0], [half, half, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(cosines(rows), expected, atol=1e-12)
    assert top([1.0, 5.0, 3.0], 2).tolist() == [1, 2]
