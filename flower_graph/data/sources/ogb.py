"""The ogbn-arxiv graph through the package ``ogb``, an optional dependency."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path, PurePath
from typing import Any

import torch

from flower_graph.data.graph import Graph
from flower_graph.data.sources.cache import (
    cached_folder,
    check_reachable,
    copy_tree,
    fingerprint,
    missing_message,
    stall_limit,
)
from flower_graph.data.sources.names import ARXIV
from flower_graph.data.sources.pyg import graph_from, pyg_classes_allowed
from flower_graph.errors import DataError

FOLDER = "ogbn_arxiv"  # the name of ogb's own folder, so that its root can be a data root
NEEDED = (
    "RELEASE_v1.txt",
    *(f"raw/{name}.csv.gz" for name in ("edge", "node-feat", "node-label", "node_year")),
    *(f"raw/num-{name}-list.csv.gz" for name in ("node", "edge")),
    *(f"split/time/{name}.csv.gz" for name in ("train", "valid", "test")),
)


def load_arxiv(*, root: Path | None, download: bool) -> Graph:
    """Load ogbn-arxiv with its split by time."""
    _loader()
    source = None if root is None else root / FOLDER
    if source is not None and all((source / name).exists() for name in NEEDED):
        files = [entry for entry in fingerprint(source) if not entry[0].startswith("processed/")]
        digest = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
        folder = cached_folder(f"{ARXIV}-{digest}", lambda new: _copy(source, new))
    else:
        folder = cached_folder(f"{ARXIV}-download", lambda new: _fetch(new, root, download))
    return _read(folder)


def _loader() -> Any:
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise DataError(
            f"data set {ARXIV!r} needs the package ogb: pip install flower-graph[ogb] ({error})"
        ) from error
    return PygNodePropPredDataset


def _copy(source: Path, folder: Path) -> None:
    for part in ("raw", "split", "mapping"):
        copy_tree(source / part, folder / FOLDER / part)
    # Without this file ogb takes the folder for an old release and asks what to do.
    (folder / FOLDER / "RELEASE_v1.txt").touch()
    _read(folder)


def _fetch(folder: Path, root: Path | None, download: bool) -> None:
    files = [PurePath(FOLDER) / name for name in NEEDED]
    missing = missing_message(ARXIV, PurePath(FOLDER), files, root)
    if not download:
        raise DataError(f"{missing} (downloads are switched off)")
    try:
        check_reachable(["http://snap.stanford.edu/"])
    except OSError as error:
        raise DataError(f"{missing} The download failed: {error}") from error
    _read(folder)


def _read(folder: Path) -> Graph:
    loader = _loader()
    try:
        # PyG's classes are needed to read what ogb has saved with torch.save.
        with _unattended(), stall_limit(), pyg_classes_allowed():
            dataset = loader(name=ARXIV, root=str(folder))
            data, split = dataset[0], dataset.get_idx_split()
    # ogb leaves the process by exit() when a question is answered with no.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"data set {ARXIV!r} cannot be loaded by ogb: {reason}") from error
    for part, ogb_name in (("train", "train"), ("val", "valid"), ("test", "test")):
        mask = torch.zeros(data.x.size(0), dtype=torch.bool)
        mask[split[ogb_name]] = True
        data[f"{part}_mask"] = mask
    return graph_from(data, ARXIV, int(dataset.num_classes))


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
