"""Clients' graphs in files: a folder of graphs, or one graph whose nodes name their client."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flower_graph.config.common import MEAN, ONE_HOT, DataConfig
from flower_graph.data.description import EDGE_VALUES, check_edges, of_edges, saying, tell
from flower_graph.data.gaps import NO_GAPS, Gaps
from flower_graph.data.graph import PARTS
from flower_graph.data.labels import as_tensor, check_entries
from flower_graph.data.sources.datasets import saved_at
from flower_graph.data.sources.names import (
    EDGES,
    GRAPH_FILES,
    NODES,
    OTHER_FILES,
    absent,
    file_path,
    folder_path,
    graphs_in,
    shown_in,
    table_in,
)
from flower_graph.data.sources.pyg import read_file
from flower_graph.data.sources.tables import CLIENT, names_clients
from flower_graph.errors import DataError
from flower_graph.storage.reading import Tree

# Keys of nodes' identities, in the order in which they are tried
IDENTITIES = ("identity", "n_id", "names")
OF_NODES = ("x", "y", *PARTS, *IDENTITIES, "public")


def clients_path(data: DataConfig) -> Path | None:
    """Return the path if ``data.name`` means clients' own graphs, else None.

    That is a folder of graphs, or one graph whose nodes have a ``client``.
    """
    folder, file = folder_path(data.name), file_path(data.name)
    if folder is not None or file is None:
        return folder
    # For this look features may have gaps
    gaps = Gaps.of(data)._replace(missing=MEAN, categories=ONE_HOT)
    return file if _says_clients(file, saved_at(data.name), gaps) else None


@lru_cache(maxsize=16)
def _says_clients(file: Path, saved: int, gaps: Gaps) -> bool:
    return names_clients(file) if file.is_dir() else read_file(file, gaps).get(CLIENT) is not None


def is_one_graph(path: Path | str) -> bool:
    """Return whether a path is one graph, a file or tables, and not a folder of graphs."""
    return Path(path).is_file() or table_in(Path(path), NODES).is_file()


def client_graphs(
    path: Path | str, gaps: Gaps = NO_GAPS
) -> Iterator[tuple[str, dict[str, object]]]:
    """Return each client's graph, still unchecked, with its name in errors."""
    path = Path(path)
    if not path.exists():
        raise absent(str(path), "folder")
    if is_one_graph(path):
        yield from _parts(path, read_file(path, gaps))
        return
    files = graphs_in(path)
    others = [file for file in shown_in(path) if file not in files]
    for file in others:
        if file.is_file() and (why := OTHER_FILES.get(file.suffix.lower())) is not None:
            raise DataError(f"file {file}: {why}")
        if file.is_dir() and (found := [one.name for one in sorted(file.glob("*.[cC][sS][vV]"))]):
            raise DataError(
                f"folder {file}: has {', '.join(found)}, but no {NODES}, beside {EDGES}"
            )
    if not files:
        there = ", ".join(file.name for file in others) or "nothing"
        raise DataError(
            f"data.name = {str(path)!r}: the folder has neither a graph for each client (files "
            f"*{', *'.join(GRAPH_FILES)}, or folders with {NODES} and {EDGES}) nor {NODES}, but "
            f"{there:.200}"
        )
    left_out = ", ".join(file.name for file in others)
    tell(f"folder {path}", [f"not read: {left_out:.200}"] if left_out else [])
    for file in files:
        yield f"file {file}", read_file(file, gaps)


def _parts(path: Path, values: dict[str, Any]) -> Iterator[tuple[str, dict[str, object]]]:
    """Divide one graph into the clients that its nodes name, with the edges within each."""
    edges, inside = values.get("edge_index"), torch.empty(0, dtype=torch.bool)
    with saying(f"file {path}"):
        who = _owners(values)
        if edges is not None:
            edges = as_tensor("edge_index", edges)
            check_edges(edges, len(who))
    clients = sorted({one for one in who if one is not None}, key=_order)
    number = {one: index for index, one in enumerate(clients)}
    owner = torch.tensor([number.get(one, -1) for one in who])
    if edges is not None:
        inside = owner[edges[0]] == owner[edges[1]]
        edges, numbers = edges[:, inside].long(), inside.nonzero().flatten()  # these, in the file
    left_out = (
        (int((~inside).sum()), "edges between clients"),
        (int((owner < 0).sum()), "nodes without a client"),
    )
    tell(f"file {path}", [f"{count} {what} left out" for count, what in left_out if count])
    for client, name in enumerate(clients):
        rows = (owner == client).nonzero().flatten()
        part = values | {key: _pick(values[key], rows) for key in OF_NODES if key in values}
        if all(values.get(key) is None for key in IDENTITIES):
            part["n_id"] = rows  # every row is a node of its own
        if edges is not None:
            mine = owner[edges[0]] == client
            part["edge_index"] = torch.searchsorted(rows, edges[:, mine])
            said = of_edges(SimpleNamespace(**values), len(inside))
            part |= dict.fromkeys(EDGE_VALUES)
            part |= {key: _pick(one, numbers[mine]) for key, one in said.items()}
        yield f"file {path}, client {name}", part


def _owners(values: Tree) -> list[object]:
    given = values.get(CLIENT)
    if given is None:
        raise DataError(f"no node has a {CLIENT}, which says whose it is")
    check_entries(SimpleNamespace(**values), (CLIENT, *OF_NODES))
    who = given.tolist() if isinstance(given, Tensor) else list(given)
    if any(isinstance(one, list) for one in who) or all(one is None for one in who):
        raise DataError(f"{CLIENT} must be a word or a number a node, at least at one")
    for key in OF_NODES:
        if values.get(key) is not None and len(values[key]) != len(who):
            raise DataError(f"{key} has {len(values[key])} entries, and client {len(who)}")
    return who


def _order(client: Any) -> tuple[bool, int, str]:
    is_number = str(client).isdecimal()
    return not is_number, int(client) if is_number else 0, str(client)


def _pick(value: Any, rows: Tensor) -> object:
    if isinstance(value, Tensor):
        return (value if value.layout == torch.strided else value.to_dense())[rows]
    return value if value is None else [value[row] for row in rows.tolist()]
