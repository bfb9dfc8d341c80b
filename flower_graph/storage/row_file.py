"""Records of many owners in one file, of which few are read and written at a time.

A record is some matrices of equal shape, ``[r, h]`` float32. An owner's first record is appended,
and later ones take its place: who was never written takes no room. Where each owner's is stands in
tensors, the *index*, which are kept and saved with the owner's other state.

*Checkpoints.* ``mark`` begins a journal of a round. Before a record is replaced for the first time
after that, what it was is written there. ``go_back`` to a round puts back what the journals since
then have; with the index as it was at the mark, all records are then as they were, at whatever
point the process was killed. A checkpoint therefore costs nothing but the index.
"""

from __future__ import annotations

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
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.storage.files import own_file, private_folder

LOG = logging.getLogger(__name__)
KEPT = 3  # journals: the server may go back to the checkpoint before the last two
AT_ONCE, MOST = 1000, 1 << 28  # buffers and bytes of one call; Linux takes 1024, and 2 GiB
# Before an entry of a journal: its length and checksum, its records, and the matrices of each
HEADER = struct.Struct("<QIII")
# Names in the index: where each owner's record begins, -1 without one; where the file ends; who was
# replaced since the last mark
START, END, CHANGED = "rows-start", "rows-end", "rows-changed"
Integers = NDArray[np.int64]
# Of a journal: where records begin, which bytes of each matrix are theirs, and the matrices
Entry = tuple[Integers, tuple[Integers, Integers], list[memoryview]]
Move = Callable[[int, list[memoryview], int], int]


class RowFile:
    """The records of some owners, whose index is the caller's.

    Parameters
    ----------
    path : Path
        The file; its journals lie beside it.
    index : dict of str to Tensor
        What ``new_index`` made, which is changed in place.
    """

    def __init__(self, path: Path, index: dict[str, Tensor]) -> None:
        self.path, self._index = path, index
        if not path.is_file():
            raise StateLostError(f"{path}: the file of users' rows is gone")
        self._handle = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._handle)

    def read(self, owners: Tensor, ptr: Tensor, parts: Sequence[Tensor]) -> None:
        """Read the first matrices of some owners' records; who has none keeps what is there."""
        # owners [p], ptr [p + 1] where rows of each begin in parts [r, h]
        start = self._index[START][owners]
        has = start >= 0
        if has.any():
            spans = _spans(ptr, parts[0].shape[1], has)
            _move(os.preadv, self._handle, start[has].numpy(), spans, _buffers(parts), self.path)

    def write(self, owners: Tensor, ptr: Tensor, parts: Sequence[Tensor]) -> None:
        """Write whole records of some owners."""
        spans = _spans(ptr, parts[0].shape[1])
        start, changed = self._index[START], self._index[CHANGED]
        self._note(owners, (start[owners] >= 0) & ~changed[owners], spans, len(parts))
        changed[owners] = True
        new = start[owners] < 0
        sizes = torch.from_numpy(spans[1] - spans[0])[new] * len(parts)
        ends = int(self._index[END]) + sizes.cumsum(0)
        start[owners[new]] = ends - sizes
        if new.any():
            self._index[END].fill_(ends[-1])
        _move(os.pwritev, self._handle, start[owners].numpy(), spans, _buffers(parts), self.path)

    def disk_bytes(self) -> int:
        """Return what the file takes on the disk."""
        return os.fstat(self._handle).st_blocks * 512

    # Checkpoints

    def prepare(self) -> None:
        """Bring all records to the disk; the index from now on is that of a checkpoint."""
        os.fsync(self._handle)
        self._index[CHANGED].zero_()

    def mark(self, server_round: int) -> None:
        """Begin the journal of a round, as its checkpoint is complete."""
        os.close(own_file(_journal(self.path, server_round)))
        for old in _rounds(self.path)[:-KEPT]:
            _journal(self.path, old).unlink()

    def _note(
        self, owners: Tensor, noted: Tensor, spans: tuple[Integers, Integers], parts: int
    ) -> None:
        """Write what the records of some of the owners are into the last journal."""
        rounds = _rounds(self.path)
        if not rounds or not noted.any():
            return
        owners, size = owners[noted], (spans[1] - spans[0])[noted.numpy()]
        start, last = self._index[START][owners].numpy(), size.cumsum()
        old = [np.empty(int(last[-1]), np.uint8) for _ in range(parts)]
        buffers = [part.data for part in old]
        _move(os.preadv, self._handle, start, (last - size, last), buffers, self.path)
        body = [start, size, *old]
        check, length = 0, sum(part.nbytes for part in body)
        for part in body:
            check = zlib.crc32(part.data, check)
        with _journal(self.path, rounds[-1]).open("ab") as stream:
            stream.write(HEADER.pack(length, check, owners.numel(), parts))
            for part in body:
                stream.write(part.data)
            stream.flush()
            # What it was must be on the disk before it is written over.
            os.fdatasync(stream.fileno())


