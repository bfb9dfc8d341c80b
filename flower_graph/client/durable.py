"""A Flower mod that keeps a client's context where a SuperNode that is started anew finds it.

Flower holds a SuperNode's contexts in memory: with the SuperNode they are gone, keys, optimisers
and graph learners with them. Where the node's config names a place (``state-dir``, or the ``state``
folder of its ``data-folder``), ``keep_state`` writes the context's state there after each message,
before the reply leaves: what the server has seen, the client knows of, so no mask is used twice.
Without such a place the mod does nothing.

The file, ``run-<run id>/context-<name>.state``, is its owner's alone (mode 600), as it holds keys.
A number of the messages handled tells whether it is newer than what Flower has: then it goes before
that. Larger tensors are in files of their own beside it (``flower_graph.client.state``).
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto

from flower_graph.errors import StateLostError
from flower_graph.storage.checkpoint import replaced
from flower_graph.storage.supernode_folder import node_name, own_folder, own_place, remove_if_empty

LOG = logging.getLogger(__name__)
RECORD, HANDLED = "durable-state", "messages"
MAGIC = b"flower-graph state 1\n"
DIGEST, NUMBER = hashlib.sha256().digest_size, 8


def keep_state(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Load the context's state if the file's is newer; save it before the reply leaves."""
    file = state_file(context)
    if file is None:
        return call_next(message, context)
    _take_over(file, context)
    reply = call_next(message, context)
    handled = messages_handled(context) + 1
    context.state.pop(RECORD, None)
    if not context.state:  # nothing to keep yet, or the run is over
        forget(file)
        return reply
    context.state[RECORD] = ConfigRecord({HANDLED: handled})
    write_state(file, context.state, handled)
    return reply


def state_file(context: Context) -> Path | None:
    """Return the file of a client's context; None where it has no place of its own."""
    place = own_place(context)
    if place is None:
        return None
    return place / f"run-{context.run_id}" / f"context-{node_name(context)}.state"


def messages_handled(context: Context) -> int:
    """Return how many messages a context has behind it, of those after which it was saved."""
    record = context.state.config_records.get(RECORD)
    return 0 if record is None else int(record[HANDLED])  # type: ignore[arg-type]


def write_state(file: Path, state: RecordDict, handled: int) -> None:
    """Write a context's state, whole or not at all."""
    own_folder(file.parent)
    body = handled.to_bytes(NUMBER, "big") + recorddict_to_proto(state).SerializeToString()
    with replaced(file) as part:
        part.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)


def read_state(file: Path) -> tuple[RecordDict, int]:
    """Read what ``write_state`` wrote: the state and how many messages it has behind it."""
    data = file.read_bytes()
    start = len(MAGIC) + DIGEST
    body = data[start:]
    if not data.startswith(MAGIC) or hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise ValueError("it does not have the SHA-256 that it names")
    proto = RecordDictProto.FromString(body[NUMBER:])
    return recorddict_from_proto(proto), int.from_bytes(body[:NUMBER], "big")


def forget(file: Path) -> None:
    """Remove a client's file, and the run's folder if it was the last."""
    file.unlink(missing_ok=True)
    remove_if_empty(file.parent)


def _take_over(file: Path, context: Context) -> None:
    """Put the file's state into the context if Flower's is older or gone."""
    known = messages_handled(context)
    try:
        state, handled = read_state(file)
    except FileNotFoundError:
        if known:
            LOG.warning("%s is gone; going on with what Flower has in memory", file)
        return
    except (OSError, ValueError) as error:
        if known:
            LOG.warning("%s: %s; going on with what Flower has in memory", file, error)
            return
        raise StateLostError(
            f"client {node_name(context)}: its state {file} is damaged: {error}; remove it and the "
            "client begins anew"
        ) from error
    if handled > known:
        context.state = state
