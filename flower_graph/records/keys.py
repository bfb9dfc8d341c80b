"""All keys on the wire, and how exact integers and arrays are written and read.

Numbers that must arrive exactly as they left (identities, rounds) travel in the ``ConfigRecord``
as bytes, because mods such as ``LocalDpMod`` add noise to everything in the ``ArrayRecord``. That
mod also wants the same keys up and down, so a latent vector and its gradient share one key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.arrays import decode_array
from flower_graph.errors import MalformedReplyError

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]

# Records
ARRAYS, AVERAGE, CONFIG, METRICS = "arrays", "average", "config", "metrics"
# Arrays: latent vectors up, their gradients down; averaged weights both ways; how many users held
# each row, up
RELAY, WEIGHTS, HOLDERS = "relay", "weights", "holders"
# Exact integers, as little-endian bytes
USERS, GRADIENT_ROUND = "users", "gradient-round"
# Scalars
ROUND, AVERAGE_ROUND, RESUME_ROUND = "round", "average-round", "resume-round"
SEND_WEIGHTS, CHECKPOINT = "send-weights", "checkpoint"
LATENT_SIZE, USER_BIAS, SEED = "latent-size", "user-bias", "seed"
LEARNING_RATE, WEIGHT_DECAY = "learning-rate", "weight-decay"
AVERAGE_OVER, WEIGHT_SHAPE = "average-over", "weight-shape"
# How the adaptor (``flower_graph.client``) names the arrays of a reply
ARRAY_NAMES = "array-names"
# Metrics that Flower's own strategies look for
NUM_EXAMPLES, LOSS = "num-examples", "loss"


def pack_integers(values: IntArray) -> bytes:
    """Write integers as little-endian 64-bit bytes."""
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def unpack_integers(data: object, what: str) -> NDArray[np.int64]:
    """Read what ``pack_integers`` wrote; ``MalformedReplyError`` names ``what`` if it cannot."""
    if not isinstance(data, bytes) or len(data) % 8:
        raise MalformedReplyError(f"{what}: expected 64-bit integers as bytes, got {data!r:.60}")
    return np.frombuffer(data, dtype="<i8").astype(np.int64)


def read_array(content: RecordDict, record: str, key: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Read one array of a reply and check it.

    Parameters
    ----------
    content : RecordDict
        The reply.
    record, key : str
        Where the array is.
    shape : tuple
        Expected shape.

    Returns
    -------
    ndarray
        The array, finite, of that shape.

    Raises
    ------
    MalformedReplyError
        If it is missing, unreadable, of another shape or type, or not finite.
    """
    arrays = content.array_records.get(record)
    if arrays is None or key not in arrays:
        raise MalformedReplyError(f"the array {record}/{key} is missing")
    try:
        value = decode_array(f"{record}/{key}", arrays[key])
    except (ValueError, TypeError) as error:
        raise MalformedReplyError(f"{record}/{key} cannot be read: {error}") from error
    if value.shape != shape:
        raise MalformedReplyError(f"{record}/{key} has shape {value.shape}, expected {shape}")
    if value.dtype.kind not in "fiu":
        raise MalformedReplyError(f"{record}/{key} has type {value.dtype}, expected numbers")
    with np.errstate(over="ignore"):
        # The server computes in float32: what overflows there is as bad as infinity.
        finite = np.isfinite(value.astype(np.float32, copy=False)).all()
    if not finite:
        raise MalformedReplyError(f"{record}/{key} has NaN or infinite values in float32")
    return value
