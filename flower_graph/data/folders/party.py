"""A run's data, assigned to its parties: written as folders, and read by an app.

An app works with all of the run's data, or with its party's folder. A folder has graphs as plain
tensors by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import Context
from torch import Tensor

from flower_graph import __version__
from flower_graph.config.common import RunConfig
from flower_graph.data.folders.members import MEMBERS, Member, write_members
from flower_graph.data.folders.run_folder import (
    CLASS_NAMES,
    CLIENTS,
    MANIFEST,
    SERVER,
    Manifest,
    RunFolder,
    deciding_settings,
    open_folder,
    write_folder,
)
from flower_graph.data.graph import Graph, HeldGraph, take_rows
from flower_graph.errors import ConfigError, DataError, told
from flower_graph.ops.graph import csr_tensor, pointers
from flower_graph.storage.places import DATA_FOLDER, PARTITION, PARTITIONS

HINT = (
    "start the SuperNode with --node-config 'partition-id=0 num-partitions=4', with numbers from 0 "
    "on, or with a data-folder of its own"
)
USERS = "users"
Tensors = dict[str, Tensor]
T = TypeVar("T")
# Of a matrix, besides its values: start and columns of each row, and [rows, columns, is dense].
POINTERS, COLUMNS, FORM = ".pointers", ".columns", ".form"


@dataclass(frozen=True)
class RunData:
    """The data of a run's parties."""

    num_clients: int  # Of the whole run
    features: int
    classes: int
    # Returns the tensors of the clients in a range of numbers
    part: Callable[[range], Tensors]
    server: Tensors = field(default_factory=dict)  # The tensors of the server
    # Further entries that the method's app needs
    server_details: dict[str, object] = field(default_factory=dict)
    client_details: dict[str, object] = field(default_factory=dict)
    class_names: Sequence[str] | None = None  # By number; None: the numbers themselves


def node_data(graph: Graph) -> RunData:
    """Assign each client one node's features, and the server edges, labels and masks."""
    held = {"edge_index": graph.edge_index, "y": graph.y}
    masks = {part: getattr(graph, part) for part in ("train_mask", "val_mask", "test_mask")}

    def part(users: range) -> Tensors:
        rows = torch.arange(users.start, users.stop)
        return {USERS: rows, **matrix_tensors("x", take_rows(graph.x, rows))}

    n, f = (int(size) for size in graph.x.shape)
    return RunData(n, f, graph.num_classes, part, held | masks, class_names=graph.classes)


# Any: further fields of ``RunData``
def graph_data(graphs: Sequence[HeldGraph], classes: int, **details: Any) -> RunData:
    """Assign each client its graph; the server gets only counts."""

    def part(clients: range) -> Tensors:
        return {
            f"{client}.{name}": tensor
            for client in clients
            for name, tensor in graph_tensors(graphs[client]).items()
        }

    return RunData(len(graphs), int(graphs[0].x.shape[1]), classes, part, **details)


