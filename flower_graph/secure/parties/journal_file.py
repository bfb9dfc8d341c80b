"""The file of a party's journal: lines of a key, JSON and a hash; the last line of a key counts.

A note is one more line, written at the end and then synced; other notes are neither read nor
written again. A line that a crash cut short was not on disk when anything left, and does not count.
Now and then the file is rewritten without superseded lines. A line with a wrong hash was changed:
then the whole file is no journal, and nothing is sent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_graph.errors import IdentityError
from flower_graph.storage.reading import MOST_RECORD, parse_json, read_bytes, reading
from flower_graph.storage.writing import open_own, replaced

HEAD = b"flower-graph journal 2\n"
UNSEALED = b"flower-graph journal 1\n"  # without hashes; it is written anew with the next note
HASH = 16  # hexadecimal digits
MOST_DEAD = 1 << 16  # bytes of lines that count no more
OTHER = (
    "is no journal of a SuperNode, or is damaged"  # what is wrong with a file that is no journal
)


@dataclass
class JournalFile:
    """The file's content, and the notes to be added."""

    path: Path
    lines: dict[bytes, bytes]  # by key the JSON that counts, the last noted at the end
    size: int = 0  # bytes of the file; 0 where it must be written anew
    fresh: bytes = b""  # lines to be added

    @classmethod
    def read(cls, path: Path) -> JournalFile:
        with reading(f"journal {path}", IdentityError):
            try:
                data = read_bytes(path, MOST_RECORD)
            except FileNotFoundError:
                return cls(path, {})
        is_sealed = data.startswith(HEAD)
        if not is_sealed and not data.startswith(UNSEALED):
            raise IdentityError(f"journal {path}: {OTHER}")
        *whole, rest = data[len(HEAD) :].split(b"\n")
        if is_sealed:
            lines = [line[: -HASH - 1] for line in whole]
            # A whole line with something else than a line's end behind it was not cut short.
            if any(map(_is_other, whole, lines)) or not _is_other(rest[:-1], rest[: -HASH - 2]):
                raise IdentityError(f"journal {path}: {OTHER}")
            whole = lines
        found = cls(path, {}, len(data) if is_sealed and not rest else 0)
        for line in whole:
            key, _, content = line.partition(b" ")
            found.lines.pop(key, None)
            found.lines[key] = content
        return found

    # The JSON is not checked here: the reader of a key checks it
    def get(self, key: bytes) -> Any:
        if key not in self.lines:
            return None
        with reading(f"journal {self.path}", IdentityError, OTHER):
            return parse_json(self.lines[key])

    def put(self, key: bytes, value: object) -> None:
        self.lines.pop(key, None)
        self.lines[key] = json.dumps(value).encode()
        self.fresh += sealed(key, self.lines[key])

    def drop(self, key: bytes) -> None:
        del self.lines[key]
        self.size = 0

    def write(self) -> None:
        """Write the notes; they are on the disk when this returns."""
        try:
            if self._may_grow():
                _append(self.path, self.size, self.fresh)
                return
            with replaced(self.path) as stream:
                stream.write(HEAD + b"".join(sealed(*line) for line in self.lines.items()))
        except OSError as error:
            raise IdentityError(
                f"journal {self.path}: cannot be written: {error.strerror}"
            ) from error

    def _may_grow(self) -> bool:
        """Tell whether the file is the owner's alone, and has few superseded lines."""
        if not self.size or self.path.stat().st_mode & 0o077:
            return False
        live = sum(len(key) + len(content) + HASH + 3 for key, content in self.lines.items())
        return self.size + len(self.fresh) - live < MOST_DEAD


def sealed(key: bytes, content: bytes) -> bytes:
    """Write a line with its hash."""
    line = key + b" " + content
    return line + b" " + _hash(line) + b"\n"


def _is_other(sealed: bytes, line: bytes) -> bool:
    return sealed != line + b" " + _hash(line)


def _hash(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest()[:HASH].encode()


def _append(path: Path, size: int, data: bytes) -> None:
    handle = open_own(path, os.O_WRONLY)
    try:
        if os.pwrite(handle, data, size) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(handle)
    finally:
        os.close(handle)
