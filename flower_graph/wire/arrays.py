"""Arrays on the wire: one copy to write, none to read, never pickle. Records of messages.

``Array(ndarray)`` copies the data more than once and ``Array.numpy()`` once more; in a round of a
million node-clients, which carries 64 MB each way, that costs seconds. ``encode_array`` writes the
same bytes as ``numpy.save`` (any Flower peer reads them) with one copy, ``decode_array`` reads them
as a view. Data from another party is checked first: serialisation, shape, type and length. Pickle,
which can run code, is refused in both directions.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from typing import Any, Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief
from flower_graph.flower_compat import SType
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, CONFIG, MAX_NUMBER, METRICS

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
MAX_ITEM = 8  # bytes of a number
HEADERS = 256  # heads of arrays in the cache: most heads of a round are alike
MAX_HEADER = 10_016  # bytes of a head; NumPy reads no longer ones


def encode_array(name: str, values: NDArray[np.generic]) -> Array:
    """Turn an array into Flower's ``Array`` with one copy of the data."""
    # The bytes are those of ``numpy.save`` for an array in C order, so any Flower peer reads them.
    if not isinstance(values, np.ndarray):
        raise TypeError(f"array {name!r} must be a numpy.ndarray, got {type(values).__name__}")
    if values.dtype.hasobject:
        raise ValueError(f"array {name!r} has dtype {values.dtype}, which needs pickle; refused")
    values = np.asarray(values, order="C")
    # One join allocates and copies once; numpy.save to memory goes through two buffers.
    data = b"".join((_header(values.dtype, values.shape), values.reshape(-1).view(np.uint8).data))
    return Array(dtype=str(values.dtype), shape=values.shape, stype=SType.NUMPY, data=data)


@lru_cache(HEADERS)
def _header(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    stream = BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    described = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()


def decode_array(name: str, array: Array, *, copy: bool = False) -> NDArray[np.generic]:
    """Read Flower's ``Array`` as an ndarray, by default without a copy."""
    if array.stype != SType.NUMPY:
        raise MalformedReplyError(f"array {name!r} is serialised as {brief(array.stype)}")
    length = int.from_bytes(array.data[8:10], "little")
    try:
        shape, fortran, dtype, offset = _read_header(array.data[: min(10 + length, MAX_HEADER)])
    except Exception as error:  # hostile bytes make the parser raise almost anything
        raise MalformedReplyError(f"array {name!r} is not in NumPy's format: {error}") from error
    if dtype.hasobject:
        raise MalformedReplyError(f"array {name!r} has dtype {dtype}, which needs pickle; refused")
    if shape != tuple(array.shape) or str(dtype) != array.dtype:
        claimed, held = f"{array.dtype[:20]}{brief(list(array.shape))}", f"{dtype}{list(shape)}"
        raise MalformedReplyError(f"array {name!r} says it is {claimed} but holds {held}")
    expected = int(np.prod(shape, dtype=object)) * dtype.itemsize  # no overflow in Python's int
    if (size := len(array.data) - offset) != expected:
        raise MalformedReplyError(f"array {name!r} holds {size} bytes, its shape needs {expected}")
    order: Literal["F", "C"] = "F" if fortran else "C"
    try:
        view: NDArray[np.generic] = np.ndarray(shape, dtype, array.data, offset, order=order)
    except (ValueError, TypeError) as error:  # sizes that are negative or beyond NumPy's
        raise MalformedReplyError(f"array {name!r} cannot be read: {error}") from error
    return view.copy(order="K") if copy else view


@lru_cache(HEADERS)
def _read_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    stream = BytesIO(head)
    if (version := np.lib.format.read_magic(stream)) != (1, 0):  # later ones are for long heads
        raise ValueError(f"npy version {version}")
    header = np.lib.format.read_array_header_1_0(stream)
    if min(header[0], default=0) < 0:
        raise ValueError(f"shape {header[0]}")
    return (*header, stream.tell())


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
    return bool(np.diff(np.sort(clients)).all())


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
    # PyTorch has no numbers of another byte order, nor longer ones.
    if value.dtype.kind not in "fiu" or not value.dtype.isnative or value.dtype.itemsize > MAX_ITEM:
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


# A ``NumPyClient``'s records ----------------------------------------------------------------------


def arrays_of(message: Message) -> tuple[list[tuple[str, str]], list[NDArray[np.generic]]]:
    """Return the (record, key) slots of a message's arrays and the arrays, in order."""
    # The arrays are copies: a client may write into them, and in one process several clients would
    # otherwise write into the server's bytes.
    slots, arrays = [], []
    for record_name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                slots.append((record_name, key))
                arrays.append(decode_array(f"{record_name}/{key}", array, copy=True))
    return slots, arrays


# Any, here and below: entries have whatever types Flower's records take, lists too
def config_of(message: Message) -> dict[str, Any]:
    """Merge the config records of a message."""
    config: dict[str, object] = {}
    for record in message.content.values():
        if isinstance(record, ConfigRecord):
            if doubled := sorted(config.keys() & record.keys()):
                raise ValueError(f"config keys {doubled} are in more than one config record")
            config.update(record)
    return config


def reply_slots(
    names: object, incoming: list[tuple[str, str]], count: int
) -> list[tuple[str, str]]:
    """Choose the (record, key) for each of `count` reply arrays."""
    if names is None:
        if len(incoming) != count:
            return [(ARRAYS, str(index)) for index in range(count)]
        if len({record for record, _ in incoming}) == 1:
            return [(ARRAYS, key) for _, key in incoming]
        return incoming
    if isinstance(names, str) or not isinstance(names, Sequence) or len(names) != count:
        raise ValueError(f"metrics[{ARRAY_NAMES!r}] must name {count} arrays, got {names!r}")
    slots = []
    for name in names:
        record, slash, key = str(name).partition("/")
        slots.append((record, key) if slash else (ARRAYS, record))
        if not all(slots[-1]) or slots[-1][0] in (METRICS, CONFIG):
            raise ValueError(f"array name {name!r} is empty or names a reserved record")
    if len(set(slots)) != count:
        raise ValueError(f"metrics[{ARRAY_NAMES!r}] has a name twice: {list(names)}")
    return slots


# Any: likewise
def metric_records(fixed: dict[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Split metrics into numbers, for the metric record, and the rest, for the config record."""
    if reserved := sorted(fixed.keys() & metrics.keys()):
        raise ValueError(f"metrics keys {reserved} are reserved: they are returned on their own")
    numbers, others = dict(fixed), dict[str, Any]()
    for key, value in metrics.items():
        plain = plain_value(key, value)
        probe = (plain[0] if plain else 0) if isinstance(plain, list) else plain
        is_number = isinstance(probe, (int, float)) and not isinstance(probe, bool)
        (numbers if is_number else others)[key] = plain
    records: dict[str, object] = {METRICS: MetricRecord(numbers)}
    return records | {CONFIG: ConfigRecord(others)} if others else records


# Any: likewise
def plain_value(key: str, value: object) -> Any:
    """Turn NumPy scalars into Python's, and refuse what no Flower record can hold."""
    if isinstance(value, (list, tuple)):
        items = [plain_value(key, item) for item in value]
        # A record's list has one type, but figures of a round may be 1, 0.5, ...
        is_mixed = {type(item) for item in items} == {int, float}
        return [float(item) for item in items] if is_mixed else items
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float, str, bytes)):
        kind = type(value).__name__
        raise TypeError(f"{key!r}: {kind}; must be a number, str, bytes, bool or a list of such")
    return value
