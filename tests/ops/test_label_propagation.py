"""Label propagation, moments and confidence by hand, and what they must be whatever the graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_graph.ops.graph import gcn_adjacency
from flower_graph.ops.label_propagation import moments, propagate_labels, smoothing_confidence

# The path 0 - 1 - 2 with self-loops: degrees 2, 3, 2.
PATH = gcn_adjacency(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
START = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])


def test_one_step_on_a_path_by_hand() -> None:
    found = propagate_labels(PATH, START, 1, 0.5)
    root = 1 / math.sqrt(6)
    first = [0.5 + 0.5 * (0.5 + 0.5 * root), 0.5 * 0.5 * root]
    middle = 0.25 + 0.5 * (root + 0.5 / 3)
    wanted = torch.tensor([first, [middle, middle], first[::-1]])
    torch.testing.assert_close(found, wanted)


def test_two_steps_are_a_step_from_what_one_gave() -> None:
    once = propagate_labels(PATH, START, 1, 0.3)
    wanted = 0.3 * START + 0.7 * PATH.matrix.to_dense() @ once
    torch.testing.assert_close(propagate_labels(PATH, START, 2, 0.3), wanted)


@pytest.mark.parametrize(("steps", "restart"), [(0, 0.5), (4, 1.0)])
def test_without_a_step_and_with_nothing_but_the_start_all_stays(steps: int, restart: float):
    torch.testing.assert_close(propagate_labels(PATH, START, steps, restart), START)


def test_an_impossible_restart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"restart is 1\.5, must be at least 0 and at most 1"):
        propagate_labels(PATH, START, 1, 1.5)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("raw", [0.5, 0.5, 0.25, 0.5, 0.125, 0.5]),
        ("central", [0, 0, 0, 0.25, 0, 0]),
        ("hybrid", [0.5, 0.5, 0.25, 0.5, 0.125, 0.5, 0, 0, 0, 0.25, 0, 0]),
    ],
)
def test_moments_of_two_rows_by_hand(kind: str, wanted: list[float]) -> None:
    rows = torch.tensor([[0.5, 0.0], [0.5, 1.0]])
    torch.testing.assert_close(moments(rows, 3, kind), torch.tensor(wanted).float())


def test_moments_do_not_know_the_nodes_order_and_their_kinds_are_named() -> None:
    rows = torch.rand(7, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(moments(rows.flip(0), 4), moments(rows, 4))
    with pytest.raises(ValueError, match="'mixed' is unknown: allowed are raw, central, hybrid"):
        moments(rows, 4, "mixed")


def confidence(shares: list[list[float]], degree: list[int]) -> float:
    return smoothing_confidence(torch.tensor(shares), torch.tensor(degree))


def test_confidence_by_hand_counts_a_sure_node_as_often_as_it_has_neighbours() -> None:
    sure, half = 2 / math.e, 2 / math.e - math.log(2)
    assert confidence([[1.0, 0.0]], [1]) == pytest.approx(sure)
    assert confidence([[0.5, 0.5]], [1]) == pytest.approx(half)
    assert confidence([[1.0, 0.0], [0.5, 0.5]], [2, 3]) == pytest.approx(2 * sure + 3 * half)


def test_confidence_is_never_negative_and_certainty_gives_the_most() -> None:
    even: Tensor = torch.full((5, 3), 1 / 3)
    sure = torch.eye(3)[[0, 1, 2, 0, 1]]
    degree = torch.ones(5)
    assert 0 < smoothing_confidence(even, degree) < smoothing_confidence(sure, degree)
    assert smoothing_confidence(even, 0 * degree) == 0
