"""Sorting whole numbers, by hand and against Python's."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.ops.ordering import largest_of, order_of

LARGE = 2**63 - 1
NUMBERS = st.integers(-LARGE, LARGE)


@settings(deadline=None)
@given(numbers=st.lists(NUMBERS, max_size=20))
def test_order_sorts(numbers: list[int]):
    key = torch.tensor(numbers, dtype=torch.int64)
    places = order_of(key)
    assert key[places].tolist() == sorted(numbers)
    assert sorted(places.tolist()) == list(range(len(numbers)))


@settings(deadline=None)
@given(
    rows=st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    k=st.integers(1, 5),
)
def test_largest_are_those_of_a_sorted_row(rows: list[list[int]], k: int):
    k = min(k, len(rows[0]))
    key = torch.tensor(rows, dtype=torch.int64)
    assert largest_of(key, k).tolist() == [sorted(row, reverse=True)[:k] for row in rows]
    assert key.tolist() == rows, "what was given is as it was"
