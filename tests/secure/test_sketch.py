"""Unions with multiplicities, from sums of tables alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.secure.align.sketch import MAX_CLIENTS, cells_for, insert, peel


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 12), np.uint8)


def test_one_token_of_one_client_by_hand() -> None:
    token = np.arange(1, 13, dtype=np.uint8)[None]
    table = insert(token, 8).reshape(3, 8)
    used = np.flatnonzero(table[0])
    assert [cell // 2 for cell in used] == [0, 1, 2, 3]  # one cell in each part
    assert set((table[0, used] & np.uint64(0xFFFF)).tolist()) == {1}
    assert set(table[1, used].tolist()) == {0x060504030201}
    assert set(table[2, used].tolist()) == {0x0C0B0A090807}
    assert np.count_nonzero(table) == 12


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.lists(st.lists(st.booleans(), min_size=60, max_size=60), max_size=9))
def test_the_sum_gives_exactly_the_union_and_its_counts(n: int, holds: list[list[bool]]) -> None:
    universe = tokens(n)
    cells = cells_for(4 * n)
    total = np.zeros(3 * cells, np.uint64)
    expected = np.zeros(n, np.int64)
    for row in holds:
        own = np.array(row[:n], bool)
        total += insert(universe[own], cells)
        expected += own
    union = peel(total)
    assert union is not None
    found = dict(zip(map(bytes, union[0]), union[1].tolist(), strict=True))
    pairs = zip(universe, expected.tolist(), strict=True)
    assert found == {bytes(token): count for token, count in pairs if count}
    assert list(found) == sorted(found)


def test_as_many_clients_as_are_allowed() -> None:
    own = np.full((20, 12), 255, np.uint8)
    own[:, 0] = np.arange(20)
    with np.errstate(over="ignore"):
        total = insert(own, cells_for(20)) * np.uint64(MAX_CLIENTS)
    union = peel(total)
    assert union is not None
    assert union[1].tolist() == [MAX_CLIENTS] * 20
    assert {bytes(token) for token in union[0]} == {bytes(token) for token in own}


def test_too_small_a_table_is_seen_and_the_next_size_is_read_in_a_second() -> None:
    many = tokens(10_000)
    assert peel(insert(many, cells_for(5_000))) is None
    total = insert(many, cells_for(10_000))
    start = time.process_time()
    union = peel(total)
    assert time.process_time() - start < 1
    assert union is not None
    assert len(union[0]) == 10_000


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63))
def test_what_is_no_sum_of_tables_is_not_read(seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 2**64, 12 * 20, np.uint64)
    assert peel(noise) is None


@pytest.mark.parametrize("cells", [0, -4, 6])
def test_impossible_sizes_are_refused(cells: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4 cells"):
        insert(tokens(1), cells)
    with pytest.raises(ValueError, match="multiple of 12 words"):
        peel(np.zeros(13, np.uint64))
