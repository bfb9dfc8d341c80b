"""Where a client keeps its secrets between two messages: keys, shares, slots.

They are objects, not tensors, and small: ``Context.state`` holds them as bytes, and goes wherever
Flower takes the next message. In a process that has just handled a message the objects themselves
are still there; a token says whether they are the ones that the context means. With the in-process
engine (``state-dir = ":memory:"``) nothing is written, as the process is the only one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from flower_graph.errors import StateLostError
from flower_graph.storage.supernode_folder import IN_PROCESS

if TYPE_CHECKING:
    from flwr.app import Context

T = TypeVar("T")
_LIVE: dict[tuple[int, int, str], tuple[str, object]] = {}


class SecretStore(Generic[T]):
    """Keeps one object from message to message."""

    def __init__(self, context: Context, name: str) -> None:
        self._context, self._name = context, name
        self._key = (context.run_id, context.node_id, name)
        self._in_process = context.node_config.get("state-dir", "") == IN_PROCESS

    def load(self, read: Callable[[bytes], T]) -> T:
        """Return the object; ``read`` makes it from its bytes where this process lacks it."""
        record = self._context.state.config_records.get(self._name)
        if record is None:
            raise StateLostError(f"client {self._key[1]}: its keys of this run are not here")
        token, live = _LIVE.get(self._key, ("", None))
        if live is not None and token == record["token"]:
            return live  # type: ignore[return-value]
        if self._in_process:
            raise StateLostError(f"client {self._key[1]}: its keys went with another process")
        data = record["data"]
        assert isinstance(data, bytes)
        return read(data)

    def keep(self, kept: T, write: Callable[[T], bytes]) -> None:
        """Keep the object for the next message."""
        from flwr.app import ConfigRecord

        token = secrets.token_hex(8)
        entries: dict[str, str | bytes] = {"token": token}
        if not self._in_process:
            entries["data"] = write(kept)
        self._context.state[self._name] = ConfigRecord(entries)  # type: ignore[arg-type]
        _LIVE[self._key] = (token, kept)

    def drop(self) -> None:
        """Forget the object."""
        self._context.state.pop(self._name, None)
        _LIVE.pop(self._key, None)
