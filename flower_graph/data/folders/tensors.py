"""How graphs lie in the folders of a run: as plain tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from flower_graph.errors import DataError
from flower_graph.ops.graph import csr_tensor, pointers

Tensors = dict[str, Tensor]
T = TypeVar("T")
# Of a matrix, besides its values: start and columns of each row, and [rows, columns, is dense].
POINTERS, COLUMNS, FORM = ".pointers", ".columns", ".form"


def matrix_tensors(name: str, x: Tensor) -> Tensors:
    """Write a matrix of features as its numbers that are not 0."""
    # x [n, f]
    rows, columns = x.shape
    if x.layout == torch.sparse_csr:
        start, column, values = x.crow_indices(), x.col_indices(), x.values()
    elif 3 * int(x.count_nonzero()) > x.numel():
        return {name: x}
    else:
        row, column = x.nonzero(as_tuple=True)
        start, values = pointers(row, rows), x[row, column]
    form = torch.tensor([rows, columns, int(x.layout == torch.strided)])
    return {name: values, name + POINTERS: start, name + COLUMNS: column, name + FORM: form}


def read_matrix(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Read what :func:`matrix_tensors` wrote; the same matrix in the same layout."""
    if name + FORM not in tensors:
        return tensors[name]
    rows, columns, is_dense = tensors[name + FORM].tolist()
    start, column, values = (tensors[key] for key in (name + POINTERS, name + COLUMNS, name))
    if not is_dense:
        return csr_tensor(start, column, values, (rows, columns))
    x = torch.zeros(rows, columns, dtype=values.dtype)
    x[torch.repeat_interleave(start.diff()), column] = values
    return x


def graph_tensors(graph: Any) -> Tensors:
    """Write one client's graph: ``EgoNetwork``, ``ClientGraph`` or ``OverlappingGraph``."""
    result: Tensors = {}
    for field in fields(graph):
        value = getattr(graph, field.name)
        if isinstance(value, int):
            result[field.name] = torch.tensor(value)
        elif isinstance(value, Tensor):
            result |= matrix_tensors("x", value) if field.name == "x" else {field.name: value}
        elif value is not None:
            raise TypeError(f"{field.name} is a {type(value).__name__}: no folder can hold it")
    return result


def read_graph(kind: type[T], client: int, tensors: Mapping[str, Tensor], where: object) -> T:
    """Read one client's graph."""
    start = f"{client}."
    local = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
    values: dict[str, Any] = {}
    try:
        for field in fields(kind):  # type: ignore[arg-type]
            if field.name == "x":
                values["x"] = read_matrix("x", local)
            elif field.type in ("int", int):
                values[field.name] = int(local[field.name])
            else:
                needed = "None" not in str(field.type)
                values[field.name] = local[field.name] if needed else local.get(field.name)
    except KeyError as error:
        raise DataError(
            f"{where}: client {client}: {error} is missing; make the folder anew with "
            "`flower-graph partition`"
        ) from error
    return kind(**values)