def new_index(count: int) -> dict[str, Tensor]:
    """Make the index of owners of whom none has a record."""
    return {
        START: torch.full((count,), -1, dtype=torch.int64),
        END: torch.zeros((), dtype=torch.int64),
        CHANGED: torch.zeros(count, dtype=torch.bool),
    }


def create(path: Path) -> None:
    """Make an empty file in the place of what is there."""
    private_folder(path.parent)
    remove(path)
    os.close(own_file(path))


def is_marked(path: Path) -> bool:
    """Whether a checkpoint goes on from this file."""
    return bool(_rounds(path))


def remove(path: Path) -> None:
    """Remove a file and its journals."""
    for server_round in _rounds(path):
        _journal(path, server_round).unlink()
    path.unlink(missing_ok=True)


def go_back(path: Path, server_round: int) -> None:
    """Make all records what they were at the mark of a round, and begin its journal anew."""
    if not path.is_file() or not _journal(path, server_round).is_file():
        raise CheckpointError(f"{path}: it has no journal of round {server_round}")
    handle = os.open(path, os.O_RDWR)
    try:
        later = [one for one in _rounds(path) if one >= server_round]
        for one in reversed(later):
            entries = list(_entries(_journal(path, one)))
            for start, spans, buffers in reversed(entries):
                _move(os.pwritev, handle, start, spans, buffers, path)
        os.fsync(handle)
    finally:
        os.close(handle)
    for one in later[1:]:
        _journal(path, one).unlink()
    os.close(own_file(_journal(path, server_round)))


def _journal(path: Path, server_round: int) -> Path:
    return path.with_name(f"{path.name}.since-{server_round:06d}")


def _rounds(path: Path) -> list[int]:
    """Return the rounds that have a journal, ascending."""
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
            length, check, count, parts = HEADER.unpack(header)
            body = data[at : at + length]
        if len(header) < HEADER.size or body.size < length or zlib.crc32(body.data) != check:
            LOG.warning("%s: its last entry is not whole, and is left out", path)
            return
        at += length
        start, size = np.frombuffer(body[: 16 * count].tobytes(), np.int64).reshape(2, -1)
        last = size.cumsum()
        old = body[16 * count :].reshape(parts, -1)
        yield start, (last - size, last), [part.data for part in old]


def _spans(ptr: Tensor, width: int, chosen: Tensor | None = None) -> tuple[Integers, Integers]:
    """Say which bytes of a matrix are each owner's: where they begin and end."""
    place = ptr.long() * (4 * width)
    first, last = place[:-1], place[1:]
    if chosen is not None:
        first, last = first[chosen], last[chosen]
    return first.numpy(), last.numpy()


def _buffers(parts: Sequence[Tensor]) -> list[memoryview]:
    return [part.view(-1).view(torch.uint8).numpy().data for part in parts]


def _move(
    call: Move,
    handle: int,
    start: Integers,
    spans: tuple[Integers, Integers],
    parts: list[memoryview],
    path: Path,
) -> None:
    """Read or write records, those that lie one behind the other in one call."""
    order = np.argsort(start, kind="stable")
    buffers: list[memoryview] = []
    begin = end = -1
    for at, first, last in zip(
        start[order].tolist(), spans[0][order].tolist(), spans[1][order].tolist(), strict=True
    ):
        if at != end or len(buffers) > AT_ONCE - len(parts) or end - begin > MOST:
            _whole(call, handle, buffers, begin, end, path)
            buffers, begin, end = [], at, at
        buffers += [part[first:last] for part in parts]
        end += len(parts) * (last - first)
    _whole(call, handle, buffers, begin, end, path)


def _whole(
    call: Move, handle: int, buffers: list[memoryview], begin: int, end: int, path: Path
) -> None:
    if buffers and end > begin and call(handle, buffers, begin) != end - begin:
        raise StateLostError(f"{path}: bytes {begin} to {end} could not be read or written whole")
