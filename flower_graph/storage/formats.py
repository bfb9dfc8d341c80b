"""Untrusted files of numbers: zip archives of NumPy arrays, safetensors, what ``torch.save`` wrote.

None of them runs code. The sizes that a file claims are checked before anything is unpacked.
"""

import errno
import io
import json
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError as UnpicklingError
from typing import Any, BinaryIO

import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from flower_graph.storage.reading import MIB, MOST_TENSORS, open_regular, unfolded

MOST_UNPACKED = 64 * MIB  # of all members, if four times the archive is less
BOUNDED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # members that unfold as far as they are read
SUFFIX = ".npy"
_END, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
LENGTH = 8  # bytes that say how long the head of a safetensors file is
WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}
Metadata = dict[str, str]
MOST_REPEATED = 16 * MIB  # bytes of a tensor that repeats a few numbers
ZIPPED = b"PK\3\4"  # how a file begins since PyTorch 1.6; older ones cannot be mapped


# Any: arrays have whatever types the file has
def read_arrays(path: Path | str) -> dict[str, NDArray[Any]]:
    """Read the arrays of an ``npz`` file, none of which is a pickle.

    Its members, unpacked, are at most four times its size, or 64 MiB. A damaged file raises what
    its parts do: ``OSError``, ``ValueError``, ``BadZipFile``, ``zlib.error`` and others.
    """
    arrays = dict[str, NDArray[Any]]()
    with open_regular(path, MOST_TENSORS) as stream, zipfile.ZipFile(stream) as archive:
        most, members = (
            max(4 * os.fstat(stream.fileno()).st_size, MOST_UNPACKED),
            archive.infolist(),
        )
        if not BOUNDED.issuperset(member.compress_type for member in members):
            raise ValueError("it is packed in a way that unfolds without bounds")
        if (claimed := sum(member.file_size for member in members)) > most:
            raise ValueError(f"its members have {claimed:,} bytes, at most {most:,} are unpacked")
        for member in members:
            with archive.open(member) as file:
                array = npy.read_array(file, allow_pickle=False)
                if file.read(1):
                    raise ValueError(f"{member.filename}: has more bytes than its head says")
            if array.dtype.kind not in "biufUS" or not array.itemsize:
                raise ValueError(f"{member.filename}: has dtype {array.dtype!s:.60}")
            arrays[member.filename.removesuffix(SUFFIX)] = array
    return arrays


# Files of tensors ---------------------------------------------------------------------------------

# Safetensors' own reader checks the head and all sizes against the file's.
MOST_HEAD = 100 * MIB  # its own bound; a head unfolds in memory to twenty times that


def read_tensors(path: Path, head: int = MOST_HEAD) -> tuple[dict[str, Tensor], Metadata]:
    """Read a file's tensors, on first use, and its metadata.

    ``OSError``, ``ValueError`` or ``SafetensorError`` if it is not a regular safetensors file.
    """
    with open_regular(path, MOST_TENSORS) as stream:
        if (length := int.from_bytes(stream.read(LENGTH), "little")) > head:
            raise ValueError(f"its head has {length:,} bytes, at most {head:,} are read")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
        return _computed(tensors), dict(file.metadata() or {})


def load_tensors(data: bytes) -> tuple[dict[str, Tensor], Metadata]:
    """Read tensors as ``read_tensors`` does, from the bytes of such a file."""
    tensors, length = _computed(load(data)), int.from_bytes(data[:LENGTH], "little")
    return tensors, json.loads(data[LENGTH : LENGTH + length]).get("__metadata__", {})


def _computed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Refuse tensors of types that PyTorch cannot compute with."""
    if bad := {tensor.dtype for tensor in tensors.values()} - WHOLE - FLOATS:
        raise ValueError(f"it has numbers of type {bad.pop()}, which are not read")
    return tensors


def write_tensors(
    stream: BinaryIO, tensors: Mapping[str, Tensor], metadata: Metadata | None = None
) -> None:
    """Write tensors to a stream of ``storage.files``; ``OSError`` says why that fails."""
    try:
        save_file(dict(tensors), stream.name, metadata)  # without a copy of them all in memory
    except SafetensorError as error:  # it wraps the disk's error
        code = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(code, os.strerror(code)) from error


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
        most = max(size := stream.seek(0, io.SEEK_END), MOST_REPEATED)
        if is_zipped:
            _check_archive(stream, size)
    # PyTorch would read and write wherever a sparse tensor's places say
    with torch.sparse.check_sparse_tensor_invariants():
        content = torch.load(path, map_location="cpu", mmap=is_zipped, weights_only=True)
    # Not by attributes of Data, some of which are computed (num_classes is not one).
    content = content.to_dict() if hasattr(content, "to_dict") else content
    if unfolded(content, {}, most) > most:
        raise ValueError("its lists contain each other")
    if not isinstance(content, dict):
        return content
    return {key: _own(value, most) for key, value in content.items()}


def _own(value: object, most: int) -> object:
    """Copy a tensor out of its file, which may change later."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout == torch.strided and value.numel() * value.element_size() > most:
        raise ValueError(f"a tensor of size {tuple(value.shape)!s:.60} is larger than its file")
    return value.clone()


def _check_archive(stream: BinaryIO, size: int) -> None:
    """Refuse an archive that unfolds, or in which readers could find different members."""
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
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        is_sound = len({one.filename.lower() for one in members}) == len(members)
        is_sound &= all(not (one.compress_type or one.flag_bits & 1) for one in members)
        is_sound &= all(one.header_offset >= 0 for one in members)
        if not is_sound or sum(one.file_size for one in members) > size:
            raise ValueError("its members are packed, larger than it, or two have one name")


def _at(stream: BinaryIO, offset: int, form: struct.Struct) -> tuple[Any, ...]:
    if offset < 0:
        raise ValueError("it is no archive, or cut short")
    stream.seek(offset)
    return form.unpack(stream.read(form.size))
