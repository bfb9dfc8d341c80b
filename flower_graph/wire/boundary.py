"""What leaves a client's machine by an error: the error's kind, and words meant for others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flower_graph import errors
from flower_graph.errors import MalformedReplyError, RefusedError, told
from flower_graph.storage.places import IN_PROCESS, STATE_DIR

if TYPE_CHECKING:
    from flwr.app import Context

# Their texts quote the request and nothing else.
TELLABLE = (RefusedError, MalformedReplyError)
AT_HOME = "what it says stays in the SuperNode's log"


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
