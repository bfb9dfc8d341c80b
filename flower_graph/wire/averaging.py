"""Messages of methods that average weights, under the keys that Flower's own strategies use.

Models travel in one array record, with ``num-examples`` as the weight, so that any Flower strategy
that averages can carry them. What clients measure are means over clients that Flower's weighted
means over SuperNodes can carry: a SuperNode says the sum over its clients and how many of them have
a value, ``has-<name>``, both divided by its weight. Flower's mean of each is the sum over all
clients divided by a number that is the same for all: the quotient of the two is the clients' mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from flwr.app import Message as FlowerMessage
from torch import Tensor

from flower_graph.errors import MalformedReplyError
from flower_graph.wire.codec import Entries, Field, Message, Reading, Writing
from flower_graph.wire.fields import Clients, Handled, Lines, Real, Whole
from flower_graph.wire.keys import CLIENTS, LEFT_OUT, MAX_WEIGHT, NUM_EXAMPLES, SERVER_ROUND

MAX_CLIENTS = 1 << 20  # that one SuperNode may speak for
LOSS = "cross-entropy"


def sums(name: str, values: Tensor, weight: int) -> dict[str, float]:
    """Add up what is not NaN, and count it, both divided by the weight."""
    known = ~values.isnan()
    total = float(values[known].double().sum())
    return {name: total / weight, f"has-{name}": float(known.sum()) / weight}


def mean_of(metrics: Mapping[str, Any], name: str) -> float:
    """Return the mean over clients from Flower's mean of the sums; NaN where no client has any."""
    share = metrics.get(f"has-{name}", 0.0)
    return metrics[name] / share if isinstance(share, float) and share > 0 else math.nan


@dataclass(frozen=True)
class ClientMean(Field):
    """A number of each client, NaN where it has none; the reader gets the clients' mean."""

    is_number = True
    type = "float"
    sent: ClassVar = (
        ("", Real("has-*", "clients that have such a number, divided by `num-examples`")),
    )

    def write(self, value: Any, to: Writing) -> None:
        """Write sum and count, divided by the message's weight."""
        to.config |= sums(self.key, value, to.message.weight)

    def read(self, name: str, reading: Reading) -> float:
        """Read the mean."""
        return mean_of(reading.metrics, self.key)


@dataclass
class Enrolment(Message, up="query"):
    """What a SuperNode says of itself; ascending numbers of its clients, if it says them."""

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
        """Put the clients in order."""
        self.clients = sorted(np.asarray(self.clients, np.int64).tolist())

    def check(self, known: Entries) -> None:
        """Refuse numbers below 0, and more clients than there can be."""
        if not self.clients:  # whoever does not say who it is says nothing else of use
            self.handled = self.most_examples = None
        elif len(self.clients) > MAX_CLIENTS:
            raise MalformedReplyError(f"{CLIENTS}: {len(self.clients)}, at most {MAX_CLIENTS}")
        elif self.clients[0] < 0:
            raise MalformedReplyError(f"{CLIENTS}: {self.clients[0]} is below 0")


@dataclass
class RoundRequest(Message, down="train evaluate"):
    """What Flower's own strategies say besides the model."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "the round")]


@dataclass(kw_only=True)
class Trained(Message, up="train"):
    """What an answer to ``train`` says besides arrays."""

    weight: int = 1  # what the answer counts for
    clients: Annotated[int, Whole(CLIENTS, "how many it speaks for; without it, one", least=1)]
    left_out: Annotated[
        list[str], Lines(LEFT_OUT, "`client N: reason` for each that is not in the mean")
    ] = field(default_factory=list)


@dataclass(kw_only=True)
class Measured(Message, up="evaluate"):
    """What clients measured; at the server, read from Flower's mean, the means over clients."""

    weight: int = 1  # the clients
    cross_entropy: Annotated[
        Any, ClientMean(LOSS, "this and the next: sums over clients divided by `num-examples`")
    ]
    train: Annotated[Any, ClientMean("train", "accuracy over training nodes")]
    val: Annotated[Any, ClientMean("val", "over validation nodes")]
    test: Annotated[Any, ClientMean("test", "over test nodes")]

    def answer(self) -> tuple[float, int, dict[str, Any]]:
        """Return what ``evaluate`` returns: mean loss, number of clients, measurements."""
        metrics = self.to_config()
        return mean_of(metrics, LOSS), self.weight, metrics

    def to_report(self) -> dict[str, Any]:
        """Give the fields of a ``RoundReport``."""
        return {
            "loss": self.cross_entropy,
            "cross_entropy": self.cross_entropy,
            "train_accuracy": self.train,
            "val_accuracy": self.val,
            "test_accuracy": self.test,
        }


def clients_of(reply: FlowerMessage) -> int:
    """Return how many clients a reply says that it speaks for; 1 if it says nothing of use."""
    for record in reply.content.metric_records.values():
        clients = record.get(CLIENTS)
        if isinstance(clients, int) and 0 < clients <= MAX_CLIENTS:
            return clients
    return 1
