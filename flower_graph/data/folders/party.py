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
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from flwr.app import Context
from safetensors.torch import save
from torch import Tensor

from flower_graph import __version__
from flower_graph.config.common import VALUES, RunConfig, keys_of_others
from flower_graph.data.graph import PARTS, ClientGraph, Graph, take_rows
from flower_graph.data.sources.datasets import saved_at
from flower_graph.data.sources.names import GRAPH_FILES, has_ending
from flower_graph.errors import ConfigError, DataError, told
from flower_graph.ops.graph import compact, csr_tensor
from flower_graph.records.participation import numbers, ranges
from flower_graph.storage.files import (
    DATA_FOLDER,
    PARTITION,
    PARTITIONS,
    make_folder,
    replaced,
    saying,
)
from flower_graph.storage.formats import load_tensors
from flower_graph.storage.reading import (
    MOST_RECORD,
    MOST_TENSORS,
    Tree,
    read_bytes,
    read_json,
    read_text,
    reading,
)

if TYPE_CHECKING:
    from flower_graph.data.folders.client_folder import Clients

FORMAT = 2  # of the folders; a folder of another format is refused
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
# Entries of the manifest that are a folder's own fields
KINDS: dict[str, type] = {
    "role": str, "settings": dict, "clients": list, "num_clients": int, "features": int,
    "classes": int, "details": dict,
}  # fmt: skip
Tensors = dict[str, Tensor]
T = TypeVar("T")
# Of a matrix, besides its values: start and columns of each row, and [rows, columns, is dense].
ENDINGS = ("", ".pointers", ".columns", FORM := ".form")


@dataclass(frozen=True)
class RunFolder:
    """One party's folder: its part of a run's data, and what it needs of the whole."""

    role: str  # "clients" or "server"
    settings: dict[str, object]  # those that decide the data (deciding_settings)
    clients: list[int]  # numbers of the clients whose data are here; none in the server's folder
    num_clients: int  # of the whole run, as the next two
    features: int
    classes: int
    details: Tree = field(default_factory=dict)  # further entries for one method
    tensors: Tensors = field(default_factory=dict)  # by name
    path: Path = Path()  # where it was read

    @property
    def class_names(self) -> list[str] | None:
        """Names of the run's classes, by number; None if the numbers are the names."""
        names: list[str] | None = self.details.get(CLASS_NAMES)
        return names

    def detail(self, key: str, kind: type[T]) -> T:
        """Read one of the details; ``DataError`` if it is missing or of another type."""
        value = self.details.get(key)
        if not isinstance(value, kind):
            raise DataError(f"{self.path / MANIFEST}: details: {key}: {value!r:.40} is unfit")
        return value


@dataclass(frozen=True)
class RunData:
    """The data of a run's parties."""

    server: RunFolder  # without the settings; its counts and class names are the clients' too
    part: Callable[[range], Tensors]  # returns the tensors of the clients in a range of numbers
    client_details: Tree = field(default_factory=dict)


def node_data(graph: Graph, *, labels: bool = False) -> RunData:
    """Assign each client one node's features, and the server edges, labels and masks.

    With ``labels`` a client has its own, too.
    """

    def part(users: range) -> Tensors:
        rows = torch.arange(users.start, users.stop)
        own = {"y": graph.y[rows]} if labels else {}
        return {USERS: rows, **own, **matrix_tensors("x", take_rows(graph.x, rows))}

    (n, f), names = graph.x.shape, _names(graph.classes)
    held = {key: getattr(graph, key) for key in ("edge_index", "y", *PARTS)}
    return RunData(RunFolder(SERVER, {}, [], n, f, graph.num_classes, names, held), part, names)


