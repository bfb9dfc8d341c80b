"""Finds raw files, keeps processed copies, and limits how long a download waits.

The data root is only read. Loaders write to the cache folder. Without a network, downloads fail
within seconds.
"""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePath
from urllib.error import HTTPError
from urllib.parse import urlsplit

from flower_graph.data.sources.names import CSBM, LINQS, OGB, file_path, folder_path, pyg_name
from flower_graph.errors import DataError, told
from flower_graph.storage.files import ROOT_VARIABLE, data_root, user_cache
from flower_graph.storage.writing import (
    copy_file,
    make_folder,
    move,
    named,
    remove_folder,
    temporary_folder,
)

CACHE_VARIABLE = "FLOWER_GRAPH_CACHE"
PROBE_SECONDS = 5.0  # for a first answer from a host
STALL_SECONDS = 30.0  # without a byte during a download
_MAY_FETCH = ContextVar("may-fetch", default=True)


@contextmanager
def fetching(allowed: bool) -> Iterator[None]:
    """Forbid downloads in this block unless allowed: a SuperNode downloads nothing for a run."""
    before = _MAY_FETCH.set(allowed and _MAY_FETCH.get())
    try:
        yield
    finally:
        _MAY_FETCH.reset(before)


def cache_root() -> Path:
    """Return the folder for processed copies: FLOWER_GRAPH_CACHE, or the user's cache."""
    return named(os.environ.get(CACHE_VARIABLE) or user_cache())


def cached_folder(key: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder of the cache with this key; fill it first if it is not there."""
    # A folder is filled under a temporary name and renamed when it is complete, so processes that
    # start at once do not see each other's half-made folders.
    folder = cache_root() / key
    if folder.is_dir():
        return folder
    try:
        make_folder(folder.parent)
        temporary = temporary_folder(".making-", folder.parent)
    except OSError as error:
        why = f"the cache {folder.parent} cannot be written ({error}); set {CACHE_VARIABLE}"
        raise DataError(why) from error
    try:
        fill(temporary)
        try:
            move(temporary, folder)
        except OSError:
            # Another process was faster: a folder that has files cannot be replaced.
            if not folder.is_dir():
                raise
    finally:
        # Also after Ctrl-C; nothing is left to remove when the rename worked.
        with suppress(OSError):
            remove_folder(temporary)
    return folder


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder's files into a folder; the copies are writable by their owner."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copy_file(path, target / path.relative_to(source))


def fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each file, so that a new file is noticed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = ((path.relative_to(folder).as_posix(), path.stat()) for path in files)
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def missing_message(
    label: str, wanted: PurePath, files: Sequence[PurePath], root: Path | None
) -> str:
    """Return a text about a data set's missing files; raise it if downloads are forbidden."""
    absent = [file for file in files if root is None or not (root / file).exists()]
    shown = ", ".join(file.name for file in absent[:3])
    more = f" and {len(absent) - 3} more files" if len(absent) > 3 else ""
    searched = "no data root is set" if root is None else f"looked in {root / wanted}"
    missing = (
        f"data set {label!r} is missing: no {shown}{more} ({searched}, and in the cache "
        f"{cache_root()}). Set data.root or {ROOT_VARIABLE} to a folder that holds {wanted}."
    )
    if not _MAY_FETCH.get():
        off = "downloads are switched off: a SuperNode fetches only what its node config names"
        error = DataError(f"{missing} ({off})")
        raise told(error, "this SuperNode fetches no data: its node config names none in data")
    return missing


def check_reachable(urls: Iterable[str]) -> None:
    """Raise OSError when none of the hosts of these addresses answers within seconds."""
    # A firewall that drops packets would otherwise hold a download up for minutes.
    sites = sorted({f"{parts.scheme}://{parts.netloc}/" for parts in map(urlsplit, urls)})
    failures = []
    for site in sites:
        try:
            # Only http(s) addresses come here; urllib honours the proxy settings.
            with urllib.request.urlopen(site, timeout=PROBE_SECONDS):
                return
        except HTTPError:
            return  # an answer, if not a page
        except OSError as error:
            failures.append(f"{site}: {getattr(error, 'reason', error)}")
    if failures:
        raise OSError("; ".join(failures))


@contextmanager
def stall_limit() -> Iterator[None]:
    """Give sockets without a timeout of their own one in this block."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


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
    root = None
    with suppress(DataError):  # a variable that names no folder; a run says so
        root = data_root(None)
    has_raw = root is not None and any((root / folder).is_dir() for folder in folders)
    return HERE if has_raw or any(cache_root().glob(f"{label}-*")) else ABSENT
