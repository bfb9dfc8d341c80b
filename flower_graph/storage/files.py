"""Folders and files: checked early, used by one run at a time, written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import lzma
import math
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_graph.errors import DataError, OutputError, StateLostError
from flower_graph.storage import writing

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.storage.sealed import StateKey

LOG = logging.getLogger(__name__)
SHARED = Path("/dev/shm")  # Linux's shared memory
LOCK_FILE = ".running"
STATE_VARIABLE = "FLOWER_GRAPH_STATE"  # set by the process that starts a run and removes its files

# Keys of the node config; the in-process engine's value in place of a folder
STATE_DIR, IN_PROCESS = "state-dir", ":memory:"
DATA_FOLDER, PARTITION, PARTITIONS = "data-folder", "partition-id", "num-partitions"
ROOT_VARIABLE = "FLOWER_GRAPH_DATA"
_PROBE_BYTES = 4 * 2**20  # more than a run writes beside its weights


@contextmanager
def new_folder(out: Path, *, may_exist: bool = False) -> Iterator[Path]:
    """Make and lock an output folder, and check by writing that it can take a run's outputs.

    The yielded path has no links. An existing folder may be from anybody: links in it that lead
    out of it, and files of other users, are refused. At the end, folders that were made and stay
    empty are removed.
    """
    out = writing.named(out)
    made = missing_folders(out)
    try:
        with ExitStack() as lock:
            with writing.saying(out):
                writing.make_folder(out)
                if may_exist:
                    writing.check_folder(out)
                elif holds_something(out):
                    raise OutputError(
                        f"output folder {out}: exists and is not empty; choose another; for a run "
                        "that is in it, --overwrite or --resume"
                    )
                with writing.replaced(probe := out / ".probe") as stream:
                    stream.write(bytes(_PROBE_BYTES))
                writing.remove(probe)
                lock.enter_context(folder_lock(out))
            yield out
    finally:
        for folder in made:
            writing.remove_empty(folder)


def missing_folders(folder: Path) -> list[Path]:
    """List the folders of a path that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def holds_something(folder: Path) -> bool:
    """Whether a folder has more in it than the lock of a run that was killed."""
    return any(path.name != LOCK_FILE for path in folder.iterdir())


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all; ``OutputError`` if it cannot be written."""
    with writing.written(path) as stream:
        stream.write(text.encode())


def write_json(path: Path, payload: object) -> None:
    """Write a JSON file in one piece; numbers that are not finite become null."""
    write_text(path, json.dumps(plain(payload), indent=2, allow_nan=False) + "\n")


def write_packed(path: Path, payload: object) -> None:
    """Write a compressed JSON file, whole or not at all; the same content gives the same bytes."""
    text = json.dumps(plain(payload), separators=(",", ":"), allow_nan=False)
    with writing.written(path) as stream:
        stream.write(lzma.compress(text.encode(), preset=9))


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one line of JSON, whole or not at all."""
    line = json_line(record)
    # Unbuffered: one write hands the whole line over, and a Ctrl-C cannot fall inside it.
    with writing.saying(path), writing.append(path) as file:
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
        with os.fdopen(writing.open_own(path, flags, 0o666), "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                words = f"output folder {folder}: another run writes there"
                raise OutputError(f"{words} ({file.read().strip() or 'just begun'})") from None
            except OSError as error:  # some network file systems have no locks
                LOG.warning(
                    "%s cannot be locked (%s): see that no other run uses it", folder, error
                )
            if not writing.is_there(path, file.fileno()):
                continue  # the last run has removed the file, so it locks nothing
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            try:
                yield
            finally:
                writing.remove(path)
            return


# Where clients keep their state ------------------------------------------------------------------


def own_folder(folder: Path, place: Path | None = None) -> None:
    """Make a private folder of state, up to the SuperNode's folder; refuse another user's."""
    # The SuperNode's folder, by default the one above, may be in a folder that is open to all.
    writing.make_folder(folder, 0o700)
    for path in (folder, *folder.parents):
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & stat.S_ISVTX:
            why = "is another user's, or for all users"
            raise StateLostError(f"state-dir, {STATE_VARIABLE}: {path} {why}")
        writing.private_folder(path)
        if path == (place or folder.parent):
            return


def default_folder() -> Path:
    """Return the default folder of state files: shared memory if the machine has it."""
    if given := os.environ.get(STATE_VARIABLE):
        path = Path(given).expanduser()
        # Nobody may put a link there before it is made
        return writing.named(path.parent) / path.name
    base = SHARED if os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())
    folder = writing.named(base) / f"flower-graph-{os.getuid()}"
    # All users may write there: another one may have taken the name.
    return writing.named(user_cache()) / "state" if writing.is_taken(folder) else folder


def user_cache() -> Path:
    """Return the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flower-graph"


def data_root(setting: str | None) -> Path | None:
    """Return the folder of raw files, or None when none is set."""
    value, origin = setting, "data.root"
    if not value:
        value, origin = os.environ.get(ROOT_VARIABLE), ROOT_VARIABLE
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
        return writing.named(given)
    data = str(context.node_config.get(DATA_FOLDER, ""))
    return writing.named(data) / "state" if data else None


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
