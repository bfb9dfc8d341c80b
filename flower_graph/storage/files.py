"""Files and folders: all that the library writes, makes, renames or deletes goes through here.

A run's folder may come from anybody, and have links in it. So the folder of a file is opened from
the root down, part by part, without following links, and the file relative to it. A file that is
changed in place must be regular, the user's own, and have no second name. ``named`` alone follows
links: a person who names a folder may do so through one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import lzma
import math
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from flower_graph.errors import DataError, OutputError, StateLostError
from flower_graph.storage.reading import MOST_TENSORS, open_regular

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.storage.sealed import StateKey

LOG = logging.getLogger(__name__)
_CLOSED = os.O_CLOEXEC | os.O_NOFOLLOW
_ABOVE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | _CLOSED
_LAST = os.O_RDONLY | os.O_DIRECTORY | _CLOSED
SHARED = Path("/dev/shm")  # Linux's shared memory
LOCK_FILE = ".running"
STATE_VARIABLE = "FLOWER_GRAPH_STATE"  # set by the process that starts a run and removes its files

# Keys of the node config; the in-process engine's value in place of a folder
STATE_DIR, IN_PROCESS = "state-dir", ":memory:"
DATA_FOLDER, PARTITION, PARTITIONS = "data-folder", "partition-id", "num-partitions"
ROOT_VARIABLE = "FLOWER_GRAPH_DATA"
_PROBE_BYTES = 4 * 2**20  # more than a run writes beside its weights


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
        raise OutputError(f"{path}: is another user's, no regular file, or has a second name")


def make_folder(folder: Path, mode: int = 0o777, *, may_exist: bool = True) -> None:
    """Make a folder, and missing ones above it; a link in its place is refused."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        with _opened(path.parent) as handle, suppress(FileExistsError):
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
    except OSError as error:  # another user's, or a file system without modes
        LOG.warning("%s is open to other users and stays so: %s", folder, error)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, if it exists; of a link in it only the link."""
    # Another process may remove it at the same time.
    with suppress(FileNotFoundError), _opened(folder.parent) as handle:
        shutil.rmtree(folder.name, dir_fd=handle)  # follows no links


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError, OutputError), _opened(folder.parent) as handle:
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


def remove(path: Path) -> None:
    """Remove a file, if it exists; of a link the link."""
    with suppress(FileNotFoundError), _opened(path.parent) as folder:
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
        for left in os.listdir(folder):  # of a process that died while it wrote this file
            number = left.removeprefix(f".{path.name}.")
            if number != left and number.isdecimal() and not os.path.exists(f"/proc/{number}"):
                os.unlink(left, dir_fd=folder)
        try:
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _CLOSED
            handle = os.open(part, flags, mode, dir_fd=folder)
            # The stream's name is a path for writers that take no stream.
            with open(path_of(folder, part), "wb", opener=lambda *_: handle) as stream:
                yield stream
            if lasting:  # by its name: a writer may have put another file in its place
                with open(path_of(folder, part), "rb") as whole:
                    os.fsync(whole.fileno())
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if lasting:
                os.fsync(folder)
        except BaseException:
            with suppress(OSError):
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


# Outputs ------------------------------------------------------------------------------------------


@contextmanager
def new_folder(out: Path, *, may_exist: bool = False) -> Iterator[Path]:
    """Make and lock an output folder, and check by writing that it can take a run's outputs.

    The yielded path has no links. An existing folder may be from anybody: links in it that lead
    out of it, and files of other users, are refused. At the end, folders that were made and stay
    empty are removed.
    """
    out = named(out)
    made = missing_folders(out)
    try:
        with ExitStack() as lock:
            with saying(out):
                make_folder(out)
                if may_exist:
                    check_folder(out)
                elif holds_something(out):
                    raise OutputError(
                        f"output folder {out}: exists and is not empty; choose another; for a run "
                        "that is in it, --overwrite or --resume"
                    )
                with replaced(probe := out / ".probe") as stream:
                    stream.write(bytes(_PROBE_BYTES))
                remove(probe)
                lock.enter_context(folder_lock(out))
            yield out
    finally:
        for folder in made:
            remove_empty(folder)


def missing_folders(folder: Path) -> list[Path]:
    """List the folders of a path that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def holds_something(folder: Path) -> bool:
    """Whether a folder has more in it than the lock of a run that was killed."""
    return any(path.name != LOCK_FILE for path in folder.iterdir())


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all; ``OutputError`` if it cannot be written."""
    with written(path) as stream:
        stream.write(text.encode())


def write_json(path: Path, payload: object) -> None:
    """Write a JSON file in one piece; numbers that are not finite become null."""
    write_text(path, json.dumps(plain(payload), indent=2, allow_nan=False) + "\n")


def write_packed(path: Path, payload: object) -> None:
    """Write a compressed JSON file, whole or not at all; the same content gives the same bytes."""
    text = json.dumps(plain(payload), separators=(",", ":"), allow_nan=False)
    with written(path) as stream:
        stream.write(lzma.compress(text.encode(), preset=9))


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one line of JSON, whole or not at all."""
    line = json_line(record)
    # Unbuffered: one write hands the whole line over, and a Ctrl-C cannot fall inside it.
    with saying(path), append(path) as file:
        start = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(start)
            raise


