"""Which features a user of nFedGNN has, from what it sends and what it is sent.

A user's latent vector is ``x W + b``, and ``W`` starts from a matrix that the seed decides. From
then on a row of ``W`` moves by Adam, by gradients that the server itself has sent: whoever guesses
that a feature is in ``x``, and how large it is, can compute its row in every round. So each round
adds as many linear equations for ``x`` as a latent vector has numbers. Without weight decay all
rows would move alike, and later rounds would tell nothing; with it they do not.

The attack supposes that all features of a user that are not zero are equally large, as in a bag of
words. Which value, it finds out: for a wrong one, the equations have no solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.floating[Any]]
BETAS, EPSILON = (0.9, 0.999), 1e-8
EQUATIONS = 160  # more of them make the search slow, and hardly better
# Singular values below this share of the largest are drowned by float32's rounding.
RANK_TOLERANCE = 1e-6
SEARCH_STEPS = 6000


class Step(NamedTuple):
    """One request to a user, and its answer."""

    gradient: Floats | None  # [h] gradient that the user is to apply; None where it has none
    # [f, h] averaged weights that the user is to take over before that; NaN rows stay
    average: Floats | None
    latent: Floats  # [h] what it answers


class Known(NamedTuple):
    """What the messages say about the users' models."""

    start: Floats  # [f, h] the first weights, without a bias
    bias: bool  # Whether users have a bias; it starts at zero
    learning_rate: float  # Of the users' Adam
    weight_decay: float


def least_squares(latent: Floats, start: Floats) -> Floats:
    """Return the shortest ``x`` with ``x W = latent``, ``[f]``."""
    result: Floats = np.linalg.lstsq(start.T.astype(float), latent.astype(float), rcond=None)[0]
    return result


def sparse_from_one(latent: Floats, start: Floats) -> Floats:
    """Return a non-negative ``x`` with ``x W`` nearest to a latent vector, ``[f]``."""
    # Non-negative least squares has at most as many features as the latent has numbers.
    result: Floats = nnls(start.T.astype(float), latent.astype(float), maxiter=SEARCH_STEPS)[0]
    return result


def sparse_from_sequence(
    known: Known, steps: Sequence[Step], values: Sequence[float]
) -> tuple[Floats, float]:
    """Return how likely each feature is, from all equations of a sequence."""
    size = known.start.shape[1]
    steps = steps[: max(1, EQUATIONS // size)]
    shift = bias_course(known, steps)
    target = (np.stack([step.latent for step in steps]) - shift).astype(float).ravel()
    fits = [_unexplained(equations(known, steps, value), target) for value in values]
    value = values[int(np.argmin(fits))]
    result = nnls(equations(known, steps, value), target / value, maxiter=SEARCH_STEPS)[0]
    return result, value


def equations(known: Known, steps: Sequence[Step], value: float) -> Floats:
    """Return the matrix that a user's features meet, ``[T h, f]``, if each is ``value``."""
    course = row_course(known.start, value, known, steps)
    return course.transpose(0, 2, 1).reshape(-1, known.start.shape[0])


def bias_course(known: Known, steps: Sequence[Step]) -> Floats:
    """Return the bias in every round, ``[T, h]``; zeros where users have none."""
    # The last row of averaged weights is the bias's.
    size = known.start.shape[1]
    if not known.bias:
        return np.zeros((len(steps), size))
    local = [step._replace(average=_last_row(step.average)) for step in steps]
    return row_course(np.zeros((1, size)), 1.0, known, local)[:, 0]


def row_course(start: Floats, value: float, known: Known, steps: Sequence[Step]) -> Floats:
    """Return rows of weights in every round, ``[T, f, h]``, of features that are ``value`` each."""
    weight = start.astype(float).copy()
    first, second, count, course = np.zeros_like(weight), np.zeros_like(weight), 0, []
    for step in steps:
        if step.average is not None:
            new = step.average[: weight.shape[0]]
            weight = np.where(np.isnan(new), weight, new)
        if step.gradient is not None:
            count += 1
            slope = value * step.gradient.astype(float) + known.weight_decay * weight
            first += (1 - BETAS[0]) * (slope - first)
            second += (1 - BETAS[1]) * (slope * slope - second)
            size = known.learning_rate / (1 - BETAS[0] ** count)
            root = np.sqrt(second / (1 - BETAS[1] ** count)) + EPSILON
            weight = weight - size * first / root
        course.append(weight)
    return np.stack(course)


def _last_row(average: Floats | None) -> Floats | None:
    return None if average is None else average[-1:]


def _unexplained(matrix: Floats, target: Floats) -> float:
    """Return which part of the target no combination of the columns explains, 0 to 1."""
    size, space = np.linalg.eigh(matrix @ matrix.T)
    space = space[:, size > size[-1] * RANK_TOLERANCE**2]
    rest = target - space @ (space.T @ target)
    return float(np.linalg.norm(rest) / np.linalg.norm(target)) if target.any() else 0.0
