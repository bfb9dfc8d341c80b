"""An ndarray as Flower's ``Array`` and back: one copy to write, none to read, never pickle.

``Array(ndarray)`` copies the data more than once and ``Array.numpy()`` once more; a round of a
million node-clients carries 64 MB each way, where that is felt. These two functions write the
same bytes as ``numpy.save`` (any Flower peer reads them) with one copy, and read them as a view.
What comes from another party is checked first: serialisation, shape, type and length, and
anything that would need pickle, which can run code, is refused in both directions.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array
from flwr.common.constant import SType
from numpy.typing import NDArray


def encode_array(name: str, values: NDArray[Any]) -> Array:
    """Turn an array into Flower's ``Array`` with one copy of the data."""
    # The bytes are those of ``numpy.save`` for an array in C order, so any Flower peer reads them.
    if not isinstance(values, np.ndarray):
        raise TypeError(f"array {name!r} must be a numpy.ndarray, got {type(values).__name__}")
    if values.dtype.hasobject:
        raise ValueError(f"array {name!r} has dtype {values.dtype}, which needs pickle; refused")
    values = np.asarray(values, order="C")
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    # One join allocates and copies once; numpy.save to memory goes through two buffers.
    data = b"".join((header.getvalue(), values.reshape(-1).view(np.uint8).data))
    return Array(dtype=str(values.dtype), shape=values.shape, stype=SType.NUMPY, data=data)


def decode_array(name: str, array: Array, *, copy: bool = False) -> NDArray[Any]:
    """Read Flower's ``Array`` as an ndarray, by default without a copy."""
    if array.stype != SType.NUMPY:
        raise ValueError(f"array {name!r} is serialised as {array.stype!r}, not {SType.NUMPY!r}")
    shape, fortran, dtype, offset = _read_header(name, array.data)
    if dtype.hasobject:
        raise ValueError(f"array {name!r} has dtype {dtype}, which needs pickle; refused")
    if shape != tuple(array.shape) or str(dtype) != array.dtype:
        said, held = f"{array.dtype}{list(array.shape)}", f"{dtype}{list(shape)}"
        raise ValueError(f"array {name!r} says it is {said} but holds {held}")
    expected = int(np.prod(shape, dtype=object)) * dtype.itemsize  # no overflow in Python's int
    if len(array.data) - offset != expected:
        result = len(array.data) - offset
        raise ValueError(f"array {name!r} holds {result} bytes, its shape needs {expected}")
    view: NDArray[Any] = np.ndarray(
        shape, dtype, buffer=array.data, offset=offset, order="F" if fortran else "C"
    )
    return view.copy(order="K") if copy else view


def _read_header(name: str, data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read shape, order, dtype and the offset of the values from the head of npy bytes."""
    stream = BytesIO(data)  # shares the bytes
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            header = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"npy version {version}")
    except Exception as error:  # hostile bytes make the parser raise almost anything
        raise ValueError(f"array {name!r} is not in NumPy's format: {error}") from error
    return (*header, stream.tell())
