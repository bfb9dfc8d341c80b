"""Messages of methods that average weights, under the keys that Flower's own strategies use.

Models travel in one array record, with ``num-examples`` as the weight, so that any averaging
strategy of Flower can carry them. A SuperNode sends each measurement as the sum over its clients
and, as ``has-<name>``, how many of them have a value, both divided by its weight. Flower's mean of
each is the sum over all clients divided by the same number: the quotient of the two is the clients'
mean.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.errors import MalformedReplyError, brief
from flower_graph.wire import keys
from flower_graph.wire.arrays import (
    Answer,
    IntArray,
    Measurements,
    Parameters,
    decode_array,
    encode_array,
    record_of,
)
from flower_graph.wire.codec import (
    Clients,
    Entries,
    Field,
    Flag,
    Handled,
    Message,
    Reading,
    Real,
    Reasons,
    Whole,
    Writing,
)
from flower_graph.wire.counts import Counted, Counting
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, METRICS, NUM_EXAMPLES
from flower_graph.wire.ledger import ByteLedger

if TYPE_CHECKING:
    from flwr.serverapp import Grid

PerClient = Tensor | float  # a number of each client as it is written, their mean as it is read
MAX_CLIENTS = 1 << 20  # that one SuperNode may speak for
LOSS = "cross-entropy"
LEFT_OUT = Reasons(keys.LEFT_OUT, "`number:reason` of each that is left out")
LeftOut = Annotated[dict[int, str], LEFT_OUT]


def sums(name: str, values: Tensor, weight: int) -> dict[str, float]:
    """Return the sum of the numbers that are not NaN, and their count, divided by the weight."""
    has_value = ~values.isnan()
    total = float(values[has_value].double().sum())
    return {name: total / weight, f"has-{name}": float(has_value.sum()) / weight}


# Any: entries of Flower's metric record
def mean_of(metrics: Mapping[str, Any], name: str) -> float:
    """Return the mean over clients from Flower's mean of the sums; NaN where no client has any."""
    share = metrics.get(f"has-{name}", 0.0)
    return metrics[name] / share if isinstance(share, float) and share > 0 else math.nan


