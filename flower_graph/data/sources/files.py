"""Graphs that a user saved with ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flower_graph.data.graph import Graph
from flower_graph.data.sources.pyg import graph_from
from flower_graph.data.validate import PARTS
from flower_graph.errors import DataError


@contextmanager
def pyg_classes_allowed() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` read what a ``Data`` consists of, and no more."""
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    classes = (Data, DataEdgeAttr, DataTensorAttr, GlobalStorage)
    # PyG allows some of them for the whole process. Torch's context would take those away
    # again when it ends, so it is given only the others.
    allowed = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([cls for cls in classes if cls not in allowed]):
        yield


def load_file(path: Path) -> Graph:
    """Load a ``Data``, or a dict of tensors with its keys, saved by ``torch.save``."""
    # The file may come from anybody: it is read with ``weights_only=True``, so nothing in it is
    # executed.
    if not path.is_file():
        raise DataError(f"data.name = {str(path)!r}: there is no such file")
    values = read_file(path)
    classes = values.get("num_classes")
    if isinstance(classes, Tensor) and classes.numel() == 1:
        classes = int(classes)
    if classes is not None and (not isinstance(classes, int) or classes < 1):
        raise DataError(f"file {path}: num_classes is {classes!r}, must be a whole number above 0")
    return graph_from(SimpleNamespace(**values), str(path), classes)


def read_file(path: Path) -> dict[str, Any]:
    """Read what :func:`load_file` builds its graph of, still unchecked."""
    from torch_geometric.data import Data

    try:
        with pyg_classes_allowed():
            content = torch.load(path, map_location="cpu", weights_only=True)
    # A broken pickle can raise nearly anything.
    except Exception as error:
        raise DataError(
            f"file {path} is not a graph that can be loaded safely: a Data or a dict of "
            f"tensors saved by torch.save is expected ({type(error).__name__}: {error})"
        ) from error
    # Not by attributes of Data, some of which are computed (num_classes is not one).
    values = content.to_dict() if isinstance(content, Data) else content
    if not isinstance(values, dict):
        raise DataError(f"file {path} holds a {type(content).__name__}, not a Data or a dict")
    for key in ("x", "edge_index", "y", *PARTS):
        if values.get(key) is not None and not isinstance(values[key], Tensor):
            raise DataError(f"file {path}: {key} is a {type(values[key]).__name__}, not a tensor")
    return {str(key): value for key, value in values.items()}
