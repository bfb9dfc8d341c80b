"""Untrusted files of numbers: zip archives of NumPy arrays, safetensors, what ``torch.save`` wrote.

None of them runs code. The sizes that a file claims are checked before anything is unpacked.
"""

import errno
import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError as UnpicklingError
from typing import Any, BinaryIO

import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from flower_graph.storage.reading import MIB, MOST_TENSORS, open_regular, parse_json

MOST_UNPACKED = 64 * MIB  # of all members, if four times the archive is less
MOST_LISTED = 16 * MIB  # of the list of members
SUFFIX = ".npy"
_END, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
MOST_HEAD = 100 * MIB  # safetensors' own bound, some million tensors
LENGTH = 8  # bytes that say how long the head is
KINDS = frozenset(("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "C64"))
Metadata = dict[str, str]
MOST_REPEATED = 16 * MIB  # bytes of a tensor that repeats a few numbers
ZIPPED = b"PK\3\4"  # how a file begins since PyTorch 1.6; older ones cannot be mapped


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


# Files of tensors ---------------------------------------------------------------------------------

# Safetensors' own reader checks all sizes against the file's. Here the head is limited, which
# unfolds in memory, and the types of numbers, some of which PyTorch cannot compute with.


def read_tensors(path: Path, head: int = MOST_HEAD) -> tuple[dict[str, Tensor], Metadata]:
    """Read a file's tensors, on first use, and its metadata.

    ``head`` is the most bytes of its head, some hundred for each tensor. ``OSError``,
    ``ValueError`` or ``SafetensorError`` if it is not a regular safetensors file.
    """
    with open_regular(path, MOST_TENSORS) as stream:
        metadata = _metadata(stream, head)
    return load_file(path), metadata


def load_tensors(data: bytes) -> tuple[dict[str, Tensor], Metadata]:
    """Read tensors as ``read_tensors`` does, from the bytes of such a file."""
    metadata = _metadata(io.BytesIO(data), MOST_HEAD)
    return load(data), metadata


def write_tensors(
    stream: BinaryIO, tensors: Mapping[str, Tensor], metadata: Metadata | None = None
) -> None:
    """Write tensors to a stream of ``storage.writing``; ``OSError`` says why that fails."""
    try:
        save_file(dict(tensors), stream.name, metadata)  # without a copy of them all in memory
    except SafetensorError as error:  # it wraps the disk's error
        code = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(code, f"{os.strerror(code)}: {error}") from error


def _metadata(stream: BinaryIO, most: int) -> Metadata:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    length = int.from_bytes(stream.read(LENGTH), "little")
    if length > min(most, size - LENGTH):
        raise ValueError(f"its head claims {length:,} bytes, at most {most:,} are read of {size:,}")
    head = parse_json(stream.read(length))
    metadata = head.pop("__metadata__", {})
    if bad := {entry["dtype"] for entry in head.values()} - KINDS:
        raise ValueError(f"it has numbers of the kind {sorted(bad)[0]!r:.20}, which is not read")
    return {str(key): str(value) for key, value in metadata.items()}


# Graphs that people saved with torch.save ---------------------------------------------------------

# ``weights_only`` runs nothing, but believes what a file claims of its size. So the file is mapped,
# which keeps its tensors within it, and what is larger than the file is refused.


# Any: the reader checks what was saved
def load_saved(path: Path) -> Any:
    """Load what ``torch.save`` wrote, a ``Data`` as a dict, on the processor.

    Raises
    ------
    OSError, ValueError
        If it is no regular file, or claims more than it holds. A damaged file can raise nearly
        anything.
    UnpicklingError
        If it has objects of classes that are not allowed.
    """
    with open_regular(path, MOST_TENSORS) as stream:
        is_zipped = stream.read(len(ZIPPED)) == ZIPPED
        most = max(stream.seek(0, io.SEEK_END), MOST_REPEATED)
        if is_zipped:
            with open_archive(stream, packed=False):
                pass  # the file is whole, and nothing in it unfolds
    content = torch.load(path, map_location="cpu", mmap=is_zipped, weights_only=True)
    # Not by attributes of Data, some of which are computed (num_classes is not one).
    content = content.to_dict() if hasattr(content, "to_dict") else content
    if _unfolded(content, {}, most) > most:
        raise ValueError("its lists contain each other")
    if not isinstance(content, dict):
        return content
    return {key: _own(value, most) for key, value in content.items()}


def _unfolded(value: object, sizes: dict[int, int], most: int) -> int:
    """Count the values in nested lists, each list as often as it is referred to."""
    if not isinstance(value, list | tuple | set | dict):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = most + 1  # of a list that contains itself
        parts = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_unfolded(part, sizes, most) for part in parts)
    return sizes[id(value)]


def _own(value: object, most: int) -> object:
    """Copy a tensor out of its file, which may change later."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout == torch.strided and value.numel() * value.element_size() > most:
        raise ValueError(f"a tensor of size {tuple(value.shape)!s:.60} is larger than its file")
    return value.clone()
