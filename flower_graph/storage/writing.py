"""Writing: every file that the library writes, makes, renames or deletes goes through this module.

A run's folder may come from anybody, and have links in it. So the folder of a file is opened from
the root down, part by part, without following links, and the file relative to it. A file that is
changed in place must be regular, the user's own, and have no second name. ``named`` alone follows
links: a person who names a folder may do so through one.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flower_graph.errors import OutputError
from flower_graph.storage.reading import MOST_TENSORS, open_regular

LOG = logging.getLogger(__name__)
_CLOSED = os.O_CLOEXEC | os.O_NOFOLLOW
_ABOVE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | _CLOSED
_LAST = os.O_RDONLY | os.O_DIRECTORY | _CLOSED


def named(path: Path | str) -> Path:
    """Resolve a path that a person named, links included."""
    return Path(path).expanduser().resolve()


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file below a folder; ``OutputError`` if its name leads out of it."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise OutputError(f"{name!r:.80} is no name of a file below {folder}")
    return folder / name


@contextmanager
def saying(path: Path) -> Iterator[None]:
    """Turn an `OSError` into an `OutputError` that names the path and the reason."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


# Folders ------------------------------------------------------------------------------------------


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder, none of whose parts may be a link; yield its descriptor."""
    folder = folder.absolute()
    handle = os.open(folder.anchor, _ABOVE)
    try:
        # The last part by itself: the folder is open to be read, and may be "/"
        for part, flags in (*((part, _ABOVE) for part in folder.parts[1:]), (".", _LAST)):
            inner = _open_at(handle, part, flags, folder)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _open_at(folder: int, name: str, flags: int, path: Path, mode: int = 0) -> int:
    try:
        return os.open(name, flags, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OutputError(
                f"{path}: {name} is a link, or no folder; no link is followed"
            ) from None
        raise


def check_folder(folder: Path) -> None:
    """Refuse a folder with files of others, or with links that lead out of it."""
    with _opened(folder) as handle:
        for place, folders, files, inner in os.fwalk(".", dir_fd=handle):
            for name in (*folders, *files):
                path, status = folder / place / name, os.lstat(name, dir_fd=inner)
                if not stat.S_ISLNK(status.st_mode):
                    _check(status, path)
                elif not path.resolve().is_relative_to(folder):
                    raise OutputError(f"{path}: is a link out of {folder}; remove it")


def _check(status: os.stat_result, path: Path) -> None:
    """Refuse anything but the user's own folders and files without a second name."""
    is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    if status.st_uid != os.geteuid() or not (is_file or stat.S_ISDIR(status.st_mode)):
        why = "is another user's, no regular file, or has a second name"
        raise OutputError(f"{path}: {why}; copy or remove it")


def is_taken(folder: Path) -> bool:
    """Whether anything but a folder of the user's has this name."""
    if not os.path.lexists(folder):
        return False
    status = folder.lstat()
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid()


def make_folder(folder: Path, mode: int = 0o777, *, may_exist: bool = True) -> None:
    """Make a folder, and missing ones above it; a link in its place is refused."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        with _opened(path.parent) as handle, contextlib.suppress(FileExistsError):
            os.mkdir(path.name, mode, dir_fd=handle)
    if not missing and not may_exist:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    with _opened(folder):
        pass


def private_folder(folder: Path) -> None:
    """Make a folder, and missing ones above it, for their owner alone, whatever modes existed."""
    make_folder(folder, 0o700)
    try:
        with _opened(folder) as handle:
            os.fchmod(handle, 0o700)
    except PermissionError as error:  # another user's, or a file system without modes
        LOG.warning("%s is open to other users and stays so: %s", folder, error)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, if it exists; of a link in it only the link."""
    # Another process may remove it at the same time.
    with contextlib.suppress(FileNotFoundError), _opened(folder.parent) as handle:
        shutil.rmtree(folder.name, dir_fd=handle)  # follows no links


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with contextlib.suppress(OSError, OutputError), _opened(folder.parent) as handle:
        os.rmdir(folder.name, dir_fd=handle)


def temporary_folder(prefix: str = "flower-graph-", above: Path | None = None) -> Path:
    """Make a folder for its owner alone, under a name that nobody can guess."""
    return named(tempfile.mkdtemp(prefix=prefix, dir=above))


# Files --------------------------------------------------------------------------------------------


def open_own(path: Path, flags: int = os.O_RDWR, mode: int = 0o600) -> int:
    """Open a file, which must be regular, the user's and have one name; return its descriptor."""
    flags |= _CLOSED | os.O_NONBLOCK  # a pipe is opened at once, and refused
    with _opened(path.parent) as folder:
        handle = _open_at(folder, path.name, flags, path, mode)
    try:
        _check(os.fstat(handle), path)
    except OutputError:
        os.close(handle)
        raise
    return handle


def new_file(path: Path, mode: int = 0o600) -> int:
    """Make a file, replacing an existing one; return its descriptor."""
    remove(path)
    return open_own(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)


def remove(path: Path) -> None:
    """Remove a file, if it exists; of a link the link."""
    with contextlib.suppress(FileNotFoundError), _opened(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


def move(path: Path, target: Path) -> None:
    """Rename a file or folder; a file takes the place of one that is there."""
    with _opened(path.parent) as old, _opened(target.parent) as new:
        os.replace(path.name, target.name, src_dir_fd=old, dst_dir_fd=new)


def copy_file(path: Path, target: Path) -> None:
    """Copy a file, for its owner alone."""
    with open_regular(path, MOST_TENSORS) as source, replaced(target) as stream:
        shutil.copyfileobj(source, stream)


@contextmanager
def append(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file at its end, without a buffer; it is made if it is not there."""
    handle = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
    with os.fdopen(handle, "ab", buffering=0) as stream:
        yield stream


@contextmanager
def replaced(path: Path, mode: int = 0o600, *, lasting: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` once it is written whole.

    Any failure before that, Ctrl-C included, leaves ``path`` as it was. The folder is made if
    needed. A `lasting` file is then on the disk.
    """
    make_folder(path.parent, 0o700 if mode == 0o600 else 0o777)
    part = f".{path.name}.{os.getpid()}"
    with _opened(path.parent) as folder:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _CLOSED
            handle = os.open(part, flags, mode, dir_fd=folder)
            # The stream's name is a path for writers that take no stream.
            with open(path_of(folder, part), "wb", opener=lambda *_: handle) as stream:
                yield stream
            if lasting:  # by its name: a writer may have put another file in its place
                handle = os.open(part, os.O_RDONLY | _CLOSED, dir_fd=folder)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if lasting:
                os.fsync(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for people to read, as ``replaced``; ``OutputError`` if that fails."""
    with saying(path), replaced(path, 0o666, lasting=False) as stream:
        yield stream


def is_there(path: Path, handle: int) -> bool:
    """Whether an open file or folder still has this path."""
    try:
        return path.stat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


@contextmanager
def locked(folder: Path) -> Iterator[int | None]:
    """Lock a folder and yield its handle; None if the folder is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle if is_there(folder, handle) else None
    finally:
        os.close(handle)


def path_of(handle: int, name: str = "") -> str:
    """Return a path of an open descriptor, or of a file in an open folder."""
    return f"/proc/self/fd/{handle}/{name}" if name else f"/proc/self/fd/{handle}"
