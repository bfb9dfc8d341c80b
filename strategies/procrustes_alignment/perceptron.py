"""scikit-learn's ``MLPClassifier`` with its own settings: the same numbers in 0.4 of its time.

Of some hundred nodes, a batch takes scikit-learn longer to look after than to compute. A test holds
the weights of both together, to the bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# MLPClassifier's settings: numbers of the hidden layer, nodes of a batch, passes at most, weight
# decay, and the passes in a row that may gain less than the tolerance
HIDDEN, BATCH, PASSES, DECAY, PATIENCE, TOLERANCE = 100, 200, 200, 1e-4, 10, 1e-4
# A thousand passes take four times as long, and move validation micro-F1 by +1 to +1.5 points
# (DeepWalk, Cora) or -1.4 to -1.9 (GAT, CiteSeer).
RATE, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8  # Adam's
LEAST = np.finfo(np.float64).eps  # chance of a class, for the logarithm

Floats = NDArray[np.float64]


class Weights(NamedTuple):
    """Matrices and biases of both layers: views of one vector, which Adam moves."""

    first: Floats  # [d, h]
    first_bias: Floats  # [h]
    second: Floats  # [h, k], k is 1 for two classes
    second_bias: Floats  # [k]

    @classmethod
    def of(cls, vector: Floats, d: int, k: int) -> Weights:
        """Lay the parts out in a vector."""
        shapes = (d, HIDDEN), (HIDDEN,), (HIDDEN, k), (k,)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        parts = np.split(vector, ends[:-1])
        return cls(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))


class Perceptron:
    """A network with one hidden layer that classifies.

    Parameters
    ----------
    x : array
        ``[n, d]`` float64.
    y : array
        ``[n]`` classes, at least two.
    seed : int
        Determines the first weights and the order of the nodes.
    """

    def __init__(self, x: Floats, y: NDArray[np.integer], seed: int) -> None:
        rng = np.random.RandomState(seed)
        self.classes, number = np.unique(y, return_inverse=True)
        several = len(self.classes) > 2
        goal = np.eye(len(self.classes))[number] if several else number[:, None].astype(float)
        self.weights = _train(np.asarray(x, np.float64), goal, rng)

    def predict(self, x: Floats) -> NDArray[np.integer]:
        """Return the classes of some nodes, ``[n]``."""
        chance = _forward(x, self.weights)[1]
        number = chance[:, 0] > 0.5 if chance.shape[1] == 1 else chance.argmax(1)
        classes: NDArray[np.integer] = self.classes[number.astype(int)]
        return classes


def _train(x: Floats, goal: Floats, rng: np.random.RandomState) -> Weights:
    """Train until the loss settles or the passes end."""
    # x [n, d], goal [n, k]
    n, sizes = len(x), (x.shape[1], goal.shape[1])
    vector = _first_weights(*sizes, rng)
    weights, slope = Weights.of(vector, *sizes), np.empty_like(vector)
    slopes, adam = Weights.of(slope, *sizes), _Adam(vector, sizes)
    order, best, waited = np.arange(n), math.inf, 0
    for _ in range(PASSES):
        turn = np.arange(n)
        rng.shuffle(turn)
        order, loss = order[turn], 0.0
        for begin in range(0, n, BATCH):
            rows = order[begin : begin + BATCH]
            loss += _backward(x[rows], goal[rows], weights, slopes) / n
            adam.step(slope, len(rows))
        waited = waited + 1 if loss > best - TOLERANCE else 0
        best = min(best, loss)
        if waited > PATIENCE:
            break
    return weights


def _first_weights(d: int, k: int, rng: np.random.RandomState) -> Floats:
    """Draw both layers as Glorot does, each with its bias."""
    parts = []
    for inputs, outputs in ((d, HIDDEN), (HIDDEN, k)):
        bound = math.sqrt(6 / (inputs + outputs))
        parts += [rng.uniform(-bound, bound, (inputs, outputs)).ravel()]
        parts += [rng.uniform(-bound, bound, outputs)]
    return np.concatenate(parts)


def _forward(x: Floats, weights: Weights) -> tuple[Floats, Floats]:
    """Return the hidden layer ``[n, h]`` and the classes' chances ``[n, k]``."""
    hidden = x @ weights.first
    hidden += weights.first_bias
    np.maximum(hidden, 0, out=hidden)
    chance = hidden @ weights.second
    chance += weights.second_bias
    if chance.shape[1] == 1:
        from scipy.special import expit  # with scikit-learn, where it is used

        expit(chance, out=chance)
    else:
        chance -= chance.max(1)[:, None]
        np.exp(chance, out=chance)
        chance /= chance.sum(1)[:, None]
    return hidden, chance


def _backward(x: Floats, goal: Floats, weights: Weights, slopes: Weights) -> float:
    """Write the slopes of a batch's summed loss, and return that with its weight decay."""
    hidden, chance = _forward(x, weights)
    right = chance[goal > 0] if goal.shape[1] > 1 else np.where(goal > 0, chance, 1 - chance)
    loss = -float(np.log(np.clip(right, LEAST, 1 - LEAST)).sum())
    squares = sum(float(w.ravel() @ w.ravel()) for w in (weights.first, weights.second))
    chance -= goal
    np.matmul(hidden.T, chance, out=slopes.second)
    np.sum(chance, 0, out=slopes.second_bias)
    back = chance @ weights.second.T
    back *= hidden > 0
    np.matmul(x.T, back, out=slopes.first)
    np.sum(back, 0, out=slopes.first_bias)
    return loss + DECAY / 2 * squares


class _Adam:
    """Adam on one vector, in place."""

    def __init__(self, vector: Floats, sizes: tuple[int, int]) -> None:
        self._vector, self._work, self._steps = vector, np.empty_like(vector), 0
        self._mean, self._square = np.zeros_like(vector), np.zeros_like(vector)
        self._decay = np.zeros_like(vector)  # of the matrices alone
        decay = Weights.of(self._decay, *sizes)
        decay.first[:] = decay.second[:] = DECAY

    def step(self, slope: Floats, nodes: int) -> None:
        """Take a step by the mean of a batch's slopes, which it overwrites."""
        work, (one, two) = self._work, BETAS
        slope += np.multiply(self._vector, self._decay, out=work)
        slope /= nodes
        self._steps += 1
        self._mean *= one
        self._mean += np.multiply(slope, 1 - one, out=work)
        self._square *= two
        np.square(slope, out=work)
        self._square += np.multiply(work, 1 - two, out=work)
        rate = RATE * math.sqrt(1 - two**self._steps) / (1 - one**self._steps)
        np.sqrt(self._square, out=work)
        work += EPS
        move = np.multiply(self._mean, -rate, out=slope)
        self._vector += np.divide(move, work, out=move)
