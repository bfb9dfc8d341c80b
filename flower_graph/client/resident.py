"""Where a SuperNode's clients live between two messages, and how messages reach them.

Flower starts a process for every message. The first message of a run starts a worker, a process
that keeps the SuperNode's clients. The worker is a cache of files or of Flower's context, so it may
end at any time: it ends when the run is over, the SuperNode or the waiting process is gone, or no
message came for some time.

A worker listens on a Unix socket of mode 600 in a folder of mode 700, and both sides check the
other's user. Whoever connects to a worker, starts it or ends it has a lock, so two messages never
start two workers, and none calls a worker that ends. What goes over the socket are the bytes of
Flower's protobuf messages. Nothing is unpickled. The process that sends a message imports neither
PyTorch nor the engine.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Never

from flwr.app import Context, Error, Message, UserConfigValue
from flwr.clientapp import ClientApp

from flower_graph.client.home import Home, load_app
from flower_graph.errors import ConfigError, WorkerLostError, brief, told
from flower_graph.flower_compat import (
    ContextProto,
    ErrorCode,
    MessageProto,
    RecordDictProto,
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    owner_of_message,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flower_graph.storage import files
from flower_graph.wire.client_errors import boundary, on_ray
from flower_graph.wire.keys import CONFIG

LOG = logging.getLogger("flwr")  # whose lines a SuperNode's user reads
RESIDENT, IDLE = "resident", "resident-idle"  # keys of the node config
USUAL_IDLE = 600.0  # seconds
# Seconds that a worker waits for another message once a run's outputs are written: some methods
# send one more, and of the others nothing says that the run is over.
LINGER = 20.0
BACKLOG = 8  # messages that wait for a worker that is busy
# Modules are found where the process that starts it finds them, the app's own folder among them.
BOOT = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given.pop("path")
from flower_graph.client.resident import main
main(given)
"""


class ResidentClientApp(ClientApp):
    """Answers messages as another ``ClientApp`` does, in the process that keeps its clients.

    A SuperNode starts a process for each message. The first message then starts a worker, which
    keeps the clients until the run is over. Elsewhere the other app is called in this process.

    Parameters
    ----------
    reference : str
        The other app, ``"package.module:attribute"``; it is imported only where it answers.
    """

    def __init__(self, reference: str) -> None:
        super().__init__()
        self._reference = reference

    def __call__(self, message: Message, context: Context) -> Message:
        return home_of(self._reference, context)(message, context)


def home_of(reference: str, context: Context) -> Callable[[Message, Context], Message]:
    """Choose where a ``ClientApp`` answers: in a worker, or in this process."""
    if on_ray():
        from flower_graph.client.ray_workers import RayHome, workers_of  # needs Ray

        workers = workers_of(context.run_id)
        return RayHome(workers) if workers else load_app(reference)
    owner, idle = owner_of_message(), _idle(context.node_config)
    # A worker must notice when its SuperNode dies; only Linux tells it.
    if owner is None or idle is None or not hasattr(os, "pidfd_open"):
        return load_app(reference)
    return WorkerHome(reference, owner, idle)


def _idle(node_config: Mapping[str, UserConfigValue]) -> float | None:
    """Return seconds without a message after which a worker ends; None if none is wanted."""
    resident, idle = node_config.get(RESIDENT, True), node_config.get(IDLE, USUAL_IDLE)
    if not isinstance(resident, bool):
        raise ConfigError(f"node-config {RESIDENT}: {brief(resident)}; must be true or false")
    if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 < idle < 1e9:
        raise ConfigError(f"node-config {IDLE}: {brief(idle)}; must be seconds, more than 0")
    return float(idle) if resident else None


