"""Data sets through the loaders of PyTorch Geometric (PyG) and ogb, and graphs that users saved.

PyG writes next to the raw files that it reads. So the raw files of one set are
copied into a folder of the cache, and PyG is given that folder.

Some raw files are pickles (those of Planetoid), which PyG loads as such. A data root
has to be trusted, other than a file that ``data.name`` names: one saved by ``torch.save``.
The package ``ogb`` is an optional dependency.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from flower_graph.data.description import ONE_KIND, Caution, as_graph, saying
from flower_graph.data.graph import Graph
from flower_graph.data.sources.cache import (
    cached_folder,
    check_reachable,
    copy_tree,
    fingerprint,
    missing_message,
    stall_limit,
)
from flower_graph.data.sources.duplicates import without_duplicates
from flower_graph.data.sources.graphml import read_graphml
from flower_graph.data.sources.names import PygName, check_graph_file
from flower_graph.data.sources.tables import CLIENT, read_node_link, read_tables
from flower_graph.errors import DataError
from flower_graph.storage.pickled import load_saved
from flower_graph.storage.reading import MOST_TENSORS, open_regular, reading, reason

if TYPE_CHECKING:
    from torch_geometric.data import InMemoryDataset

OGB_SPLITS = {"ogbn-arxiv": "time", "ogbn-products": "sales_ranking"}
OGB_FILES = (
    "RELEASE_v1.txt",
    *(f"raw/{name}.csv.gz" for name in ("edge", "node-feat", "node-label")),
    *(f"raw/num-{name}-list.csv.gz" for name in ("node", "edge")),
)
READERS = {".json": read_node_link, ".graphml": read_graphml}  # others by torch.load


class _RawFilesWantedError(Exception):
    """Carries what a loader looks for; ends it before it does anything."""


@dataclass(frozen=True)
class _RawFiles:
    """Raw folder of a loader and its files, relative to the root that it was given."""

    folder: PurePath
    files: tuple[PurePath, ...]


def load_pyg(
    name: PygName, *, root: Path | None, download: bool, options: Mapping[str, object] | None = None
) -> Graph:
    """Load a single-graph node-classification set through its PyG class."""
    label = "/".join(part for part in name.raw if part)
    cls = _dataset_class(name.group)
    arguments = _arguments(cls, name.raw, options or {})
    if cls.__name__ == "KarateClub":  # part of PyG's code: no files
        return _graph(_call(cls, arguments, label), label)
    if "root" not in inspect.signature(cls.__init__).parameters:
        # These draw from the global random numbers: another graph each time.
        raise DataError(f"data set {label!r} is generated, not loaded; data.name=csbm generates")
    raw = _raw_files(cls, arguments, label)
    folder = _prepared(cls, arguments, raw, label, root, download)
    try:
        dataset = _call(cls, {"root": str(folder), **arguments}, label)
        return _graph(dataset, label, filtered=name != name.raw)
    except DataError as error:
        raise DataError(f"{error} (read from the cache folder {folder})") from error


def _dataset_class(group: str) -> type[InMemoryDataset]:
    import torch_geometric.datasets as datasets
    from torch_geometric.data import InMemoryDataset

    cls = getattr(datasets, group)
    if not (inspect.isclass(cls) and issubclass(cls, InMemoryDataset)):
        raise DataError(f"data set {group!r} is not a graph that PyG keeps in memory")
    return cls


def _arguments(
    cls: type[InMemoryDataset], name: PygName, options: Mapping[str, object]
) -> dict[str, object]:
    parameters = inspect.signature(cls.__init__).parameters
    arguments = dict(options)
    # Named here, because PyG warns where it is left out.
    if name.group == "WikiCS":
        arguments["is_undirected"] = True
    if name.member is not None:
        if "name" not in parameters:
            raise DataError(f"data set {name.group!r} takes no name, but {name.member!r} is given")
        arguments["name"] = name.member
    elif "name" in parameters:
        raise DataError(f"data set {name.group!r} needs a name: {name.group}/<name>")
    return arguments


def _call(cls: type[InMemoryDataset], arguments: dict[str, object], label: str) -> InMemoryDataset:
    try:
        return cls(**arguments)
    except (DataError, _RawFilesWantedError):
        raise
    # Loaders fail in any way they like: asserts, missing packages, broken files.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"data set {label!r} cannot be loaded by PyG: {reason}") from error


def _raw_files(cls: type[InMemoryDataset], arguments: dict[str, object], label: str) -> _RawFiles:
    # PyG calls download() when raw files are missing, as in an empty folder. By then the
    # loader knows their names: no table of layouts is needed for its hundred classes.
    def stop(self: InMemoryDataset) -> None:
        raise _RawFilesWantedError(self.raw_dir, self.raw_paths)

    with tempfile.TemporaryDirectory() as empty:
        try:
            _call(
                type(cls.__name__, (cls,), {"download": stop}), {"root": empty, **arguments}, label
            )
        except _RawFilesWantedError as wanted:
            folder, paths = wanted.args
            files = tuple(PurePath(path).relative_to(empty) for path in paths)
            return _RawFiles(PurePath(folder).relative_to(empty), files)
    raise DataError(f"data set {label!r} has no raw files: it is not a data set to load")


def _prepared(
    cls: type[InMemoryDataset],
    arguments: dict[str, object],
    raw: _RawFiles,
    label: str,
    root: Path | None,
    download: bool,
) -> Path:
    source = None if root is None else root / cls.__name__
    if source is not None and all((source / file).exists() for file in raw.files):
        origin = source

        def copy(folder: Path) -> None:
            copy_tree(origin / raw.folder, folder / raw.folder)
            _call(cls, {"root": str(folder), **arguments}, label)

        files = fingerprint(origin / raw.folder)
        return cached_folder(_key(label, arguments, files), copy)

    def fetch(folder: Path) -> None:
        below = [PurePath(cls.__name__) / file for file in raw.files]
        wanted = PurePath(cls.__name__) / raw.folder
        missing = missing_message(label, wanted, below, root, download)
        _download(cls, {"root": str(folder), **arguments}, label, missing)

    return cached_folder(_key(label, arguments, "download"), fetch)


def _download(
    cls: type[InMemoryDataset], arguments: dict[str, object], label: str, missing: str
) -> None:
    def guarded(self: InMemoryDataset) -> None:
        try:
            check_reachable(_urls(cls))
            with stall_limit():
                cls.download(self)
        # Not OSError alone: HTTP libraries have errors of their own.
        except Exception as error:
            raise DataError(f"{missing} The download failed: {error}") from error

    _call(type(cls.__name__, (cls,), {"download": guarded}), arguments, label)


def _urls(cls: type[InMemoryDataset]) -> list[str]:
    values = (getattr(cls, key, None) for key in dir(cls) if not key.startswith("_"))
    return [v for v in values if isinstance(v, str) and v.startswith(("http://", "https://"))]


def _key(label: str, arguments: dict[str, object], content: object) -> str:
    import torch_geometric

    # The version too: another one may process the same files otherwise.
    text = repr((label, sorted(arguments.items()), content, torch_geometric.__version__))
    return f"{label.replace('/', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _graph(dataset: InMemoryDataset, label: str, *, filtered: bool = False) -> Graph:
    from torch_geometric.data import Data

    data = dataset[0] if len(dataset) == 1 else None
    if not isinstance(data, Data):
        raise DataError(f"data set {label!r} is not one graph of one kind of nodes")
    with saying(f"data set {label!r}"):
        # A published set's labels are its classes, also where one of them has no node.
        y = getattr(data, "y", None)
        data = without_duplicates(data) if filtered else data
        return as_graph(data, num_classes=None if y is None or not y.numel() else int(y.max()) + 1)


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


def load_file(path: Path, no_features: str = "refuse") -> Graph:
    """Load a ``Data``, or a dict of tensors with its keys, saved by ``torch.save``."""
    # The file may come from anybody: it is read with ``weights_only=True``, so nothing in it is
    # executed.
    values = read_file(path)
    if values.get(CLIENT) is not None:
        note = f"the nodes' {CLIENT} is ignored: the graph stays whole"
        values["notes"] = (*values.get("notes", ()), Caution(note))
    what = f"file {path}"
    with reading(what, DataError, "is no graph that can be read"), saying(what):
        return as_graph(SimpleNamespace(**values), no_features=no_features)


def read_file(path: Path, *, needs_labels: bool = True) -> dict[str, Any]:
    """Read what :func:`load_file` builds its graph of, still unchecked."""
    check_graph_file(path)
    with reading(f"file {path}", DataError, "is damaged, or no graph"):
        if path.is_dir():
            return read_tables(path, needs_labels)
        if reader := READERS.get(path.suffix):
            return reader(path, needs_labels)
        with saying(f"file {path}"):
            return _read_saved(path)


def _read_saved(path: Path) -> dict[str, object]:
    """Read a ``Data``, or a dict of tensors with its keys, saved by ``torch.save``."""
    from torch_geometric.data import Data

    try:
        with pyg_classes_allowed():
            content = load_saved(path)
    # A broken pickle can raise nearly anything.
    except Exception as error:
        raise DataError(_unreadable(path, error)) from error
    # Not by attributes of Data, some of which are computed (num_classes is not one).
    values = content.to_dict() if isinstance(content, Data) else content
    if not isinstance(values, dict):
        raise DataError(f"holds a {type(content).__name__}, not a Data or a dict")
    return {str(key): value for key, value in values.items()}


def _unreadable(path: Path, error: Exception) -> str:
    """Say in one line why a file cannot be read by ``torch.load``."""
    if isinstance(error, PermissionError):
        return "cannot be read: make it readable for the user that this process runs as"
    if isinstance(error, OSError):
        return f"cannot be read ({reason(error)})"
    if not path.stat().st_size:
        return "is empty: save the graph again"
    with open_regular(path, MOST_TENSORS) as stream:
        is_archive = stream.read(2) == b"PK"
    if is_archive and not zipfile.is_zipfile(path):
        return "is cut short: its end is missing; copy or save it again"
    wanted = "a Data or a dict of tensors saved by torch.save"
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
        if found[1].endswith(("BaseStorage", "NodeStorage", "EdgeStorage")):
            return f"holds a HeteroData: {ONE_KIND}"
        return (
            f"is not a graph that can be loaded safely: it holds a {found[1]}, and to read that "
            f"can execute code; {wanted} is expected"
        )
    return (
        f"is not a graph that can be loaded safely, or is damaged: {wanted} is expected, or "
        "another kind by its ending (docs/own-data.md)"
    )


def load_ogb(name: str, *, root: Path | None, download: bool) -> Graph:
    """Load a set of Open Graph Benchmark with its own split."""
    _ogb(name)
    below = PurePath(name.replace("-", "_"))  # ogb's own folder: its root can be a data root
    files = _ogb_files(name)
    if root is not None and all((root / below / file).exists() for file in files):
        source = root / below
        entries = [entry for entry in fingerprint(source) if not entry[0].startswith("processed/")]
        digest = hashlib.sha256(repr(entries).encode()).hexdigest()[:16]
        folder = cached_folder(f"{name}-{digest}", lambda new: _copy_ogb(name, source, new))
    else:
        wanted = [below / file for file in files]
        folder = cached_folder(
            f"{name}-download", lambda new: _fetch_ogb(name, new, wanted, root, download)
        )
    return _read_ogb(name, folder)


def _ogb_files(name: str) -> tuple[str, ...]:
    """Name the files that a set consists of."""
    years = ("raw/node_year.csv.gz",) if name == "ogbn-arxiv" else ()
    parts = ("train", "valid", "test")
    return (*OGB_FILES, *years, *(f"split/{OGB_SPLITS[name]}/{part}.csv.gz" for part in parts))


def _ogb(name: str) -> Any:
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise DataError(
            f"data set {name!r} needs the package ogb: pip install flower-graph[ogb] ({error})"
        ) from error
    return PygNodePropPredDataset


def _copy_ogb(name: str, source: Path, folder: Path) -> None:
    for part in ("raw", "split", "mapping"):
        copy_tree(source / part, folder / source.name / part)
    # Without this file ogb takes the folder for an old release and asks what to do.
    (folder / source.name / "RELEASE_v1.txt").touch()
    _read_ogb(name, folder)


def _fetch_ogb(
    name: str, folder: Path, files: list[PurePath], root: Path | None, download: bool
) -> None:
    missing = missing_message(name, files[0].parent, files, root, download)
    try:
        check_reachable(["http://snap.stanford.edu/"])
    except OSError as error:
        raise DataError(f"{missing} The download failed: {error}") from error
    _read_ogb(name, folder)


def _read_ogb(name: str, folder: Path) -> Graph:
    loader = _ogb(name)
    try:
        # PyG's classes are needed to read what ogb has saved with torch.save.
        with _unattended(), stall_limit(), pyg_classes_allowed():
            dataset = loader(name=name, root=str(folder))
            data, split = dataset[0], dataset.get_idx_split()
    # ogb leaves the process by exit() when a question is answered with no.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"data set {name!r} cannot be loaded by ogb: {reason}") from error
    for part, ogb_name in (("train", "train"), ("val", "valid"), ("test", "test")):
        mask = torch.zeros(data.x.size(0), dtype=torch.bool)
        mask[split[ogb_name]] = True
        data[f"{part}_mask"] = mask
    with saying(f"data set {name!r}"):
        return as_graph(data, num_classes=int(dataset.num_classes))


@contextmanager
def _unattended() -> Iterator[None]:
    """Let no question of ogb wait for an answer: its ``input()`` fails instead."""
    before = sys.stdin
    sys.stdin = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.stdin = before
