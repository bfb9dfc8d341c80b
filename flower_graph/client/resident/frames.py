"""Messages and contexts on a local socket: Flower's protobuf, and the arrays' bytes beside it.

A block is a list of parts: their number, their lengths, their bytes. Each array is a part of its
own: this saves a copy, and protobuf's limit of 2 GiB does not apply. Nothing is unpickled.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator, Sequence
from socket import socket

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from flower_graph.flower_compat import (
    ContextProto,
    MessageProto,
    RecordDictProto,
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)

__all__ = [
    "read_context",
    "read_message",
    "read_records",
    "receive",
    "send",
    "write_context",
    "write_message",
    "write_records",
]

NUMBER = struct.Struct("!Q")


def send(connection: socket, parts: Sequence[bytes]) -> None:
    """Send a block; ``OSError`` if the other side is gone."""
    sizes = (len(parts), *map(len, parts))
    connection.sendall(b"".join(map(NUMBER.pack, sizes)))
    for part in parts:
        connection.sendall(part)


def receive(connection: socket) -> Iterator[bytes]:
    """Receive a whole block; return its parts. ``EOFError`` if the other side is gone."""
    (count,) = NUMBER.unpack(_read(connection, NUMBER.size))
    lengths = _read(connection, count * NUMBER.size)
    return iter([_read(connection, size) for (size,) in NUMBER.iter_unpack(lengths)])


def _read(connection: socket, size: int) -> bytes:
    data = bytearray(size)
    free = memoryview(data)
    while free:
        count = connection.recv_into(free)
        if not count:
            raise EOFError("the other side is gone")
        free = free[count:]
    return bytes(data)


def write_records(records: RecordDict) -> list[bytes]:
    """Write records in their order, as the parts of a block."""
    counts, parts = [], []
    for name, record in records.items():
        data: list[bytes] = []
        if isinstance(record, ArrayRecord):
            data = [array.data for array in record.values()]
            without = {
                key: Array(dtype=one.dtype, shape=one.shape, stype=one.stype, data=b"")
                for key, one in record.items()
            }
            record = ArrayRecord(without)
        parts += [recorddict_to_proto(RecordDict({name: record})).SerializeToString(), *data]
        counts.append(len(data))
    return [json.dumps(counts).encode(), *parts]


def read_records(parts: Iterator[bytes]) -> RecordDict:
    """Read what `write_records` wrote."""
    records = RecordDict()
    for count in json.loads(next(parts)):
        ((name, record),) = recorddict_from_proto(RecordDictProto.FromString(next(parts))).items()
        if isinstance(record, ArrayRecord):
            arrays = list(record.values())
            assert len(arrays) == count
            for array in arrays:
                array.data = next(parts)
        records[name] = record
    return records


def write_message(message: Message) -> list[bytes]:
    """Write a message, or an error reply, as the parts of a block."""
    head = copy.copy(message)
    if not message.has_content():
        return [message_to_proto(head).SerializeToString()]
    head.content = RecordDict()
    return [message_to_proto(head).SerializeToString(), *write_records(message.content)]


def read_message(parts: Iterator[bytes]) -> Message:
    """Read what `write_message` wrote."""
    message = message_from_proto(MessageProto.FromString(next(parts)))
    if message.has_content():
        message.content = read_records(parts)
    return message


def write_context(context: Context) -> list[bytes]:
    """Write a context as the parts of a block."""
    head = copy.copy(context)
    head.state = RecordDict()
    return [context_to_proto(head).SerializeToString(), *write_records(context.state)]


def read_context(parts: Iterator[bytes]) -> Context:
    """Read what `write_context` wrote."""
    context = context_from_proto(ContextProto.FromString(next(parts)))
    context.state = read_records(parts)
    return context
