"""Numbers in a file that is mapped into memory, of which each checkpoint has a copy.

The file is sparse: numbers that nobody has written are zero, and take no room on the disk.
"""

import errno
import os
from pathlib import Path

import torch
from torch import Tensor

from flower_graph.errors import StateLostError
from flower_graph.storage import files

PIECE = 1 << 20  # bytes of a copy at a time


def create(path: Path, count: int) -> None:
    """Make a file of so many float32 zeros, in the place of an older one."""
    files.private_folder(path.parent)
    files.remove(path)  # another process may hold the older file open
    handle = files.open_own(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.ftruncate(handle, 4 * count)
    os.close(handle)


def mapped(path: Path, count: int) -> Tensor:
    """Return a file's numbers, ``[count]`` float32: changes of the tensor are in the file."""
    if not path.is_file() or path.stat().st_size != 4 * count:
        raise StateLostError(f"{path}: is not the file of {count} numbers of this run")
    handle = files.open_own(path)
    try:
        if not count:  # an empty file cannot be mapped
            return torch.zeros(0)
        return torch.from_file(files.path_of(handle), shared=True, size=count)
    finally:
        os.close(handle)


def check_room(path: Path, count: int) -> None:
    """Raise ``OSError`` if the disk lacks room for so many more numbers of a sparse file.

    A write into the mapped file on a full disk would end the process.
    """
    file, disk = path.stat(), os.statvfs(path)
    growth = min(4 * count, file.st_size - 512 * file.st_blocks)
    if growth > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def copy(path: Path, target: Path) -> None:
    """Copy a file as a whole or not at all, without its zeros."""
    with (
        os.fdopen(files.open_own(path, os.O_RDONLY), "rb") as source,
        files.replaced(target) as stream,
    ):
        while piece := source.read(PIECE):
            if piece == bytes(len(piece)):
                stream.seek(len(piece), os.SEEK_CUR)
            else:
                stream.write(piece)
        stream.truncate()
