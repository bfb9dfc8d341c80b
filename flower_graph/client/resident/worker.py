"""The worker: a process that keeps one SuperNode's clients of one run between messages.

The worker is a cache of files or of Flower's context, so it may end at any time. It ends when the
run is over, the SuperNode or the waiting process is gone, or no message came for some time.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Never

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_graph.client.resident.app import load_app
from flower_graph.client.resident.launch import (
    ERROR,
    HELLO,
    REPLY,
    is_own,
    locked,
    receive,
    send,
)
from flower_graph.flower_compat import (
    ContextProto,
    MessageProto,
    context_from_proto,
    message_from_proto,
    message_to_proto,
    recorddict_to_proto,
)
from flower_graph.outputs.client import FINISH, TYPE, KeepRequest
from flower_graph.records.warned import counted_warnings
from flower_graph.storage.writing import is_alive, remove, remove_empty
from flower_graph.wire.client_errors import boundary
from flower_graph.wire.keys import CONFIG

LOG = logging.getLogger("flwr")  # whose lines a SuperNode's user reads


# Seconds that a worker waits for another message once a run's outputs are written: some methods
# send one more, and of the others nothing says that the run is over.
LINGER = 20.0


class Worker:
    """Answers messages, one after another, until nothing needs it any more.

    Parameters
    ----------
    reference : str
        The ClientApp.
    folder, name : str
        Where its socket is.
    listener : int
        The socket, which it inherits.
    owner : int
        The process of the SuperNode without which it ends.
    idle : float
        Seconds without a message after which it ends.
    """

    def __init__(
        self, reference: str, folder: str, name: str, listener: int, owner: int, idle: float
    ) -> None:
        self._reference, self._idle = reference, idle
        self._folder, self._socket = Path(folder), Path(folder, name)
        self._listener = socket.socket(fileno=listener)
        self._inode = self._socket.stat().st_ino
        self._watch = Watch(_owners(owner), self.leave)

    @cached_property
    def _app(self) -> ClientApp:
        return load_app(self._reference)

    @counted_warnings()
    def serve(self) -> None:
        self._watch.start()
        _remove_dead(self._folder.parent)
        self._listener.settimeout(self._idle)
        is_over = False
        while not is_over:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                break
            with connection:
                connection.settimeout(None)
                # Whoever has called may have died meanwhile.
                with suppress(OSError, EOFError):
                    is_over = is_own(connection) and self._serve(connection)
        self._end()

    def leave(self) -> Never:
        """End at once, even in the middle of a message; the files on disk stay whole."""
        self._remove()
        os._exit(0)

    def _serve(self, connection: socket.socket) -> bool:
        send(connection, HELLO)
        asked, given = receive(connection)
        message = message_from_proto(MessageProto.FromString(asked))
        context = context_from_proto(ContextProto.FromString(given))
        before = bool(context.state)
        with self._watch.caller(connection):
            answer = self._answer(message, context)
        is_late = _writes_outputs(message)
        self._listener.settimeout(min(self._idle, LINGER) if is_late else self._idle)
        is_over = before and not context.state  # clients forget what they kept of a run
        if is_over:
            self._end()
        send(connection, *answer)
        return is_over

    def _answer(self, message: Message, context: Context) -> list[bytes]:
        try:
            with boundary(context):  # what an app of its own tells, it decides itself
                app = self._app
            kind, reply = REPLY, message_to_proto(app(message, context)).SerializeToString()
        except Exception as error:
            LOG.error("ClientApp raised an exception", exc_info=error)  # as Flower says it
            of = type(error)
            fault = {"module": of.__module__, "name": of.__qualname__, "text": str(error)}
            kind, reply = ERROR, json.dumps(fault).encode()
        return [kind, reply, recorddict_to_proto(context.state).SerializeToString()]

    def _end(self) -> None:
        """Stop listening and remove the socket, under the lock that a new worker needs."""
        with locked(self._folder):
            self._listener.close()  # a caller in between notices, and calls the next worker
            self._remove()

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            if self._socket.stat().st_ino == self._inode:
                remove(self._socket)
        remove_empty(self._folder)


class Watch(threading.Thread):
    """Calls a function when the SuperNode or the process that waits for an answer ends.

    Parameters
    ----------
    owners : sequence of int
        Processes of the SuperNode.
    leave : Callable[[], Never]
        Ends this process.
    """

    def __init__(self, owners: Sequence[int], leave: Callable[[], Never]) -> None:
        super().__init__(daemon=True)
        self._leave = leave
        self._events = select.epoll()
        self._caller: int | None = None
        self._changing = threading.Lock()
        try:
            self._owners = {os.pidfd_open(owner) for owner in owners}
        except ProcessLookupError:
            leave()
        for handle in self._owners:
            self._events.register(handle, select.EPOLLIN)

    def run(self) -> None:
        while True:
            for handle, _ in self._events.poll():
                with self._changing:
                    if handle in self._owners or _is_gone(self._caller):
                        self._leave()

    @contextmanager
    def caller(self, connection: socket.socket) -> Iterator[None]:
        """Watch the process that waits for the answer."""
        handle = connection.fileno()
        with self._changing:
            self._caller = handle
            self._events.register(handle, select.EPOLLRDHUP)
        try:
            yield
        finally:
            with self._changing:
                self._caller = None
                self._events.unregister(handle)


def _is_gone(handle: int | None) -> bool:
    if handle is None:
        return False
    events = select.poll()
    events.register(handle, select.POLLRDHUP)
    return bool(events.poll(0))


def _writes_outputs(message: Message) -> bool:
    """Whether a message asks for a run's final outputs; at most one message follows."""
    if message.metadata.message_type != TYPE or not message.has_content():
        return False
    with suppress(KeyError, ValueError):
        request = KeepRequest.from_config(message.content.config_records[CONFIG])
        return request.action == FINISH
    return False


def _owners(owner: int) -> list[int]:
    """Return a process and its parent: SuperExec, and the SuperNode."""
    try:
        fields = Path(f"/proc/{owner}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except FileNotFoundError:
        return [owner]
    parent = int(fields[1])
    return [owner, parent] if parent > 1 else [owner]


def _remove_dead(base: Path) -> None:
    for path in base.glob("run-*/resident-*"):
        owner = path.name.rpartition("-")[2]
        if owner.isdigit() and not is_alive(int(owner)):
            with locked(path.parent) as handle:
                if handle is not None:
                    remove(path)
                    remove_empty(path.parent)


def main(given: Mapping[str, object]) -> None:
    """Run the worker that these settings describe."""
    worker = Worker(**given)  # type: ignore[arg-type]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: worker.leave())
    worker.serve()
