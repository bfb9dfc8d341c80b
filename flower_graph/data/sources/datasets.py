"""Makes one checked graph from a data config, and cuts it into clients, once a process.

Data sets are read by the loaders of PyTorch Geometric (PyG) and of ogb, an optional dependency. PyG
writes next to the raw files that it reads. So the raw files of a set are copied into a folder of
the cache, and PyG is given that folder. Some raw files are pickles (those of Planetoid), which PyG
unpickles: a data root must be trusted. A file that ``data.name`` names, saved by ``torch.save``,
need not be.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from flower_graph.config.common import AS_IS, ONE_HOT, DataConfig, RunConfig
from flower_graph.data.cora_linqs import load_cora_linqs
from flower_graph.data.description import (
    EDGE_VALUES,
    WEIGHT,
    Caution,
    DataForm,
    NewGraph,
    as_graph,
    as_tensor,
    by_columns,
    check_masks,
    describe_graph,
    entries_of,
    formed,
    saying,
    tell,
)
from flower_graph.data.features import PLAIN, ReadOptions, prepare_features
from flower_graph.data.graph import PARTS, Graph, Masks, fits_dense, labelled_split, masks_from
from flower_graph.data.sources import tables
from flower_graph.data.sources.generators import csbm
from flower_graph.data.sources.names import (
    CSBM,
    LINQS,
    OGB,
    PygName,
    absent,
    cache_root,
    cached_folder,
    check_ending,
    downloading,
    fetching,
    file_path,
    pyg_name,
    raw_files,
)
from flower_graph.errors import DataError
from flower_graph.handed import handed_over
from flower_graph.rng import generator
from flower_graph.storage.files import ROOT_VARIABLE, copy_file, data_root, named, replaced, written
from flower_graph.storage.formats import UnpicklingError, load_saved
from flower_graph.storage.reading import reading

if TYPE_CHECKING:
    from torch_geometric.data import Data

READERS = {".json": tables.read_node_link, ".graphml": tables.read_graphml}  # others by torch.load
C = TypeVar("C", bound=RunConfig)  # a method's schema
G = TypeVar("G")  # a client's graph
T = TypeVar("T")

DRAWN = (0.6, 0.2, 0.2)  # shares of a split that nobody asked for
# The splits of geom-gcn: in a data root, they may lie in a folder for all sets of Planetoid
GEOM_GCN, SPLIT_FOLDER = "geom-gcn", Path("geom-gcn-splits")
ADVICE = "set data.ratios=[0.6,0.2,0.2]"
# Classes with splits of geom-gcn; masks of all but the first are these
GEOM_GCN_CLASSES = ("Planetoid", "WikipediaNetwork", "Actor", "WebKB")
# Sections that decide the clients' data, beside the seed (as `folders.party.deciding_settings`)
DECIDING = ("data", "partition", "graph")


def load_data(config: DataConfig, *, seed: int = 0, download: bool = True) -> Data:
    """Load, split, normalise and check a data set.

    Parameters
    ----------
    config
        The data section of a config.
    seed
        Seed of the run; chooses among published splits: split ``seed`` modulo their number.
        Random splits and generated graphs depend on ``config.split_seed`` instead, if it is set.
    download
        Whether a set that is not on disk may be downloaded.

    Returns
    -------
    Data
        PyG ``Data``: ``x`` float32 ``[n, f]``; ``edge_index`` int64 ``[2, E]``, both directions of
        every edge, sorted, no duplicates, no self-loops; ``y`` int64 ``[n]``; boolean masks
        ``[n]``; ``num_classes``. ``DataError`` if the set is unknown, missing or unfit, or the
        split is impossible.
    """
    with fetching(download):
        return load_graph(config, seed=seed).to_data()


def load_graph(config: DataConfig, *, seed: int = 0, how: ReadOptions | None = None) -> Graph:
    """As :func:`load_data`, without importing PyG for sets that need none.

    ``how`` says whether nodes have numbers to learn, and edges weights, as one's own graph can.
    """
    source, draws, ratios = f"data {config.name}", config.draws(seed), config.ratios
    graph = _read(config, seed, how or ReadOptions.of(config))
    notes, rng = list(graph.notes), torch.Generator().manual_seed(draws)
    absent = [part for part, mask in graph.masks.items() if mask is None]
    if config.split == "random" and ratios is None:
        counts = {key: getattr(config, key) for key in ("train_per_class", "num_val", "num_test")}
        masks = random_split(graph.y, graph.num_classes, **counts, generator=rng)
    elif config.split == "random" or (config.split == "auto" and len(absent) == len(PARTS)):
        drawn = ratios or DRAWN
        masks = labelled_split(graph.y, drawn, generator=rng)
        if config.split == "auto":
            shares = "/".join(f"{100 * share:g}" for share in drawn)
            notes.append(f"no masks: {shares} % of the labelled nodes drawn with seed {draws}")
    elif not absent:
        masks = Masks(*graph.masks.values())
    else:
        advice = "set data.split=random data.ratios=[0.6,0.2,0.2], or of none data.split=auto"
        raise DataError(f"{source}: has no {', '.join(absent)}; {advice}")
    moved = config.feature_noise, generator(draws, "feature-noise")
    with saying(source):
        chosen = config.features, config.missing, graph.columns
        (x,), done, treatment = prepare_features([graph.x], *chosen, moved if moved[0] else None)
        graph = replace(graph, x=x, notes=(*notes, *done), treatment=treatment)
        # Of masks [n, k] the seed chooses one of the k splits
        if len(splits := {mask.size(1) for mask in masks if mask.dim() == 2}) > 1:
            raise DataError(f"masks have different numbers of splits: {sorted(splits)}")
        graph = graph.with_masks(m if m.dim() == 1 else m[:, seed % m.size(1)] for m in masks)
        check_masks(graph.masks, graph.y, graph.names)
    tell(source, graph.notes)
    return graph


def _read(config: DataConfig, seed: int, how: ReadOptions) -> Graph:
    path, name, root = file_path(config.name), config.name.lower(), config.root
    is_pyg = path is None and name not in (LINQS, CSBM, *OGB)
    known = pyg_name(config.name) if is_pyg else PygName("", None)
    if config.split == GEOM_GCN and known.group not in GEOM_GCN_CLASSES:
        raise DataError(f"data.split = {GEOM_GCN!r}: only of {', '.join(GEOM_GCN_CLASSES)}")
    if path is not None:
        return load_file(path, how)
    if how.targets:
        raise DataError(f"data.name = {config.name!r}: task=values needs a graph of your own")
    if name == LINQS:
        return load_cora_linqs()
    if name == CSBM:
        keys = ("degree", "active", "homophily", "signal")
        own = {"features": config.num_features, "seed": config.draws(seed)}
        own |= {key: getattr(config, key) for key in keys}
        sparse = how.sparse and not fits_dense(config.nodes, config.num_features)
        if sparse and config.features != AS_IS:
            raise DataError(f"data.features = {config.features!r}: must be {AS_IS} if so large")
        return csbm(config.nodes, config.classes, **own, sparse=sparse)
    if name in OGB:
        return load_ogb(name, root=data_root(root))
    # As columns of the masks, of which the seed chooses one
    has_splits = known.group == "Planetoid" and config.split == GEOM_GCN
    return load_pyg(known, root=data_root(root), options={"split": GEOM_GCN} if has_splits else {})


def random_split(
    y: Tensor,
    num_classes: int,
    *,
    train_per_class: int,
    num_val: int,
    num_test: int,
    generator: torch.Generator,
) -> Masks:
    """Draw a fixed number of training nodes of each class, then the rest by count.

    ``y`` is the class of each node, below 0 without a label, and then in no part; classes without
    any node are passed over. ``DataError`` if a class, or the rest after the training nodes, has
    too few nodes.
    """
    classes = []
    for label in range(num_classes):
        members = (y == label).nonzero().flatten()
        if 0 < members.numel() < train_per_class:
            why = f"class {label} has {members.numel()}; {ADVICE}"
            raise DataError(f"data.train_per_class = {train_per_class}: {why}")
        order = torch.randperm(members.numel(), generator=generator)
        classes.append(members[order[:train_per_class]])
    chosen = torch.cat(classes)
    rest = (y >= 0).index_fill(0, chosen, False).nonzero().flatten()
    if (left := rest.numel()) < (wanted := num_val + num_test):
        raise DataError(f"data.num_val + data.num_test = {wanted}: {left} left; {ADVICE}")
    rest = rest[torch.randperm(rest.numel(), generator=generator)]
    return masks_from(y.numel(), [chosen, rest[:num_val], rest[num_val : num_val + num_test]])


# The settings and the data of two runs: a run's data may be here as read, and as divided, too
_made: dict[object, Any] = {}
MOST_MADE = 10


def once(what: str, saved: object, make: Callable[[], T], by: object = None) -> T:
    """Make a run's data or settings once a process, or take what another process has made.

    ``what`` describes them; ``saved`` is when their files were saved, so that a new file is read
    anew; ``by`` tells makers apart whose data have one description.
    """
    key = what, saved, by

    def answer() -> T:
        result = _made.pop(key) if key in _made else make()
        _made[key] = result  # the last used is the last to go
        while len(_made) > MOST_MADE:
            del _made[next(iter(_made))]
        return result

    return handed_over(what, answer)


def cached_data(config: RunConfig) -> Graph:
    """Load the run's graph once a process; clients are built anew for every message."""
    # JSON, because writing YAML takes longer than a client's whole answer.
    own = {one.name: getattr(config.data, one.name) for one in fields(DataConfig)}
    how = ReadOptions.of(config)
    what = f"data {json.dumps(own)} {config.seed} {how}"  # without a method's own keys
    saved = saved_at(config.data.name)
    return once(what, saved, lambda: load_graph(config.data, seed=config.seed, how=how))


