"""The state of sums and alignments as bytes: plain values, and arrays beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

PLAIN = "state"  # the array with the plain values' JSON; the others are numbered


def write_state(state: object) -> bytes:
    """Write numbers, texts, bytes and arrays, in lists and tables with any keys of these."""
    arrays: dict[str, NDArray[np.generic]] = {}

    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            arrays[str(len(arrays))] = np.ascontiguousarray(value)
            return {"array": len(arrays) - 1}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, Mapping):
            return {"table": [[plain(key), plain(one)] for key, one in value.items()]}
        return [plain(one) for one in value] if isinstance(value, (list, tuple, set)) else value

    text = json.dumps(plain(state)).encode()
    return bytes(save({PLAIN: np.frombuffer(text, np.uint8), **arrays}))


def read_state(data: bytes) -> Any:
    """Read the output of ``write_state``; tuples and sets come back as lists."""
    arrays = load(data)

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(one) for one in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "array":
            return arrays[str(content)].copy()
        if kind == "bytes":
            return bytes.fromhex(content)
        return {whole(key): whole(one) for key, one in content}

    return whole(json.loads(arrays[PLAIN].tobytes()))
