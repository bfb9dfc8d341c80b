"""Records of many owners in one file, of which few are read and written at a time.

A record is some matrices of equal shape, ``[r, h]`` float32. An owner's first record is appended,
and later ones replace it: an owner without a record takes no room. Tensors, the *index*, have each
record's position; they are kept and saved with the owner's other state.

*Checkpoints.* ``mark`` begins a journal of a round. The first change of a record after that writes
its old content there. ``go_back`` to a round restores the content from the journals since then;
with the index of the mark, all records are then as they were, at whatever point the process was
killed. A checkpoint therefore costs nothing but the index.
"""

from __future__ import annotations

import io
import logging
import os
import re
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.storage.files import private_folder
from flower_graph.storage.writing import append, new_file, open_own
from flower_graph.storage.writing import remove as remove_file

LOG = logging.getLogger(__name__)
KEPT = 3  # journals: the server may go back to the checkpoint before the last two
MOST = 1 << 28  # bytes of one call, about; Linux takes 2 GiB
# Before an entry of a journal: its length, its checksum, and how many records it has
HEADER = struct.Struct("<QII")
# Names in the index: where each owner's record begins, -1 without one; where the file ends; the
# records replaced since the last mark
START, END, CHANGED = "rows-start", "rows-end", "rows-changed"
Entry = tuple[Tensor, Tensor, Tensor]  # where records begin, their sizes, and their bytes
Move = Callable[[int, list[memoryview], int], int]


class RowFile:
    """The records of some owners, whose index is the caller's.

    Parameters
    ----------
    path : Path
        The file; its journals lie beside it.
    index : dict of str to Tensor
        From ``new_index``; it is changed in place.
    """

    def __init__(self, path: Path, index: dict[str, Tensor]) -> None:
        self.path, self._index = path, index
        if not path.is_file():
            raise StateLostError(f"{path}: the file of users' rows is gone")
        self._handle = open_own(path)
        weakref.finalize(self, os.close, self._handle)
        # The index may be from another's checkpoint: nothing is moved beyond what is there.
        start, end = index[START], int(index[END])
        inner = not start.numel() or (int(start.min()) >= -1 and int(start.max()) <= end)
        if not inner or not 0 <= end <= os.fstat(self._handle).st_size:
            raise StateLostError(f"{path}: its index names bytes that it does not have")

    def read(self, owners: Tensor, ptr: Tensor, parts: Sequence[Tensor]) -> None:
        """Read the first matrices of some owners' records; without a record, the content stays."""
        # owners [p], ptr [p + 1] where rows of each begin in parts [r, h]
        start = self._index[START][owners]
        chosen = (start >= 0).nonzero().flatten()
        chosen = chosen[torch.argsort(start[chosen])]
        rows, place = _rows(ptr, chosen, len(parts), parts[0].shape[0])
        buffer = torch.empty(place.numel(), parts[0].shape[1])
        _move(os.preadv, self._handle, start[chosen], rows * len(parts), buffer, self.path)
        _put(parts, place, buffer)

    def write(self, owners: Tensor, ptr: Tensor, parts: Sequence[Tensor]) -> None:
        start, changed = self._index[START], self._index[CHANGED]
        count, row = len(parts), 4 * parts[0].shape[1]
        noted = ((start[owners] >= 0) & ~changed[owners]).nonzero().flatten()
        self._note(start[owners[noted]], ptr.diff().long()[noted] * (count * row))
        changed[owners] = True
        new = start[owners] < 0
        sizes = ptr.diff().long()[new] * (count * row)
        ends = int(self._index[END]) + sizes.cumsum(0)
        start[owners[new]] = ends - sizes
        if new.any():
            self._index[END].fill_(ends[-1])
        order = torch.argsort(start[owners])
        rows, place = _rows(ptr, order, count, parts[0].shape[0])
        buffer = torch.cat(list(parts))[place]
        _move(os.pwritev, self._handle, start[owners[order]], rows * count, buffer, self.path)

    def disk_bytes(self) -> int:
        return os.fstat(self._handle).st_blocks * 512

    # Checkpoints

    def prepare(self) -> None:
        """Flush all records to the disk; the index from now on is that of a checkpoint."""
        os.fsync(self._handle)
        self._index[CHANGED].zero_()

    def mark(self, server_round: int) -> None:
        """Begin the journal of a round, as its checkpoint is complete."""
        os.close(new_file(_journal(self.path, server_round)))
        for old in _journals(self.path)[:-KEPT]:
            remove_file(_journal(self.path, old))

    def _note(self, start: Tensor, size: Tensor) -> None:
        rounds = _journals(self.path)
        if not rounds or not start.numel():
            return
        order = torch.argsort(start)
        start, size = start[order], size[order]
        old = torch.empty(int(size.sum()), dtype=torch.uint8)
        _move(os.preadv, self._handle, start, size, old, self.path)
        body = [one.numpy() for one in (start, size, old)]
        check, length = 0, sum(part.nbytes for part in body)
        for part in body:
            check = zlib.crc32(part.data, check)
        with append(_journal(self.path, rounds[-1])) as raw, io.BufferedWriter(raw) as stream:
            stream.write(HEADER.pack(length, check, start.numel()))
            for part in body:
                stream.write(part.data)
            stream.flush()
            # What it was must be on the disk before it is written over.
            os.fdatasync(stream.fileno())