def client_means(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Average the clients' measurements, for ``evaluate_metrics_aggr_fn`` of Flower's strategies.

    Flower's own mean of ``test`` also counts clients without test nodes, as 0. This mean is over
    the clients that have some; NaN if there are none. ``weighted_by`` is the weight's key in the
    replies; the result has no shares ``has-<name>``.
    """
    # Any: Flower's records hold numbers and lists of them
    records: list[Any] = [next(iter(reply.metric_records.values())) for reply in replies]
    weights = [one[weighted_by] for one in records]
    means = {
        name: np.average([one[name] for one in records], 0, weights)
        for name in records[0]
        if name != weighted_by
    }
    result = MetricRecord()
    for name in (name for name in means if not name.startswith("has-")):
        with np.errstate(invalid="ignore"):
            result[name] = (means[name] / means.get(f"has-{name}", 1.0)).tolist()
    return result


@dataclass(frozen=True)
class ClientMean(Field[Tensor]):
    """A number of each client, NaN where it has none; the reader gets the clients' mean."""

    is_number = True
    type = "float"
    sent: ClassVar = (
        ("", Real("has-*", "clients that have such a number, divided by `num-examples`")),
    )

    def write(self, value: Tensor, to: Writing) -> None:
        to.config |= sums(self.key, value, to.message.weight)

    def read(self, name: str, reading: Reading) -> float:
        return mean_of(reading.config, self.key)


class Enrolment(Message, up="query"):
    """A SuperNode's answer to ``query``: the ascending numbers of its clients, if it sends them."""

    # the clients here
    clients: Annotated[list[int], Clients(keys.CLIENTS, shape="c")] = field(default_factory=list)
    handled: Handled = None
    # most that `train` counts for
    most_examples: Annotated[int | None, Whole(NUM_EXAMPLES, least=0, most=keys.MAX_WEIGHT)] = None

    def __post_init__(self) -> None:
        self.clients = sorted(np.asarray(self.clients, np.int64).tolist())

    def check(self, known: Entries) -> None:
        if not self.clients:  # without clients' numbers the other entries are of no use
            self.handled = self.most_examples = None
        elif len(self.clients) > MAX_CLIENTS:
            raise MalformedReplyError(f"{keys.CLIENTS}: {len(self.clients)}, at most {MAX_CLIENTS}")
        elif self.clients[0] < 0:
            raise MalformedReplyError(f"{keys.CLIENTS}: {self.clients[0]} is below 0")


class RoundRequest(Message, down="train evaluate"):
    """The entries that Flower's own strategies send besides the model."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND)]  # the round
    counting: Counting = ""


class Trained(Message, up="train", kw_only=True):
    """The entries of an answer to ``train`` besides arrays."""

    weight: int = 1  # what the answer counts for
    clients: Annotated[int, Whole(keys.CLIENTS, least=1)]  # how many it speaks for; without it, one
    left_out: LeftOut = field(default_factory=dict)


class Measured(Message, up="evaluate", kw_only=True):
    """The clients' measurements; at the server, means over clients, from Flower's mean."""

    weight: int = 1  # the clients
    cross_entropy: Annotated[PerClient, ClientMean(LOSS)]  # the sum divided by `num-examples`
    train: Annotated[PerClient, ClientMean()]  # accuracy over training nodes
    val: Annotated[PerClient, ClientMean()]  # over validation nodes
    test: Annotated[PerClient, ClientMean()]  # over test nodes
    counts: Counted = None

    def answer(self) -> Measurements:
        metrics = self.to_config()
        return mean_of(metrics, LOSS), self.weight, metrics

    def to_report(self) -> dict[str, object]:
        return {
            "loss": self.cross_entropy,
            "cross_entropy": self.cross_entropy,
            "train_accuracy": self.train,
            "val_accuracy": self.val,
            "test_accuracy": self.test,
        }


def clients_of(reply: FlowerMessage) -> int:
    """Return how many clients a reply claims to speak for; 1 if it has no usable number."""
    for record in reply.content.metric_records.values():
        clients = record.get(keys.CLIENTS)
        if isinstance(clients, int) and 0 < clients <= MAX_CLIENTS:
            return clients
    return 1


# A reply to ``train`` ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientReply:
    """A client's answer to ``train`` that passed the checks, or a mean where that is enough.

    Attributes
    ----------
    clients : tuple of int
        Its client numbers, ascending; empty if its SuperNode does not say. More than one only if
        the strategy needs no more than the weighted sum.
    message : Message
        Flower's message, as Flower's own averaging takes it: of this answer alone.
    extras : dict
        The arrays of ``ReportedFedAvg.extras``: name to array.
    """

    clients: tuple[int, ...]
    message: FlowerMessage
    extras: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    @property
    def client(self) -> int:
        """The number of the reply's only client; ``ValueError`` if it has several."""
        if len(self.clients) != 1:
            raise ValueError(f"the reply is of clients {list(self.clients)!s:.60}, not of one")
        return self.clients[0]

    @property
    def num_examples(self) -> int | float:
        (record,) = self.message.content.metric_records.values()
        weight = record[NUM_EXAMPLES]
        assert isinstance(weight, (int, float))
        return weight

    @cached_property
    def metrics(self) -> dict[str, object]:
        """Numbers, and lists of numbers, that the client measured, by name."""
        (record,) = self.message.content.metric_records.values()
        return {name: value for name, value in record.items() if name != NUM_EXAMPLES}

    @cached_property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The client's model: name to array, in the model's order; the caller may change it."""
        return _decoded(self.message.content.array_records[ARRAYS])


def read_reply(message: FlowerMessage, clients: Sequence[int]) -> ClientReply:
    """Read a usable message; move the arrays beside the model out of it."""
    more = message.content.array_records.get(keys.EXTRAS)
    if more is not None:  # Flower's averaging takes one record of arrays
        del message.content[keys.EXTRAS]
    return ClientReply(tuple(clients), message, _decoded(more or ArrayRecord()))


def _decoded(record: ArrayRecord) -> dict[str, NDArray[np.generic]]:
    return {name: decode_array(name, array, copy=True) for name, array in record.items()}


# Answers in rows ---------------------------------------------------------------------------------

# The server asks for rows if it needs more than the weighted sum: for a median, or for personal
# models. The first axis of all arrays is then the clients. A single client's arrays have no such
# axis: its answer is that of any Flower client.


class Asked(Message, down="train evaluate"):
    """The clients that a request is for, and whether they answer one by one."""

    clients: Annotated[IntArray | None, Clients(keys.CLIENTS, shape="c")] = None  # for these alone
    has_rows: Annotated[bool | None, Flag(keys.OWN_ARRAYS)] = None  # arrays have a row for each
    wants_rows: Annotated[bool | None, Flag(keys.ROW_EACH)] = None  # a row of each is wanted

    def chosen(self, hosted: Sequence[int]) -> list[int]:
        """Return the clients that it is for, ascending; ``ValueError`` if one is not here."""
        if self.clients is None:
            return sorted(hosted)
        if strangers := sorted(set(self.clients.tolist()) - set(hosted)):
            raise ValueError(f"{keys.CLIENTS}: {strangers!s:.60} are not here")
        return sorted(self.clients.tolist())

    def arrays_for(self, parameters: Parameters, hosted: Sequence[int]) -> dict[int, Parameters]:
        """Return the arrays that each of the clients begins with."""
        clients = self.chosen(hosted)
        if not self.has_rows:
            return dict.fromkeys(clients, parameters)
        rows = [[np.asarray(row) for row in part] for part in zip(*parameters, strict=True)]
        return dict(zip(clients, rows, strict=True))


class RowsBeside(Message, up="train"):
    """The entries of an answer in rows besides arrays and metrics."""

    # whose rows all arrays have, and lists all metrics, ascending
    rows: Annotated[IntArray, Clients(keys.ROWS, shape="c")]
    left_out: LeftOut = field(default_factory=dict)


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

    def joined(self) -> tuple[Parameters, list[int], dict[str, Any]]:
        """Return all as one answer: rows of arrays, weights, and lists of numbers."""
        numbers = sorted(self.answers)
        arrays, weights, entries = zip(*(self.answers[one] for one in numbers), strict=True)
        metrics = {key: [own[key] for own in entries] for key in entries[0]}
        names = metrics.pop(ARRAY_NAMES, [None])[0]
        for key, values in metrics.items():
            lists = (one if isinstance(one, list | tuple) else [one] for one in values)
            metrics[key] = [number for one in lists for number in one]
        beside = RowsBeside(np.array(numbers, np.int64), dict(self.left_out)).to_config()
        rows = [np.stack(one) for one in zip(*arrays, strict=True)]
        return rows, list(weights), metrics | beside | ({ARRAY_NAMES: names} if names else {})


def split_rows(reply: FlowerMessage, asked: Sequence[int]) -> dict[int, FlowerMessage]:
    """Return each client's answer as the message that it would have sent alone."""
    numbers: list[int] = RowsBeside.read(reply.content).rows.tolist()
    if strangers := sorted(set(numbers) - set(asked)):
        raise MalformedReplyError(f"{keys.ROWS}: clients {brief(strangers, 60)} were not asked")
    count, result = len(numbers), {client: copy.copy(reply) for client in numbers}
    for part in result.values():
        part.content = RecordDict({METRICS: MetricRecord()})

    def deal(name: str, key: str, rows: Sequence[Any]) -> None:
        for part, row in zip(result.values(), rows, strict=True):
            part.content[name][key] = row

    for name, record in reply.content.items():
        if isinstance(record, ArrayRecord):
            for part in result.values():
                part.content[name] = ArrayRecord()
            for key, array in record.items():
                rows = decode_array(f"{name}/{key}", array)
                if rows.shape[:1] != (count,):
                    shape = f"{name}/{key} has shape {rows.shape}"
                    raise MalformedReplyError(f"{shape}, expected {count} rows")
                deal(name, key, [encode_array(key, np.asarray(row)) for row in rows])
    for key, value in (record_of(reply.content, METRICS, MetricRecord) or MetricRecord()).items():
        values = value if isinstance(value, list) else [value]
        size, rest = divmod(len(values), count)
        if rest or not size:
            raise MalformedReplyError(f"{key}: {len(values)} numbers for {count} clients")
        parts = [values[at : at + size] for at in range(0, len(values), size)]
        deal(METRICS, key, [part[0] if size == 1 else part for part in parts])
    return result


def stacked(models: Sequence[ArrayRecord]) -> ArrayRecord:
    """Concatenate models, a row each."""
    # A model that many rows have is read once: a SuperNode that claims thousands of clients, which
    # all start from the common model, would else cost the server minutes.
    distinct, record = {id(model): model for model in models}, ArrayRecord()
    place = {key: row for row, key in enumerate(distinct)}
    rows = np.array([place[id(model)] for model in models])
    for name in models[0]:
        each = np.stack([decode_array(name, one[name]) for one in distinct.values()])
        record[name] = encode_array(name, each[rows])
    return record


# Flower's messages ------------------------------------------------------------------------------


def grid_of(nodes: list[int]) -> Grid:
    """Return a grid of these SuperNodes only, for Flower to choose from."""
    return cast("Grid", SimpleNamespace(get_node_ids=lambda: nodes))


def count_payload(
    ledger: ByteLedger,
    sent: Iterable[FlowerMessage],
    replies: Mapping[int, FlowerMessage],
    asked: Mapping[int, Sequence[int]],
) -> None:
    """Count every client's arrays both ways, also if clients share a SuperNode."""
    answers = {node: one for node, one in replies.items() if one.has_content()}
    for message in sent:
        node, entries = message.metadata.dst_node_id, message.content.config_records.values()
        answer = answers.get(node)
        # A SuperNode that does not say which clients it hosts counts as one client.
        clients = len(asked.get(node, ())) or (1 if answer is None else clients_of(answer))
        for way, one, key in (("down", message, keys.OWN_ARRAYS), ("up", answer, keys.ROW_EACH)):
            rows = clients if any(record.get(key) for record in entries) else 1
            for name, record in one.content.array_records.items() if one is not None else ():
                kind = keys.EXTRAS if name == keys.EXTRAS else "weights"
                for key_, array in record.items():
                    # NumPy's header, by the length that it states: it may not be checked yet
                    size = len(array.data)
                    head = min(10 + int.from_bytes(array.data[8:10], "little"), size)
                    ledger.count(way, kind, clients * (len(key_) + head + (size - head) // rows))