def cached_clients(make: Callable[[C], list[G]], config: C, *also: str | int) -> list[G]:
    """Make a run's clients once a process: by seed, deciding sections, and what else `make` reads.

    Clients are built anew for every message, and each of them calls this.
    """
    sections = [getattr(config, name) for name in DECIDING if hasattr(config, name)]
    # Not by ``asdict``, whose copies take several times longer than the rest.
    settings = json.dumps([config.seed, sections, ReadOptions.of(config), also], default=vars)
    what = f"clients {config.app} {make.__qualname__} {settings}"
    return once(what, saved_at(config.data.name), lambda: make(config), by=make)


def saved_at(name: str) -> int:
    """Return when a file, or the last of a folder's, was saved; 0 for other names."""
    # With it a cache reads a new one anew.
    path = Path(name)
    if not path.is_dir():
        return path.stat().st_mtime_ns if path.is_file() else 0
    files = [*os.scandir(path)]  # asked for every message: one look at each file
    own = (file for at in files if at.is_dir() for file in os.scandir(at))
    files += [file for file in own if file.name.endswith(".csv")]
    return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)


# Graphs that users saved --------------------------------------------------------------------------


def pyg_classes_allowed() -> AbstractContextManager[None]:
    """Let ``torch.load(weights_only=True)`` read the classes of a ``Data``, and no more."""
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    classes = (Data, DataEdgeAttr, DataTensorAttr, GlobalStorage)
    # PyG allows some of them for the whole process. Torch's context would take those away
    # again when it ends, so it is given only the others.
    allowed = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([cls for cls in classes if cls not in allowed])


