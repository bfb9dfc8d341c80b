"""Weights of edges: from any form to one weight for each edge, in the edges' order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flower_graph.data.labels import as_tensor
from flower_graph.errors import DataError
from flower_graph.ops.graph import values_at

# What a `Data` may say of edges besides their ends; the second is NetworkX's name
WEIGHT, NAMED, ATTRIBUTES = EDGE_VALUES = ("edge_weight", "weight", "edge_attr")


def with_edges(data: object) -> object:
    """Return a graph whose edges are in ``edge_index``, also where it has ``adj_t`` instead."""
    adjacency: Any = getattr(data, "adj_t", None)
    if adjacency is None or getattr(data, "edge_index", None) is not None:
        return data
    if isinstance(adjacency, Tensor):
        listed = adjacency.to_sparse_coo().coalesce()
        (target, source), value = listed.indices(), listed.values()
    else:  # torch_sparse's
        target, source, value = adjacency.coo()
    values = data.to_dict() if hasattr(data, "to_dict") else vars(data)
    values = {key: one for key, one in values.items() if key != "adj_t"}
    if value is not None and not bool((value == 1).all()):
        values[WEIGHT] = value
    return SimpleNamespace(**values | {"edge_index": torch.stack([source, target])})


# Any: what a user's graph holds
def of_edges(data: object, count: int) -> dict[str, Any]:
    """Return a graph's attributes of its edges, of which there are ``count``."""
    given: dict[str, Any] = {key: getattr(data, key, None) for key in EDGE_VALUES}
    if given[NAMED] is not None and len(given[NAMED]) != count:
        del given[NAMED]  # of the nodes
    return {key: one for key, one in given.items() if one is not None}


def read_weights(
    data: object, edges: Tensor, n: int, *, wanted: bool
) -> tuple[Tensor | None, list[str], list[str]]:
    """Read the weights of edges, if there are any.

    Parameters
    ----------
    data
        With ``edge_index`` ``[2, E]`` and perhaps ``edge_weight`` ``[E]``, or instead ``weight``
        or ``edge_attr`` of one column.
    edges
        The same edges, both directions of each once, int64 ``[2, e]``.
    n
        Number of nodes.
    wanted
        Whether the run uses them.

    Returns
    -------
    tuple
        float32 ``[e]``, or None; notes; warnings of what is left out.

    Raises
    ------
    DataError
        If ``edge_weight`` is not a number from 0 on for each edge.
    """
    pairs = as_tensor("edge_index", getattr(data, "edge_index", None)).long()
    given = of_edges(data, pairs.size(1))
    for key, value in given.items() if wanted else ():
        tensor = as_tensor(key, value)
        column = tensor.flatten() if tensor.dim() == 2 and tensor.size(1) == 1 else tensor
        if why := _why_unfit(column, pairs.size(1)):
            if key != ATTRIBUTES:
                raise DataError(f"{key} {why}")
            continue  # attributes may be anything
        weights, differ = _by_edge(pairs, column.to(torch.float32), edges, n)
        said = [f"{key}: {differ} edges have several weights, and their mean counts"]
        return weights, said * bool(differ), _ignored([one for one in given if one != key])
    return None, [], _ignored(list(given))


def _ignored(keys: list[str]) -> list[str]:
    if not keys:
        return []
    words = f"{', '.join(keys)} of the edges is ignored: all edges count the same"
    return [
        f"{words} (a client's GCN on a graph of its own uses weights: `flower-graph docs own-data`)"
    ]


def _why_unfit(column: Tensor, count: int) -> str:
    if column.dim() != 1 or column.numel() != count or column.is_complex():
        form = f"{column.dtype} {list(column.shape)}"
        return f"is {form}: must be one number for each edge, [{count}]"
    wrong = ~(column.double().isfinite() & (column >= 0))
    if wrong.any():
        place = int(wrong.nonzero()[0])
        return f"has {column[place].item()} at edge {place}: must be finite, 0 or more"
    return ""


def _by_edge(given: Tensor, weight: Tensor, edges: Tensor, n: int) -> tuple[Tensor, int]:
    """Return each edge's mean weight over its directions, and how many of these differ."""
    keys = given.amin(0) * n + given.amax(0)
    pairs, place = keys.unique(return_inverse=True)
    times = torch.bincount(place, minlength=len(pairs))
    means = torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, place, weight.double())
    means /= times
    differ = torch.zeros(len(pairs), dtype=torch.bool)
    differ[place[(weight - means[place]).abs() > 1e-6 * means[place].abs()]] = True
    known = torch.stack([pairs // max(n, 1), pairs % max(n, 1)])
    ends = torch.stack([edges.amin(0), edges.amax(0)])
    return values_at(ends, known, means.float(), n), int(differ.sum())
