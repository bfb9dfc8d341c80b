"""Averages of several clients' weights, one for each client, by the clients' similarity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def cosine_similarities(vectors: NDArray[np.generic]) -> Floats:
    """Return all cosine similarities: 1 with itself, 0 with others for a zero vector."""
    # vectors [c, m], result [c, c]
    wide = np.asarray(vectors, np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    unit = wide / np.where(length > 0, length, 1)
    result: Floats = np.clip(unit @ unit.T, -1, 1)
    np.fill_diagonal(result, 1)
    return result


def mixtures(
    models: Sequence[Mapping[str, NDArray[np.generic]]], weights: NDArray[np.generic]
) -> list[dict[str, NDArray[np.generic]]]:
    """Average all models once for each row of weights, whose sum need not be 1."""
    # weights [rows, models]; sums in float64, results of the arrays' types
    shares = weights / weights.sum(1, keepdims=True)
    result: list[dict[str, NDArray[np.generic]]] = [{} for _ in shares]
    for name, values in models[0].items():
        stacked = np.stack([model[name] for model in models]).astype(np.float64)
        means = np.tensordot(shares, stacked, 1).astype(values.dtype)
        for model, mean in zip(result, means, strict=True):
            model[name] = mean
    return result