def assigned(part: int, parts: int, count: int) -> range:
    """Return which of `count` clients the SuperNode `part` of `parts` hosts: a range."""
    return range(part * count // parts, (part + 1) * count // parts)


def check_supernodes(supernodes: int, clients: int) -> None:
    """Refuse fewer than one SuperNode, and more SuperNodes than clients."""
    if not 1 <= supernodes <= clients:
        raise ConfigError(
            f"num-supernodes: {supernodes} SuperNodes for {clients} clients; at most one each, "
            "and at least 1 in all"
        )


def write_run(out: Path, settings: dict[str, object], data: RunData, supernodes: int) -> None:
    """Write the folder of every party: ``server``, and one for each SuperNode."""
    check_supernodes(supernodes, data.num_clients)
    counts = (data.num_clients, data.features, data.classes)
    names = {} if data.class_names is None else {CLASS_NAMES: list(data.class_names)}
    versions = {"flower-graph": __version__, "torch": torch.__version__}
    server = Manifest(SERVER, settings, [], *counts, data.server_details | names, versions=versions)
    write_folder(out / "server", server, data.server)
    members = list[Member]()
    for number in range(supernodes):
        clients = assigned(number, supernodes, data.num_clients)
        manifest = Manifest(
            CLIENTS, settings, [*clients], *counts, data.client_details | names, versions=versions
        )
        folder = folder_name(clients, data.num_clients)
        write_folder(out / folder, manifest, data.part(clients))
        members.append(Member(folder, frozenset(clients)))
    write_members(out / "server" / MEMBERS, members)


def folder_name(clients: range, count: int) -> str:
    """Name a folder by its clients: ``client-0000``, or ``clients-0000-0676``."""
    width = max(4, len(str(count - 1)))
    first, last = (f"{number:0{width}}" for number in (clients[0], clients[-1]))
    return f"client-{first}" if len(clients) == 1 else f"clients-{first}-{last}"


def matrix_tensors(name: str, x: Tensor) -> Tensors:
    """Write a matrix of features as its non-zero entries."""
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
    """Read the output of :func:`matrix_tensors`; the same matrix in the same layout."""
    if name + FORM not in tensors:
        return tensors[name]
    rows, columns, is_dense = tensors[name + FORM].tolist()
    start, column, values = (tensors[key] for key in (name + POINTERS, name + COLUMNS, name))
    if not is_dense:
        return csr_tensor(start, column, values, (rows, columns))
    x = torch.zeros(rows, columns, dtype=values.dtype)
    x[torch.repeat_interleave(start.diff()), column] = values
    return x


# Any: a method's own dataclass
def graph_tensors(graph: Any) -> Tensors:
    """Write one client's graph: ``EgoNetwork``, ``ClientGraph`` or ``OverlappingGraph``."""
    result: Tensors = {}
    for one in fields(graph):
        value = getattr(graph, one.name)
        if isinstance(value, int):
            result[one.name] = torch.tensor(value)
        elif isinstance(value, Tensor):
            result |= matrix_tensors("x", value) if one.name == "x" else {one.name: value}
        elif value is not None:  # words, such as nodes' names
            result[one.name] = torch.tensor([*json.dumps(value).encode()], dtype=torch.uint8)
    return result


def read_graph(kind: type[T], client: int, tensors: Mapping[str, Tensor], where: object) -> T:
    """Read one client's graph."""
    start = f"{client}."
    local = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
    values: dict[str, object] = {}
    try:
        for one in fields(kind):  # type: ignore[arg-type]
            if one.name == "x":
                values["x"] = read_matrix("x", local)
            elif one.type in ("int", int):
                values[one.name] = int(local[one.name])
            elif "tuple" in str(one.type):
                text = bytes(local[one.name].tolist()) if one.name in local else b"null"
                values[one.name] = tuple(json.loads(text) or ()) or None
            else:
                needed = "None" not in str(one.type)
                values[one.name] = local[one.name] if needed else local.get(one.name)
    except KeyError as error:
        raise DataError(
            f"{where}: client {client}: {error} is missing; make the folder anew with "
            "`flower-graph partition`"
        ) from error
    return kind(**values)


def client_folder(config: RunConfig, context: Context) -> RunFolder | None:
    """Open the folder that a SuperNode's ``data-folder`` names."""
    given = context.node_config.get(DATA_FOLDER)
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise ConfigError(
            f"node-config {DATA_FOLDER}: {given!r} is no folder; write "
            f"--node-config '{DATA_FOLDER}=\"/path/client-0000\"'"
        )
    return _open(config, Path(given), CLIENTS)


def server_folder(config: RunConfig, given: str) -> RunFolder | None:
    """Open the folder that the run config's ``server-folder`` names; None without one."""
    # The server then reads nothing else. ``DataError`` if the folder cannot be used.
    return _open(config, Path(given), SERVER) if given else None


def graphs_of(folder: RunFolder, kind: type[T]) -> list[T]:
    """Read the graphs of a folder's clients, which are of one class."""
    clients = folder.manifest.clients
    return [read_graph(kind, client, folder.tensors, folder.path) for client in clients]


def share(context: Context, count: int) -> slice:
    """Return which clients a SuperNode hosts: ranges of nearly equal size."""
    part, parts = (_whole(context, key) for key in (PARTITION, PARTITIONS))
    check_supernodes(parts, count)
    if not 0 <= part < parts:
        error = ConfigError(
            f"node-config {PARTITION}: {part} with {PARTITIONS}: {parts}; must be at least 0 and "
            f"below {parts}; {HINT}"
        )
        words = f"must be at least 0 and below {PARTITIONS}; {HINT}"
        raise told(error, f"node-config {PARTITION}: {words}")
    here = assigned(part, parts, count)
    return slice(here.start, here.stop)


def _whole(context: Context, key: str) -> int:
    value: object = context.node_config.get(key)
    if value is None:
        message = f"node-config {key}: is missing; {HINT}"
        raise told(ConfigError(message), message)
    if not isinstance(value, int) or isinstance(value, bool):
        error = ConfigError(f"node-config {key}: {value!r:.60} is no whole number; {HINT}")
        raise told(error, f"node-config {key}: is no whole number; {HINT}")
    return value


def _open(config: RunConfig, path: Path, role: str) -> RunFolder:
    path = path.expanduser().absolute()
    settings = json.dumps(deciding_settings(asdict(config)))
    manifest = path / MANIFEST
    saved = manifest.stat().st_mtime_ns if manifest.is_file() else 0
    return _opened(path, settings, role, saved)


@lru_cache(maxsize=64)
def _opened(path: Path, settings: str, role: str, saved: int) -> RunFolder:
    """Open a folder once a process; with `saved`, a changed folder is read again."""
    return open_folder(path, json.loads(settings), role)
