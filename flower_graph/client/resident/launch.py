"""Starts the worker that keeps the clients, and passes messages to it.

A worker has one SuperNode's clients in one run. It listens on a Unix socket of mode 600 in a folder
of mode 700, and both sides check the other's user. Starting a worker takes a lock on the folder, so
two messages never start two workers. A block on the socket is a list of Flower's protobuf messages:
their number, their lengths, their bytes. Nothing is unpickled.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flwr.app import Context, Message

from flower_graph.errors import WorkerLostError, told
from flower_graph.flower_compat import (
    MessageProto,
    RecordDictProto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
)
from flower_graph.storage.files import default_folder, own_folder
from flower_graph.wire.client_errors import ClientError, boundary

HELLO = b"flower-graph resident 1"  # what a worker says first
REPLY, ERROR = b"reply", b"error"  # what a worker's answer begins with
ATTEMPTS = 3  # a worker may end, its work done, just when it is called
NUMBER = struct.Struct("!Q")
BACKLOG = 8  # messages that wait for a worker that is busy
# Modules are found where the process that starts it finds them, the app's own folder among them.
BOOT = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given.pop("path")
from flower_graph.client.resident.worker import main
main(given)
"""


class WorkerHome:
    """Clients that live in a worker. The first message starts it.

    Parameters
    ----------
    reference : str
        The ClientApp that the worker calls.
    owner : int
        The process of the SuperNode that starts a process for each message.
    idle : float
        Seconds without a message after which the worker ends.
    """

    def __init__(self, reference: str, owner: int, idle: float) -> None:
        self._reference, self._owner, self._idle = reference, owner, idle

    def answer(self, message: Message, context: Context) -> Message:
        """Have the worker answer a message.

        Raises
        ------
        WorkerLostError
            If it cannot be started, or dies over the message; the next message starts another.
        Exception
            The ClientApp's own, by the same name and words.
        """
        with boundary(context), self._called(context) as connection:
            asked = message_to_proto(message), context_to_proto(context)
            try:
                send(connection, *(one.SerializeToString() for one in asked))
                kind, answer, state = receive(connection)
            except (OSError, EOFError) as error:
                words = "the process that keeps its clients died while it answered"
                raise told(WorkerLostError(words), words) from error
            context.state = recorddict_from_proto(RecordDictProto.FromString(state))
            if kind != REPLY:
                raise _as_raised(answer)
            return message_from_proto(MessageProto.FromString(answer))

    @contextmanager
    def _called(self, context: Context) -> Iterator[socket.socket]:
        folder = default_folder() / f"run-{context.run_id}"
        name = f"resident-{context.node_id}-{self._owner}"
        for _ in range(ATTEMPTS):
            try:
                own_folder(folder)
            except FileNotFoundError:  # it was removed just now, as its last worker ended
                continue
            with locked(folder) as handle:
                if handle is None:  # likewise
                    continue
                connection = self._connected(handle, name)
                if connection is None:
                    self._start(folder, handle, name)
                    connection = self._connected(handle, name)
            if connection is None:
                continue
            with connection:
                try:
                    ready = receive(connection) == [HELLO]
                except (OSError, EOFError):
                    continue
                if ready:
                    yield connection
                    return
        words = "the process that keeps its clients cannot be started"
        raise told(WorkerLostError(f"{words}: the SuperNode's log says why"), words)

    def _connected(self, handle: int, name: str) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(reach(handle, name))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        if not is_own(connection):
            connection.close()
            raise WorkerLostError(f"{name}: its socket belongs to another user's process")
        return connection

    def _start(self, folder: Path, handle: int, name: str) -> None:
        """Make the socket and start the worker, which outlives this process."""
        where = reach(handle, name)
        with suppress(FileNotFoundError):
            os.unlink(where)  # of a worker that was killed
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(where)
            os.chmod(where, 0o600)
            listener.listen(BACKLOG)
            given = {
                "path": sys.path,
                "reference": self._reference,
                "folder": str(folder),
                "name": name,
                "listener": listener.fileno(),
                "owner": self._owner,
                "idle": self._idle,
            }
            subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a Ctrl-C is for the SuperNode, with which it ends
            )


def _as_raised(fault: bytes) -> Exception:
    said: dict[str, str] = json.loads(fault)
    about = {"__module__": said["module"], "__qualname__": said["name"]}
    kind: type[ClientError] = type(said["name"], (ClientError,), about)
    return told(kind(said["text"]), said["text"])


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
        try:
            is_there = os.stat(folder).st_ino == os.fstat(handle).st_ino
        except FileNotFoundError:
            is_there = False
        yield handle if is_there else None
    finally:
        os.close(handle)


def reach(handle: int, name: str) -> str:
    """Return a path to a socket in an open folder, short enough for the system's limit."""
    return f"/proc/self/fd/{handle}/{name}"


def is_own(connection: socket.socket) -> bool:
    """Whether this user owns the process at the other end."""
    form = struct.Struct("3i")  # process, user, group
    told_by_system = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    _, user, _ = form.unpack(told_by_system)
    return bool(user == os.getuid())


def send(connection: socket.socket, *parts: bytes) -> None:
    """Send a block; ``OSError`` if the other side is gone."""
    connection.sendall(b"".join(map(NUMBER.pack, (len(parts), *map(len, parts)))))
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> list[bytes]:
    """Receive a whole block; return its parts. ``EOFError`` if the other side is gone."""
    (count,) = NUMBER.unpack(_read(connection, NUMBER.size))
    lengths = _read(connection, count * NUMBER.size)
    return [_read(connection, size) for (size,) in NUMBER.iter_unpack(lengths)]


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    free = memoryview(data)
    while free:
        count = connection.recv_into(free)
        if not count:
            raise EOFError("the other side is gone")
        free = free[count:]
    return bytes(data)
