"""Files of tensors (safetensors), whose heads are checked before anything else is read.

The format runs no code, and its own reader checks all sizes against the file's. This module limits
the head, which unfolds in memory, and the types of numbers, some of which PyTorch cannot compute
with.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from flower_graph.storage.reading import MIB, MOST_TENSORS, open_regular, parse_json

MOST_HEAD = 100 * MIB  # safetensors' own bound, some million tensors
LENGTH = 8  # bytes that say how long the head is
KINDS = frozenset(("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "C64"))
Metadata = dict[str, str]


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
