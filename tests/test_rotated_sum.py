"""Vectors of the secure consensus: where rows go, which nodes are in, what everybody turns to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.procrustes_alignment.rotated_sum import (
    ABSENT,
    SumOrder,
    common_nodes,
    fewest_holders,
    find_slots,
    first_points,
    rotation,
    sum_vector,
)


def test_rows_go_to_their_slots() -> None:
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    found = sum_vector(rows, np.array([2, ABSENT, 0]), 8)
    assert found.tolist() == [5, 6, 0, 0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("slots", "length", "what"),
    [
        ([0, 0, 1], 8, "slot named twice"),
        ([0, 1, 2], 7, "7 numbers for rows of 2"),
        ([0, 1, 4], 8, "slots from 0 to 4, must be 0 to 3"),
        ([0, 1, -2], 8, "slots from -2 to 1"),
    ],
)
def test_slots_that_cannot_be(slots: list[int], length: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        sum_vector(np.ones((3, 2)), np.array(slots), length)


def test_nodes_with_enough_holders() -> None:
    ids = {c: np.array(own) for c, own in enumerate([[1, 2, 3], [2, 3], [3, 9, 2], [3, 1]])}
    # Of four clients one may be missing, so three must hold a node: 2 and 3.
    assert fewest_holders(4, 0.3) == 3
    assert common_nodes(ids, [0, 1, 2, 3], 0.3).tolist() == [2, 3]
    assert common_nodes(ids, [0, 1, 2, 3], 0.0).tolist() == [1, 2, 3]
    assert common_nodes(ids, [1, 2], 0.3).tolist() == [2, 3]
    assert common_nodes(ids, [], 0.3).tolist() == []


@given(
    st.lists(st.sets(st.integers(0, 12), min_size=1), min_size=2, max_size=9),
    st.sampled_from([0.0, 0.1, 0.3, 0.5]),
    st.randoms(use_true_random=False),
)
def test_no_sum_is_ever_of_one_client_alone(owned, dropout, chance) -> None:
    ids = {c: np.array(sorted(own)) for c, own in enumerate(owned)}
    m = len(owned)
    least = max(2, m - int(dropout * m + 1e-12))  # contributors without which a sum is skipped
    there = chance.sample(range(m), chance.randint(least, m))
    for node in common_nodes(ids, range(m), dropout).tolist():
        assert sum(node in ids[client] for client in there) >= 2


def test_slots_of_nodes() -> None:
    assert find_slots(np.array([9, 4, 2]), np.array([2, 5, 9])).tolist() == [2, ABSENT, 0]
    assert find_slots(np.array([9, 4]), np.zeros(0, np.int64)).tolist() == [ABSENT, ABSENT]


def test_first_points_are_the_same_for_all_and_for_a_seed() -> None:
    points = first_points(3, 500, 4)
    assert np.array_equal(points, first_points(3, 500, 4))
    assert not np.allclose(points, first_points(4, 500, 4))
    assert abs(points.mean()) < 0.1 and abs(points.std() - 1) < 0.1


def test_clients_that_embed_alike_turn_to_the_same_place() -> None:
    chance = np.random.default_rng(0)
    x = chance.normal(size=(30, 3))
    turned = []
    for _ in range(2):
        q = np.linalg.qr(chance.normal(size=(3, 3)))[0]
        turned.append(x @ q @ rotation(x @ q, first_points(0, 30, 3), False))
    assert np.allclose(turned[0], turned[1], atol=1e-12)


def test_rotation_without_common_nodes_or_reflection() -> None:
    assert np.array_equal(rotation(np.zeros((0, 2)), np.zeros((0, 2)), False), np.eye(2))
    x = np.array([[1.0, 0], [0, 2]])
    assert np.allclose(rotation(x, x * [-1, 1], False), [[-1, 0], [0, 1]])
    assert np.linalg.det(rotation(x, x * [-1, 1], True)) == pytest.approx(1)


def test_slots_that_do_not_fit_are_refused() -> None:
    entries = SumOrder([np.array([3, ABSENT])], 7, True, False).to_config()
    with pytest.raises(MalformedReplyError, match="slots: 2 came, expected 3"):
        SumOrder.from_config(entries, sizes=[3])
