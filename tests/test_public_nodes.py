"""Members of PPFL-GNN: what cannot be a client is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from public_helpers import StillModel, ToyModel

from flower_graph.strategies.procrustes_alignment.cohort_client import (
    EmbeddingClient,
    KeepsState,
    public_rows,
)

VECTORS = np.zeros((3, 2), np.float32)
GOOD: dict[str, Any] = {
    "number": 7,
    "nodes": np.array([4, 2, 9]),
    "rows": np.array([2, 0]),
    "dimension": 2,
    "build": lambda: StillModel(VECTORS),
}


def test_public_ids_are_in_the_order_of_the_rows() -> None:
    assert EmbeddingClient(**GOOD).public.tolist() == [9, 4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": np.zeros(0, np.int64)}, r"client 7: nodes has shape \(0,\), must be \[n\]"),
        ({"nodes": np.array([4, 4, 9])}, "client 7: two of its nodes have one id"),
        ({"rows": np.zeros(0, np.int64)}, "client 7 has no public node"),
        ({"rows": np.array([1, 1])}, "client 7: a public node is named twice"),
        ({"rows": np.array([3])}, "client 7: row 3 is none of its 3 nodes"),
        ({"rows": np.array([-1])}, "client 7: row -1 is none of its 3 nodes"),
        ({"dimension": 0}, "client 7: dimension is 0, must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EmbeddingClient(**GOOD | changes)


def test_rows_by_id() -> None:
    assert public_rows(np.array([4, 2, 9]), np.array([9, 4])).tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"public nodes \[3, 11\] are none of the client's 3"):
        public_rows(np.array([4, 2, 9]), np.array([3, 9, 11]))


def test_which_models_keep_a_state() -> None:
    assert isinstance(ToyModel(VECTORS), KeepsState)
    assert not isinstance(StillModel(VECTORS), KeepsState)
