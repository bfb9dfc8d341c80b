"""Makes one checked graph from a data config, and cuts it into clients, once a process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flower_graph.config.common import AS_IS, DataConfig, RunConfig
from flower_graph.data.cora_linqs import load_cora_linqs
from flower_graph.data.description import check_masks, saying, tell
from flower_graph.data.features import ReadOptions, prepare_features
from flower_graph.data.graph import PARTS, Graph, Masks, fits_dense
from flower_graph.data.sources.generators import csbm, csbm_sparse
from flower_graph.data.sources.names import (
    CSBM,
    EDGES,
    LINQS,
    NODES,
    OGB,
    PygName,
    fetching,
    file_path,
    pyg_name,
    table_in,
)
from flower_graph.data.sources.pyg import load_file, load_ogb, load_pyg
from flower_graph.data.splits import geom_gcn_split, labelled_split, random_split, select_column
from flower_graph.errors import DataError
from flower_graph.handed import handed_over
from flower_graph.rng import generator
from flower_graph.storage.files import data_root

if TYPE_CHECKING:
    from torch_geometric.data import Data

C = TypeVar("C", bound=RunConfig)  # a method's schema
G = TypeVar("G")  # a client's graph
T = TypeVar("T")

DRAWN = (0.6, 0.2, 0.2)  # shares of a split that nobody asked for
FOLDS = 10  # splits that geom-gcn published for each set
SPLIT_FOLDER = "geom-gcn-splits"
# Classes with splits of geom-gcn; masks of all but the first are these
GEOM_GCN_CLASSES = ("Planetoid", "WikipediaNetwork", "Actor", "WebKB")
# Sections that decide the clients' data, beside the seed (as `run_folder.deciding_settings`)
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
    elif config.split == "auto":
        raise DataError(f"{source}: has no {', '.join(absent)}; or set data.split=random")
    else:
        advice = "use data.split=random data.ratios=[0.6,0.2,0.2], or data.split=auto"
        raise DataError(f"data set {config.name!r} has no public split: {advice}")
    moved = config.feature_noise, generator(draws, "feature-noise")
    with saying(source):
        chosen = config.features, config.missing, graph.columns
        (x,), done, treatment = prepare_features([graph.x], *chosen, moved if moved[0] else None)
        graph = replace(graph, x=x, notes=(*notes, *done), treatment=treatment)
        graph = graph.with_masks(select_column(masks, seed))
        check_masks(graph.masks, graph.y, graph.names)
    tell(source, graph.notes)
    return graph


# Any: ``Graph`` or PyG's ``Data``, which types its attributes as nothing
def describe(data: Any) -> dict[str, int]:
    """Count a graph's parts.

    Returns ``nodes``, ``edges`` (undirected), ``features``, ``classes``, ``isolated`` (nodes
    without an edge), and the sizes ``train``, ``val`` and ``test``.
    """
    nodes, features = data.x.shape
    return {
        "nodes": nodes,
        "edges": data.edge_index.size(1) // 2,
        "features": features,
        "classes": int(data.num_classes),
        "isolated": nodes - data.edge_index.unique().numel(),
        **{part.partition("_")[0]: int(getattr(data, part).sum()) for part in PARTS},
    }


def _read(config: DataConfig, seed: int, how: ReadOptions) -> Graph:
    path, name, root = file_path(config.name), config.name.lower(), config.root
    is_pyg = path is None and name not in (LINQS, CSBM, *OGB)
    known, geom_gcn = pyg_name(config.name) if is_pyg else PygName("", None), "geom-gcn"
    if config.split == geom_gcn and known.group not in GEOM_GCN_CLASSES:
        only = f"only of {', '.join(GEOM_GCN_CLASSES)}"
        raise DataError(f"data.split = {geom_gcn!r}: not of {config.name!r}: {only}")
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
        if not how.sparse or fits_dense(config.nodes, config.num_features):
            return csbm(config.nodes, config.classes, **own)
        if config.features != AS_IS:
            why = f"must be {AS_IS} of so many nodes"
            raise DataError(f"data.features = {config.features!r}: {why}")
        return csbm_sparse(config.nodes, config.classes, **own)
    if name in OGB:
        return load_ogb(name, root=data_root(root))
    if known.group != "Planetoid" or config.split != geom_gcn:
        return load_pyg(known, root=data_root(root))
    fold = f"{str(known.member).lower()}_split_0.6_0.2_{seed % FOLDS}.npz"
    file, folder = Path(SPLIT_FOLDER) / fold, data_root(root)
    if folder is not None and (folder / file).is_file():
        graph = load_pyg(known, root=folder)
        return graph.with_masks(geom_gcn_split(folder / file, graph.num_nodes))
    try:  # PyG has the ten splits as columns, once it has downloaded them
        return load_pyg(known, root=folder, options={"split": geom_gcn})
    except DataError as error:
        raise DataError(f"the data root has no {file}, and PyG has none either: {error}") from error


_made: dict[object, Any] = {}  # two runs', whose clients a method may ask for as read, as checked
MOST_MADE = 8


def once(what: str, saved: object, make: Callable[[], T], by: object = None) -> T:
    """Make a run's data once a process, or take what another process of the run has made.

    ``what`` describes the data; ``saved`` is when their files were saved, so that a new file is
    read anew; ``by`` is the maker, if others make data of this description.
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
    with os.scandir(path) as listing:  # asked for every message: one look at each file
        entries = list(listing)
    folders = [Path(one.path) for one in entries if one.is_dir()]
    tables = [table_in(one, file) for one in folders for file in (NODES, EDGES)]
    times = [one.stat().st_mtime_ns for one in entries if one.is_file()]
    return max(times + [file.stat().st_mtime_ns for file in tables if file.is_file()], default=0)
