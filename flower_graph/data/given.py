"""Saves graphs, passed to ``fg.run`` as ``data.name``, in files that a run can read."""

import hashlib
import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData

from flower_graph.data.description import EDGE_VALUES, as_tensor, check_kind, entries_of, saying
from flower_graph.data.graph import Graph
from flower_graph.errors import DataError
from flower_graph.storage.writing import named, replaced

# Attributes of nodes that are no features, like some columns of `nodes.csv`
NO_FEATURES = {"x", "y", "label", "name", "split", "client", "identity", "train_mask", "val_mask"}
NO_FEATURES |= {"test_mask", "edge_index", "n_id", "public", "num_nodes", "names", "classes"}


def with_saved_graphs(settings: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Save a graph that is given for ``data.name``, and replace it by its file's name."""
    section, dotted = settings.get("data"), "data.name"
    inner = dict(section) if isinstance(section, Mapping) else {}
    label = inner.get("label", settings.get("data.label"))
    result = dict(settings)
    if "name" in inner:
        result["data"] = inner | {"name": _named(inner["name"], folder, label)}
    if dotted in result:
        result[dotted] = _named(result[dotted], folder, label)
    return result


def _named(value: object, folder: Path, label: object) -> object:
    if isinstance(value, str | Path):
        return value
    with saying("data.name"):
        if isinstance(value, Graph):
            value = value.to_data()
        if isinstance(value, BaseData):
            check_kind(value)
            content = BytesIO()
            torch.save(Data.from_dict(_as_read(value, label)), content)
            return str(_saved(content.getvalue(), folder, ".pt"))
        if (listed := _listed(value)) is not None:
            try:  # NumPy's and PyTorch's numbers have `tolist`
                text = json.dumps(listed, default=lambda one: one.tolist())
            except (AttributeError, TypeError, ValueError) as error:
                raise DataError(f"the graph is not one of numbers and words: {error}") from error
            return str(_saved(text.encode(), folder, ".json"))
    return value


def _saved(content: bytes, folder: Path, ending: str) -> Path:
    """Save a graph under a hash of its content, so that equal graphs have one file."""
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = named(folder) / f"{digest}{ending}"
    if not path.is_file():
        with replaced(path) as stream:
            stream.write(content)
    return path


# Any: a graph of another library
def _listed(graph: Any) -> dict[str, object] | None:
    """Return nodes and edges of a graph of NetworkX or igraph as node-link JSON; else None."""
    library = type(graph).__module__.partition(".")[0]
    graph = graph.to_networkx() if library == "igraph" and hasattr(graph, "vs") else graph
    if library not in ("igraph", "networkx") or not hasattr(graph, "nodes"):
        return None
    # A node that is no number, such as a grid position, is a word
    ids = {node: node if isinstance(node, int | float) else str(node) for node in graph}
    edges = graph.edges(data=True)
    return {
        "nodes": [{**own, "id": ids[node]} for node, own in graph.nodes(data=True)],
        "links": [{**own, "source": ids[one], "target": ids[two]} for one, two, own in edges],
    }


def _as_read(data: BaseData, label: object) -> dict[str, object]:
    """Return a graph's entries as in files; ``from_networkx`` makes each attribute an entry."""
    values = {key: value for key, value in entries_of(data.cpu()).items() if value is not None}
    if hasattr(values.get("x"), "tocoo"):
        values["x"] = as_tensor("x", values["x"])
    n, e = data.num_nodes, values.get("edge_index", torch.empty(2, 0)).size(-1)
    if "y" not in values and "label" in values and label is None:
        values["y"] = values.pop("label")
    columns = {
        key: one
        for key, one in values.items()
        if isinstance(one, Tensor) and one.dim() in (1, 2) and one.size(0) == n
        if key not in {label, *NO_FEATURES, *EDGE_VALUES} and not key.startswith("edge_")
    }
    if "x" not in values and columns:
        if n == e:
            raise DataError(f"has no x, and as many edges as nodes: whose is {', '.join(columns)}?")
        values = {key: value for key, value in values.items() if key not in columns}
        rows = {key: one.reshape(n, -1).double() for key, one in columns.items()}
        values["x"] = torch.cat([*rows.values()], 1)
        values["columns"] = [
            f"{key}[{i}]" if one.size(1) > 1 else key
            for key, one in rows.items()
            for i in range(one.size(1))
        ]
    if "y" not in values and label is None:
        raise DataError(
            f"has no y and no label; data.label names one of {', '.join(sorted(values))}"
        )
    return values
