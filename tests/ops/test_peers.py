"""Similarities of clients and averages for each, by hand."""

import numpy as np
import pytest

from flower_graph.ops.peers import cosine_similarities, mixtures


def test_cosines_by_hand_a_zero_is_like_itself_alone() -> None:
    found = cosine_similarities(np.array([[3.0, 4.0], [4.0, 3.0], [-6.0, -8.0], [0.0, 0.0]]))
    wanted = [[1, 0.96, -1, 0], [0.96, 1, -0.96, 0], [-1, -0.96, 1, 0], [0, 0, 0, 1]]
    assert found == pytest.approx(np.array(wanted))


def test_one_average_for_each_row_of_weights_by_hand() -> None:
    models = [
        {"w": np.array([[1.0, 2.0]], np.float32), "b": np.float32([0])},
        {"w": np.array([[3.0, 6.0]], np.float32), "b": np.float32([4])},
    ]
    first, second, third = mixtures(models, np.array([[1.0, 0.0], [1.0, 3.0], [5.0, 5.0]]))
    assert first["w"].tolist() == [[1, 2]] and first["b"].tolist() == [0]
    assert second["w"].tolist() == [[2.5, 5]] and second["b"].tolist() == [3]
    assert third["w"].tolist() == [[2, 4]] and third["b"].tolist() == [2]
    assert first["w"].dtype == np.float32 and list(second) == ["w", "b"]
