"""Checks of a graph: what is refused, with which value in the message, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flower_graph.data import Graph, check_data
from flower_graph.errors import DataError


def graph(**changes: Any) -> Graph:
    """Four nodes, one edge, two of them isolated; one node in no part."""
    parts: dict[str, Any] = {
        "x": torch.ones(4, 2),
        "edge_index": torch.tensor([[0, 1], [1, 0]]),
        "y": torch.tensor([0, 1, 0, 1]),
        "num_classes": 2,
        "train_mask": torch.tensor([True, False, False, False]),
        "val_mask": torch.tensor([False, True, False, False]),
        "test_mask": torch.tensor([False, False, True, False]),
    }
    return Graph(**{**parts, **changes})


def test_isolated_nodes_and_unused_nodes_are_allowed() -> None:
    check_data(graph())
    check_data(graph().to_data())


def test_a_graph_without_edges_is_allowed() -> None:
    check_data(graph(edge_index=torch.empty(2, 0, dtype=torch.int64)))


NAN = torch.tensor([[1.0, 1.0], [1.0, float("nan")], [1.0, 1.0], [1.0, 1.0]])
INF = torch.tensor([[1.0, 1.0], [1.0, 1.0], [float("-inf"), 1.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": NAN}, r"x\[1, 1\] is nan"),
        ({"x": INF}, r"x\[2, 0\] is -inf"),
        ({"x": torch.ones(4)}, r"x has shape \[4\]"),
        ({"x": torch.ones(4, 0)}, r"x has shape \[4, 0\]"),
        ({"x": torch.ones(4, 2, dtype=torch.float64)}, "torch.float64"),
        ({"edge_index": torch.tensor([[0, 1], [1, 4]])}, r"edge_index\[1, 1\] is 4: .* 0 to 3"),
        ({"edge_index": torch.tensor([[0, -1], [1, 0]])}, r"edge_index\[0, 1\] is -1"),
        ({"edge_index": torch.tensor([[0, 1]])}, r"\[1, 2\]: must be int64 \[2, E\]"),
        ({"edge_index": torch.zeros(2, 2)}, "torch.float32"),
        ({"y": torch.tensor([0, 1, 2, 1])}, r"y\[2\] is 2: labels must be 0 to 1"),
        ({"y": torch.tensor([0, 1, 0, -1])}, r"y\[3\] is -1"),
        ({"y": torch.tensor([0, 1, 0])}, r"y is torch.int64 \[3\]: must be int64 \[4\]"),
        ({"y": torch.zeros(4)}, "regression"),
        ({"y": torch.zeros(4, 3, dtype=torch.int64)}, "several labels"),
        ({"train_mask": torch.zeros(4, dtype=torch.bool)}, "train_mask is empty"),
        ({"val_mask": torch.zeros(4, dtype=torch.bool)}, "val_mask is empty"),
        ({"test_mask": torch.tensor([0, 3])}, r"test_mask is torch.int64 \[2\]"),
        (
            {"val_mask": torch.tensor([False, True, True, False])},
            "val_mask and test_mask overlap in 1 nodes, the first is node 2",
        ),
        ({"train_mask": None}, "no tensor 'train_mask'"),
    ],
)
def test_bad_graphs_are_refused_with_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_data(graph(**changes))


def test_without_num_classes_only_negative_labels_are_refused() -> None:
    data = graph(y=torch.tensor([0, 1, 5, 1])).to_data()
    del data.num_classes
    check_data(data)
    data.y[0] = -1
    with pytest.raises(DataError, match=r"y\[0\] is -1: labels must be at least 0"):
        check_data(data)
