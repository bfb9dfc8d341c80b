"""Seconds that a server sleeps after the last reply of an exchange is there: Flower's, and ours.

A grid whose replies come after a given time stands for a deployment, so that neither SuperNodes
nor the load of the machine play a part. Flower's own code waits as ``HttpGrid.send_and_receive``.
Run alone: ``python -m benchmarks.waiting``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from flower_graph.flower_compat import HttpGrid, stamp
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.exchange import Exchange

AFTER = (0.2, 1.0, 2.0, 4.0)  # seconds until the reply is there
TIMEOUT = 60.0


class _Slow:
    """A grid with one node, which answers after a while."""

    def __init__(self, after: float) -> None:
        self.after, self.ready = after, 0.0
        self.message: Any = None

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take the message."""
        (self.message,) = messages
        stamp(self.message, message_id="1")
        self.ready = time.monotonic() + self.after
        return ["1"]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Give the reply once it is there."""
        if time.monotonic() < self.ready:
            return []
        return [Message(RecordDict(), reply_to=self.message)]


def slept(after: float, exchange: Callable[[Any, list[Message]], Any]) -> float:
    """Return how long after its reply an exchange ends."""
    grid = _Slow(after)
    exchange(grid, [Message(RecordDict(), 1, "train")])
    return time.monotonic() - grid.ready


def flowers(grid: Any, messages: list[Message]) -> None:
    """Wait as Flower does."""
    HttpGrid.send_and_receive(grid, messages, timeout=TIMEOUT)


def ours(grid: Any, messages: list[Message]) -> None:
    """Wait as strategies that average do."""
    Exchange(grid).relay(messages, server_round=1, timeout=TIMEOUT)


def main() -> None:
    """Print the result as JSON."""
    InProcessGrid(ClientApp(), num_supernodes=1)  # messages want a process that has a run
    rows = [
        {"after": after, "flower": slept(after, flowers), "ours": slept(after, ours)}
        for after in ((0.2,) if "--quick" in sys.argv else AFTER)
    ]
    print(json.dumps({"load": os.getloadavg()[0], "entries": rows}))


if __name__ == "__main__":
    main()
