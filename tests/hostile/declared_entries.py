"""Entries of requests, from the messages' declarations, and other values for each on the wire."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, Message

from flower_graph.wire.arrays import decode_array
from flower_graph.wire.codec import Field, Part
from flower_graph.wire.codec import Message as Declared
from flower_graph.wire.fields import Block, Exact, Flags
from flower_graph.wire.keys import CONFIG

# What an entry that is left out stands for, by its type
DEFAULTS: Mapping[str, Any] = {"str": "", "int": 0, "float": 0.0, "bool": False}


class Entry(NamedTuple):
    """An entry of a request, or one of its arrays."""

    message: type[Declared]
    key: str
    field: Field | None  # None of what a message always says, such as its stage
    beside: frozenset[str] = frozenset()  # all keys of the message

    @property
    def default(self) -> Any:
        """What it stands for where it is left out; None if it cannot be."""
        return None if self.field is None else DEFAULTS.get(self.field.type)

    def __str__(self) -> str:
        return f"{self.message.__name__}.{self.key}"


def entries_of_requests(modules: Iterable[ModuleType]) -> dict[str, Entry]:
    """Give all entries that the requests of some modules declare, by their names."""
    found = dict[str, Entry]()
    for module in modules:
        for one in vars(module).values():
            if not isinstance(one, type) or not issubclass(one, Declared) or not one.down:
                continue
            if one.__module__ == module.__name__:
                fields = list(_fields(one.layout))
                beside = frozenset(field.key for field in fields)
                entries = [Entry(one, key, None) for key in one.fixed]
                entries += [Entry(one, field.key, field, beside) for field in fields]
                found |= {str(entry): entry for entry in entries}
    return found


def _fields(part: Part) -> Iterator[Field]:
    """Give the fields of a part, those of parts in it, and those that fields have with them."""
    for field in part.parts.values():
        beside = [one for kind in type(field).__mro__ for one in vars(kind).values()]
        beside += [*vars(field).values(), *(size for _, size in getattr(field, "sent", ()))]
        yield from (one for one in beside if isinstance(one, Field) and one.key)
        if isinstance(field, Part):
            yield from _fields(field)
        elif field.key:
            yield field


class Seen(NamedTuple):
    """A request as it travels: its type, its entries, and its arrays by record and name."""

    kind: str
    config: Mapping[str, Any]
    arrays: Mapping[str, Array]

    @classmethod
    def of(cls, message: Message) -> Seen:
        """Take a message apart once, as Flower's records take long to look through."""
        content, arrays = message.content, dict[str, Array]()
        for record, named in content.array_records.items():
            arrays |= {f"{record}/{name}": array for name, array in named.items()}
        return cls(message.metadata.message_type, dict(content.get(CONFIG, {})), arrays)

    def has(self, entry: Entry) -> bool:
        """Tell whether it has an entry, or could have one that is left out."""
        fixed, config = entry.message.fixed, self.config
        names = {self.kind, self.kind.removeprefix("train.")}  # of a sum's messages the latter
        if names.isdisjoint(entry.message.down) or any(config.get(k) != fixed[k] for k in fixed):
            return False
        if entry.key in config or entry.key in self.arrays:
            return True
        return entry.default is not None and bool(entry.beside & self.config.keys())

    def value(self, entry: Entry) -> Any:
        """Return an entry's value on the wire, of an array its numbers."""
        if entry.key in self.config:
            return self.config[entry.key]
        if entry.key not in self.arrays:
            return entry.default
        return decode_array(entry.key.partition("/")[2], self.arrays[entry.key])


def set_value(entry: Entry, records: dict[str, Any], value: Any) -> None:
    """Put another value in an entry's place."""
    if entry.key in records.get(CONFIG, {}) or entry.default is not None:
        records[CONFIG] = type(records[CONFIG])({**records[CONFIG], entry.key: value})
        return
    record, _, name = entry.key.partition("/")
    records[record] = type(records[record])({**records[record], name: Array(value)})


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are the same."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return type(one) is type(other) and bool(one == other)


def others(entry: Entry, value: Any) -> list[Any]:
    """Give other values than an honest one, by what the field declares and what travels."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(0, value // 2), 2 * value + 10]
    if isinstance(value, float):
        return [value / 2, value * 2 + 1]
    if isinstance(value, str):  # what the declaration names, and what it does not
        words = re.findall(r"`([\w-]+)`", entry.field.says if entry.field else "")
        return [*words, value[::-1] or "another"]
    if isinstance(value, list):
        turned = [1 - one if one in (0, 1) else one + 1 for one in value]
        return [turned, value[:-1], value[::-1]]
    found = _other_bytes(entry.field, value) if isinstance(value, bytes) else _other_numbers(value)
    return [one for one in found if not same(one, value)]


def _other_bytes(field: Field | None, value: bytes) -> list[bytes]:
    """Give other bytes: one number or bit changed, rows turned round, one fewer, one twice."""
    width = 8 if isinstance(field, Exact) else 1
    if isinstance(field, Block) and not isinstance(field, (Exact, Flags)):
        last = field.shape.split()[-1]
        width = int(last) if last.isdecimal() else 1
    rows = [value[at : at + width] for at in range(0, len(value), width)]
    if not rows:
        return [np.ones(1, np.int64).tobytes() if width == 8 else bytes(width)]
    first = bytes([rows[0][0] ^ 1]) + rows[0][1:]
    changed = [[first, *rows[1:]], rows[::-1], rows[:-1], [*rows, rows[0]]]
    return [b"".join(one) for one in changed]


def _other_numbers(value: Any) -> list[Any]:
    noise = np.random.default_rng(3).permutation(value.reshape(-1)).reshape(value.shape)
    if value.dtype.kind == "f":
        return [-value, np.zeros_like(value), noise]
    return [value ^ value.dtype.type(1), np.zeros_like(value), noise]
