"""Whether a data set is on this machine, told from names of folders alone."""

from __future__ import annotations

from pathlib import Path

from flower_graph.data.sources.cache import cache_root
from flower_graph.data.sources.names import CSBM, LINQS, OGB, file_path, folder_path, pyg_name
from flower_graph.errors import DataError
from flower_graph.storage.places import data_root

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
    if name.lower() in OGB:
        folders, label = [Path(name.replace("-", "_"))], name
    else:
        known = pyg_name(name).raw
        member = known.member or ""
        folders = [Path(known.group, one) for one in (member, member.lower())]
        label = "-".join(part for part in known if part)
    root = _root()
    has_raw = root is not None and any((root / folder).is_dir() for folder in folders)
    return HERE if has_raw or any(cache_root().glob(f"{label}-*")) else ABSENT


def _root() -> Path | None:
    try:
        return data_root(None)
    except DataError:  # a variable that names no folder; a run says so
        return None
