"""Fields that travel as bytes: exact whole numbers, and rows of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.messages.fields import Numbers, Reading, Shaped, Writing
from flower_graph.messages.keys import pack_integers, unpack_integers

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Exact(Shaped):
    """Whole numbers that must arrive as they left: bytes, past mods that add noise to arrays."""

    type = "bytes (int64)"

    def encode(self, value: Any) -> bytes:
        """Write the numbers row by row."""
        return pack_integers(value)

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Refuse bytes of another size, and numbers that are not as asked."""
        numbers = self.unpack(value)
        if name in reading.known and not np.array_equal(numbers, wanted := reading.known[name]):
            raise MalformedReplyError(f"{self.key}: {numbers[:5]}..., expected {wanted[:5]}...")
        result = reading.fit(name, self.shape, numbers.size)
        if result is None:
            raise MalformedReplyError(f"{self.key}: {self._misfit(numbers.size, reading)}")
        return numbers.reshape(result)

    def unpack(self, value: Any) -> Any:
        """Read the bytes."""
        return unpack_integers(value, self.key)

    def _misfit(self, count: int, reading: Reading) -> str:
        first = self.shape.split()[0]
        if first in reading.sizes:
            return (
                f"{count} numbers for {reading.sizes[first]} {reading.owners.get(first, 'clients')}"
            )
        known = reading.shape(self.shape)
        if -1 not in known:
            return f"{count} came, expected {math.prod(known)}"
        unit = -math.prod(known)
        return f"{count} numbers are no {'pairs' if unit == 2 else f'rows of {unit}'}"


@dataclass(frozen=True)
class Clients(Exact):
    """Numbers of clients: at least one, none twice."""

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Refuse none at all, and the same twice."""
        clients = super().decode(value, name, reading)
        if clients.size == 0:
            raise MalformedReplyError(f"{self.key}: there is no client")
        numbers, counts = np.unique(clients, return_counts=True)
        if counts.max() > 1:
            raise MalformedReplyError(
                f"{self.key}: client {numbers[counts.argmax()]} is there twice"
            )
        return clients


@dataclass(frozen=True)
class Block(Shaped):
    """Bytes of a shape, for each client or row."""

    type = "bytes (uint8)"

    def encode(self, value: Any) -> bytes:
        """Write the bytes row by row."""
        data: bytes = value.tobytes()
        return data

    def decode(self, value: Any, name: str, reading: Reading) -> Bytes:
        """Refuse bytes of another size."""
        result = reading.fit(name, self.shape, len(value)) if isinstance(value, bytes) else None
        if result is None:
            known = reading.shape(self.shape)
            unit = math.prod(size for size in known if size != -1)
            got = f"{len(value)} bytes" if isinstance(value, bytes) else f"{value!r:.60}"
            wanted = f"rows of {unit} bytes" if -1 in known else f"{unit} bytes"
            raise MalformedReplyError(f"{self.key}: expected {wanted}, got {got}")
        return np.frombuffer(value, np.uint8).reshape(result)


@dataclass(frozen=True)
class Flags(Block):
    """Yes or no for each of a shape."""

    type = "bytes (bool)"

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Read all but zero as yes."""
        return super().decode(value, name, reading) > 0


@dataclass(frozen=True)
class Ragged(Exact):
    """Whole numbers of several clients, one behind the other; cut by how many each has."""

    # An entry that says how many these are; without, the reader knows it as ``sizes``
    pointer: Numbers | None = None

    @property
    def described(self) -> str:
        """The type, and what all sizes add up to."""
        return f"{self.type} `[{self.shape}]`"

    def write(self, value: Any, to: Writing) -> None:
        """Write all numbers, and how many each client has."""
        if self.pointer is not None:
            self.pointer.write([int(part.size) for part in value], to)
        super().write(np.concatenate(value), to)

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Refuse numbers that are not as many as the sizes say."""
        if self.pointer is None:
            sizes, words = reading.known["sizes"], "came, expected"
        else:
            sizes, words = self.pointer.read(name, reading), f"ids came, {self.pointer.key} says"
        numbers = unpack_integers(value, self.key)
        if numbers.size != sum(sizes):
            raise MalformedReplyError(f"{self.key}: {numbers.size} {words} {sum(sizes)}")
        if min(sizes, default=0) < 0:
            raise MalformedReplyError(f"{self.key}: {min(sizes)} ids of a client")
        return split_rows(numbers, sizes)


def split_rows(values: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Cut rows that lie one behind the other into parts."""
    return list(np.split(values, np.cumsum(sizes)[:-1]))


@dataclass(frozen=True)
class Sizes(Exact):
    """How many rows of another field each client has."""

    rows: str = "n"  # the letter of all rows together
    turn = 2

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Refuse sizes that do not add up."""
        sizes, clients = self.unpack(value), reading.shape(self.shape)[0]
        if sizes.size != clients:
            raise MalformedReplyError(f"{sizes.size} sizes for {clients} clients")
        rows = reading.sizes[self.rows]
        if (sizes < 0).any() or (sizes > rows).any() or sizes.sum() != rows:
            raise MalformedReplyError(f"sizes {sizes.tolist()!s:.60} for {rows} rows in all")
        return sizes
