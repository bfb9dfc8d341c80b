"""Errors that clients answer with: their kind, and words meant for others, written and read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from flwr.app import Error, Message

from flower_graph import errors
from flower_graph.errors import (
    MAX_REASON,
    MalformedReplyError,
    RefusedError,
    StateLostError,
    one_line,
    told,
)
from flower_graph.storage.places import IN_PROCESS, STATE_DIR

if TYPE_CHECKING:
    from flwr.app import Context

# Their texts quote the request and nothing else.
TELLABLE = (RefusedError, MalformedReplyError)
AT_HOME = "what it says stays in the SuperNode's log"
STATE_LOST = 1001  # an error reply's code; those that Flower gives are small
# What Flower says of a ClientApp without a function for ``query``. Nothing else tells it from one
# whose function failed.
NO_QUERY = "No query function registered"


class Kind(Enum):
    """What an error reply is, as far as the server acts on it."""

    STATE_LOST = "what the client kept between rounds is gone"
    NO_QUERY = "the ClientApp has no function for query"
    OTHER = "anything else"


class ClientError(RuntimeError):
    """An error of no kind of our own, on its way to the server."""


def on_ray() -> bool:
    """Whether this process is an actor of Ray, which no SuperNode is."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def is_own_machine(context: Context) -> bool:
    """Whether a client runs where its run was started, in one process or on Ray."""
    return on_ray() or context.node_config.get(STATE_DIR) == IN_PROCESS


@contextmanager
def boundary(context: Context) -> Iterator[None]:
    """Let no error out of a SuperNode but by its kind and the words that it was given for that."""
    try:
        yield
    except Exception as error:
        is_told = isinstance(error, TELLABLE) or getattr(error, "told", None) == str(error)
        if is_told or is_own_machine(context):
            raise
        # Flower logs both here, and sends kind and text of the new one.
        raise _outward(error) from error


def _outward(error: Exception) -> Exception:
    kind, words = type(error), getattr(error, "told", AT_HOME)
    if kind is getattr(errors, kind.__name__, None):
        outward: Exception = kind(words)
        return told(outward, words)
    words = f"{kind.__name__}: {words}"
    return told(ClientError(words), words)


def lost_reply(error: StateLostError, message: Message) -> Message:
    """Answer a message with the error that a client's state is lost, under a code of its own."""
    words = f"{StateLostError.__name__}: {error}"
    return Message(Error(STATE_LOST, words), reply_to=message)


def kind_of(reply: Message) -> Kind:
    """Say of what kind an error reply is: by its code, where Flower leaves us one."""
    if not reply.has_error():
        return Kind.OTHER
    if reply.error.code == STATE_LOST:
        return Kind.STATE_LOST
    return Kind.NO_QUERY if NO_QUERY in one_line(reply.error.reason or "") else Kind.OTHER


def no_content(reply: Message) -> str | None:
    """Say why there is nothing to read in a reply, or None."""
    if reply.has_error():
        what, said = "error reply: ", reply.error.reason or f"code {reply.error.code}"
        return what + one_line(said, MAX_REASON - len(what))
    return None if reply.has_content() else "empty reply"
