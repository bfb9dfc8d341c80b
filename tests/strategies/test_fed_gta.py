"""FedGTA: what clients say of their neighbourhoods and what the server makes of it, by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import METHODS

from flower_graph.ops.graph import gcn_adjacency
from flower_graph.strategies.fed_gta import (
    METHOD,
    FedGTASection,
    moments,
    peer_weights,
    propagate_labels,
    smoothing_confidence,
    spread_predictions,
)

SMALL = METHODS["fedgta"]
# Two nodes with an edge between them; the first one's class, 0, is known.
EDGE = torch.tensor([[0, 1], [1, 0]])
Y, TRAIN = torch.tensor([0, 1]), torch.tensor([True, False])


def softmax(*values: float) -> list[float]:
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


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


@pytest.mark.parametrize(("steps", "restart"), [(0, 0.5), (4, 1.0)])
def test_without_a_step_and_with_nothing_but_the_start_all_stays(steps: int, restart: float):
    torch.testing.assert_close(propagate_labels(PATH, START, steps, restart), START)


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


def test_confidence_by_hand_counts_a_sure_node_as_often_as_it_has_neighbours() -> None:
    def confidence(shares: list[list[float]], degree: list[int]) -> float:
        return smoothing_confidence(torch.tensor(shares), torch.tensor(degree))

    sure, half = 2 / math.e, 2 / math.e - math.log(2)
    assert confidence([[1.0, 0.0]], [1]) == pytest.approx(sure)
    assert confidence([[0.5, 0.5]], [1]) == pytest.approx(half)
    assert confidence([[1.0, 0.0], [0.5, 0.5]], [2, 3]) == pytest.approx(2 * sure + 3 * half)


def test_predictions_of_two_nodes_are_spread_by_hand() -> None:
    how = FedGTASection(steps=1, restart=0.5, temperature=2.0)
    logits = torch.tensor([[-9.0, 9.0], [0.0, math.log(3)]])  # the second node: 1/4 and 3/4
    shares, smooth = spread_predictions(logits, Y, TRAIN, EDGE, how)
    # A' has 1/2 everywhere: the mean of (1, 0) and (1/4, 3/4) is (5/8, 3/8).
    spread = [0.5 * 0.25 + 0.5 * 5 / 8, 0.5 * 0.75 + 0.5 * 3 / 8]
    assert shares[0].tolist() == smooth[0].tolist() == [1, 0]
    assert shares[1].tolist() == pytest.approx(softmax(*spread))
    assert smooth[1].tolist() == pytest.approx(softmax(spread[0] / 2, spread[1] / 2))


def test_the_server_weighs_those_that_are_alike_by_their_confidence() -> None:
    vectors = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])  # cosines 0.71, 0, 0.71
    weights = peer_weights(vectors, np.array([1.0, 2.0, 5.0]), 0.5)
    assert weights.tolist() == [[1, 2, 0], [1, 2, 5], [0, 2, 5]]
    assert peer_weights(vectors, np.ones(3), 0.8).tolist() == np.eye(3).tolist()
    assert peer_weights(vectors, np.ones(3), -1.0).tolist() == np.ones((3, 3)).tolist()
    assert peer_weights(vectors, np.ones(3), 1.0).tolist() == np.eye(3).tolist()


def test_the_server_averages_for_each_client_by_hand() -> None:
    server = METHOD.build_strategy(SMALL.load("strategy.moments=raw", "strategy.order=1"), None)
    assert server.extras() == {"moments": (3,), "confidence": ()}
    replies = [
        SimpleNamespace(
            client=client,
            arrays={"w": np.float32([value])},
            extras={"moments": np.array(moments), "confidence": np.float32(sure)},
        )
        for client, value, moments, sure in (
            (4, 0.0, [1.0, 0.0, 0.0], 1.0),
            (7, 8.0, [1.0, 0.1, 0.0], 3.0),
            (9, 5.0, [0.0, 0.0, 1.0], -2.0),  # impossible; alone all the same
        )
    ]
    found = server.combine(replies)
    assert {client: arrays["w"].tolist() for client, arrays in found.items()} == {
        4: [6.0],
        7: [6.0],
        9: [5.0],
    }
