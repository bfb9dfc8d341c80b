"""Checks of a graph before training; each message names the value that is wrong."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from flower_graph.errors import DataError

PARTS = ("train_mask", "val_mask", "test_mask")


def check_data(data: Any) -> None:
    """Check that a graph can be trained on. Isolated nodes are allowed.

    Parameters
    ----------
    data
        A PyG ``Data`` or a :class:`~flower_graph.data.Graph`: ``x`` float32 ``[n, f]``,
        ``edge_index`` int64 ``[2, E]``, ``y`` int64 ``[n]``, three boolean masks ``[n]``,
        and ``num_classes`` (without it: the largest label plus one).

    Raises
    ------
    DataError
        If something is missing, of the wrong shape or type, NaN, infinite, out of
        range, empty or overlapping.
    """
    for key in ("x", "edge_index", "y", *PARTS):
        check_tensor(data, key)
    check_features(data.x)
    nodes = int(data.x.size(0))
    check_edges(data.edge_index, nodes)
    check_labels(data.y, nodes, getattr(data, "num_classes", None))
    check_masks({key: getattr(data, key) for key in PARTS}, nodes)


def check_client(data: Any) -> None:
    """Check a client's own graph: some labels, all edges and all masks may be missing."""
    for key in ("x", "y"):
        check_tensor(data, key)
    if data.x.layout != torch.strided:
        raise DataError(f"x has the layout {data.x.layout}: must be dense")
    check_features(data.x.float())
    count = int(data.x.shape[0])
    if getattr(data, "edge_index", None) is not None:
        check_tensor(data, "edge_index")
        check_edges(data.edge_index, count)
    if data.y.shape != (count,) or data.y.dtype != torch.int64:
        raise DataError(f"y is {data.y.dtype} {list(data.y.shape)}: must be int64 [{count}]")
    taken = data.y < 0  # a node without a label has no part
    for part in PARTS:
        mask = mask_of(data, part)
        if mask.shape != (count,) or mask.dtype != torch.bool:
            raise DataError(f"{part} is {mask.dtype} {list(mask.shape)}: must be bool [{count}]")
        if (taken & mask).any():
            node = int((taken & mask).nonzero()[0])
            raise DataError(f"{part}: node {node} has no label or is in another mask too")
        taken = taken | mask


def mask_of(data: Any, part: str) -> Tensor:
    """Give a graph's mask, or one of no nodes where it has none."""
    mask = getattr(data, part, None)
    return torch.zeros(data.y.numel(), dtype=torch.bool) if mask is None else torch.as_tensor(mask)


def check_tensor(data: Any, key: str) -> None:
    """Raise DataError unless the graph has a tensor of this name."""
    if not isinstance(getattr(data, key, None), Tensor):
        raise DataError(f"the graph has no tensor {key!r}")


def check_features(x: Tensor) -> None:
    """Check the feature matrix."""
    if x.dim() != 2 or x.numel() == 0:
        raise DataError(f"x has shape {list(x.shape)}: must be [nodes, features], not empty")
    if x.dtype != torch.float32:
        raise DataError(f"x has dtype {x.dtype}: must be torch.float32")
    if not torch.isfinite(x).all():
        row, column = (~torch.isfinite(x)).nonzero()[0].tolist()
        raise DataError(f"x[{row}, {column}] is {x[row, column].item()}: must be finite")


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Check that edges are pairs of existing nodes."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise DataError(
            f"edge_index is {edge_index.dtype} {list(edge_index.shape)}: must be int64 [2, E]"
        )
    wrong = (edge_index < 0) | (edge_index >= num_nodes)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise DataError(
            f"edge_index[{row}, {column}] is {int(edge_index[row, column])}: "
            f"must be 0 to {num_nodes - 1}"
        )


def check_labels(y: Tensor, num_nodes: int, num_classes: int | None) -> None:
    """Check that every node has one class."""
    if y.shape != (num_nodes,) or y.dtype != torch.int64:
        raise DataError(
            f"y is {y.dtype} {list(y.shape)}: must be int64 [{num_nodes}], one class a node "
            "(several labels a node, and regression, are not supported)"
        )
    wrong = y < 0
    if num_classes is not None:
        wrong = wrong | (y >= num_classes)
    if wrong.any():
        node = int(wrong.nonzero()[0])
        allowed = "at least 0" if num_classes is None else f"0 to {num_classes - 1}"
        raise DataError(f"y[{node}] is {int(y[node])}: labels must be {allowed}")


def check_masks(masks: dict[str, Tensor], num_nodes: int) -> None:
    """Check that the three parts exist, have nodes and share none."""
    for key, mask in masks.items():
        if mask.shape != (num_nodes,) or mask.dtype != torch.bool:
            raise DataError(f"{key} is {mask.dtype} {list(mask.shape)}: must be bool [{num_nodes}]")
        if not mask.any():
            raise DataError(f"{key} is empty: every part needs at least one node")
    for (first, left), (second, right) in combinations(masks.items(), 2):
        both = left & right
        if both.any():
            raise DataError(
                f"{first} and {second} overlap in {int(both.sum())} nodes, "
                f"the first is node {int(both.nonzero()[0])}"
            )