def load_file(path: Path, how: ReadOptions = PLAIN) -> Graph:
    """Load one graph from a file, or from a folder with tables."""
    # The file may be untrusted: it is read with ``weights_only=True``, which executes nothing.
    found = describe_file(path, how)
    if found.values.get(tables.CLIENT) is not None:
        found.notes += (Caution("the nodes' client is ignored: the graph stays whole"),)
    with saying(found.where):
        return found.numbered()


def read_new_graph(path: Path, of: DataForm) -> NewGraph:
    """Read a file or a folder with tables; ``DataError`` if it does not fit the run's models."""
    found = describe_file(path, of.how)
    with saying(found.where):
        if found.values.get("x") is not None:
            x = by_columns(found.where, found.x, found.columns, of.treatment.columns)
            found = replace(found, x=x)
        elif of.given.no_features == ONE_HOT:
            raise DataError("has no x, and data.no_features=one-hot stands for none here")
        return formed(found, of)


def describe_file(path: Path, how: ReadOptions = PLAIN) -> NewGraph:
    """Read a graph file, and bring it into canonical form."""
    values, where = read_file(path, how), f"file {path}"
    with saying(where):
        return describe_graph(values, how, where)


# Any: entries are as the user's file has them
def read_file(path: Path, how: ReadOptions = PLAIN) -> dict[str, Any]:
    """Read the entries of a graph file, unchecked."""
    if not path.exists():
        raise absent(str(path))
    check_ending(path)
    where = f"file {path}"
    with reading(where, DataError, "is damaged, or no graph"), saying(where):
        if path.is_dir():
            return tables.read_tables(path, how)
        if reader := READERS.get(path.suffix.lower()):
            return reader(path, how)
        values = entries_of(_read_saved(path))
        for setting, given, key in (("label", how.label, "y"), ("weight", how.weight, WEIGHT)):
            if given in values:  # it goes where graphs have theirs
                values |= {key: values[given] if given == key else values.pop(given)}
            elif given is not None and (key == WEIGHT or how.needs_labels):
                raise DataError(f"data.{setting} = {given!r}: must be one of {', '.join(values)}")
        return values