def graph_data(graphs: Clients, server: Tree | None = None, clients: Tree | None = None) -> RunData:
    """Assign each client its graph; the server gets only counts, and both get further details."""

    def part(numbers: range) -> Tensors:
        each = ((client, graph_tensors(graphs[client])) for client in numbers)
        return {f"{client}.{name}": tensor for client, own in each for name, tensor in own.items()}

    counts = len(graphs), int(graphs[0].x.shape[1]), graphs.num_classes
    names = _names(graphs.classes)
    common = RunFolder(SERVER, {}, [], *counts, {**(server or {}), **names})
    return RunData(common, part, {**(clients or {}), **names})


def _names(classes: Sequence[str] | None) -> Tree:
    return {} if classes is None else {CLASS_NAMES: [*classes]}


def assigned(part: int, parts: int, count: int) -> range:
    """Return which of `count` clients the SuperNode `part` of `parts` hosts: a range."""
    return range(part * count // parts, (part + 1) * count // parts)


def check_supernodes(supernodes: int, clients: int) -> None:
    """Refuse fewer than one SuperNode, and more SuperNodes than clients."""
    if not 1 <= supernodes <= clients:
        raise ConfigError(f"num-supernodes: {supernodes}: must be 1 to {clients}, one a client")


# Writing ----------------------------------------------------------------------------------------


def write_run(out: Path, settings: dict[str, object], data: RunData, supernodes: int) -> None:
    """Write the folders ``server``, and ``client-0000`` or ``clients-0000-0676`` by SuperNode."""
    server, members = replace(data.server, settings=settings), list[Member]()
    check_supernodes(supernodes, server.num_clients)
    write_folder(out / SERVER, server)
    width = max(4, len(str(server.num_clients - 1)))
    for number in range(supernodes):
        clients = assigned(number, supernodes, server.num_clients)
        ends = "-".join(f"{client:0{width}}" for client in sorted({clients[0], clients[-1]}))
        folder = f"client{'s' * (len(clients) > 1)}-{ends}"
        own = replace(server, role=CLIENTS, clients=[*clients], details=data.client_details)
        write_folder(out / folder, replace(own, tensors=data.part(clients)))
        members.append(Member(folder, frozenset(clients)))
    write_members(out / SERVER / MEMBERS, members)


def write_folder(path: Path, folder: RunFolder) -> None:
    """Write a folder that only its owner can read."""
    contents, record = {}, {name: getattr(folder, name) for name in KINDS}
    if folder.tensors:
        # Copies: safetensors takes neither views nor two names for one tensor.
        contents[TENSORS] = save({key: t.contiguous().clone() for key, t in folder.tensors.items()})
    record["sha256"] = {key: hashlib.sha256(one).hexdigest() for key, one in contents.items()}
    record["versions"] = {"flower-graph": __version__, "torch": torch.__version__}
    contents[MANIFEST] = (json.dumps({"format": FORMAT, **record}, indent=2) + "\n").encode()
    with saying(path):
        make_folder(path, 0o700, may_exist=False)
        for name, content in contents.items():
            with replaced(path / name) as stream:
                stream.write(content)


def deciding_settings(config: Tree) -> dict[str, object]:
    """Return the settings that decide each party's data, by dotted key."""
    data = {key: value for key, value in config["data"].items() if key not in _OTHERS}
    if data.get("split_seed", 0) is None:
        data["split_seed"] = config["seed"]
    name, partition = str(data["name"]), dict(config.get("partition", {}))
    if has_ending(name, "/", *GRAPH_FILES) or name.startswith(("/", ".", "~")):
        data["name"] = PurePath(name).name
    own_seed = partition.pop("seed", None)
    # Keys that play no part decide nothing.
    if "method" in partition:
        others = keys_of_others(partition["method"])
        partition = {key: value for key, value in partition.items() if key not in others}
    result = {"app": config["app"], "seed": config["seed"] if own_seed is None else own_seed}
    result |= {f"data.{key}": value for key, value in data.items()}
    result |= {f"partition.{key}": value for key, value in partition.items()}
    if "graphless_ratio" in config.get("graph", {}):
        result["graph.graphless_ratio"] = config["graph"]["graphless_ratio"]
    return result | ({"task": VALUES} if config.get("task") == VALUES else {})


# Reading ----------------------------------------------------------------------------------------


def client_folder(config: RunConfig, context: Context) -> RunFolder | None:
    """Open the folder that a SuperNode's ``data-folder`` names."""
    given = context.node_config.get(DATA_FOLDER)
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise ConfigError(f"node-config {DATA_FOLDER}: {given!r} is no folder; {HINT[CLIENTS]}")
    return _open(config, given, CLIENTS)


def server_folder(config: RunConfig, given: str) -> RunFolder | None:
    """Open the folder that the run config's ``server-folder`` names; None without one."""
    # The server then reads nothing else. ``DataError`` if the folder cannot be used.
    return _open(config, given, SERVER) if given else None


def _open(config: RunConfig, given: str, role: str) -> RunFolder:
    path, settings = Path(given).expanduser().absolute(), deciding_settings(asdict(config))
    return _opened(path, json.dumps(settings), role, saved_at(str(path / MANIFEST)))


@lru_cache(maxsize=64)
def _opened(path: Path, settings: str, role: str, saved: int) -> RunFolder:
    # With ``saved``, a folder that was changed is read again
    return open_folder(path, json.loads(settings), role)


def graphs_of(folder: RunFolder) -> list[ClientGraph]:
    """Read the graphs of a folder's clients."""
    with reading(folder.path, DataError, "is incomplete; make the folder anew"):
        return [read_graph(client, folder.tensors) for client in folder.clients]


def share(context: Context, count: int) -> slice:
    """Return which clients a SuperNode hosts: ranges of nearly equal size."""

    def number(key: str, most: int) -> int:
        value = context.node_config.get(key)
        if type(value) is int and (key == PARTITIONS or 0 <= value < most):
            return value
        why = f"must be a whole number, and {PARTITION} below {PARTITIONS}; {PLACED}"
        error = ConfigError(f"node-config {key}: {value!r:.60} {why}")
        raise told(error, f"node-config {key}: {why}")

    parts = number(PARTITIONS, 0)
    check_supernodes(parts, count)
    here = assigned(number(PARTITION, parts), parts, count)
    return slice(here.start, here.stop)


def open_folder(path: Path, settings: Mapping[str, object], role: str) -> RunFolder:
    """Open a folder, and check that it is whole and of this run."""
    label, file = f"{KEY[role]} {path}", path / MANIFEST
    if not path.is_dir():
        error = DataError(f"{label}: there is no such folder; {HINT[role]}")
        raise told(error, f"{KEY[role]}: cannot be used")
    with reading(file, DataError, f"cannot be used; {HINT[role]}"):
        record = read_json(file, 4 * MOST_RECORD)
        if record["format"] != FORMAT or record["role"] != role:
            found = f"format: {record['format']!r:.20}, role: {record['role']!r:.40}"
            raise ValueError(f"{found}: must be {FORMAT} and {role!r}")
        for name, kind in (KINDS | {"sha256": dict}).items():
            if not isinstance(record[name], kind):
                raise ValueError(f"{name}: {record[name]!r:.40} is unfit")
        own, digest = {name: record[name] for name in KINDS}, record["sha256"].get(TENSORS)
        clients, count = own["clients"], own["num_clients"]
        inside = all(type(one) is int and 0 <= one < count for one in clients)
        if not inside or len({*clients}) < len(clients):
            raise ValueError(f"clients: {clients!r:.40} are not different numbers of clients")
    theirs = own["settings"]
    keys = sorted({*theirs, *settings}) if theirs.get("app") == settings["app"] else ["app"]
    if differing := [key for key in keys if theirs.get(key) != settings.get(key)]:
        each = [f"{k} is {theirs.get(k)!r}, this run's is {settings.get(k)!r}" for k in differing]
        error = DataError(f"{label}: data folder of another run: {'; '.join(each)}; {MADE}")
        raise told(error, f"{KEY[role]}: data folder of another run: {', '.join(differing)}")
    tensors: Tensors = {}
    if digest is not None:
        with reading(path / TENSORS, DataError, "cannot be used; copy the whole folder again"):
            content = read_bytes(path / TENSORS, MOST_TENSORS)
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError("its SHA-256 is not that of the manifest")
            tensors = load_tensors(content)[0]
    return RunFolder(**own, tensors=tensors, path=path)


# Tensors ----------------------------------------------------------------------------------------


def matrix_tensors(name: str, x: Tensor) -> Tensors:
    """Write a matrix ``[n, f]`` as it is, or, if it has many zeros, as its other entries."""
    if (held := compact(x)).layout == torch.strided:
        return {name: held}
    is_dense, columns = x.layout == torch.strided, held.col_indices()
    form = torch.tensor([*x.shape, int(is_dense)])
    parts = held.values(), held.crow_indices(), columns.long() if is_dense else columns, form
    return dict(zip([name + ending for ending in ENDINGS], parts, strict=True))


def read_matrix(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Read the output of :func:`matrix_tensors`; the same matrix in the same layout."""
    if name in tensors and name + FORM not in tensors:
        return tensors[name]
    values, start, column, form = (tensors[name + ending] for ending in ENDINGS)
    rows, columns, is_dense = form.tolist()
    matrix = csr_tensor(start, column, values, (rows, columns))
    return matrix.to_dense() if is_dense else matrix


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


def read_graph(client: int, tensors: Mapping[str, Tensor]) -> ClientGraph:
    """Read one client's graph; ``TypeError`` if the tensors lack a field."""
    start = f"{client}."
    local = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
    values: dict[str, Any] = {"edge_index": None, "hidden_edges": None}
    values |= {name: tensor for name, tensor in local.items() if "." not in name}
    for key in {"called", "names"} & {*local}:
        values[key] = tuple(json.loads(bytes(local[key].tolist())))
    return ClientGraph(**values | {"x": read_matrix("x", local), "client": int(local["client"])})


# Members: which client numbers each SuperNode may speak for ---------------------------------------

MEMBERS = "members.csv"
HEAD = ("folder", "clients", "node-id")
MOST_CLIENTS = 2**20  # of one SuperNode, as at enrolment


class Member(NamedTuple):
    """One SuperNode of the list."""

    folder: str  # the data folder that it was given
    clients: frozenset[int]  # the client numbers that it may speak for
    node: int | None = None  # its id in Flower (`flwr supernode register`); None: any SuperNode's


def write_members(path: Path, members: Iterable[Member]) -> None:
    """Write the list, readable by its owner alone, like all of a data folder."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows([HEAD, *((one.folder, ranges(one.clients), one.node) for one in members)])
    with saying(path), replaced(path) as stream:
        stream.write(text.getvalue().encode())


def read_members(folder: Path) -> tuple[Member, ...] | None:
    """Read the list of a server's folder, in the file's order; None if it has none.

    ``DataError`` if the list cannot be read, or has a client number or a node id twice.
    """
    path, members = folder / MEMBERS, list[Member]()
    if not path.exists():
        return None
    with reading(path, DataError, "is no list of members"):
        head, *rows = csv.reader(io.StringIO(read_text(path, MOST_RECORD)))
        if tuple(head) != HEAD:
            raise ValueError(f"its first line is not {','.join(HEAD)}")
        for row in filter(None, rows):
            name, clients, node = (entry.strip() for entry in row)
            if node and not (node.isascii() and node.isdigit() and int(node[:21]) < 2**64):
                raise ValueError(f"node-id: {node!r:.40} is no id of a SuperNode")
            numbered = frozenset(numbers(clients.replace(" ", ""), MOST_CLIENTS))
            members.append(Member(name, numbered, int(node) if node else None))
        every = Counter(("client", client) for one in members for client in one.clients)
        every.update(("node-id", one.node) for one in members if one.node is not None)
        for (what, number), times in every.most_common(1):
            if times > 1:
                raise ValueError(f"{what} {number} is there {times} times")
    return tuple(members)
