"""The worker, a process that keeps one SuperNode's clients of one run, and how messages reach it.

The first message of a run starts the worker. The worker is a cache of files or of Flower's context,
so it may end at any time: it ends when the run is over, the SuperNode or the waiting process is
gone, or no message came for some time.

A worker listens on a Unix socket of mode 600 in a folder of mode 700, and both sides check the
other's user. Starting a worker takes a lock on the folder, so two messages never start two workers.
What goes over the socket are the bytes of Flower's protobuf messages. Nothing is unpickled. The
process that sends a message imports neither PyTorch nor the engine.
"""

import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Never

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_graph.errors import WorkerLostError, told
from flower_graph.flower_compat import (
    ContextProto,
    MessageProto,
    RecordDictProto,
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flower_graph.storage.files import default_folder, own_folder
from flower_graph.storage.writing import locked, path_of, remove, remove_empty
from flower_graph.wire.client_errors import ClientError, boundary
from flower_graph.wire.keys import CONFIG

LOG = logging.getLogger("flwr")  # whose lines a SuperNode's user reads
# Seconds that a worker waits for another message once a run's outputs are written: some methods
# send one more, and of the others nothing says that the run is over.
LINGER = 20.0
HELLO = b"flower-graph resident 1"  # what a worker says first
REPLY, ERROR = b"reply", b"error"  # what a worker's answer begins with
ATTEMPTS = 3  # a worker may end, its work done, just when it is called
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
    """Clients that live in a worker. The first message starts it."""

    # owner: the process of the SuperNode that starts a process for each message; idle: seconds
    # without a message after which the worker ends
    def __init__(self, reference: str, owner: int, idle: float) -> None:
        self._reference, self._owner, self._idle = reference, owner, idle

    def __call__(self, message: Message, context: Context) -> Message:
        """Have the worker answer a message.

        Raises
        ------
        WorkerLostError
            If it cannot be started, or dies over the message; the next message starts another.
        Exception
            The ClientApp's own, by the same name and words.
        """
        with boundary(context), self._called(context) as connection:
            try:
                connection.send_bytes(message_to_proto(message).SerializeToString())
                connection.send_bytes(context_to_proto(context).SerializeToString())
                kind, answer, state = (connection.recv_bytes() for _ in range(3))
            except (OSError, EOFError) as error:
                words = "the process that keeps its clients died while it answered"
                raise told(WorkerLostError(words), words) from error
            context.state = recorddict_from_proto(RecordDictProto.FromString(state))
            if kind == REPLY:
                return message_from_proto(MessageProto.FromString(answer))
            said: dict[str, str] = json.loads(answer)
            about = {"__module__": said["module"], "__qualname__": said["name"]}
            fault: type[ClientError] = type(said["name"], (ClientError,), about)
            raise told(fault(said["text"]), said["text"])

    @contextmanager
    def _called(self, context: Context) -> Iterator[Connection]:
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
                where = path_of(handle, name)
                reached = _connected(where)
                if reached is None:
                    self._start(folder, where)
                    reached = _connected(where)
            if reached is None:
                continue
            with Connection(reached.detach()) as connection:
                try:
                    hello = connection.recv_bytes()
                except (OSError, EOFError):
                    continue
                if hello == HELLO:
                    yield connection
                    return
        words = "the process that keeps its clients cannot be started"
        raise told(WorkerLostError(f"{words}: the SuperNode's log says why"), words)

    def _start(self, folder: Path, where: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(where)  # of a worker that was killed
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(where)
            os.chmod(where, 0o600)
            listener.listen(BACKLOG)
            given = {
                "path": sys.path,
                "reference": self._reference,
                "path_of_socket": str(folder / where.rpartition("/")[2]),
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


def _connected(where: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(where)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    if not is_own(connection):
        connection.close()
        raise WorkerLostError(f"{where}: its socket belongs to another user's process")
    return connection


def is_own(connection: socket.socket) -> bool:
    """Whether this user owns the process at the other end."""
    form = "3i"  # process, user, group
    size = struct.calcsize(form)
    told_by_system = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack(form, told_by_system)[1] == os.getuid())


# The process -------------------------------------------------------------------------------------


def load_app(reference: str) -> ClientApp:
    """Import a ``ClientApp`` by its reference, ``"package.module:attribute"``."""
    module, _, attribute = reference.partition(":")
    app = getattr(import_module(module), attribute)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{reference} must be a ClientApp, is {type(app).__name__}")
    return app


class Worker:
    """Answers messages, one after another, until nothing needs it any more."""

    # listener: the socket, which it inherits; owner: the process of the SuperNode without which it
    # ends; idle: seconds without a message after which it ends
    def __init__(
        self, reference: str, path_of_socket: str, listener: int, owner: int, idle: float
    ) -> None:
        self._reference, self._idle, self._socket = reference, idle, Path(path_of_socket)
        self._listener = socket.socket(fileno=listener)
        self._inode = self._socket.stat().st_ino
        self._events = select.epoll()
        try:
            # Of SuperExec, and of its parent, the SuperNode
            status = Path(f"/proc/{owner}/stat").read_text(encoding="utf-8")
            for process in (owner, int(status.rpartition(")")[2].split()[1])):
                if process > 1:
                    self._events.register(os.pidfd_open(process), select.EPOLLIN)
        except (ProcessLookupError, FileNotFoundError):
            self.leave()

    def serve(self) -> None:
        def leave_when_alone() -> None:
            self._events.poll()  # a process of the SuperNode is gone, or the one that waits
            self.leave()

        threading.Thread(target=leave_when_alone, daemon=True).start()
        self._listener.settimeout(self._idle)
        is_over = False
        while not is_over:
            try:
                caller, _ = self._listener.accept()
            except TimeoutError:
                break
            caller.settimeout(None)
            # Whoever has called may have died meanwhile.
            with suppress(OSError, EOFError):
                is_ours = is_own(caller)
                with Connection(caller.detach()) as connection:
                    is_over = is_ours and self._serve(connection)
        self._end()

    def leave(self) -> Never:
        """End at once, even in the middle of a message; the files on disk stay whole."""
        self._remove()
        os._exit(0)

    def _serve(self, connection: Connection) -> bool:
        connection.send_bytes(HELLO)
        asked, given = connection.recv_bytes(), connection.recv_bytes()
        message = message_from_proto(MessageProto.FromString(asked))
        context = context_from_proto(ContextProto.FromString(given))
        before = bool(context.state)
        self._events.register(connection, select.EPOLLRDHUP)
        try:
            answer = self._answer(message, context)
        finally:
            self._events.unregister(connection)
        from flower_graph.outputs.client import FINISH, TYPE  # not in a process that only sends

        # Whether it asks for the run's final outputs: at most one message follows
        asks = message.metadata.message_type == TYPE and message.has_content()
        entries = message.content.config_records.get(CONFIG) if asks else None
        is_late = entries is not None and entries.get("keep-action") == FINISH
        self._listener.settimeout(min(self._idle, LINGER) if is_late else self._idle)
        is_over = before and not context.state  # clients forget what they kept of a run
        if is_over:
            self._end()
        for part in answer:
            connection.send_bytes(part)
        return is_over

    def _answer(self, message: Message, context: Context) -> list[bytes]:
        try:
            with boundary(context):  # what an app of its own tells, it decides itself
                app = load_app(self._reference)
            kind, reply = REPLY, message_to_proto(app(message, context)).SerializeToString()
        except Exception as error:
            LOG.error("ClientApp raised an exception", exc_info=error)  # as Flower says it
            of = type(error)
            fault = {"module": of.__module__, "name": of.__qualname__, "text": str(error)}
            kind, reply = ERROR, json.dumps(fault).encode()
        return [kind, reply, recorddict_to_proto(context.state).SerializeToString()]

    def _end(self) -> None:
        """Stop listening and remove the socket, under the lock that a new worker needs."""
        with locked(self._socket.parent):
            self._listener.close()  # a caller in between notices, and calls the next worker
            self._remove()

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            if self._socket.stat().st_ino == self._inode:
                remove(self._socket)
        remove_empty(self._socket.parent)


def main(given: Mapping[str, object]) -> None:
    """Run the worker that these settings describe."""
    from flower_graph.records.warned import counted_warnings  # here, as the outputs below

    worker = Worker(**given)  # type: ignore[arg-type]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: worker.leave())
    with counted_warnings():
        worker.serve()