def _read_saved(path: Path) -> dict[str, object]:
    try:
        try:
            content = load_saved(path)  # a dict of tensors needs no PyG, whose import takes long
        except UnpicklingError:  # it names classes
            with pyg_classes_allowed():
                content = load_saved(path)
    # A broken pickle can raise nearly anything.
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        held = f"it holds {named[1]}" if named else "it is empty, cut short or damaged"
        advice = "save a Data (of a HeteroData its to_homogeneous()) or a dict of tensors"
        raise DataError(f"is not a graph that can be loaded safely: {held}; {advice}") from error
    if not isinstance(content, dict):
        raise DataError(f"holds a {type(content).__name__}, not a Data or a dict")
    return {str(key): value for key, value in content.items()}


# Graphs that Python gave --------------------------------------------------------------------------

# Attributes of nodes that are no features, like some columns of `nodes.csv`
NO_FEATURES = {*tables.OWN, *tables.NAMES, *tables.ELSEWHERE}
NO_FEATURES |= {"x", "y", "public", "num_nodes", "names", "classes"}


def with_saved_graphs(settings: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Save a graph that is given for ``data.name``, and replace it by its file's name."""
    section, dotted, result = settings.get("data"), "data.name", dict(settings)
    inner = dict(section) if isinstance(section, Mapping) else {}
    label = inner.get("label", settings.get("data.label"))
    if "name" in inner:
        result["data"] = inner | {"name": _saved(inner["name"], folder, label)}
    if dotted in result:
        result[dotted] = _saved(result[dotted], folder, label)
    return result


def _saved(value: object, folder: Path, label: object) -> object:
    """Save a graph under a hash of its content, so that equal graphs have one file."""
    if isinstance(value, str | Path):
        return value
    from torch_geometric.data.data import BaseData

    ending, content = ".pt", b""
    with saying("data.name"):
        if isinstance(value, Graph):
            value = value.to_data()
        if isinstance(value, BaseData):
            stream = io.BytesIO()
            torch.save(_as_read(value, label), stream)
            content = stream.getvalue()
        elif (listed := _listed(value)) is not None:
            with reading("the graph", DataError, "is not one of numbers and words"):
                # NumPy's and PyTorch's numbers have `tolist`
                content = json.dumps(listed, default=lambda one: one.tolist()).encode()
                ending = ".json"
    if not content:
        return value
    path = named(folder) / f"{hashlib.sha256(content).hexdigest()[:16]}{ending}"
    if not path.is_file():
        with replaced(path) as file:
            file.write(content)
    return str(path)


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


# Any: PyG's data
def _as_read(data: Any, label: object) -> dict[str, object]:
    """Return a graph's entries as in files; ``from_networkx`` makes each attribute an entry."""
    values = {key: value for key, value in entries_of(data.cpu()).items() if value is not None}
    if hasattr(values.get("x"), "tocoo"):
        values["x"] = as_tensor("x", values["x"])
    n, e = data.num_nodes, values.get("edge_index", torch.empty(2, 0)).size(-1)
    if "y" not in values and "label" in values and label is None:
        values["y"] = values.pop("label")
    found = {
        key: one.reshape(n, -1).double()
        for key, one in values.items()
        if isinstance(one, Tensor) and one.dim() in (1, 2) and one.size(0) == n
        if key not in {label, *NO_FEATURES, *EDGE_VALUES} and not key.startswith("edge_")
    }
    if "x" not in values and found:
        if n == e:
            raise DataError(f"has no x, and as many edges as nodes: whose is {', '.join(found)}?")
        columns = list[str]()
        for key, one in found.items():
            del values[key]
            columns += [key] if one.size(1) == 1 else [f"{key}[{i}]" for i in range(one.size(1))]
        values |= {"x": torch.cat([*found.values()], 1), "columns": columns}
    if "y" not in values and label is None:
        raise DataError(f"has no y and no label; data.label names it: {', '.join(sorted(values))}")
    return values


# Loaders of PyG and ogb ---------------------------------------------------------------------------


def load_pyg(
    name: PygName, *, root: Path | None, options: Mapping[str, object] | None = None
) -> Graph:
    """Load a single-graph node-classification set through its PyG class."""
    import torch_geometric.datasets as datasets
    from torch_geometric.data import InMemoryDataset

    label = name.raw.label
    cls: Any = getattr(datasets, name.group)
    if not (inspect.isclass(cls) and issubclass(cls, InMemoryDataset)):
        raise DataError(f"data set {name.group!r} is not a graph that PyG keeps in memory")
    arguments = dict(options or {})
    if name.member is not None:
        arguments["name"] = name.raw.member
    if name.group == "WikiCS":  # named here, because PyG warns if it is left out
        arguments["is_undirected"] = True
    with _loading(label):
        if name.group == "KarateClub":  # generated by PyG's code, without files
            return _graph(cls(**arguments), label)
        dataset = _in_cache(name.raw, cls, arguments, root, name.group)
    return _graph(dataset, label, filtered=name != name.raw)


def load_ogb(name: str, *, root: Path | None) -> Graph:
    """Load a set of Open Graph Benchmark with its own split."""
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise DataError(f"data set {name!r}: pip install flower-graph[ogb] ({error})") from error
    # PyG's classes are needed to read what ogb has saved with torch.save.
    with _loading(name), pyg_classes_allowed():
        home = PygName(name.replace("-", "_"), None)
        dataset = _in_cache(home, PygNodePropPredDataset, {"name": name}, root)
        split = dataset.get_idx_split()
    return _graph(dataset, name, [split[part] for part in ("train", "valid", "test")])


def _loading(label: str) -> AbstractContextManager[None]:
    why = f"cannot be loaded (in the cache {cache_root()})"
    return reading(f"data set {label!r}", DataError, why)


# Any: the classes of data sets that are PyG's and ogb's
def _in_cache(
    name: PygName, cls: Any, arguments: Mapping[str, object], root: Path | None, home: str = ""
) -> Any:
    """Make a data set in a folder of the cache, with the raw files of the data root.

    Files that are missing there are downloaded. ``home`` is the folder that PyG's classes have in
    both; ogb makes it itself.
    """
    from torch_geometric import __version__ as version  # another one may read the files differently

    def load(folder: Path) -> Any:
        def download(self: Any) -> None:  # called when raw files are missing
            raw, files = Path(self.raw_dir), [*map(Path, self.raw_paths)]
            sources = {raw: raw}
            if not home:
                sources = {Path(self.root): Path(self.root)}
                split = Path(self.root, "split", self.meta_info["split"])
                files += [split / f"{part}.csv.gz" for part in ("train", "valid", "test")]
            elif raw.parent.name == GEOM_GCN:
                sources = {raw.parents[1] / "raw": raw, folder / SPLIT_FOLDER: raw}
                files += [raw / f"{self.name.lower()}_split_0.6_0.2_{k}.npz" for k in range(10)]
            for source, target in sources.items():
                own = (root or folder) / source.relative_to(folder)
                for path in raw_files(own) if root is not None else ():
                    copy_file(path, target / path.relative_to(own))
            if absent := [file for file in files if not file.exists()]:
                what = f"data {name.label}: no {absent[0].name}; {len(absent)} of {len(files)}"
                where = f"data.root or {ROOT_VARIABLE}, a folder with {raw.relative_to(folder)}"
                with downloading(f"{what} files are missing in the data root ({where}): {root}."):
                    cls.download(self)
            if not home:
                # Without this file ogb takes the folder for an old release and asks what to do.
                with written(Path(self.root, "RELEASE_v1.txt")):
                    pass

        loader: Any = type(cls.__name__, (cls,), {"download": download})
        before, sys.stdin = sys.stdin, io.StringIO()  # no question of ogb's waits for an answer
        try:
            with redirect_stdout(io.StringIO()):
                return loader(root=str(folder / home), **arguments)
        finally:
            sys.stdin = before

    places = [] if root is None else [root / name.group, root / SPLIT_FOLDER]
    files = [(path, path.stat()) for place in places for path in raw_files(place)]
    content = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in files]
    key = repr((name, sorted(arguments.items()), version, content))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return load(cached_folder(f"{name.label.replace('/', '-')}-{digest}", load))


