"""Untrusted zip archives, and the NumPy arrays in them.

The sizes that an archive claims are checked before anything is unpacked.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from numpy.lib import format as npy
from numpy.typing import NDArray

from flower_graph.storage.reading import MIB, MOST_TENSORS, open_regular

MOST_UNPACKED = 64 * MIB  # of all members, if four times the archive is less
MOST_LISTED = 16 * MIB  # of the list of members
SUFFIX = ".npy"
_END, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")


# Any: arrays have whatever types the file has
def read_arrays(path: Path | str, most: int = MOST_TENSORS) -> dict[str, NDArray[Any]]:
    """Read the arrays of an ``npz`` file, none of which is a pickle.

    Raises
    ------
    OSError, ValueError
        If it is no regular file, no such archive, or its headers claim more than it holds. A
        damaged one raises what its parts do: ``BadZipFile``, ``zlib.error`` and others.
    """
    with open_regular(path, most) as stream, open_archive(stream) as archive:
        members = archive.infolist()
        if any(not one.filename.endswith(SUFFIX) for one in members):
            raise ValueError("it has members that are no arrays")
        return {one.filename.removesuffix(SUFFIX): _array(archive, one) for one in members}


@contextmanager
def open_archive(stream: BinaryIO, *, packed: bool = True) -> Iterator[zipfile.ZipFile]:
    """Open an archive whose members, unpacked, are at most four times its size, or 64 MiB."""
    size = stream.seek(0, os.SEEK_END)
    _check_end(stream, size)
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        if len({one.filename.lower() for one in members}) < len(members):
            raise ValueError("it has two members of one name")
        allowed = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[: 2 if packed else 1]
        if any(one.compress_type not in allowed or one.flag_bits & 1 for one in members):
            raise ValueError("its members are compressed in a way that is not supported")
        if any(one.header_offset < 0 for one in members):
            raise ValueError("its list of members is damaged")
        most = max(4 * size, MOST_UNPACKED) if packed else size
        if (claimed := sum(one.file_size for one in members)) > most:
            raise ValueError(f"its members have {claimed:,} bytes, at most {most:,} are unpacked")
        yield archive


def _check_end(stream: BinaryIO, size: int) -> None:
    """Refuse an archive in which readers could find different lists of members, or a long one."""
    sign, *_, length, start, comment = _at(stream, size - _END.size, _END)
    end = size - _END.size
    is_sound = sign == b"PK\5\6" and not comment
    if end >= _LOCATOR.size + _END64.size:
        mark, _, directory, _ = _at(stream, end - _LOCATOR.size, _LOCATOR)
        if mark == b"PK\6\7":  # as large archives have it: then it counts
            end -= _LOCATOR.size + _END64.size
            sign, *_, length, start = _at(stream, end, _END64)
            is_sound &= sign == b"PK\6\6" and directory == end
    if not is_sound or start + length != end:
        raise ValueError("it is no archive, cut short, or goes on after its end")
    if length > MOST_LISTED:
        raise ValueError(f"its list of members has {length:,} bytes, at most {MOST_LISTED:,}")
    stream.seek(0)


def _at(stream: BinaryIO, offset: int, form: struct.Struct) -> tuple[Any, ...]:
    if offset < 0:
        raise ValueError("it is no archive, or cut short")
    stream.seek(offset)
    return form.unpack(stream.read(form.size))


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one array after checking its header against its bytes."""
    with archive.open(member) as file:
        version = npy.read_magic(file)
        heads = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in heads:
            raise ValueError(f"{member.filename}: version {version} is not read")
        shape, _, dtype = heads[version](file)
        size = member.file_size - file.tell()
    if dtype.kind not in "biufUS" or dtype.names or not dtype.itemsize or dtype.subdtype:
        raise ValueError(f"{member.filename}: has dtype {dtype!s:.60}")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{member.filename}: {size:,} bytes are there for {shape!s:.60} {dtype}")
    with archive.open(member) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    return array
