"""Adaptor from a ``NumPyClient`` to a Flower ``ClientApp`` for message-based strategies.

Flower's own ``ClientApp(client_fn)`` speaks the older protocol: a message-based strategy loses the
client's metrics, evaluation fails on a missing key, and named actions (``train.align``) are
refused. This adaptor calls the methods of a ``NumPyClient`` and writes replies exactly as
``flwr.serverapp.strategy.FedAvg`` reads them. Mods work as with any ``ClientApp``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flower_graph import __version__
from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.flower_compat import (
    ClientAppCallable,
    Mod,
    NumPyClient,
    RecordDictProto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flower_graph.outputs.client import ClientOutputs, KeepReply, KeepRequest, count_traffic
from flower_graph.storage import checkpoint, files
from flower_graph.wire import keys
from flower_graph.wire.arrays import decode_array, encode_array, own_records
from flower_graph.wire.client_errors import boundary, lost_reply

if TYPE_CHECKING:
    from flower_graph.storage.sealed import StateKey

LOG = logging.getLogger(__name__)
RECORD, HANDLED = "durable-state", "messages"
TRUST_KEYS = ("identity-key", "registry", "block-cap")  # node config, as `TrustSettings` reads it


def make_client_app(
    client_fn: Callable[[Context], NumPyClient],
    *,
    mods: list[Mod] | None = None,
    train_mods: list[Mod] | None = None,
) -> ClientApp:
    """Build a ``ClientApp`` that answers messages with the methods of a ``NumPyClient``.

    ``train`` calls ``fit``, ``evaluate`` calls ``evaluate``, ``query`` calls ``get_properties``.
    ``train.<action>`` calls the method ``<action>``, with the signature of ``fit``, if the tuple
    ``client.actions`` names it. If the server asks for a reply of each client, ``fit_each`` is
    called instead of ``fit``: its arrays have a row for each client, its weight and numbers are
    lists, and its entries have those of ``RowsBeside``. ``parameters`` are writable copies of the
    arrays of all array records, in order; ``config`` has the entries of all config records. On
    ``query.keep`` the client's ``outputs``, a ``ClientOutputs``, write the result of ``snapshot``,
    if it has both.

    Parameters
    ----------
    client_fn : Callable[[Context], NumPyClient]
        Makes the client for one message. Its memory may not last until the next message.
    mods : list[Mod] or None
        Flower mods around every message.
    train_mods : list[Mod] or None
        Mods around ``train`` and the actions only, inside `mods`. ``LocalDpMod`` belongs here: it
        turns replies without arrays (``evaluate``, ``query``) into errors.

    Returns
    -------
    ClientApp
        The app, for ``flwr run``, a SuperNode or the in-process engine.
    """
    # Outermost except for the time, so that the state is saved after all other mods.
    app = _ActingClientApp(mods=[servers_time, keep_state, count_traffic, *(mods or [])])

    def handler(answer: Callable[[NumPyClient, Message], Message]) -> ClientAppCallable:
        def handle(message: Message, context: Context) -> Message:
            client = client_fn(context)
            if not isinstance(client, NumPyClient):
                raise TypeError(f"client_fn: {type(client).__name__}, must be a NumPyClient")
            _refuse_less(client, context)
            return answer(client, message)

        return handle

    app.act = lambda action: app.train(action, mods=train_mods)(
        handler(partial(action_reply, action))
    )
    app.train(mods=train_mods)(handler(partial(action_reply, "")))
    app.evaluate()(handler(_evaluate))
    app.query()(
        handler(
            lambda client, message: _properties(client.get_properties(config_of(message)), message)
        )
    )
    app.query("keep")(handler(_keep))
    return app


class _ActingClientApp(ClientApp):
    """Registers each action at its first call: only the client knows its actions."""

    act: Callable[[str], object]  # registers the function for a named action

    def __call__(self, message: Message, context: Context) -> Message:
        kind, _, action = message.metadata.message_type.partition(".")
        if kind == "train" and action:
            with suppress(ValueError):  # registered, or no name: Flower raises the error
                self.act(action)
        state = own_records(context.state)
        try:
            with boundary(context):
                return super().__call__(message, context)
        except StateLostError as error:
            # Flower answers all errors with one code.
            LOG.exception("node %d: its clients have lost their state", context.node_id)
            context.state = state
            return lost_reply(error, message)


def _refuse_less(client: NumPyClient, context: Context) -> None:
    """Refuse the message if the node config has a key, but the client trusts the server.

    The node config decides: the server may have written the run's config. The client has not seen
    the message yet.
    """
    given = [key for key in context.node_config if key in TRUST_KEYS or key.startswith("trust-")]
    if given and getattr(client, "trust", None) is None:
        why = "this SuperNode joins no run whose clients trust the server"
        raise RefusedError(f"node config: {', '.join(given)}: {why}")


def action_reply(action: str, client: NumPyClient, message: Message) -> Message:
    """Call ``fit``, or an action that the client names: the server cannot call other methods."""
    if action and action not in getattr(client, "actions", ()):
        raise ValueError(f"{type(client).__name__} does not name {action!r} in its actions")
    slots, parameters = arrays_of(message)
    config = config_of(message)
    if action or not config.get(keys.ROW_EACH):
        method = action or "fit"
        result = getattr(client, method)(parameters, config)
        arrays, weight, given = _checked_result(method, result, (list,))
    elif (fit_each := getattr(client, "fit_each", None)) is None:
        raise TypeError(f"{keys.ROW_EACH}: {type(client).__name__} has no fit_each to answer it")
    else:
        arrays, weight, given = fit_each(parameters, config)
    metrics = dict(given)
    names = metrics.pop(keys.ARRAY_NAMES, None)
    records: dict[str, Any] = {}
    for (record, key), values in zip(reply_slots(names, slots, len(arrays)), arrays, strict=True):
        records.setdefault(record, ArrayRecord())[key] = encode_array(f"{record}/{key}", values)
    records = records or {keys.ARRAYS: ArrayRecord()}
    records |= metric_records({keys.NUM_EXAMPLES: weight}, metrics)
    return Message(RecordDict(records), reply_to=message)


def _evaluate(client: NumPyClient, message: Message) -> Message:
    _, parameters = arrays_of(message)
    result = client.evaluate(parameters, config_of(message))
    loss, weight, metrics = _checked_result("evaluate", result, (float, int, np.number))
    content = metric_records({keys.LOSS: float(loss), keys.NUM_EXAMPLES: weight}, metrics)
    return Message(RecordDict(content), reply_to=message)


def _keep(client: NumPyClient, message: Message) -> Message:
    outputs, snapshot = (getattr(client, name, None) for name in ("outputs", "snapshot"))
    if not isinstance(outputs, ClientOutputs) or snapshot is None:
        raise TypeError(f"{type(client).__name__} keeps nothing: it has no outputs and snapshot")
    problem = outputs.keep(KeepRequest.from_config(config_of(message)), snapshot)
    return _properties(KeepReply(problem).to_config(), message)


def _properties(properties: Mapping[str, object], message: Message) -> Message:
    stamp: dict[str, Any] = {keys.VERSION: __version__, keys.MESSAGE_FORMAT: keys.FORMAT}
    plain = {key: plain_value(key, value) for key, value in properties.items()}
    record = ConfigRecord(stamp | plain)
    return Message(RecordDict({keys.CONFIG: record}), reply_to=message)


def _checked_result(
    method: str, result: Any, kinds: tuple[type, ...]
) -> tuple[Any, int, Mapping[str, object]]:
    """Check what a client's method returned; its first part is of one of some kinds."""
    is_triple = isinstance(result, tuple | list) and len(result) == 3
    value, count, metrics = result if is_triple else (None, -1, None)
    is_count = isinstance(count, int | np.integer) and not isinstance(count, bool) and count >= 0
    is_kind = isinstance(value, kinds) and not isinstance(value, bool)
    if not (is_kind and is_count and isinstance(metrics, Mapping)):
        wanted = f"({kinds[0].__name__}, num_examples of 0 or more, metrics)"
        raise TypeError(f"{method} must return {wanted}, got {brief(result)}")
    return value, int(count), metrics