def _graph(
    dataset: Any, label: str, split: Sequence[Tensor] | None = None, *, filtered: bool = False
) -> Graph:
    from torch_geometric.data import Data

    data = dataset[0] if len(dataset) == 1 else None
    if not isinstance(data, Data):
        raise DataError(f"data set {label!r} is not one graph of one kind of nodes")
    if split is not None:
        data.update(dict(zip(PARTS, masks_from(len(data.x), split), strict=True)))
    with saying(f"data set {label!r}"):
        # A published set's classes stay, even if one of them has no node.
        return as_graph(
            without_duplicates(data) if filtered else data, num_classes=dataset.num_classes or None
        )


def without_duplicates(data: Data) -> Data:
    """Keep one node of each group with the same outgoing edges and class: the most linked one."""
    source, target = data.edge_index.tolist()
    outgoing: list[set[int]] = [set() for _ in range(data.x.size(0))]
    for one, other in zip(source, target, strict=True):
        outgoing[one].add(other)
    incoming = torch.bincount(data.edge_index[1], minlength=len(outgoing)).tolist()
    groups: dict[tuple[frozenset[int], int], list[int]] = {}
    for node, (links, label) in enumerate(zip(outgoing, data.y.tolist(), strict=True)):
        groups.setdefault((frozenset(links), label), []).append(node)
    kept = sorted(max(group, key=incoming.__getitem__) for group in groups.values())
    result = data.subgraph(torch.tensor(kept))
    result.notes = (
        f"{len(kept):,} of {len(outgoing):,} nodes kept: one of each group with the same outgoing "
        "edges and the same class",
    )
    return result
