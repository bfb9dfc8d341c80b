"""Reads graphs that people saved with ``torch.save``, without running code.

``torch.load`` with ``weights_only`` runs nothing, but believes what a file claims of its size. So
the file is mapped, which keeps its tensors within it, and what is larger than the file is refused.
"""

from __future__ import annotations

import io
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from flower_graph.storage.archives import open_archive
from flower_graph.storage.reading import MIB, MOST_TENSORS, open_regular

__all__ = ["UnpicklingError", "load_saved"]

MOST_REPEATED = 16 * MIB  # bytes of a tensor that repeats a few numbers
ZIPPED = b"PK\3\4"  # how a file begins since PyTorch 1.6; older ones cannot be mapped


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
