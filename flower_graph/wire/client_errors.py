"""Errors that clients answer with: written at the client, read at the server.

In a deployment only an error's kind, and words that are meant for others, leave a client's machine;
its traceback stays in the SuperNode's log. In one process or on Ray the server has tracebacks. If
all clients fail alike, the run stops and says how (`Failures`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from flwr.app import Error, Message

from flower_graph import errors
from flower_graph.storage.files import IN_PROCESS, STATE_DIR

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

# They quote the request and nothing else
TELLABLE = (errors.RefusedError, errors.MalformedReplyError)
AT_HOME = "what it says stays in the SuperNode's log"
# The kind of an error whose text stays on another machine
NOT_OURS = re.compile(rf"\b(\w{{1,99}}): {AT_HOME}")
STATE_LOST = 1001  # an error reply's code; those that Flower gives are small
# Flower's error of a ClientApp without a function for a type of message
NO_FUNCTION = re.compile(r"No \w+ function registered")
# Of a traceback: each call, and the kind of its error
PLACE = re.compile(r'^\s*File "(.+)", line (\d+), in', re.MULTILINE)
KIND = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)
# Python writes the first error of a chain first; what Ray adds comes behind
CHAINED = "\nThe above exception was the direct cause"


class Kind(Enum):
    """The kinds of error replies that the server tells apart, by words of Flower's."""

    STATE_LOST = "what the client kept between rounds is gone"  # known by its code
    NO_QUERY = "No query function registered"
    OTHER = "anything else"


class ClientError(RuntimeError):
    """An error of another kind than our own, on its way to the server."""


def on_ray() -> bool:
    """Whether this process is an actor of Ray, which no SuperNode is."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def is_own_machine(context: Context) -> bool:
    """Whether a client runs where its run was started, in one process or on Ray."""
    return on_ray() or context.node_config.get(STATE_DIR) == IN_PROCESS


@contextmanager
def boundary(context: Context) -> Iterator[None]:
    """Replace an error that leaves a SuperNode by one with only its kind and ``told`` words."""
    try:
        yield
    except Exception as error:
        is_told = isinstance(error, TELLABLE) or getattr(error, "told", None) == str(error)
        if is_told or is_own_machine(context):
            raise
        kind, words = type(error), getattr(error, "told", AT_HOME)
        if kind is not getattr(errors, kind.__name__, None):
            kind, words = ClientError, f"{kind.__name__}: {words}"
        # Flower logs both here, and sends kind and text of the new one.
        raise errors.told(kind(words), words) from error


def lost_reply(error: errors.StateLostError, message: Message) -> Message:
    """Answer a message with the error that a client's state is lost, under a code of its own."""
    words = f"{errors.StateLostError.__name__}: {error}"
    return Message(Error(STATE_LOST, words), reply_to=message)


# Read at the server -----------------------------------------------------------------------------


def kind_of(reply: Message) -> Kind:
    """Return the kind of an error reply."""
    if not reply.has_error():
        return Kind.OTHER
    if reply.error.code == STATE_LOST:
        return Kind.STATE_LOST
    end = (reply.error.reason or "")[-errors.LOOKED_AT :]  # Ray's tracebacks end with the error
    return Kind.NO_QUERY if Kind.NO_QUERY.value in end else Kind.OTHER


def no_content(reply: Message) -> str | None:
    """Return why a reply has no content, or None."""
    if reply.has_error():
        what, words = "error reply: ", reply.error.reason or f"code {reply.error.code}"
        return what + errors.one_line(words, errors.MAX_REASON - len(what))
    return None if reply.has_content() else "empty reply"


# A fault that all clients have ------------------------------------------------------------------


@dataclass
class Failures:
    """The nodes whose last answer was an error of another kind than our own."""

    grid: Grid
    # By node: the error's place, if it is known, and kind; and all that the node says
    found: dict[int, tuple[tuple[str, ...], str]] = field(default_factory=dict)

    def note(self, node_id: int, reply: Message) -> None:
        # A plain ClientApp cannot answer a query, but trains
        if reply.metadata.message_type.startswith("query"):
            return
        self.found.pop(node_id, None)
        if reply.has_error():
            said = self._said(reply, node_id)
            fault = None if NO_FUNCTION.search(said) else fault_of(said)
            if fault and not hasattr(errors, fault[-1].rpartition(".")[2]):  # ours are no bugs
                self.found[node_id] = fault, said

    def check(self, asked: Iterable[int]) -> None:
        """Raise ``ClientBugError`` if all nodes have failed at one line with one kind of error."""
        nodes, found = {*asked}, self.found
        if not nodes or not nodes <= found.keys() or {*self.grid.get_node_ids()} - found.keys():
            return
        if len({fault for fault, _ in found.values()}) == 1:
            (*place, kind), said = next(iter(found.values()))
            words = said.strip() if place else f"{kind}, whose text stays in the log of each"
            each = f"each of {len(found)} SuperNodes fails with this error"
            raise errors.ClientBugError(f"{each}:\n{words}")

    def _said(self, reply: Message, node_id: int) -> str:
        """Return an error's traceback, or the part of a remote error that may be told."""
        here: dict[int, str] | None = getattr(self.grid, "tracebacks", None)
        if here is not None:
            return here.get(node_id, "")
        reason = reply.error.reason or ""
        if on_ray():
            return reason.partition(CHAINED)[0]
        at_home = NOT_OURS.search(reason[-errors.LOOKED_AT :])
        return at_home[0] if at_home else ""


def fault_of(said: str) -> tuple[str, ...] | None:
    """Return an error's place, if it is known, and kind, without its words."""
    if at_home := NOT_OURS.search(said):
        return at_home.groups()
    places = [*PLACE.finditer(said)]
    kind = KIND.search(said, places[-1].end()) if places else None
    return (*places[-1].groups(), kind[1]) if kind else None
