"""Names of data sets, where their files are, and how long a download waits.

The data root is only read. Loaders write to the cache folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from flower_graph.config.rules import nearest
from flower_graph.errors import DataError, told
from flower_graph.storage import files

LINQS = "cora-linqs"
CSBM = "csbm"
OGB = ("ogbn-arxiv", "ogbn-products")

# Names that PyG's classes take, where a wrong one would otherwise be an attempt to download; with
# the ending, the same set without its duplicate nodes.
FILTERED = "-filtered"
WIKI = ("chameleon", "squirrel")
MEMBERS = {
    "Planetoid": ("Cora", "CiteSeer", "PubMed"),
    "WikipediaNetwork": tuple(f"{name}{ending}" for name in WIKI for ending in ("", FILTERED)),
    "Amazon": ("Computers", "Photo"),
    "Coauthor": ("CS", "Physics"),
    "CitationFull": ("Cora", "Cora_ML", "CiteSeer", "DBLP", "PubMed"),
    "WebKB": ("Cornell", "Texas", "Wisconsin"),
}
# Groups whose members are known by their own names
_SHORT = ("Planetoid", "WikipediaNetwork")
SHORT = {member.lower(): (group, member) for group in _SHORT for member in MEMBERS[group]}
SINGLE = ("Actor", "Flickr", "LastFMAsia", "WikiCS")
# Endings of graph files, and of other files that hold graphs
GRAPH_FILES = (".pt", ".graphml", ".json")
_TABLES = (".csv", ".tsv", ".xls", ".xlsx", ".ods", ".parquet")
_PICKLES = (".gpickle", ".pickle", ".pkl")  # reading one can execute code
OTHER_FILES = (*_TABLES, *_PICKLES, ".gexf", ".gml", ".net", ".gdf", ".dot", ".lgl", ".ncol")
NODES, EDGES = "nodes.csv", "edges.csv"  # of a folder with one graph in tables


class PygName(NamedTuple):
    """A class of ``torch_geometric.datasets`` and the name it is asked for, if any."""

    group: str
    member: str | None

    @property
    def raw(self) -> PygName:
        return PygName(self.group, self.member and self.member.removesuffix(FILTERED))

    @property
    def label(self) -> str:
        return "/".join(filter(None, self))


def known_names() -> tuple[str, ...]:
    """Return the names that ``data.name`` knows by itself, bundled sets first.

    Any other single-graph node-classification class of PyG (``Class`` or ``Class/name``) and the
    path of a saved graph are allowed too.
    """
    short = (member for _, member in SHORT.values())
    groups = (group for group in MEMBERS if group not in _SHORT)
    long = (f"{group}/{member}" for group in groups for member in MEMBERS[group])
    return (LINQS, CSBM, *short, *SINGLE, *OGB, *long)


def expanded(path: str) -> Path:
    """Expand ``~`` in a path, unless it names an unknown user."""
    return Path(os.path.expanduser(path))


def is_known(name: str) -> bool:
    """Return whether a name is a data set's, whatever files lie here."""
    with suppress(DataError):
        return name in known_names() or bool(pyg_name(name))
    return False


def file_path(name: str) -> Path | None:
    """Return the path when a name means one graph: a file, or a folder with tables; else None."""
    # That is a name with an ending such as ``.pt``, or with a path separator or an ending, if the
    # file exists.
    path = expanded(name)
    if has_ending(name, *GRAPH_FILES, *OTHER_FILES) or (path / NODES).is_file():
        return path
    return path if (len(path.parts) > 1 or path.suffix) and path.is_file() else None


def folder_path(name: str) -> Path | None:
    """Return the path when a name means a folder of clients' graphs, else None."""
    # That is a name that ends in ``/``, or a folder with ``.pt`` files in it; a folder of raw data
    # with the name of a data set does not count.
    path = expanded(name)
    if (path / NODES).is_file():
        return None
    if name.endswith("/") or (path.is_dir() and any(path.glob("*.pt"))):
        return path
    return None


def graphs_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """List a folder's graphs, files and folders with tables, and its other files, by name."""
    hidden = (".", "~$", "__MACOSX")  # of the system
    graphs, others = list[Path](), list[Path]()
    for path in sorted(path for path in folder.glob("*") if not path.name.startswith(hidden)):
        is_file = path.is_file() and has_ending(path.name, *GRAPH_FILES)
        (graphs if is_file or (path / NODES).is_file() else others).append(path)
    return graphs, others


def has_ending(name: str, *endings: str) -> bool:
    """Return whether a file's name has one of some endings, in any case of letters."""
    return name.lower().endswith(endings)


def in_full(path: str, folder: Path) -> str:
    """Make a path absolute; a relative path starts from ``folder``."""
    if not path or "${" in path:  # empty, or still to be filled in by OmegaConf
        return path
    full = folder.absolute() / expanded(path)
    if ".." in full.parts:  # one file has one name, from whichever folder it was named
        full = full.resolve()
    return f"{full}{'/' if path.endswith('/') else ''}"


def located(name: str, folder: Path) -> str:
    """Make a name absolute if it means a file or a folder of clients, from the given folder."""
    path = in_full(name, folder)
    # A name without an ending is a file only with a separator: `Cora` is the data set.
    is_bare = "/" not in name and not Path(name).suffix and Path(path).is_file()
    return name if is_bare or (file_path(path) or folder_path(path)) is None else path