@dataclass
class WorkerHome:
    """Clients that live in a worker. The first message starts it."""

    reference: str  # the ClientApp that answers
    owner: int  # the process of the SuperNode that starts a process for each message
    idle: float  # seconds without a message after which the worker ends

    def __call__(self, message: Message, context: Context) -> Message:
        """Have the worker answer a message.

        Raises
        ------
        WorkerLostError
            If it dies over the message; the next message starts another.
        """
        with boundary(context), self._called(context) as connection:
            try:
                connection.send_bytes(message_to_proto(message).SerializeToString())
                connection.send_bytes(context_to_proto(context).SerializeToString())
                answer, state = connection.recv_bytes(), connection.recv_bytes()
            except (OSError, EOFError) as error:
                words = "the process that keeps its clients died; the SuperNode's log says why"
                raise told(WorkerLostError(words), words) from error
            context.state = recorddict_from_proto(RecordDictProto.FromString(state))
            return message_from_proto(MessageProto.FromString(answer))

    def _called(self, context: Context) -> Connection:
        base, run = files.default_folder(), f"run-{context.run_id}"
        path = base / run / f"resident-{context.node_id}-{self.owner}"
        files.own_folder(base, base)
        with files.locked(base) as handle:
            assert handle is not None
            files.own_folder(path.parent)
            # A socket's path has at most 107 bytes
            where = files.path_of(handle, f"{run}/{path.name}")
            try:
                return _connected(where)
            except (FileNotFoundError, ConnectionRefusedError):
                self._start(path, where)
                return _connected(where)

    def _start(self, path: Path, where: str) -> None:
        files.remove(path)  # of a worker that was killed
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(where)
            os.chmod(where, 0o600)
            listener.listen(BACKLOG)
            given = {
                "path": sys.path,
                "path_of_socket": str(path),
                "listener": listener.fileno(),
                **vars(self),
            }
            subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a Ctrl-C is for the SuperNode, with which it ends
            )


def _connected(where: str) -> Connection:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(where)
        if not is_own(connection):
            raise WorkerLostError(f"{where}: its socket belongs to another user's process")
        return Connection(connection.detach())


def is_own(connection: socket.socket) -> bool:
    """Whether this user owns the process at the other end."""
    form = "3i"  # process, user, group
    size = struct.calcsize(form)
    told_by_system = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack(form, told_by_system)[1] == os.getuid())


class Worker:
    """Answers messages, one after another, until nothing needs it any more."""

    # listener: the socket, which it inherits; owner: the process of the SuperNode without which it
    # ends; idle: seconds without a message after which it ends
    def __init__(
        self, reference: str, path_of_socket: str, listener: int, owner: int, idle: float
    ) -> None:
        self._home, self._idle, self._socket = Home(reference), idle, Path(path_of_socket)
        self._listener = socket.socket(fileno=listener)
        self._listener.settimeout(idle)
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
        is_over = False
        while not is_over:
            try:
                caller, _ = self._listener.accept()
                caller.settimeout(None)
                is_ours = is_own(caller)
                with Connection(caller.detach()) as connection:
                    ends = is_ours and self._serve(connection)
            except TimeoutError:
                ends = True
            except (OSError, EOFError):  # the caller has died meanwhile
                ends = False
            if ends:
                with files.locked(self._socket.parents[1]):  # nobody calls it meanwhile
                    if is_over := not select.select([self._listener], [], [], 0)[0]:
                        self._remove()

    def leave(self) -> Never:
        """End at once, even in the middle of a message; the files on disk stay whole."""
        self._remove()
        os._exit(0)

    def _serve(self, connection: Connection) -> bool:
        asked, given = connection.recv_bytes(), connection.recv_bytes()
        message = message_from_proto(MessageProto.FromString(asked))
        context = context_from_proto(ContextProto.FromString(given))
        before = bool(context.state)
        self._events.register(connection, select.EPOLLRDHUP)
        try:
            reply = self._home(message, context)
        except Exception as error:
            LOG.error("ClientApp raised an exception", exc_info=error)  # as Flower says it
            words = f"{type(error)}:<'{error}'>"
            fault = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, words)
            reply = Message(fault, reply_to=message)
        finally:
            self._events.unregister(connection)
        connection.send_bytes(message_to_proto(reply).SerializeToString())
        connection.send_bytes(recorddict_to_proto(context.state).SerializeToString())
        from flower_graph.outputs.client import FINISH  # not in a process that only sends

        # After the run's final outputs at most one message follows
        config = message.content.config_records.get(CONFIG) if message.has_content() else None
        is_late = config is not None and config.get("keep-action") == FINISH
        self._listener.settimeout(min(self._idle, LINGER) if is_late else self._idle)
        return before and not context.state  # clients forget what they kept of a run

    def _remove(self) -> None:
        files.remove(self._socket)
        files.remove_empty(self._socket.parent)


def main(given: Mapping[str, object]) -> None:
    """Run the worker that these settings describe."""
    from flower_graph.records.warned import counted_warnings  # here, as the outputs above

    worker = Worker(**given)  # type: ignore[arg-type]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: worker.leave())
    with counted_warnings():
        worker.serve()
