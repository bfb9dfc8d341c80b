"""Copies of a SuperNode's files on a machine that lacks the run's folders.

The run's folders are on the driver's machine. A worker on another machine fetches a SuperNode's
files before its first message, and sends the changed files back before each reply.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import ray

from flower_graph.client.resident.on_ray import Actor
from flower_graph.config.common import CHECKPOINTS
from flower_graph.errors import OutputError, brief
from flower_graph.storage.reading import MOST_TENSORS, open_regular
from flower_graph.storage.writing import (
    inside,
    open_own,
    remove,
    remove_folder,
    replaced,
    temporary_folder,
)

__all__ = ["Change", "Folders", "Mirror", "TemporaryFolder"]

# What a SuperNode has in the run's outputs, and its keys where it does not trust the server
NEEDED = {
    "out": ("clients/{0}/**/*", CHECKPOINTS + "/round-*/client-{0}.safetensors"),
    "state": ("parties/{0}", "parties/{0}.*", "parties/registry.json"),
}
# Of each file, by the folder that it is in and its path there: inode, size, time of change
Stamps = dict[tuple[str, str], tuple[int, int, int]]
T = TypeVar("T")


class Change(NamedTuple):
    """The change of a file."""

    folder: str  # out or state
    path: str  # below it
    start: int  # of the bytes in the file; 0: they are the whole file
    data: bytes | None  # None: the file was removed


class Folders:
    """The folders of a run on one machine.

    Parameters
    ----------
    out : Path
        The run's outputs.
    state : Path
        Further state of the run's clients.
    """

    def __init__(self, out: Path, state: Path) -> None:
        self.out, self._roots = out, {"out": out, "state": state}

    def read(self, supernode: str) -> list[Change]:
        """Read all files that a SuperNode may need."""
        found = {
            (folder, str(path.relative_to(root)))
            for folder, root in self._roots.items()
            for pattern in NEEDED[folder]
            for path in root.glob(pattern.format(supernode))
            if path.is_file()
        }
        return [self._from(name, 0) for name in sorted(found)]

    def write(self, changes: Iterable[Change]) -> None:
        for folder, name, start, data in changes:
            path = inside(self._roots[folder], name)
            if data is None:
                remove(path)
            elif start:
                with os.fdopen(open_own(path), "r+b") as file:
                    if not 0 < start <= file.seek(0, os.SEEK_END):
                        raise OutputError(f"{path}: has no byte {brief(start)} to go on from")
                    file.truncate(start)
                    file.seek(start)
                    file.write(data)
            else:
                with replaced(path) as stream:
                    stream.write(data)

    def stamps(self) -> Stamps:
        """Return a stamp for each file, which changes when the file does."""
        result = {}
        for folder, root in self._roots.items():
            for path in filter(Path.is_file, root.rglob("*")):
                status = path.stat()
                stamp = status.st_ino, status.st_size, status.st_mtime_ns
                result[folder, str(path.relative_to(root))] = stamp
        return result

    def changes(self, before: Stamps) -> list[Change]:
        now = self.stamps()
        result = [Change(*name, 0, None) for name in before.keys() - now.keys()]
        for name, stamp in now.items():
            old = before.get(name, (0, 0, 0))
            if stamp != old:
                # A file that is written anew replaces the old one, and has another inode
                is_longer = stamp[0] == old[0] and stamp[1] > old[1]
                result.append(self._from(name, old[1] if is_longer else 0))
        return result

    def _from(self, name: tuple[str, str], start: int) -> Change:
        folder, path = name
        with open_regular(self._roots[folder] / path, MOST_TENSORS) as file:
            file.seek(start)
            return Change(folder, path, start, file.read())

    def drop_checkpoints(self) -> None:
        with suppress(OSError):
            remove_folder(self.out / CHECKPOINTS)


class Mirror:
    """Keeps SuperNodes' files on this machine equal to those in the driver's folders.

    Parameters
    ----------
    here : Folders
        On this machine.
    there : ActorHandle
        An actor that is the driver's `Folders`.
    """

    def __init__(self, here: Folders, there: Actor) -> None:
        self._here, self._there = here, there
        self._known = set[str]()  # SuperNodes whose files here are as there

    def during(self, supernode: str, answer: Callable[[], T]) -> T:
        """Answer a message of a SuperNode: fetch its files before, send changes after."""
        if supernode not in self._known:
            self._here.write(ray.get(self._there.read.remote(supernode)))
        before = self._here.stamps()
        self._known.discard(supernode)  # if it fails, what it has changed counts for nothing
        result = answer()
        if changes := self._here.changes(before):
            ray.get(self._there.write.remote(changes))
        # A client that has lost its state asks for its checkpoint: then they are fetched again
        self._here.drop_checkpoints()
        self._known.add(supernode)
        return result

    def forget(self, supernode: str) -> None:
        """Fetch a SuperNode's files again before its next message."""
        self._known.discard(supernode)


class TemporaryFolder:
    """A folder that is removed when this process ends, even if it is killed."""

    def __init__(self) -> None:
        self.path = temporary_folder()
        # Python runs nothing any more in a process that is killed. A shell sees that its pipe is
        # closed; a grandchild, because Ray kills the children of a worker with it.
        waiting = 'exec 3<&0; (cat <&3 > /dev/null; rm -rf "$0") &'
        command = ["/bin/sh", "-c", waiting, str(self.path)]
        self._shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._shell.wait()
