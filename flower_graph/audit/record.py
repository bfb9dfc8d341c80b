"""A grid that keeps every message as the server sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from flower_graph.messages.arrays import decode_array
from flower_graph.messages.keys import CONFIG
from flower_graph.simulation import InProcessGrid


class Exchange(NamedTuple):
    """One message and its reply.

    Attributes
    ----------
    kind : str
        Flower's message type, such as ``train`` or ``query``.
    node : int
        Id of the SuperNode.
    request, reply : RecordDict
        What went down, and what came up.
    """

    kind: str
    node: int
    request: RecordDict
    reply: RecordDict


class RecordingGrid(InProcessGrid):
    """The in-process grid, with a list of all exchanges that were answered."""

    # Nothing here is known to the server alone: whoever reads the traffic of all SuperNodes, where
    # there is no TLS, has the same list.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchanges: list[Exchange] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages as the in-process grid does, and note each with its reply."""
        sent: list[str] = []
        for message in messages:
            # One at a time: strategies may hand over a generator that makes messages as they go.
            ids = super().push_messages([message])
            for message_id in ids:
                self._note(message, self._replies[message_id])
            sent += ids
        return sent

    def _note(self, message: Message, reply: Message) -> None:
        if reply.has_error():
            return
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        self.exchanges.append(Exchange(kind, node, message.content, reply.content))


def of_kind(exchanges: Iterable[Exchange], kind: str) -> Iterator[Exchange]:
    """Give the exchanges of one message type, in order."""
    return (one for one in exchanges if one.kind == kind)


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return the config entries of a recorded message; empty where it has none."""
    return dict(content.config_records.get(CONFIG, ConfigRecord()))


def array_of(content: RecordDict, record: str, key: str) -> NDArray[Any]:
    """Read one array of a recorded message."""
    arrays = content.array_records.get(record)
    if arrays is None or key not in arrays:
        raise ValueError(f"the message has no array {record}/{key}; it has {sorted(content)}")
    return decode_array(f"{record}/{key}", arrays[key])
