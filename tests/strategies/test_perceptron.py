"""The judge's MLP is scikit-learn's, number for number."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

from flower_graph.strategies.procrustes_alignment.perceptron import Perceptron


def _groups(nodes: int, classes: int, apart: float) -> tuple[NDArray[np.float64], ...]:
    rng = np.random.default_rng(nodes)
    y = np.arange(nodes) % classes
    x = rng.normal(size=(nodes, 6))
    x[:, 0] += apart * y
    return x, 3 + 2 * y, rng.normal(size=(50, 6)) + apart


# More than a batch, less than one, of two classes, and one that settles before the passes end
@pytest.mark.parametrize(
    ("nodes", "classes", "apart"), [(230, 7, 0.5), (60, 3, 1.0), (210, 2, 0.2), (90, 2, 40.0)]
)
@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_equals_scikit_learn(nodes: int, classes: int, apart: float, seed: int) -> None:
    x, y, unseen = _groups(nodes, classes, apart)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        wanted = MLPClassifier(random_state=seed).fit(x, y)
        found = Perceptron(x, y, seed)
    matrices = [found.weights.first, found.weights.second]
    biases = [found.weights.first_bias, found.weights.second_bias]
    for mine, theirs in zip(matrices + biases, wanted.coefs_ + wanted.intercepts_, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(found.predict(unseen), wanted.predict(unseen))
