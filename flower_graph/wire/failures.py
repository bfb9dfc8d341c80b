"""A fault that all clients of a simulation have: the run stops, and says the client's traceback.

Where clients run on the server's machine, in one process or on Ray, their tracebacks are at hand.
In a deployment they stay in the SuperNodes' logs, and nothing here applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from flower_graph import errors
from flower_graph.errors import ClientBugError
from flower_graph.wire.boundary import on_ray

PLACE = re.compile(r'^\s*File "(.+)", line (\d+), in', re.MULTILINE)
KIND = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)
# Python writes the first error of a chain first; what Ray adds comes behind
CHAINED = "\nThe above exception was the direct cause"


@dataclass
class Failures:
    """The errors that nodes of a simulation answered with, until one of them answers well."""

    grid: Grid
    works: bool = False  # whether a node has trained
    found: dict[int, str] = field(default_factory=dict)  # node id -> traceback

    def note(self, reply: Message, waiting: Mapping[str, int]) -> None:
        """Note what a node that is waited for, by its message's id, answered."""
        node_id = waiting.get(reply.metadata.reply_to_message_id)
        # Who cannot answer a query may be a plain ClientApp, which trains.
        if self.works or node_id is None or not reply.metadata.message_type.startswith("train"):
            return
        if not reply.has_error():
            self.works = True
        elif traceback := self._traceback(reply, node_id):
            self.found[node_id] = traceback

    def check(self, asked: Iterable[int]) -> None:
        """Raise ``ClientBugError`` if all nodes have failed at one line with one kind of error."""
        if self.works or not self.found or not {*asked} <= self.found.keys():
            return
        if not {*self.grid.get_node_ids()} <= self.found.keys():
            return
        faults = {fault_of(traceback) for traceback in self.found.values()}
        if len(faults) > 1 or (fault := faults.pop()) is None:
            return
        kind, count = fault[0], len(self.found)
        first = next(iter(self.found.values())).strip()
        # Errors of ours are what a client tells on purpose, and no bug.
        if not hasattr(errors, kind.rpartition(".")[2]):
            who = "the SuperNode" if count == 1 else f"each of the {count} SuperNodes"
            raise ClientBugError(f"{who} fails with the same error:\n{first}")

    def _traceback(self, reply: Message, node_id: int) -> str:
        """Give the traceback behind an error reply, if this is a simulation."""
        here: dict[int, str] | None = getattr(self.grid, "tracebacks", None)
        if here is not None:
            return here.get(node_id, "")
        return (reply.error.reason or "").partition(CHAINED)[0] if on_ray() else ""


def fault_of(traceback: str) -> tuple[str, str, str] | None:
    """Name an error's kind, file and line, without the values that its words may have."""
    places = [*PLACE.finditer(traceback)]
    kind = KIND.search(traceback, places[-1].end()) if places else None
    return (kind[1], places[-1][1], places[-1][2]) if kind else None