def json_line(record: Mapping[str, object]) -> bytes:
    """Return a record as one line of JSON."""
    return json.dumps(plain(record), allow_nan=False).encode() + b"\n"


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


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock an output folder; ``OutputError`` if another process has locked it."""
    # The lock is the operating system's, on the file ``.running``, so one whose process was killed
    # stands in nobody's way. What the file says, process and machine, is for the message.
    path, flags = folder / LOCK_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT
    while True:
        with os.fdopen(open_own(path, flags, 0o666), "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                words = f"another run writes there ({file.read().strip() or 'just begun'})"
                raise OutputError(f"output folder {folder}: {words}") from None
            except OSError as error:  # some network file systems have no locks
                LOG.warning("%s cannot be locked: let no other run use it (%s)", folder, error)
            if is_there(path, file.fileno()):  # else the last run has just removed it
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                try:
                    yield
                finally:
                    remove(path)
                return


# Where clients keep their state ------------------------------------------------------------------


def own_folder(folder: Path, place: Path | None = None) -> None:
    """Make a private folder of state, up to the SuperNode's folder; refuse another user's."""
    # The SuperNode's folder, by default the one above, may be in a folder that is open to all.
    make_folder(folder, 0o700)
    for path in (folder, *folder.parents):
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & stat.S_ISVTX:
            why = "is another user's, or for all users"
            raise StateLostError(f"state-dir, {STATE_VARIABLE}: {path} {why}")
        private_folder(path)
        if path == (place or folder.parent):
            return


def default_folder() -> Path:
    """Return the default folder of state files: shared memory if the machine has it."""
    if given := os.environ.get(STATE_VARIABLE):
        path = Path(given).expanduser()
        # Nobody may put a link there before it is made
        return named(path.parent) / path.name
    base = SHARED if os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())
    folder = named(base) / f"flower-graph-{os.getuid()}"
    # All users may write there: another one may have taken the name.
    with suppress(FileNotFoundError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return named(user_cache()) / "state"
    return folder


def user_cache() -> Path:
    """Return the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flower-graph"


def data_root(setting: str | None) -> Path | None:
    """Return the folder of raw files, or None when none is set."""
    variable = os.environ.get(ROOT_VARIABLE)
    value, origin = (setting, "data.root") if setting else (variable, ROOT_VARIABLE)
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise DataError(f"{origin} = {value!r}: there is no such folder")
    return folder


# A SuperNode that is started anew without authentication gets another node id, so its id is no name
# for files. Its data folder, or the number of its partition, stays.


def own_place(context: Context) -> Path | None:
    """Return the SuperNode's own lasting folder."""
    given = str(context.node_config.get(STATE_DIR, ""))
    if given == IN_PROCESS:
        return None
    if given:
        return named(given)
    data = str(context.node_config.get(DATA_FOLDER, ""))
    return named(data) / "state" if data else None


def state_key(context: Context) -> StateKey | None:
    """Return the key that encrypts the SuperNode's files, if its node config names one."""
    if "state-key" not in context.node_config:
        return None
    from flower_graph.storage.sealed import StateKey  # loads cryptography

    return StateKey.of(context.node_config, own_place(context))


def node_name(context: Context) -> str:
    """Return a name for the SuperNode's files that stays when it is started anew."""
    config = context.node_config
    if PARTITION in config:
        return str(config[PARTITION])  # the app checks that it is a number
    if data := str(config.get(DATA_FOLDER, "")):
        folder = Path(data).expanduser().absolute()
        # Several SuperNodes of a machine may share one state-dir.
        return f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    return "0"
