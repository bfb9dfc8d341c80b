"""The file of a party's journal: lines of a key and JSON, of which the last of a key counts.

A note is one line more, written at the end and then synced: what others notes say is neither read
nor written again, however much it is. A line that a crash cut short was on no disk when anything
left, and does not count. Now and then the file is written anew, without what counts no more.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_graph.errors import IdentityError
from flower_graph.storage.reading import MOST_RECORD, parse_json, read_bytes, reading
from flower_graph.storage.writing import open_own, replaced

HEAD = b"flower-graph journal 1\n"
MOST_DEAD = 1 << 16  # bytes of lines that count no more
OTHER = (
    "is no journal of a SuperNode, or is damaged"  # what is wrong with a file that is no journal
)


@dataclass
class JournalFile:
    """What the file has, and what is to be added to it."""

    path: Path
    lines: dict[bytes, bytes]  # by key the JSON that counts, the last noted at the end
    size: int = 0  # bytes of the file; 0 where it must be written anew
    fresh: bytes = b""  # lines to be added

    @classmethod
    def read(cls, path: Path) -> JournalFile:
        """Read the file; it need not exist."""
        with reading(f"journal {path}", IdentityError):
            try:
                data = read_bytes(path, MOST_RECORD)
            except FileNotFoundError:
                return cls(path, {})
        if not data.startswith(HEAD):
            raise IdentityError(f"journal {path}: {OTHER}")
        *whole, rest = data[len(HEAD) :].split(b"\n")
        found = cls(path, {}, 0 if rest else len(data))
        for line in whole:
            key, _, content = line.partition(b" ")
            found.lines.pop(key, None)
            found.lines[key] = content
        return found

    # Left open: what JSON says; whoever asks for a key checks it
    def get(self, key: bytes) -> Any:
        """Return what was noted last under a key; None if nothing was."""
        if key not in self.lines:
            return None
        with reading(f"journal {self.path}", IdentityError, OTHER):
            return parse_json(self.lines[key])

    def put(self, key: bytes, value: object) -> None:
        """Note something under a key."""
        self.lines.pop(key, None)
        self.lines[key] = json.dumps(value).encode()
        self.fresh += key + b" " + self.lines[key] + b"\n"

    def drop(self, key: bytes) -> None:
        """Forget a key."""
        del self.lines[key]
        self.size = 0

    def write(self) -> None:
        """Write what was noted; it is on the disk when this returns."""
        try:
            if self._may_grow():
                _append(self.path, self.size, self.fresh)
                return
            with replaced(self.path) as stream:
                lines = [key + b" " + content + b"\n" for key, content in self.lines.items()]
                stream.write(HEAD + b"".join(lines))
        except OSError as error:
            raise IdentityError(
                f"journal {self.path}: cannot be written: {error.strerror}"
            ) from error

    def _may_grow(self) -> bool:
        """Tell whether the file is the owner's alone, and has few lines that count no more."""
        if not self.size or self.path.stat().st_mode & 0o077:
            return False
        live = sum(len(key) + len(content) + 2 for key, content in self.lines.items())
        return self.size + len(self.fresh) - live < MOST_DEAD


def _append(path: Path, size: int, data: bytes) -> None:
    handle = open_own(path, os.O_WRONLY)
    try:
        if os.pwrite(handle, data, size) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(handle)
    finally:
        os.close(handle)
