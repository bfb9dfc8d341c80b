"""A run's data, assigned to its parties: written as folders, and read by an app.

An app works with all of the run's data, or with its party's folder. A folder has graphs as plain
tensors by name.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from flwr.app import Context
from safetensors.torch import save
from torch import Tensor

from flower_graph import __version__
from flower_graph.config.common import POINT, VALUES, RunConfig
from flower_graph.config.partition import keys_of_others
from flower_graph.data.graph import PARTS, ClientGraph, Graph, take_rows
from flower_graph.data.sources.generators import SIGNAL
from flower_graph.data.sources.names import GRAPH_FILES, has_ending
from flower_graph.errors import ConfigError, DataError, told
from flower_graph.ops.graph import csr_tensor, pointers
from flower_graph.records.participation import numbers, ranges
from flower_graph.storage.files import DATA_FOLDER, PARTITION, PARTITIONS
from flower_graph.storage.formats import load_tensors
from flower_graph.storage.reading import (
    MOST_RECORD,
    MOST_TENSORS,
    Tree,
    parse_json,
    read_bytes,
    read_text,
    reading,
)
from flower_graph.storage.writing import make_folder, replaced, saying

FORMAT = 1  # of the folders; a folder of another format is refused
MANIFEST, TENSORS = "manifest.json", "data.safetensors"
CLIENTS, SERVER = "clients", "server"
KEY = {CLIENTS: DATA_FOLDER, SERVER: "server-folder"}  # where a folder is named
MADE = "give a folder of `flower-graph partition`"
HINT = {
    CLIENTS: f"{MADE}: --node-config 'data-folder=\"/path/client-0000\"'",
    SERVER: f"{MADE}: --run-config 'server-folder=\"/path/server\"'",
}
PLACED = "set --node-config 'partition-id=0 num-partitions=4', from 0 on, or a data-folder"
CLASS_NAMES, DATA_FORM = "class-names", "data-form"
# Keys of ``data`` that do not change a party's data: its folder, and users that came and went
_OTHERS = ("root", "add", "remove")
USERS = "users"
Tensors = dict[str, Tensor]
T = TypeVar("T")
# Of a matrix, besides its values: start and columns of each row, and [rows, columns, is dense].
POINTERS, COLUMNS, FORM = ".pointers", ".columns", ".form"


@dataclass(frozen=True)
class Manifest:
    """The description of a folder."""

    role: str  # "clients" or "server"
    settings: dict[str, object]  # The settings that decide the data (deciding_settings)
    clients: list[int]  # Numbers of the clients whose data are here; none in the server's folder
    num_clients: int  # Clients of the whole run
    features: int  # Of the whole run
    classes: int
    details: Tree = field(default_factory=dict)  # Further entries for one method
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 of each file, by name
    versions: dict[str, str] = field(default_factory=dict)  # Versions of the packages that wrote it
    format: int = FORMAT

    @property
    def app(self) -> str:
        return str(self.settings.get("app"))

    def to_json(self) -> dict[str, object]:
        own = {name.replace("_", "-"): value for name, value in vars(self).items()}
        return {"app": self.app, "fingerprint": fingerprint(self.settings), **own}

    @classmethod
    def from_json(cls, record: Tree) -> Manifest:
        """Read the entries of ``to_json``; any error if they are unfit."""
        if record["format"] != FORMAT:
            raise ValueError(f"format: {record['format']!r:.20} must be {FORMAT}")
        if fingerprint(record["settings"]) != record["fingerprint"]:
            raise ValueError("fingerprint: does not fit the settings")
        values = {}
        for one in fields(cls):
            value = values[one.name] = record[name := one.name.replace("_", "-")]
            kind = {"int": int, "str": str, "list[int]": list}.get(str(one.type), dict)
            if not isinstance(value, kind):
                raise ValueError(f"{name}: {value!r:.40} is unfit")
        result = cls(**values)
        if result.role not in KEY:
            raise ValueError(f"role: {result.role!r:.40} is neither {CLIENTS} nor {SERVER}")
        clients = result.clients
        inside = all(type(one) is int and 0 <= one < result.num_clients for one in clients)
        if not inside or len({*clients}) < len(clients):
            raise ValueError(f"clients: {clients!r:.40} are not different numbers of clients")
        if bad := {*result.files} - {TENSORS}:
            raise ValueError(f"files: {sorted(bad)!r:.60} are none of this format")
        return result


@dataclass(frozen=True)
class RunFolder:
    """A folder that was opened and checked."""

    path: Path  # The folder
    manifest: Manifest  # What it is
    tensors: Tensors  # What it holds, by name

    @property
    def class_names(self) -> list[str] | None:
        """Names of the run's classes, by number; None if the numbers are the names."""
        names: list[str] | None = self.manifest.details.get(CLASS_NAMES)
        return names

    def detail(self, key: str, kind: type[T]) -> T:
        """Read one of the manifest's details; ``DataError`` if it is missing or of another type."""
        value = self.manifest.details.get(key)
        if not isinstance(value, kind):
            raise DataError(f"{self.path / MANIFEST}: details: {key}: {value!r:.40} is unfit")
        return value


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
    held = {key: getattr(graph, key) for key in ("edge_index", "y", *PARTS)}

    def part(users: range) -> Tensors:
        rows = torch.arange(users.start, users.stop)
        return {USERS: rows, **matrix_tensors("x", take_rows(graph.x, rows))}

    n, f = (int(size) for size in graph.x.shape)
    return RunData(n, f, graph.num_classes, part, held, class_names=graph.classes)


