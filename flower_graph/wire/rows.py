"""Answers of several clients in one message, a row for each: the arrays' first axis is clients.

The server asks for rows if it needs more than the weighted sum: for a median, or for personal
models. A single client's arrays have no such axis: its answer is that of any Flower client.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief
from flower_graph.wire.arrays import (
    Answer,
    IntArray,
    Parameters,
    decode_array,
    encode_array,
    metric_records,
    plain_value,
    record_of,
    reply_slots,
)
from flower_graph.wire.codec import Message
from flower_graph.wire.fields import Clients, Flag, Reasons
from flower_graph.wire.keys import (
    ARRAY_NAMES,
    ARRAYS,
    CLIENTS,
    CONFIG,
    LEFT_OUT,
    METRICS,
    NUM_EXAMPLES,
    OWN_ARRAYS,
    ROW_EACH,
    ROWS,
)


@dataclass
class Asked(Message, down="train evaluate"):
    """The clients that a request is for, and whether they answer one by one."""

    clients: Annotated[
        IntArray | None,
        Clients(
            CLIENTS, "those that it is for; without it, all that are here", shape="c", optional=True
        ),
    ] = None
    has_rows: Annotated[
        bool,
        Flag(OWN_ARRAYS, "whether `arrays` have a first axis `c`: a row for each", optional=True),
    ] = False
    wants_rows: Annotated[
        bool, Flag(ROW_EACH, "whether each answers with a row of its own", optional=True)
    ] = False

    def chosen(self, hosted: Sequence[int]) -> list[int]:
        """Return the clients that it is for, ascending; ``ValueError`` if one is not here."""
        if self.clients is None:
            return sorted(hosted)
        if strangers := sorted(set(self.clients.tolist()) - set(hosted)):
            raise ValueError(f"{CLIENTS}: {strangers!s:.60} are not here")
        return sorted(self.clients.tolist())

    def arrays_for(self, parameters: Parameters, hosted: Sequence[int]) -> dict[int, Parameters]:
        """Return the arrays that each of the clients begins with."""
        clients = self.chosen(hosted)
        if not self.has_rows:
            return dict.fromkeys(clients, parameters)
        rows = [[np.asarray(row) for row in part] for part in zip(*parameters, strict=True)]
        return dict(zip(clients, rows, strict=True))


@dataclass
class RowsBeside(Message, up="train"):
    """The entries of an answer in rows besides arrays and metrics."""

    rows: Annotated[
        IntArray,
        Clients(
            ROWS,
            "where each answers with a row: whose they are, ascending. All arrays then have a "
            "first axis `c`, and metrics are lists, client after client",
            shape="c",
        ),
    ]
    left_out: Annotated[
        dict[int, str], Reasons(LEFT_OUT, "`number:reason` for each that has no row")
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """The result of ``fit_each`` for several clients, each with an answer of its own.

    Attributes
    ----------
    answers : dict of int to tuple
        A client's result of ``fit``, by its number: arrays, their weight, and further numbers,
        under the same names for all.
    left_out : dict of int to str
        Clients without an answer, and why.
    """

    answers: Mapping[int, Answer]
    left_out: Mapping[int, str] = field(default_factory=dict)

    def to_record(self, incoming: list[tuple[str, str]]) -> RecordDict:
        """Write the rows; ``incoming`` are the request's arrays, as (record, key)."""
        numbers = sorted(self.answers)
        parts = [self.answers[client] for client in numbers]
        entries: list[dict[str, Any]] = [dict(part[2]) for part in parts]
        names = [one.pop(ARRAY_NAMES, None) for one in entries]
        slots = reply_slots(names[0], incoming, len(parts[0][0]))
        records: dict[str, Any] = {ARRAYS: ArrayRecord()}
        for index, (record, key) in enumerate(slots):
            values = np.stack([part[0][index] for part in parts])
            records.setdefault(record, ArrayRecord())[key] = encode_array(key, values)
        weights = [{NUM_EXAMPLES: part[1]} for part in parts]
        split = [metric_records(*one) for one in zip(weights, entries, strict=True)]
        if any(list(one) != [METRICS] for one in split):
            raise TypeError("beside its arrays a client's answer in rows has numbers alone")
        records[METRICS] = _joined([one[METRICS] for one in split])
        beside = RowsBeside(np.array(numbers, np.int64), dict(self.left_out)).to_config()
        return RecordDict(records | {CONFIG: ConfigRecord(beside)})


def _joined(records: Sequence[MetricRecord]) -> MetricRecord:
    joined = MetricRecord()
    for name in records[0]:
        values: list[Any] = []
        for record in records:
            value = record[name]
            values += value if isinstance(value, list) else [value]
        joined[name] = plain_value(name, values)
    return joined


def split_rows(reply: FlowerMessage, asked: Sequence[int]) -> dict[int, FlowerMessage]:
    """Return each client's answer as the message that it would have sent alone."""
    beside = RowsBeside.read(reply.content)
    numbers: list[int] = beside.rows.tolist()
    if strangers := sorted(set(numbers) - set(asked)):
        raise MalformedReplyError(f"{ROWS}: clients {brief(strangers, 60)} were not asked")
    count = len(numbers)
    contents = [RecordDict({METRICS: MetricRecord()}) for _ in numbers]
    for name, record in reply.content.items():
        if isinstance(record, ArrayRecord):
            for content in contents:
                content[name] = ArrayRecord()
            for key, array in record.items():
                for content, row in zip(
                    contents, _rows(f"{name}/{key}", array, count), strict=True
                ):
                    content.array_records[name][key] = encode_array(key, np.asarray(row))
    metrics = record_of(reply.content, METRICS, MetricRecord) or MetricRecord()
    for key, value in metrics.items():
        values = value if isinstance(value, list) else [value]
        size, rest = divmod(len(values), count)
        if rest or not size:
            raise MalformedReplyError(f"{key}: {len(values)} numbers for {count} clients")
        for index, content in enumerate(contents):
            own = values[index * size : (index + 1) * size]
            content.metric_records[METRICS][key] = own[0] if size == 1 else own
    return {n: _with(reply, content) for n, content in zip(numbers, contents, strict=True)}


def _rows(name: str, array: Array, count: int) -> NDArray[np.generic]:
    values = decode_array(name, array)
    if values.shape[:1] != (count,):
        raise MalformedReplyError(f"{name} has shape {values.shape}, expected {count} rows")
    return values


def _with(message: FlowerMessage, content: RecordDict) -> FlowerMessage:
    result = copy.copy(message)
    result.content = content
    return result


def stacked(models: Sequence[ArrayRecord]) -> ArrayRecord:
    """Concatenate models, a row each; a model that many rows have is read once."""
    distinct = {id(model): model for model in models}
    place = {key: row for row, key in enumerate(distinct)}
    rows = np.array([place[id(model)] for model in models])
    return ArrayRecord(
        {
            name: encode_array(
                name,
                np.stack([decode_array(name, one[name]) for one in distinct.values()])[rows],
            )
            for name in models[0]
        }
    )


def bytes_of_each(record: ArrayRecord, count: int) -> int:
    """Count one client's bytes in a record with a row for each of ``count``."""
    if count == 1:
        return record.count_bytes()
    total = 0
    for name, array in record.items():
        # NumPy's header, by the length that it states; the record may not have been checked yet
        head = min(10 + int.from_bytes(array.data[8:10], "little"), len(array.data))
        total += len(name) + head + (len(array.data) - head) // count
    return total