# A ``NumPyClient``'s records ----------------------------------------------------------------------


def arrays_of(message: Message) -> tuple[list[tuple[str, str]], list[NDArray[np.generic]]]:
    """Return the (record, key) slots of a message's arrays and the arrays, in order."""
    # The arrays are copies: a client may write into them, and in one process several clients would
    # otherwise write into the server's bytes.
    slots, arrays = [], []
    for name, record in message.content.items():  # ``array_records``: see ``record_of``
        for key, array in record.items() if isinstance(record, ArrayRecord) else ():
            slots.append((name, key))
            arrays.append(decode_array(f"{name}/{key}", array, copy=True))
    return slots, arrays


# Any, here and below: entries have whatever types Flower's records take, lists too
def config_of(message: Message) -> dict[str, Any]:
    """Merge the config records of a message."""
    records = (one for one in message.content.values() if isinstance(one, ConfigRecord))
    return {key: value for record in records for key, value in record.items()}


def reply_slots(names: Any, incoming: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Choose the (record, key) for each of `count` reply arrays."""
    if names is None:
        if len(incoming) != count:
            return [(keys.ARRAYS, str(index)) for index in range(count)]
        is_one = len({record for record, _ in incoming}) == 1
        return [(keys.ARRAYS, key) for _, key in incoming] if is_one else incoming
    parts = [(name if "/" in name else f"{keys.ARRAYS}/{name}").partition("/") for name in names]
    slots = [(record, key) for record, _, key in parts]
    are_bad = isinstance(names, str) or not len(set(slots)) == len(slots) == count
    if are_bad or any(r in ("", keys.METRICS, keys.CONFIG) or not key for r, key in slots):
        raise ValueError(f"metrics[{keys.ARRAY_NAMES!r}] must name {count} arrays, got {names!r}")
    return slots


def metric_records(fixed: dict[str, Any], metrics: Mapping[str, object]) -> dict[str, Any]:
    """Split metrics into numbers, for the metric record, and the rest, for the config record."""
    if reserved := sorted(fixed.keys() & metrics.keys()):
        raise ValueError(f"metrics keys {reserved} are reserved: they are returned on their own")
    numbers, others = dict[str, Any](), dict[str, Any]()
    for key, value in {**fixed, **metrics}.items():
        plain = plain_value(key, value)
        probe = (plain[0] if plain else 0) if isinstance(plain, list) else plain
        is_number = isinstance(probe, (int, float)) and not isinstance(probe, bool)
        (numbers if is_number else others)[key] = plain
    records: dict[str, object] = {keys.METRICS: MetricRecord(numbers)}
    return records | {keys.CONFIG: ConfigRecord(others)} if others else records


def plain_value(key: str, value: object) -> Any:
    """Turn NumPy scalars into Python's, and refuse what no Flower record can hold."""
    if isinstance(value, (list, tuple)):
        items = [plain_value(key, item) for item in value]
        # A record's list has one type, but figures of a round may be 1, 0.5, ...
        is_mixed = {type(item) for item in items} == {int, float}
        return [float(item) for item in items] if is_mixed else items
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float, str, bytes)):
        kind = type(value).__name__
        raise TypeError(f"{key!r}: {kind}; must be a number, str, bytes, bool or a list of such")
    return value


