"""Folders and files: checked early, used by one run at a time, written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from flower_graph.errors import OutputError, StateLostError

LOG = logging.getLogger(__name__)
LOCK_FILE = ".running"
SEALED = b"flower-graph sealed 1\n"  # begins files that are encrypted (``storage.sealed``)
STATE_VARIABLE = "FLOWER_GRAPH_STATE"  # set by the process that starts a run and removes its files

# More than a run writes beside its weights: writing this much shows whether the disk is full.
_PROBE_BYTES = 4 * 2**20


def prepare_folder(out: Path, *, may_exist: bool = False) -> Path:
    """Make an output folder, and check by writing to it that it can take a run's outputs."""
    out = Path(out).expanduser().absolute()
    if out.exists() and not out.is_dir():
        raise OutputError(f"output folder {out}: is a file, not a folder")
    made = missing_folders(out)
    with saying(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
            if not may_exist and holds_something(out):
                raise OutputError(
                    f"output folder {out}: exists and is not empty; choose another; for a run "
                    "that is in it, --overwrite or --resume"
                )
            _probe(out / ".probe")
        except OSError:
            remove_empty(made)
            raise
    return out


@contextmanager
def new_folder(out: Path, *, may_exist: bool = False) -> Iterator[Path]:
    """Prepare an output folder; remove folders that were made for it and stay empty."""
    made = missing_folders(Path(out).expanduser().absolute())
    try:
        yield prepare_folder(out, may_exist=may_exist)
    finally:
        remove_empty(made)


def missing_folders(folder: Path) -> list[Path]:
    """List the folders of a path that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove the empty ones of some folders."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def holds_something(folder: Path) -> bool:
    """Whether a folder has more in it than the lock of a run that was killed."""
    return any(path.name != LOCK_FILE for path in folder.iterdir())


def _probe(path: Path) -> None:
    try:
        with path.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            # Some file systems find room only when the bytes leave memory.
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which replaces it once it is written whole."""
    # Whatever goes wrong before that, Ctrl-C included, leaves ``path`` as it was and removes the
    # temporary file. An `OSError` becomes an `OutputError`.
    # The ending stays, because some writers choose their format by it.
    temporary = path.with_name(f".partial-{path.name}")
    with saying(path):
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a private temporary path, which replaces ``path`` once it is on the disk."""
    _make(path.parent)
    for left in path.parent.glob(f".{path.name}.*"):
        number = left.suffix[1:]  # of a process, which may have died while it wrote this file
        if number.isdigit() and not is_alive(int(number)):
            left.unlink(missing_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Made here, because a writer would let everybody read it.
        os.close(own_file(part))
        yield part
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def saying(path: Path) -> Iterator[None]:
    """Turn an `OSError` into an `OutputError` that names the path and the reason."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all; ``OutputError`` if it cannot be written."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, payload: object) -> None:
    """Write a JSON file in one piece; numbers that are not finite become null."""
    with atomic(path) as temporary:
        text = json.dumps(plain(payload), indent=2, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one line of JSON, whole or not at all."""
    line = json.dumps(plain(record), allow_nan=False).encode() + b"\n"
    # Unbuffered: one write hands the whole line over, and a Ctrl-C cannot fall inside it.
    with saying(path), path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(start)
            raise


# Any: JSON values; each file's writer and reader know their types
def plain(value: object) -> Any:
    """Turn nested values into JSON values: NumPy's to numbers, NaN and infinity to null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


class FolderLock:
    """Locks an output folder until ``release``, or until the process ends."""

    # The lock is the operating system's, on the file ``.running``, so one whose process was killed
    # stands in nobody's way. What the file says, process and machine, is for the message.

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file: IO[str] | None = None
        # Whoever released it last has removed the file: one that is not in the folder any more
        # locks nothing.
        while self._file is None or not self._is_there():
            self._file = self._taken(folder)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Unlock the folder; may be called twice."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _taken(self, folder: Path) -> IO[str]:
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "a run that has just begun"
            file.close()
            raise OutputError(
                f"output folder {folder}: another run writes there ({who}); wait for its end, or "
                "choose another folder"
            ) from None
        except OSError as error:  # some network file systems have no locks
            LOG.warning("%s cannot be locked (%s): see that no other run uses it", folder, error)
        return file

    def _is_there(self) -> bool:
        assert self._file is not None
        try:
            is_same = self._path.stat().st_ino == os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self._file.close()
        return is_same


# Where clients keep their state ------------------------------------------------------------------


def private_folder(folder: Path) -> None:
    """Make a folder, and missing ones above it, for their owner alone, whatever modes existed."""
    _make(folder)
    if folder.stat().st_mode & 0o077:
        try:
            folder.chmod(0o700)
        except OSError as error:  # a file system without modes
            LOG.warning("%s is open to other users and stays so: %s", folder, error)


def own_file(path: Path) -> int:
    """Create a file for its owner alone; an old file of another mode is replaced."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)


def own_folder(folder: Path, place: Path | None = None) -> None:
    """Make a private folder of state, up to the SuperNode's folder; refuse another user's."""
    # The SuperNode's folder, by default the one above, may be in a folder that is open to all.
    _make(folder)
    for path in (folder, *folder.parents):
        status = path.stat()
        why = "belongs to another user" if status.st_uid != os.getuid() else ""
        if why or status.st_mode & stat.S_ISVTX:
            raise StateLostError(
                f"{path} {why or 'is for all users'}; set state-dir in the node's config to "
                "another folder"
            )
        private_folder(path)
        if path == (place or folder.parent):
            return


def _make(folder: Path) -> None:
    for path in reversed(missing_folders(folder)):
        path.mkdir(mode=0o700, exist_ok=True)


def default_folder() -> Path:
    """Return the default folder of state files: shared memory if the machine has it."""
    if named := os.environ.get(STATE_VARIABLE):
        return Path(named)
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"flower-graph-{os.getuid()}"


def remove_if_empty(folder: Path) -> None:
    """Remove a run's folder once it is empty; any process may have removed its last file."""
    remove_empty([folder])