def new_index(count: int) -> dict[str, Tensor]:
    """Make the index of owners without records."""
    return {
        START: torch.full((count,), -1, dtype=torch.int64),
        END: torch.zeros((), dtype=torch.int64),
        CHANGED: torch.zeros(count, dtype=torch.bool),
    }


def create(path: Path) -> None:
    """Replace a path by an empty file."""
    private_folder(path.parent)
    remove(path)
    os.close(new_file(path))


def is_marked(path: Path) -> bool:
    """Whether a checkpoint resumes from this file."""
    return bool(_journals(path))


def remove(path: Path) -> None:
    """Remove a file and its journals."""
    for server_round in _journals(path):
        remove_file(_journal(path, server_round))
    remove_file(path)


def go_back(path: Path, server_round: int) -> None:
    """Restore all records as of the mark of a round, and begin its journal anew."""
    if not path.is_file() or not _journal(path, server_round).is_file():
        raise CheckpointError(f"{path}: it has no journal of round {server_round}")
    handle = open_own(path)
    try:
        later = [one for one in _journals(path) if one >= server_round]
        for one in reversed(later):
            entries = list(_entries(_journal(path, one)))
            for start, size, old in reversed(entries):
                last = os.fstat(handle).st_size - size
                if (start < 0).any() or (size < 0).any() or (start > last).any():
                    raise CheckpointError(f"{path}: its journal names bytes that it does not have")
                _move(os.pwritev, handle, start, size, old, path)
        os.fsync(handle)
    finally:
        os.close(handle)
    for one in later[1:]:
        remove_file(_journal(path, one))
    os.close(new_file(_journal(path, server_round)))


def _journal(path: Path, server_round: int) -> Path:
    return path.with_name(f"{path.name}.since-{server_round:06d}")


def _journals(path: Path) -> list[int]:
    found = (
        re.fullmatch(r".*\.since-(\d+)", one.name)
        for one in path.parent.glob(f"{path.name}.since-*")
    )
    return sorted(int(match[1]) for match in found if match)


def _entries(path: Path) -> Iterator[Entry]:
    """Read the entries of a journal, up to one that a killed process did not finish."""
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    at = 0
    while at < data.size:
        header = data[at : at + HEADER.size].tobytes()
        at += HEADER.size
        if len(header) == HEADER.size:
            length, check, count = HEADER.unpack(header)
            body = data[at : at + length].copy()
        if len(header) < HEADER.size or body.size < length or zlib.crc32(body.data) != check:
            LOG.warning("%s: its last entry is not whole, and is left out", path)
            return
        at += length
        start, size = torch.from_numpy(body[: 16 * count].view(np.int64).reshape(2, -1))
        yield start, size, torch.from_numpy(body[16 * count :])


def _rows(ptr: Tensor, chosen: Tensor, count: int, total: int) -> tuple[Tensor, Tensor]:
    """Return each owner's number of rows, and the rows' positions in the matrices."""
    # A record has the owner's rows of the first matrix, then those of the next.
    rows = ptr.diff().long()[chosen]
    first = ptr[:-1].long()[chosen, None] + torch.arange(count) * total  # [p, count]
    sizes = rows.repeat_interleave(count)
    begin = first.flatten() - (sizes.cumsum(0) - sizes)
    place = begin.repeat_interleave(sizes)
    place += torch.arange(place.numel())
    return rows, place


def _put(parts: Sequence[Tensor], place: Tensor, buffer: Tensor) -> None:
    total = parts[0].shape[0]
    for number, part in enumerate(parts):
        mine = (place >= number * total) & (place < (number + 1) * total)
        part[place[mine] - number * total] = buffer[mine]


def _move(call: Move, handle: int, start: Tensor, size: Tensor, buffer: Tensor, path: Path) -> None:
    """Read or write consecutive records in a buffer, ascending in the file."""
    if not size.numel():
        return
    size = size if buffer.dtype == torch.uint8 else size * (4 * buffer.shape[1])
    data: memoryview = buffer.view(-1).view(torch.uint8).numpy().data
    ends = size.cumsum(0)
    # Neighbours in the file are moved in one call, up to a limit.
    apart = torch.ones(size.numel(), dtype=torch.bool)
    apart[1:] = start[1:] != start[:-1] + size[:-1]
    apart[1:] |= ends[1:] // MOST != ends[:-1] // MOST
    begins = apart.nonzero().flatten()
    firsts = (ends - size)[begins].tolist()
    for at, first, last in zip(
        start[begins].tolist(), firsts, [*firsts[1:], int(ends[-1])], strict=True
    ):
        if first < last and call(handle, [data[first:last]], at) != last - first:
            raise StateLostError(f"{path}: {last - first} bytes at {at} were not moved whole")