def servers_time(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Make a reply expire with its message, by the server's clock."""
    # Flower computes how long a reply is valid from the message's time (the server's clock) and the
    # client's clock. A client whose clock is ahead by more than the message's lifetime would
    # answer with what has expired already, and the SuperLink would drop it.
    reply = call_next(message, context)
    asked = message.metadata
    reply.metadata.created_at, reply.metadata.ttl = asked.created_at, asked.ttl
    return reply


# A context that outlasts the SuperNode -----------------------------------------------------------

# Flower holds a SuperNode's contexts in memory: with the SuperNode they are gone. If the node's
# config names a folder (``state-dir``, or the ``state`` folder of its ``data-folder``),
# ``keep_state`` writes the context's state there after each message, before the reply leaves: a
# restarted client knows of every reply that the server has seen, so no mask is used twice. The file
# has the number of messages handled, and is used if that is higher than in Flower's state. Larger
# tensors are in files beside it (``flower_graph.client.state``).


def keep_state(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Load the context's state if the file is newer. Save it before the reply leaves."""
    file, key, in_memory = state_file(context), files.state_key(context), _handled(context.state)
    if file is None:
        return call_next(message, context)
    try:
        if _handled(state := read_state(file, key)) > in_memory:
            context.state = state
    except Exception as error:  # any error that damaged bytes cause
        if in_memory:
            LOG.warning("%s; going on with what Flower has in memory", error)
        elif file.exists():
            who = f"client {files.node_name(context)}"
            raise StateLostError(f"{who}: its state: {error}") from error
    reply = call_next(message, context)
    handled = _handled(context.state) + 1
    context.state.pop(RECORD, None)
    if not context.state:  # no state yet, or the run is over
        files.remove(file)
        files.remove_empty(file.parent)  # removes the run's folder, if this was its last file
        return reply
    context.state[RECORD] = ConfigRecord({HANDLED: handled})
    write_state(file, context.state, key)
    return reply


def state_file(context: Context) -> Path | None:
    """Return the file of a client's context; None if the SuperNode has no folder of its own."""
    name = f"run-{context.run_id}/context-{files.node_name(context)}.state"
    return None if (folder := files.own_place(context)) is None else folder / name


def _handled(state: RecordDict) -> int:
    record = state.config_records.get(RECORD)
    return 0 if record is None else int(record[HANDLED])  # type: ignore[arg-type]


def write_state(file: Path, state: RecordDict, key: StateKey | None = None) -> None:
    """Write a context's state, whole or not at all; encrypted with a key."""
    files.own_folder(file.parent)
    data = bytearray(recorddict_to_proto(state).SerializeToString())
    tensors = {"state": torch.frombuffer(data, dtype=torch.uint8)}
    checkpoint.save_client(file, tensors, "", key)


def read_state(file: Path, key: StateKey | None = None) -> RecordDict:
    """Read the output of ``write_state``."""
    tensors = checkpoint.load_client(file, None, key)
    proto = RecordDictProto.FromString(tensors["state"].numpy().tobytes())
    return recorddict_from_proto(proto)
