"""Metrics of embeddings by scikit-learn's classifiers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import one_fast
from numpy.typing import NDArray

from flower_graph.errors import DataError
from flower_graph.strategies.ppfl.evaluation import CLASSIFIERS, check_labels, judge_embeddings

EACH = one_fast(CLASSIFIERS, "svc")  # the MLP takes seconds
Embeddings = tuple[NDArray[np.float32], NDArray[np.int64]]


def _groups(distance: float, n: int = 60, seed: int = 0) -> Embeddings:
    """Make three groups of nodes at this distance from each other, in eight dimensions."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    z = rng.normal(size=(n, 8))
    z[np.arange(n), y] += distance
    return z.astype(np.float32), y


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_groups_far_apart_are_told_and_groups_in_one_place_are_not(classifier: str) -> None:
    assert judge_embeddings(*_groups(20.0), 5, 0, classifier) == 1.0
    assert judge_embeddings(*_groups(0.0, 300), 5, 0, classifier) == pytest.approx(1 / 3, abs=0.1)


def test_the_figure_is_the_share_of_right_guesses_in_folds_of_equal_size() -> None:
    """Two nodes of twenty bear the other group's label: no classifier can tell them."""
    z = np.repeat([[-1.0], [1.0]], 10, axis=0)
    y = np.repeat([0, 1], 10)
    y[0], y[-1] = 1, 0
    assert judge_embeddings(z, y, 5, 0) == pytest.approx(18 / 20)


@pytest.mark.parametrize("classifier", EACH)
def test_seed_alone_says_what_is_drawn_and_columns_are_standardised(classifier: str) -> None:
    z, y = _groups(1.0, 90)
    first = [judge_embeddings(z, y, 5, seed, classifier) for seed in range(4)]
    np.random.seed(7)  # others' use of NumPy's own generator
    assert [judge_embeddings(z, y, 5, seed, classifier) for seed in range(4)] == first
    assert len(set(first)) > 1
    moved = z.astype(np.float64) * (10.0 ** np.arange(-4, 4)) + np.arange(8)
    assert judge_embeddings(moved, y, 5, 3, classifier) == pytest.approx(first[3], abs=0.02)


def test_nodes_without_a_label_are_left_out() -> None:
    z, y = _groups(1.0)
    more = np.concatenate([z, np.full((5, 8), np.nan, np.float32)])
    labels = np.concatenate([y, np.full(5, -1)])
    assert judge_embeddings(more, labels, 5, 0) == judge_embeddings(z, y, 5, 0)


def _check(role: str, y: list[int], folds: int, client: int = 0) -> None:
    """Check a client whose nodes all have this role."""
    everyone = torch.ones(len(y), dtype=torch.bool)
    masks = {"val_mask": ~everyone, "test_mask": ~everyone} | {f"{role}_mask": everyone}
    graph: Any = SimpleNamespace(client=client, y=torch.tensor(y), **masks)
    check_labels([graph], folds)


def test_a_class_with_fewer_nodes_than_folds_is_an_error_that_names_it() -> None:
    y = [0] * 6 + [4] * 4 + [-1] * 3
    _check("test", y, 4)
    with pytest.raises(DataError, match=r"client 2.*class 4: 4 .*judge\.folds=5"):
        _check("test", y, 5, client=2)
    with pytest.raises(ValueError, match=r"class 4.*4"):
        judge_embeddings(np.zeros((13, 2)), np.array(y), 5, 0)
    for y in ([1] * 9, [-1, -1], [1] * 9 + [-1] * 9):
        with pytest.raises(DataError, match="client 0"):
            _check("val", y, 5)


def test_what_cannot_be_judged_is_an_error() -> None:
    z, y = _groups(1.0)
    with pytest.raises(ValueError, match="'forest'"):
        judge_embeddings(z, y, 5, 0, "forest")
    with pytest.raises((ValueError, IndexError)):
        judge_embeddings(z[:-1], y, 5, 0)
    z[7, 2] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        judge_embeddings(z, y, 5, 0)
