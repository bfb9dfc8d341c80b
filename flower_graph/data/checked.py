"""Checks of data that constructors are given, with the errors of ``description``.

Clients are built anew for every message, so data that passed are remembered: by their tensors'
memory, as long as it exists and is not written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_graph.data.description import (
    check_edges,
    check_parts,
    read_edges,
    read_mask,
    saying,
    tell,
)
from flower_graph.data.graph import PARTS, HeldGraph, to_undirected
from flower_graph.data.labels import as_tensor, check_labels, read_labels
from flower_graph.errors import DataError

HELD = ("y", "edge_index", *PARTS)  # besides x, which a data folder's reader makes anew
LAYOUTS = (torch.strided, torch.sparse_csr)
_fit: dict[tuple[object, ...], tuple[weakref.ref[object], ...]] = {}


class ServerGraph(NamedTuple):
    """A server's graph without features."""

    edge_index: Tensor  # int64 [2, e], both directions, sorted
    y: Tensor  # int64 [n], -1 without a label
    masks: dict[str, Tensor]  # boolean [n] each, by the part's first word


# Any: an object with the attributes of a `Data`, each of which is checked
def server_graph(data: Any) -> ServerGraph:
    """Bring edges, labels and masks of a graph into canonical form; missing masks are empty."""
    notes: list[str] = []
    for key in ("y", "edge_index"):
        if getattr(data, key, None) is None:
            raise DataError(f"the graph has no {key}")
    y = read_labels(data.y, None, notes)
    if not isinstance(y, Tensor):
        raise DataError("y has words: flower_graph.data.as_graph(data) turns them into classes")
    y = y.clamp(min=-1)
    check_labels(y)
    edges = read_edges(data.edge_index, y.numel(), notes)
    given = as_tensor("edge_index", data.edge_index).long()
    edges = given if _is_whole(given, edges) else edges  # their order is the caller's
    masks = {}
    for part in PARTS:
        mask = read_mask(part, getattr(data, part, None), y.numel(), notes)
        if mask is not None and mask.dim() != 1:
            raise DataError(f"{part} is of {mask.size(1)} splits: must be bool [n]")
        masks[part] = torch.zeros_like(y, dtype=torch.bool) if mask is None else mask
    check_parts(masks, y)
    tell("data", notes)
    return ServerGraph(edges, y, {part.partition("_")[0]: mask for part, mask in masks.items()})


def check_clients(graphs: Iterable[HeldGraph]) -> None:
    """Check clients' graphs without converting them; ``DataError`` names the client."""
    for graph in graphs:
        with saying(f"client {graph.client}"):
            check_rows(graph.x)
            tensors = [getattr(graph, name) for name in HELD]
            if graph.y.shape != graph.x.shape[:1] or not _is_fit(tensors):
                _check_client(graph)
                _remember(tensors)


def check_rows(x: Tensor) -> None:
    """Check features of users: a finite float32 matrix, dense or CSR."""
    if _is_fit([x]):
        return
    if x.dim() != 2 or x.dtype != torch.float32 or x.layout not in LAYOUTS:
        raise DataError(f"x is {x.dtype} {list(x.shape)}: must be float32 [n, f], dense or CSR")
    values = x if x.layout == torch.strided else x.values()
    # A finite sum has only finite terms, and takes no memory.
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        dense = x if x.layout == torch.strided else x.to_dense()
        row, column = (~torch.isfinite(dense)).nonzero()[0].tolist()
        raise DataError(f"x[{row}, {column}] is {dense[row, column].item()}: must be finite")
    _remember([x])


def _check_client(graph: HeldGraph) -> None:
    n, y = int(graph.x.shape[0]), graph.y
    if y.dtype != torch.int64 or y.shape != (n,):
        raise DataError(f"y is {y.dtype} {list(y.shape)}: must be int64 [{n}], -1 without a label")
    check_labels(y)
    if graph.edge_index is not None:
        check_edges(graph.edge_index, n)
        if not _is_whole(graph.edge_index, to_undirected(graph.edge_index, n)):
            raise DataError(
                "edge_index must have every edge once in each direction: see data.to_undirected"
            )
    masks = {part: getattr(graph, part) for part in PARTS}
    for part, mask in masks.items():
        if mask.dtype != torch.bool or mask.shape != (n,):
            raise DataError(f"{part} is {mask.dtype} {list(mask.shape)}: must be bool [{n}]")
    check_parts(masks, y)


def _is_whole(edges: Tensor, wanted: Tensor) -> bool:
    if edges.shape != wanted.shape:
        return False
    n = 1 + int(edges.max()) if edges.numel() else 1
    return torch.equal((edges[0] * n + edges[1]).sort().values, wanted[0] * n + wanted[1])


def _parts(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    for one in tensors:
        if one is not None and one.layout == torch.strided:
            yield one
        elif one is not None:
            yield from (one.crow_indices(), one.col_indices(), one.values())


def _key(tensors: Iterable[Tensor | None]) -> tuple[object, ...]:
    found: list[object] = []
    for one in _parts(tensors):
        place = id(one.untyped_storage()), one.storage_offset(), one.shape, one.stride()
        found += [*place, one.dtype, one._version]
    return tuple(found)


def _is_fit(tensors: Iterable[Tensor | None]) -> bool:
    return _key(tensors) in _fit


def _remember(tensors: Iterable[Tensor | None]) -> None:
    tensors = list(tensors)
    key = _key(tensors)

    def forget(_: object) -> None:
        _fit.pop(key, None)

    _fit[key] = tuple(weakref.ref(one.untyped_storage(), forget) for one in _parts(tensors))
