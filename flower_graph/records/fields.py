"""Reads single config entries of the secure messages and checks them.

Each function raises ``MalformedReplyError``, naming the key, for what is missing or not as it
should be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.records.keys import unpack_integers

Config = Mapping[str, Any]
RUN_BYTES = 16  # the nonce that tells one run from another


def read_run(config: Config, key: str) -> bytes:
    """Read the identity of a run."""
    value = config.get(key)
    if not isinstance(value, bytes) or len(value) != RUN_BYTES:
        raise MalformedReplyError(f"{key}: expected {RUN_BYTES} bytes, got {value!r:.60}")
    return value


def read_integer(config: Config, key: str) -> int:
    """Read an integer."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedReplyError(f"{key}: expected an integer, got {value!r:.60}")
    return value


def read_clients(config: Config, key: str) -> NDArray[np.int64]:
    """Read client numbers: at least one, none twice."""
    clients = unpack_integers(config.get(key), key)
    if clients.size == 0:
        raise MalformedReplyError(f"{key}: there is no client")
    numbers, counts = np.unique(clients, return_counts=True)
    if counts.max() > 1:
        raise MalformedReplyError(f"{key}: client {numbers[counts.argmax()]} is there twice")
    return clients


def read_block(config: Config, key: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read bytes of a shape; the first size may be -1."""
    data = config.get(key)
    unit = math.prod(size for size in shape if size != -1)
    is_open = -1 in shape
    good = isinstance(data, bytes) and (
        len(data) % unit == 0 if is_open and unit else len(data) == unit
    )
    if not isinstance(data, bytes) or not good:
        got = f"{len(data)} bytes" if isinstance(data, bytes) else f"{data!r:.60}"
        raise MalformedReplyError(
            f"{key}: expected {'a multiple of ' if is_open else ''}{unit} bytes, got {got}"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_reasons(config: Config, key: str) -> dict[int, str]:
    """Read a list of ``number:reason``; a missing entry is an empty list."""
    entries = config.get(key, [])
    reasons: dict[int, str] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        number, colon, why = str(entry).partition(":")
        if not colon or not number.removeprefix("-").isdecimal():
            raise MalformedReplyError(f"{key}: expected number:reason, got {entry!r:.60}")
        reasons[int(number)] = why
    return reasons
