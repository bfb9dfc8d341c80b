"""Messages of methods that average weights, under the keys that Flower's own strategies use.

A SuperNode sends each measurement as the sum over its clients and, as ``has-<name>``, how many of
them have a value, both divided by its weight. The quotient of Flower's means of the two is the
clients' mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from torch import Tensor

from flower_graph.errors import MalformedReplyError
from flower_graph.wire import keys
from flower_graph.wire.arrays import IntArray, Measurements, Parameters
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
from flower_graph.wire.keys import NUM_EXAMPLES

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
        named = {f"{role}_accuracy": getattr(self, role) for role in keys.ROLES}
        return {"loss": self.cross_entropy, "cross_entropy": self.cross_entropy, **named}


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
