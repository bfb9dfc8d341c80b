"""How well an attack does, against a guess."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

Floats = NDArray[np.floating[Any]]
# Measures and what they say
AUC, PRECISION = "AUC", "precision"


@dataclass
class Finding:
    """What one attack reached."""

    attack: str  # What was tried to find out
    # AUC: how often something true is ranked above something false. precision: share of the guesses
    # that are right
    measure: str
    success: float  # The measure; and what guessing reaches
    chance: float
    n: int  # Cases that were decided: those ranked, or the guesses
    true: int = 0  # How many of the ranked ones are true; 0 for precision
    detail: dict[str, float] = field(default_factory=dict)  # Further figures, by name


def ranking(attack: str, scores: ArrayLike, truth: ArrayLike, **detail: float) -> Finding:
    """Judge scores that are to be higher where something is true."""
    # scores, truth [n]
    hits = np.asarray(truth, bool).ravel()
    return Finding(
        attack, AUC, auc(scores, hits), 0.5, int(hits.size), int(hits.sum()), dict(detail)
    )


def guesses(attack: str, right: ArrayLike, chance: float, **detail: float) -> Finding:
    """Judge guesses, each of which is right or wrong."""
    # right [n]
    hits = np.asarray(right, bool).ravel()
    if not hits.size:
        raise ValueError(f"{attack}: nothing was guessed; at least one guess is needed")
    return Finding(attack, PRECISION, float(hits.mean()), chance, int(hits.size), 0, dict(detail))


def auc(scores: ArrayLike, truth: ArrayLike) -> float:
    """Return the area under the ROC curve; ties count half."""
    values, hits = np.asarray(scores, float).ravel(), np.asarray(truth, bool).ravel()
    if values.shape != hits.shape:
        raise ValueError(f"{values.size} scores for {hits.size} cases; one each is needed")
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} scores are not finite")
    positive = int(hits.sum())
    negative = hits.size - positive
    if not positive or not negative:
        raise ValueError(f"{positive} of {hits.size} cases are true: must be some, and not all")
    ranks = rankdata(values)
    above = float(ranks[hits].sum()) - positive * (positive + 1) / 2
    return above / (positive * negative)


def auc_deviation(positive: int, negative: int) -> float:
    """Return the standard deviation of a guess's AUC, if cases are independent of each other."""
    if positive < 1 or negative < 1:
        raise ValueError(f"{positive} true and {negative} false cases; at least one each is needed")
    return math.sqrt((positive + negative + 1) / (12 * positive * negative))


def top(scores: ArrayLike, count: int) -> NDArray[np.int64]:
    """Return the places of the highest scores, the highest first."""
    return np.argsort(-np.asarray(scores, float), kind="stable")[:count]


def cosines(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return the cosine of each row to each other one, ``[n, n]``; 0 for a row of zeros."""
    values = rows.astype(np.float64)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    unit = values / np.where(length > 0, length, 1)
    return unit @ unit.T