# Any: further fields of ``RunData``
def graph_data(graphs: Sequence[ClientGraph], classes: int, **details: Any) -> RunData:
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
        raise ConfigError(f"num-supernodes: {supernodes}: must be 1 to {clients}, one a client")


# Writing ----------------------------------------------------------------------------------------


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
        details = data.client_details | names
        manifest = Manifest(CLIENTS, settings, [*clients], *counts, details, versions=versions)
        folder = folder_name(clients, data.num_clients)
        write_folder(out / folder, manifest, data.part(clients))
        members.append(Member(folder, frozenset(clients)))
    write_members(out / "server" / MEMBERS, members)


def folder_name(clients: range, count: int) -> str:
    """Name a folder by its clients: ``client-0000``, or ``clients-0000-0676``."""
    width = max(4, len(str(count - 1)))
    first, last = (f"{number:0{width}}" for number in (clients[0], clients[-1]))
    return f"client-{first}" if len(clients) == 1 else f"clients-{first}-{last}"


def write_folder(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder that only its owner can read."""
    with saying(path):
        make_folder(path, 0o700, may_exist=False)
    contents = {}
    if tensors:
        # Copies: safetensors takes neither views nor two names for one tensor.
        contents[TENSORS] = save({name: t.contiguous().clone() for name, t in tensors.items()})
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    record = manifest.to_json() | {"files": files}
    contents[MANIFEST] = (json.dumps(record, indent=2) + "\n").encode()
    for name, content in contents.items():
        with saying(path / name), replaced(path / name) as stream:
            stream.write(content)


def deciding_settings(config: Tree) -> dict[str, object]:
    """Return the settings that decide each party's data, by dotted key."""
    data = {key: value for key, value in config["data"].items() if key not in _OTHERS}
    # A new key at its default decides nothing; the first is of generated graphs only
    for key, default in (("signal", SIGNAL), ("decimal", POINT), ("label", None), ("weight", None)):
        if data.get(key) == default:
            data.pop(key, None)
    if data.get("split_seed", 0) is None:
        data["split_seed"] = config["seed"]
    result = {f"data.{key}": value for key, value in data.items()}
    name = str(config["data"]["name"])
    if has_ending(name, ("/", *GRAPH_FILES)) or name.startswith(("/", ".", "~")):
        result["data.name"] = PurePath(name).name
    partition = dict(config.get("partition", {}))
    own_seed = partition.pop("seed", None)
    # Keys that play no part decide nothing.
    if "method" in partition:
        others = keys_of_others(partition["method"])
        partition = {key: value for key, value in partition.items() if key not in others}
    if not partition.get("every_node", True):
        del partition["every_node"]
    result |= {f"partition.{key}": value for key, value in partition.items()}
    if "graphless_ratio" in config.get("graph", {}):
        result["graph.graphless_ratio"] = config["graph"]["graphless_ratio"]
    if config.get("task") == VALUES:
        result["task"] = VALUES
    seed = config["seed"] if own_seed is None else own_seed
    return {"app": config["app"], "seed": seed, **result}


def fingerprint(settings: Mapping[str, object]) -> str:
    """Return the SHA-256 of settings, as hexadecimal digits."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# Reading ----------------------------------------------------------------------------------------


def client_folder(config: RunConfig, context: Context) -> RunFolder | None:
    """Open the folder that a SuperNode's ``data-folder`` names."""
    given = context.node_config.get(DATA_FOLDER)
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise ConfigError(f"node-config {DATA_FOLDER}: {given!r} is no folder; {HINT[CLIENTS]}")
    return _open(config, Path(given), CLIENTS)


def server_folder(config: RunConfig, given: str) -> RunFolder | None:
    """Open the folder that the run config's ``server-folder`` names; None without one."""
    # The server then reads nothing else. ``DataError`` if the folder cannot be used.
    return _open(config, Path(given), SERVER) if given else None


def graphs_of(folder: RunFolder, kind: type[T]) -> list[T]:
    """Read the graphs of a folder's clients, which are of one class."""
    with reading(folder.path, DataError, "is incomplete; make the folder anew"):
        return [read_graph(kind, client, folder.tensors) for client in folder.manifest.clients]


def share(context: Context, count: int) -> slice:
    """Return which clients a SuperNode hosts: ranges of nearly equal size."""
    numbers = []
    for key in (PARTITION, PARTITIONS):
        value: object = context.node_config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            error = ConfigError(f"node-config {key}: {value!r:.60} is no whole number; {PLACED}")
            raise told(error, f"node-config {key}: is no whole number; {PLACED}")
        numbers.append(value)
    part, parts = numbers
    check_supernodes(parts, count)
    if not 0 <= part < parts:
        why = f"must be at least 0 and below {PARTITIONS}; {PLACED}"
        error = ConfigError(f"node-config {PARTITION}: {part} with {PARTITIONS}: {parts}; {why}")
        raise told(error, f"node-config {PARTITION}: {why}")
    here = assigned(part, parts, count)
    return slice(here.start, here.stop)


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


def open_folder(path: Path, settings: Mapping[str, object], role: str) -> RunFolder:
    """Open a folder, and check that it is whole and of this run."""
    label = f"{KEY[role]} {path}"
    if not path.is_dir():
        error = DataError(f"{label}: there is no such folder; {HINT[role]}")
        raise told(error, f"{KEY[role]}: cannot be used")
    file = path / MANIFEST
    with reading(file, DataError, f"cannot be used; {HINT[role]}"):
        manifest = Manifest.from_json(parse_json(read_bytes(file, 4 * MOST_RECORD)))
    if manifest.role != role:
        raise DataError(f"{label}: it is for {KEY[manifest.role]}; {HINT[role]}")
    theirs = manifest.settings
    keys = ["app"] if manifest.app != settings["app"] else sorted({*theirs, *settings})
    if differing := [key for key in keys if theirs.get(key) != settings.get(key)]:
        each = [f"{k} is {theirs.get(k)!r}, this run's is {settings.get(k)!r}" for k in differing]
        error = DataError(f"{label}: data folder of another run: {'; '.join(each)}; {MADE}")
        raise told(error, f"{KEY[role]}: data folder of another run: {', '.join(differing)}")
    tensors: Tensors = {}
    for name, digest in manifest.files.items():
        with reading(path / name, DataError, "cannot be used; copy the whole folder again"):
            content = read_bytes(path / name, MOST_TENSORS)
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError("its SHA-256 is not that of the manifest")
            tensors |= load_tensors(content)[0]
    return RunFolder(path, manifest, tensors)


# Tensors ----------------------------------------------------------------------------------------


def matrix_tensors(name: str, x: Tensor) -> Tensors:
    """Write a matrix of features as its non-zero entries."""
    # x [n, f]
    is_dense = x.layout == torch.strided
    if is_dense and 3 * int(x.count_nonzero()) > x.numel():
        return {name: x}
    form = torch.tensor([*x.shape, int(is_dense)])
    if is_dense:
        row, column = x.nonzero(as_tuple=True)
        x = csr_tensor(pointers(row, len(x)), column, x[row, column], (x.size(0), x.size(1)))
    parts = x.values(), x.crow_indices(), x.col_indices(), form
    return dict(zip(_entries(name), parts, strict=True))


def read_matrix(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Read the output of :func:`matrix_tensors`; the same matrix in the same layout."""
    if name + FORM not in tensors:
        return tensors[name]
    values, start, column, form = (tensors[key] for key in _entries(name))
    rows, columns, is_dense = form.tolist()
    csr = csr_tensor(start, column, values, (rows, columns))
    return csr.to_dense() if is_dense else csr


def _entries(name: str) -> tuple[str, str, str, str]:
    return name, name + POINTERS, name + COLUMNS, name + FORM


def graph_tensors(graph: ClientGraph) -> Tensors:
    """Write one client's graph."""
    result: Tensors = {}
    for key, value in vars(graph).items():
        if isinstance(value, int):
            result[key] = torch.tensor(value)
        elif isinstance(value, Tensor):
            result |= matrix_tensors(key, value) if key == "x" else {key: value}
        elif value is not None:  # words, such as nodes' names
            result[key] = torch.tensor([*json.dumps(value).encode()], dtype=torch.uint8)
    return result


def read_graph(kind: type[T], client: int, tensors: Mapping[str, Tensor]) -> T:
    """Read one client's graph; ``KeyError`` if the tensors lack a field."""
    start = f"{client}."
    local = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
    values: dict[str, object] = {}
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in local and "None" in str(one.type):
            values[one.name] = None
        elif one.name == "x":
            values["x"] = read_matrix("x", local)
        elif one.type in ("int", int):
            values[one.name] = int(local[one.name])
        elif "tuple" in str(one.type):
            values[one.name] = tuple(json.loads(bytes(local[one.name].tolist())))
        else:
            values[one.name] = local[one.name]
    return kind(**values)


# Members: which client numbers each SuperNode may speak for ---------------------------------------

MEMBERS = "members.csv"
HEAD = ("folder", "clients", "node-id")
MOST_CLIENTS = 2**20  # of one SuperNode, as at enrolment


@dataclass(frozen=True)
class Member:
    """One SuperNode of the list.

    Parameters
    ----------
    folder : str
        The data folder that it was given.
    clients : frozenset of int
        The client numbers that it may speak for.
    node : int, optional
        Its id in Flower, as ``flwr supernode register`` prints it; None: any SuperNode's.
    """

    folder: str
    clients: frozenset[int]
    node: int | None = None


def write_members(path: Path, members: Iterable[Member]) -> None:
    """Write the list, readable by its owner alone, like all of a data folder."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(HEAD)
    for one in members:
        rows.writerow([one.folder, ranges(one.clients), "" if one.node is None else one.node])
    with saying(path), replaced(path) as stream:
        stream.write(text.getvalue().encode())


def read_members(folder: Path) -> tuple[Member, ...] | None:
    """Read the list of a server's folder, in the file's order; None if it has none.

    ``DataError`` if the list cannot be read, or has a client number or a node id twice.
    """
    path = folder / MEMBERS
    if not path.exists():
        return None
    with reading(path, DataError, "is no list of members"):
        head, *rows = csv.reader(io.StringIO(read_text(path, MOST_RECORD)))
        if tuple(head) != HEAD:
            raise ValueError(f"its first line is not {','.join(HEAD)}")
        members = tuple(_member(row) for row in rows if row)
        clients = [("client", client) for one in members for client in one.clients]
        nodes = [("node-id", one.node) for one in members if one.node is not None]
        for (what, number), times in Counter([*clients, *nodes]).items():
            if times > 1:
                raise ValueError(f"{what} {number} is there {times} times")
    return members


def _member(row: list[str]) -> Member:
    folder, clients, node = (entry.strip() for entry in row)
    if node and not (node.isascii() and node.isdigit() and int(node[:21]) < 2**64):
        raise ValueError(f"node-id: {node!r:.40} is no id of a SuperNode")
    numbered = frozenset(numbers(clients.replace(" ", ""), MOST_CLIENTS))
    return Member(folder, numbered, int(node) if node else None)
