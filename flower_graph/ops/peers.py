"""Averages of several clients' weights, one for each client, by the clients' similarity."""

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
    means = {
        name: np.tensordot(shares, np.stack([one[name] for one in models]).astype(float), 1)
        for name in models[0]
    }
    types = {name: values.dtype for name, values in models[0].items()}
    rows = range(len(shares))
    return [{name: mean[row].astype(types[name]) for name, mean in means.items()} for row in rows]
