"""What ``combine`` is given: replies that passed the checks, read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flwr.app import ArrayRecord, Message
from numpy.typing import NDArray

from flower_graph.messages.arrays import decode_array
from flower_graph.messages.keys import ARRAYS, EXTRAS, NUM_EXAMPLES
from flower_graph.server.reply_checks import weight_of

__all__ = ["ClientReply", "read_replies"]


@dataclass(frozen=True)
class ClientReply:
    """A reply to ``train`` that passed the checks.

    Attributes
    ----------
    clients : tuple of int
        Numbers of the clients that it speaks for, ascending; empty if its SuperNode does not say.
    message : Message
        Flower's message, as Flower's own averaging takes it.
    extras : dict
        What ``ReportedFedAvg.extras`` declares: name to array.
    """

    clients: tuple[int, ...]
    message: Message
    extras: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def client(self) -> int:
        """Number of the one client that it is of; ``ValueError`` where there are others."""
        if len(self.clients) != 1:
            raise ValueError(f"the reply is of clients {list(self.clients)!s:.60}, not of one")
        return self.clients[0]

    @property
    def num_examples(self) -> int | float:
        """What it weighs, above 0."""
        return weight_of(self.message)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Numbers, and lists of numbers, that the client measured, by name."""
        (record,) = self.message.content.metric_records.values()
        return {name: value for name, value in record.items() if name != NUM_EXAMPLES}

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The model that it sent: name to array, in the model's order; the caller's own."""
        return _decoded(self.message.content.array_records[ARRAYS])


def read_replies(
    messages: Iterable[Message], hosted: Mapping[int, Sequence[int]]
) -> list[ClientReply]:
    """Read usable messages; what a client sent besides the model leaves the message."""
    replies = []
    for message in messages:
        clients = tuple(hosted.get(message.metadata.src_node_id, ()))
        more = message.content.array_records.get(EXTRAS)
        if more is not None:  # Flower's averaging takes one record of arrays
            del message.content[EXTRAS]
        replies.append(ClientReply(clients, message, _decoded(more or ArrayRecord())))
    return replies


def _decoded(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {name: decode_array(name, array, copy=True) for name, array in record.items()}
