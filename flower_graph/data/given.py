"""Saves graphs that are given to ``fg.run`` for ``data.name``, as files that a run reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from flower_graph.data.graph import Graph
from flower_graph.errors import DataError
from flower_graph.storage.writing import named, replaced

SECTION, KEY = "data", "name"
# Attributes of nodes that are no features, like some columns of `nodes.csv`
NAMED = {"x", "y", "label", "name", "split", "client", "identity", "train_mask", "val_mask"}
NAMED |= {"test_mask", "edge_index", "n_id", "public", "num_nodes", "names", "classes"}


def with_saved_graphs(settings: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Save a graph that is given for ``data.name``, and replace it by its file's name."""
    result = dict(settings)
    for key, value in settings.items():
        if key == SECTION and isinstance(value, Mapping):
            result[key] = {name: _named(name, one, folder) for name, one in value.items()}
        else:
            result[key] = _named(key.removeprefix(f"{SECTION}."), value, folder)
    return result


def _named(key: str, value: object, folder: Path) -> object:
    """Save a graph; leave any other value as it is."""
    if isinstance(value, Graph):
        value = value.to_data()
    return str(save_graph(value, folder)) if key == KEY and isinstance(value, Data) else value


def save_graph(data: Data, folder: Path) -> Path:
    """Save a graph under a hash of its content, so that equal graphs have one file."""
    content = BytesIO()
    torch.save(Data.from_dict(_as_read(data)), content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()[:16]
    path = named(folder) / f"{digest}.pt"
    if not path.is_file():
        with replaced(path) as stream:
            stream.write(content.getvalue())
    return path


def _as_read(data: Data) -> dict[str, object]:
    """Return a graph's entries as in files; ``from_networkx`` makes each attribute an entry."""
    values = {key: value for key, value in data.cpu().to_dict().items() if value is not None}
    n = data.num_nodes
    if "y" not in values and "label" in values:
        values["y"] = values.pop("label")
    columns = {key: one for key, one in values.items() if _is_column(key, one, n)}
    if "x" not in values and columns:
        values = {key: value for key, value in values.items() if key not in columns}
        values["x"] = torch.cat([one.float().reshape(n, -1) for one in columns.values()], 1)
    if "y" not in values:
        raise DataError(
            f"data.name: the graph has no y and no label, but {', '.join(sorted(values))}; give "
            "each node a class, -1 for none, such as data.y = ..."
        )
    return values


def _is_column(key: str, value: object, n: int | None) -> bool:
    """Whether an entry is a feature: one or more numbers for each node."""
    is_rows = isinstance(value, Tensor) and value.dim() in (1, 2) and value.size(0) == n
    return is_rows and key not in NAMED and not key.startswith("edge_")
