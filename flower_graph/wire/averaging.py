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

from flower_graph.errors import MalformedReplyError
from flower_graph.wire.arrays import Measurements, decode_array, own_records
from flower_graph.wire.codec import Entries, Field, Message, Reading, Writing
from flower_graph.wire.counts import Counted, Counting
from flower_graph.wire.fields import Clients, Handled, Real, Reasons, Whole
from flower_graph.wire.keys import (
    ARRAYS,
    CLIENTS,
    EXTRAS,
    LEFT_OUT,
    MAX_WEIGHT,
    NUM_EXAMPLES,
    OWN_ARRAYS,
    ROW_EACH,
    SERVER_ROUND,
)
from flower_graph.wire.ledger import ByteLedger
from flower_graph.wire.rows import bytes_of_each

if TYPE_CHECKING:
    from flwr.serverapp import Grid

PerClient = Tensor | float  # a number of each client as it is written, their mean as it is read
MAX_CLIENTS = 1 << 20  # that one SuperNode may speak for
LOSS = "cross-entropy"


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
    names = [name for name in records[0] if name != weighted_by and not name.startswith("has-")]

    def total(name: str) -> NDArray[np.float64]:
        return np.asarray(sum(one[weighted_by] * np.asarray(one[name], float) for one in records))

    result = MetricRecord()
    for name in names:
        share = f"has-{name}"
        below = total(share) if share in records[0] else sum(one[weighted_by] for one in records)
        with np.errstate(invalid="ignore"):
            result[name] = (total(name) / np.float64(below)).tolist()
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
        """Write sum and count, divided by the message's weight."""
        to.config |= sums(self.key, value, to.message.weight)

    def read(self, name: str, reading: Reading) -> float:
        return mean_of(reading.metrics, self.key)


@dataclass
class Enrolment(Message, up="query"):
    """A SuperNode's answer to ``query``: the ascending numbers of its clients, if it sends them."""

    clients: Annotated[
        list[int],
        Clients(CLIENTS, "numbers of the clients here, if it says them", shape="c", optional=True),
    ] = field(default_factory=list)
    handled: Handled = None
    most_examples: Annotated[
        int | None,
        Whole(
            NUM_EXAMPLES,
            "what an answer to `train` counts for at most; one to `evaluate` then counts for at "
            "most the number of `clients`. Optional: without it, any number is taken",
            least=1,
            most=MAX_WEIGHT,
            optional=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        self.clients = sorted(np.asarray(self.clients, np.int64).tolist())

    def check(self, known: Entries) -> None:
        if not self.clients:  # without clients' numbers the other entries are of no use
            self.handled = self.most_examples = None
        elif len(self.clients) > MAX_CLIENTS:
            raise MalformedReplyError(f"{CLIENTS}: {len(self.clients)}, at most {MAX_CLIENTS}")
        elif self.clients[0] < 0:
            raise MalformedReplyError(f"{CLIENTS}: {self.clients[0]} is below 0")


@dataclass
class RoundRequest(Message, down="train evaluate"):
    """The entries that Flower's own strategies send besides the model."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "the round")]
    counting: Counting = ""


@dataclass(kw_only=True)
class Trained(Message, up="train"):
    """The entries of an answer to ``train`` besides arrays."""

    weight: int = 1  # what the answer counts for
    clients: Annotated[int, Whole(CLIENTS, "how many it speaks for; without it, one", least=1)]
    left_out: Annotated[
        dict[int, str], Reasons(LEFT_OUT, "`number:reason` for each that is not in the mean")
    ] = field(default_factory=dict)


@dataclass(kw_only=True)
class Measured(Message, up="evaluate"):
    """The clients' measurements; at the server, means over clients, from Flower's mean."""

    weight: int = 1  # the clients
    cross_entropy: Annotated[
        PerClient,
        ClientMean(LOSS, "this and the next: sums over clients divided by `num-examples`"),
    ]
    train: Annotated[PerClient, ClientMean("train", "accuracy over training nodes")]
    val: Annotated[PerClient, ClientMean("val", "over validation nodes")]
    test: Annotated[PerClient, ClientMean("test", "over test nodes")]
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
        clients = record.get(CLIENTS)
        if isinstance(clients, int) and 0 < clients <= MAX_CLIENTS:
            return clients
    return 1


# A reply to ``train`` ----------------------------------------------------------------------------


def weight_of(reply: FlowerMessage) -> int | float:
    """Return the weight of a usable reply."""
    (record,) = reply.content.metric_records.values()
    weight = record[NUM_EXAMPLES]
    assert isinstance(weight, (int, float))
    return weight


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
        return weight_of(self.message)

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
    more = message.content.array_records.get(EXTRAS)
    if more is not None:  # Flower's averaging takes one record of arrays
        del message.content[EXTRAS]
    return ClientReply(tuple(clients), message, _decoded(more or ArrayRecord()))


def _decoded(record: ArrayRecord) -> dict[str, NDArray[np.generic]]:
    return {name: decode_array(name, array, copy=True) for name, array in record.items()}


# Flower's messages ------------------------------------------------------------------------------


def grid_of(nodes: list[int]) -> Grid:
    """Return a grid of these SuperNodes only, for Flower to choose from."""
    return cast("Grid", SimpleNamespace(get_node_ids=lambda: nodes))


def with_own_content(
    message: FlowerMessage, key: str, arrays: ArrayRecord | None = None
) -> FlowerMessage:
    """Give a message its own copies of its records, with other arrays under ``key`` if given."""
    # Flower builds all messages of a round around one content: what is changed for one client
    # would be changed for all.
    content = own_records(message.content)
    if arrays is not None:
        content[key] = arrays
    for name, record in list(content.array_records.items()):
        content[name] = ArrayRecord({each: copy.copy(array) for each, array in record.items()})
    message.content = content
    return message


def count_payload(
    ledger: ByteLedger,
    sent: Iterable[FlowerMessage],
    replies: Iterable[FlowerMessage],
    asked: Mapping[int, Sequence[int]],
) -> None:
    """Count every client's arrays both ways, also if clients share a SuperNode."""
    # A SuperNode that does not say which clients it hosts counts as one client.
    answers = {one.metadata.src_node_id: one for one in replies if one.has_content()}
    for message in sent:
        node = message.metadata.dst_node_id
        answer, clients = answers.get(node), len(asked.get(node, ()))
        if not clients:
            clients = 1 if answer is None else clients_of(answer)
        entries = list(message.content.config_records.values())
        has, wants = (any(one.get(key) for one in entries) for key in (OWN_ARRAYS, ROW_EACH))
        pairs = [("down", message, has)] + ([] if answer is None else [("up", answer, wants)])
        for direction, one, is_in_rows in pairs:
            count = clients if is_in_rows else 1
            records = one.content.array_records.items()
            sizes = {name: bytes_of_each(record, count) for name, record in records}
            extras = sizes.pop(EXTRAS, 0)
            ledger.count(direction, "weights", clients * sum(sizes.values()))
            if extras:
                ledger.count(direction, EXTRAS, clients * extras)