def pyg_name(name: str) -> PygName:
    """Return the PyG class and member that a name stands for."""
    folder, lower = folder_path(name), name.lower()
    if folder is not None and folder.is_dir():
        raise DataError(f"data.name = {name!r}: is a folder without {NODES} and {EDGES}")
    if folder is not None or name.startswith(("/", ".", "~")):
        raise absent(name, "folder" if name.endswith("/") else "file")
    if lower in SHORT:
        return PygName(*SHORT[lower])
    group, _, member = lower.partition("/")
    classes = {one.lower(): one for one in (*MEMBERS, *SINGLE)}
    if group not in classes:
        import torch_geometric.datasets as datasets  # not at the top: it takes seconds

        classes = {one.lower(): one for one in datasets.__all__}
    if group not in classes:
        others = "PyG's Class or Class/name; a file or folder (`flower-graph docs own-data`)"
        known = known_names()
        raise _unknown(name, (*known, *classes.values()), f"{', '.join(known)}; {others}")
    found = classes[group]
    if found not in MEMBERS:
        return PygName(found, name.partition("/")[2] or None)
    members = {one.lower(): one for one in MEMBERS[found]}
    if member not in members:
        names = [f"{found}/{one}" for one in MEMBERS[found]]
        raise _unknown(name, names, ", ".join(names))
    return PygName(found, members[member])


def check_ending(path: Path) -> None:
    """Refuse a file that holds a graph in a form that is not read."""
    if path.is_file() and has_ending(path.name, *OTHER_FILES):
        remedy = f"networkx.write_graphml saves one that is, or save {NODES} and {EDGES}"
        raise DataError(f"file {path}: is not read: {remedy}")


def absent(name: str, what: str = "file") -> DataError:
    """Return the error for a missing file or folder, with the place where it was looked for."""
    place = f"{expanded(name).absolute()}; in a YAML a path starts from the YAML's folder"
    return DataError(f"data.name = {name!r}: there is no such {what} ({place})")


def _unknown(name: str, names: Sequence[str], allowed: str) -> DataError:
    by_lower = {known.lower(): known for known in names}
    near = nearest(name, by_lower, 0.5)
    hint = f"; did you mean {by_lower[near]!r}?" if near else "."
    if name and Path(name).is_dir() and graphs_in(Path(name))[0]:
        hint = f"; for the folder of clients write {name}/."
    return DataError(f"data.name = {name!r}: unknown data set{hint} Known: {allowed}")


# The cache, and downloads -------------------------------------------------------------------------

CACHE_VARIABLE = "FLOWER_GRAPH_CACHE"
STALL_SECONDS = 15.0  # without a byte before or during a download
_MAY_FETCH = ContextVar("may-fetch", default=True)


@contextmanager
def fetching(allowed: bool) -> Iterator[None]:
    """Forbid downloads in this block unless allowed: a SuperNode downloads nothing for a run."""
    before = _MAY_FETCH.set(allowed and _MAY_FETCH.get())
    try:
        yield
    finally:
        _MAY_FETCH.reset(before)


@contextmanager
def downloading(missing: str) -> Iterator[None]:
    """Download a data set in this block, or refuse; errors begin with what is missing."""
    if not _MAY_FETCH.get():
        off = "downloads are switched off: a SuperNode fetches only what its node config names"
        error = DataError(f"{missing} ({off})")
        raise told(error, "this SuperNode fetches no data: its node config names none in data")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)  # for sockets without a timeout of their own
    try:
        yield
    # Not OSError alone: HTTP libraries have errors of their own.
    except Exception as error:
        raise DataError(f"{missing} The download failed: {error}") from error
    finally:
        socket.setdefaulttimeout(before)


def cache_root() -> Path:
    """Return the folder for processed copies: FLOWER_GRAPH_CACHE, or the user's cache."""
    return files.named(os.environ.get(CACHE_VARIABLE) or files.user_cache())


def cached_folder(key: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder of the cache with this key; fill it first if it is not there."""
    # A folder is filled under a temporary name and renamed when it is complete, so processes that
    # start at once do not see each other's half-made folders.
    folder = cache_root() / key
    if folder.is_dir():
        return folder
    with files.saying(folder.parent):  # of the variable
        files.make_folder(folder.parent)
        temporary = files.temporary_folder(".making-", folder.parent)
    try:
        fill(temporary)
        try:
            files.move(temporary, folder)
        except OSError:
            if not folder.is_dir():  # another process was not faster
                raise
    finally:
        with suppress(OSError):
            files.remove_folder(temporary)
    return folder


def raw_files(folder: Path) -> list[Path]:
    """List the raw files in a folder, and not those that PyG has made of them."""
    every = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in every if path.parent.name != "processed")


HERE, ABSENT, OWN = "here", "to be downloaded", "name your own"


def presence(name: str) -> str:
    """Tell where a data set is: ``HERE``, ``ABSENT``, or ``OWN`` for a missing file or folder.

    Files are not looked into, so a set with missing files counts as here.
    """
    if name.lower() in (LINQS, CSBM):
        return HERE
    path = file_path(name) or folder_path(name)
    if path is not None:
        return HERE if path.exists() else OWN
    known = PygName(name.replace("-", "_"), None) if name.lower() in OGB else pyg_name(name).raw
    places, member = [*cache_root().glob(f"{known.label.replace('/', '-')}-*")], known.member or ""
    with suppress(DataError):  # a variable that names no folder; a run says so
        if (root := files.data_root(None)) is not None:
            places += [root / known.group / one for one in (member, member.lower())]
    return HERE if any(place.is_dir() for place in places) else ABSENT
