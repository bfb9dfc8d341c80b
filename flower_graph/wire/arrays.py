"""Arrays on the wire: one copy to write, none to read, never pickle. Records of messages.

``encode_array`` writes the bytes of ``numpy.save`` (any Flower peer reads them) with one copy, and
``decode_array`` reads them as a view: ``Array(ndarray)`` and ``Array.numpy()`` copy three times,
which takes seconds in a round of a million node-clients. Pickle is refused in both directions.
"""

from functools import lru_cache
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief
from flower_graph.flower_compat import SType
from flower_graph.wire.keys import MAX_NUMBER

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
# Arguments and results of a ``NumPyClient``'s methods. Entries of messages may be lists too, which
# Flower's type leaves out
Scalar = bool | bytes | float | int | str
Config = dict[str, Scalar]
Parameters = list[NDArray[np.generic]]
Answer = tuple[Parameters, int, Config]  # arrays, their weight, further entries
Measurements = tuple[float, int, Config]  # the loss, its weight, further figures


def encode_array(name: str, values: NDArray[np.generic]) -> Array:
    """Turn an array into Flower's ``Array`` with one copy of the data."""
    if not isinstance(values, np.ndarray):
        raise TypeError(f"array {name!r} must be a numpy.ndarray, got {type(values).__name__}")
    if values.dtype.hasobject:
        raise ValueError(f"array {name!r} has dtype {values.dtype}, which needs pickle; refused")
    values = np.asarray(values, order="C")
    # One join allocates and copies once; numpy.save to memory goes through two buffers.
    head = _header(values.dtype, values.shape, False)
    data = b"".join((head, values.reshape(-1).view(np.uint8).data))
    return Array(dtype=str(values.dtype), shape=values.shape, stype=SType.NUMPY, data=data)


@lru_cache(256)  # most heads of a round are alike
def _header(dtype: np.dtype[np.generic], shape: tuple[int, ...], fortran: bool) -> bytes:
    stream, descr = BytesIO(), np.lib.format.dtype_to_descr(dtype)
    described = {"descr": descr, "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()


def decode_array(name: str, array: Array, *, copy: bool = False) -> NDArray[np.generic]:
    """Read Flower's ``Array`` as an ndarray, by default without a copy."""
    data, shape = array.data, tuple(array.shape)
    try:
        if len(array.dtype) > 99 or len(shape) > 64:  # NumPy's most; longer ones cost time
            raise ValueError
        # The head must be what NumPy writes for the type and the shape that the array claims
        dtype = np.dtype(array.dtype)
        heads = (_header(dtype, shape, fortran) for fortran in (False, True))
        order, head = next(one for one in zip("CF", heads, strict=True) if data.startswith(one[1]))
        view: NDArray[Any] = np.frombuffer(data, dtype, offset=len(head))  # refuses objects
        view = view.reshape(shape, order="F" if order == "F" else "C")
        good = array.stype == SType.NUMPY and min(shape, default=0) >= 0
    except Exception:  # hostile claims make NumPy raise almost anything
        good = False
    if not good:
        claimed = f"{brief(array.stype)} of {array.dtype[:20]}{brief(list(shape))}"
        raise MalformedReplyError(f"array {name!r} is not in NumPy's format: {claimed}")
    return view.copy(order="K") if copy else view


def pack_integers(values: IntArray) -> bytes:
    """Write integers as little-endian 64-bit bytes."""
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def unpack_integers(data: object, what: str) -> NDArray[np.int64]:
    """Read the output of ``pack_integers``; ``MalformedReplyError`` names ``what`` if it fails."""
    if not isinstance(data, bytes) or len(data) % 8:
        raise MalformedReplyError(f"{what}: expected 64-bit integers as bytes, got {brief(data)}")
    return np.frombuffer(data, dtype="<i8").astype(np.int64)


def each_once(clients: NDArray[np.int64]) -> bool:
    """Whether no client is there twice; ``np.unique`` takes a second for a million."""
    ordered = np.sort(clients)
    return bool((ordered[1:] != ordered[:-1]).all())


def read_array(
    content: RecordDict,
    record: str,
    key: str,
    shape: tuple[int, ...],
    *,
    limit: float | None = MAX_NUMBER,
    must_be_finite: bool = True,
) -> NDArray[np.generic]:
    """Read one array of a reply and check it."""
    arrays, name = record_of(content, record, ArrayRecord), f"{record}/{key}"
    if arrays is None or key not in arrays:
        raise MalformedReplyError(f"the array {name} is missing")
    value = decode_array(name, arrays[key])
    if value.shape != shape:
        raise MalformedReplyError(f"{name} has shape {value.shape}, expected {shape}")
    # PyTorch has no numbers of another byte order, nor longer ones than 8 bytes.
    if value.dtype.kind not in "fiu" or not value.dtype.isnative or value.dtype.itemsize > 8:
        raise MalformedReplyError(f"{name} has type {value.dtype.str}, expected numbers")
    if must_be_finite and value.dtype.kind == "f":
        with np.errstate(over="ignore"):
            # The server computes in float32: what overflows there is as bad as infinity.
            if not np.isfinite(value.astype(np.float32, copy=False)).all():
                raise MalformedReplyError(f"{name} has NaN or infinite values in float32")
    if limit is not None and value.size and (largest := largest_size(value)) > limit:
        raise MalformedReplyError(f"{name} has {largest:g}, at most {limit:g} is possible")
    return value


def largest_size(values: NDArray[np.generic]) -> float:
    """Return the largest absolute value; values are not empty."""
    return max(float(values.max()), -float(values.min()))


def record_of(content: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return the record of a name, if it is of a kind."""
    # ``content.array_records`` would leave a circle, which holds all arrays until it is collected.
    record = content.get(name)
    return record if isinstance(record, kind) else None


def own_records(content: RecordDict) -> RecordDict:
    """Copy the records and their lists; the arrays' bytes are immutable and stay shared."""
    local: dict[str, Any] = {name: record.copy() for name, record in content.items()}
    for record in local.values():
        if not isinstance(record, ArrayRecord):
            record.update({k: list(v) for k, v in record.items() if isinstance(v, list)})
    return RecordDict(local)
