"""What ``combine`` returns, checked: one set of arrays, or one for each client."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard, cast

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from numpy.typing import NDArray

from flower_graph.messages.arrays import encode_array

Arrays = ArrayRecord | Mapping[str, NDArray[Any]]
Combined = Arrays | Mapping[int, Arrays] | None


def is_by_client(combined: Combined) -> TypeGuard[Mapping[int, Arrays]]:
    """Whether there is one set of arrays for each client."""
    return bool(combined) and all(isinstance(key, int) for key in combined or ())


def shared_arrays(combined: Combined, model: ArrayRecord) -> ArrayRecord | None:
    """Check a model for all; what Flower made stays as it is."""
    if combined is None or isinstance(combined, ArrayRecord):
        return combined
    return _record(cast(Arrays, combined), model, "combine")


def personal_arrays(
    combined: Mapping[int, Arrays], model: ArrayRecord, known: Iterable[int]
) -> dict[int, ArrayRecord]:
    """Check a model for each client."""
    if strangers := sorted(combined.keys() - set(known)):
        raise ValueError(f"combine: it gives arrays for clients {strangers!s:.60}, unknown here")
    return {
        client: _record(arrays, model, f"combine: client {client}")
        for client, arrays in combined.items()
    }


def _record(arrays: Arrays, model: ArrayRecord, what: str) -> ArrayRecord:
    """Write arrays as the model's are: names, order, shapes and types."""
    if arrays.keys() != model.keys():
        raise ValueError(f"{what}: arrays {list(arrays)!s:.80}, expected {list(model)!s:.80}")
    record = ArrayRecord()
    for name, wanted in model.items():
        held: Any = arrays[name]
        values = held.numpy() if isinstance(arrays, ArrayRecord) else np.asarray(held)
        if values.shape != tuple(wanted.shape):
            shape = tuple(wanted.shape)
            raise ValueError(f"{what}: {name} has shape {values.shape}, expected {shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"{what}: {name} has NaN or infinite values")
        dtype = np.dtype(wanted.dtype)
        # A mean of counters is no whole number.
        rounded = np.rint(values) if dtype.kind in "iu" and values.dtype.kind == "f" else values
        record[name] = encode_array(name, rounded.astype(dtype))
    return record


def with_own_content(message: Message, key: str, arrays: ArrayRecord | None = None) -> Message:
    """Give a message records of its own, with other arrays under ``key`` if there are any."""
    # Flower builds all messages of a round around one content: what is changed for one client
    # would be changed for all.
    content = {name: record.copy() for name, record in message.content.items()}
    if arrays is not None:
        content[key] = arrays
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            local = {each: copy.copy(array) for each, array in record.items()}
            content[name] = ArrayRecord(local)
        else:
            lists: Any = {k: list(v) for k, v in record.items() if isinstance(v, list)}
            record.update(lists)
    message.content = RecordDict(content)
    return message
