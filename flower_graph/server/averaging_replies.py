"""Checks the replies of a round that averages, and the arrays that ``combine`` returns.

Flower's averaging trusts its clients: a reply without a key ends the run, one NaN spoils the model,
and a first array of half precision makes the mean half precision.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief, one_line
from flower_graph.records.participation import NOT_CONNECTED
from flower_graph.records.rounds import RoundReport
from flower_graph.server.session import Session, unsaved
from flower_graph.wire.arrays import encode_array, read_array
from flower_graph.wire.averaging import ClientReply, clients_of, read_reply, weight_of
from flower_graph.wire.client_errors import Kind, kind_of, no_content
from flower_graph.wire.counts import counts_size, read_counts
from flower_graph.wire.exchange import MAX_NAMED, Rejected, unreadable
from flower_graph.wire.fields import MAX_LINES, read_not_saved, reason_of
from flower_graph.wire.keys import (
    ARRAYS,
    CONFIG,
    EXTRAS,
    LEFT_OUT,
    MAX_NUMBER,
    MAX_WEIGHT,
    NUM_EXAMPLES,
    ROWS,
)
from flower_graph.wire.ledger import reply_bytes, size_of, too_large
from flower_graph.wire.rows import split_rows

# Measurements from 0 to 1, whose sum cannot exceed their number
RATIOS = frozenset(("train", "val", "test", "precision", "recall", "homophily", "true-homophily"))
RECORD = -2  # in place of a length: marks a name as that of a record
ROUNDING = 1e-5  # rounding error allowed in such a sum
NO_ROW = "its SuperNode's answer has no row of it"
NOT_COUNTED = (0, "")  # no classes, and nothing that was to be counted
Form = frozenset[tuple[str, int]]  # each metric's name and length; -1 for a single number


Place = tuple[int, int | None]  # a SuperNode, and the client where it answers with a row for each


class Wanted(NamedTuple):
    """What a reply must have."""

    model: ArrayRecord | None  # whose names and shapes its arrays have; None: it measures
    extras: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # shapes of further arrays
    counted: tuple[int, str] = NOT_COUNTED  # number of classes, and the kind of counts
    rows: bool = False  # of each client that was asked, where a SuperNode has several


class Checked(NamedTuple):
    """The checked replies of one exchange."""

    # In the order of the messages sent; rows in that of the clients
    usable: list[ClientReply]
    # Every other node that was asked, and clients that are left out
    rejected: list[Rejected]
    failed: dict[int, str]  # clients that were asked and whose training does not count


def check_replies(
    sent: Sequence[Message],
    replies: Iterable[Message],
    wanted: Wanted,
    timeout: float,
    most_examples: Callable[[int], int | None] = lambda node: None,
    asked: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> Checked:
    """Leave out replies that cannot be averaged; ``asked`` has the clients of each SuperNode."""
    nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    came, rejected = dict[int, Message](), list[Rejected]()
    for reply in replies:
        # An error that the grid writes for a lost node comes from the grid's own id.
        sender, answers = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
        node = nodes.get(answers, sender)
        if reply.has_content() and sender != node:
            rejected.append(Rejected(sender, f"reply in the name of node {node}"))
        else:
            came.setdefault(node, reply)
    order = [node for node in nodes.values() if node in came]
    order += sorted(came.keys() - set(order))
    rows = asked if wanted.rows else {}
    reasons = {n: f"no reply within {timeout:g} s" for n in nodes.values() if n not in came}
    parts: dict[Place, Message] = {}
    for node in order:
        clients = rows.get(node, ())
        try:
            _check_whole(came[node], wanted, len(clients) or 1)
            own: Mapping[int | None, Message] = {clients[0] if clients else None: came[node]}
            if len(clients) > 1:
                own = dict(split_rows(came[node], clients))
        except Exception as error:
            reasons[node] = unreadable(error)
        else:
            parts |= {(node, client): one for client, one in own.items()}
    bad = dict[Place, str]()
    for find in (partial(_problems, wanted), partial(_too_heavy, most_examples), _odd_ones):
        bad |= find({at: one for at, one in parts.items() if at not in bad})
    reasons |= {at[0]: why for at, why in bad.items() if len(rows.get(at[0], ())) < 2}
    kinds = {node: kind_of(reply) for node, reply in came.items()}
    out = [Rejected(n, one_line(why), kinds.get(n, Kind.OTHER)) for n, why in reasons.items()]
    failed = dict[int, str]()
    for node in (node for node in order if node not in reasons):
        out += [Rejected(node, why) for why in _left_out(came[node].content)]
        said = _client_reasons(came[node], asked)
        unfit = {c: NO_ROW for c in rows.get(node, ()) if (node, c) not in parts}
        unfit |= {c: bad[node, c] for c in rows.get(node, ()) if (node, c) in bad}
        failed |= unfit | said
        unsaid = {c: why for c, why in unfit.items() if c not in said}
        out += [Rejected(node, one_line(f"client {c}: {why}")) for c, why in unsaid.items()]
    usable = [place for place in parts if place not in bad]
    usable.sort(key=lambda at: (at[1] is None, at[1] or 0))  # stable: otherwise as they were sent
    whose = [asked.get(node, ()) if client is None else [client] for node, client in usable]
    found = [read_reply(parts[at], own) for at, own in zip(usable, whose, strict=True)]
    return Checked(found, out + rejected, failed)


def _client_reasons(reply: Message, hosted: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Return the clients that a SuperNode left out: client to reason."""
    # It may name its own clients only.
    local = set(hosted.get(reply.metadata.src_node_id, ()))
    pairs = map(reason_of, _named(reply.content)[:MAX_LINES])
    return {pair[0]: pair[1] for pair in pairs if pair is not None and pair[0] in local}


def _check_whole(reply: Message, wanted: Wanted, clients: int) -> None:
    numbers = sum(map(math.prod, wanted.extras.values())) + counts_size(*wanted.counted)
    # float64 where float32 would do
    model = 0 if wanted.model is None else 2 * wanted.model.count_bytes()
    most = clients * (reply_bytes(numbers) + model)
    if (problem := too_large(reply, size_of(reply), most) or no_content(reply)) is not None:
        raise MalformedReplyError(problem)
    if clients > 1 and ROWS not in (reply.content.config_records.get(CONFIG) or ()):
        words = f"one mean for {clients} clients; a row for each was asked for"
        raise MalformedReplyError(words)
    if wanted.model is not None:
        _check_names(reply.content, wanted.model, wanted.extras)


def _problems(wanted: Wanted, replies: Mapping[Place, Message]) -> dict[Place, str]:
    result = {}
    for at, reply in replies.items():
        try:
            _check_part(reply.content, wanted)
        except Exception as error:
            result[at] = unreadable(error)
        else:
            if at[1] is not None and (count := clients_of(reply)) > 1:
                result[at] = f"it speaks for {count} clients; one was asked"
    return result


def _check_part(content: RecordDict, wanted: Wanted) -> None:
    metrics = _check_metrics(content)
    _check_sums(metrics)
    if wanted.model is not None:
        _check_arrays(content, wanted.model, wanted.extras)
        return
    for name, value in metrics.items():
        if not np.isfinite(np.asarray(value, np.float64)).all():
            raise MalformedReplyError(f"{name} is {brief(value, 40)}")
    read_counts(content, *wanted.counted)


def _check_metrics(content: RecordDict) -> MetricRecord:
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise MalformedReplyError(f"{len(records)} metric records, expected 1")
    weight = records[0].get(NUM_EXAMPLES)
    if not (isinstance(weight, (int, float)) and 0 < weight <= MAX_WEIGHT):
        words = f"{NUM_EXAMPLES} is {brief(weight, 40)}, must be a positive number"
        raise MalformedReplyError(words)
    return records[0]


def _too_heavy(
    most_examples: Callable[[int], int | None], replies: Mapping[Place, Message]
) -> dict[Place, str]:
    result, claimed = {}, Counter[int]()
    for (node, _), reply in replies.items():
        claimed[node] += weight_of(reply)  # type: ignore[assignment]
    for node, client in replies:
        most, weight = most_examples(node), claimed[node]
        if most is not None and weight > most:
            result[node, client] = f"{NUM_EXAMPLES} is {weight}, its SuperNode has {most}"
    return result


def _check_sums(metrics: MetricRecord) -> None:
    for name, value in metrics.items():
        share = metrics.get(f"has-{name}")
        if not isinstance(share, (int, float)) or not isinstance(value, (int, float)):
            continue
        # A number that is not finite is named by the client, or refused as a measurement.
        if not (-ROUNDING <= share <= 1 + ROUNDING) and math.isfinite(share):
            raise MalformedReplyError(f"has-{name} is {share:g}, must be from 0 to 1")
        low, high = (0.0, share) if name in RATIOS else (-MAX_NUMBER, MAX_NUMBER)
        if not (low - ROUNDING <= value <= high + ROUNDING) and math.isfinite(value):
            raise MalformedReplyError(f"{name} is {value:g}, must be from {low:g} to {high:g}")


def _check_names(
    content: RecordDict, model: ArrayRecord, extras: Mapping[str, tuple[int, ...]]
) -> None:
    records, expected = content.array_records, [ARRAYS, EXTRAS] if extras else [ARRAYS]
    if sorted(records) != expected:
        raise MalformedReplyError(f"array records {brief(list(records), 80)}, expected {expected}")
    if extras and sorted(records[EXTRAS]) != sorted(extras):
        named = f"extras {brief(list(records[EXTRAS]), 80)}, expected {sorted(extras)!s:.80}"
        raise MalformedReplyError(named)
    names = list(records[ARRAYS])
    if names != list(model):
        # Clients read arrays by position, and the first reply's order would become the mean's.
        wanted = f"{list(model)!s:.80} in order"
        raise MalformedReplyError(f"arrays {brief(names, 80)}, expected {wanted}")


def _check_arrays(
    content: RecordDict, model: ArrayRecord, extras: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in extras.items():
        read_array(content, EXTRAS, name, shape)
    for name, wanted in model.items():
        value = read_array(content, ARRAYS, name, tuple(wanted.shape))
        if not np.can_cast(np.dtype(wanted.dtype), value.dtype):
            types = f"{value.dtype}, expected {wanted.dtype}"
            raise MalformedReplyError(f"{ARRAYS}/{name} has type {types}")


def _odd_ones(replies: dict[Place, Message]) -> dict[Place, str]:
    """Find replies whose metrics differ from most replies': Flower needs the same in all."""
    forms = {place: _form(reply) for place, reply in replies.items()}
    if not forms:
        return {}
    ((common, _),) = Counter(forms.values()).most_common(1)
    return {
        place: f"metrics are not as in the other replies: {_names(common ^ form)}"
        for place, form in forms.items()
        if form != common
    }


def _names(form: Form) -> str:
    return brief(sorted(dict(form)), 80)


def _form(reply: Message) -> Form:
    ((local, record),) = reply.content.metric_records.items()
    lengths = [(name, len(v) if isinstance(v, list) else -1) for name, v in record.items()]
    return frozenset([*lengths, (local, RECORD)])


def _left_out(content: RecordDict) -> list[str]:
    named = _named(content)
    more = [f"and {len(named) - MAX_NAMED} more clients"] if len(named) > MAX_NAMED else []
    pairs = [(line, reason_of(line)) for line in named[:MAX_NAMED]]
    lines = [line if pair is None else f"client {pair[0]}: {pair[1]}" for line, pair in pairs]
    return [one_line(line) for line in lines] + more


def _named(content: RecordDict) -> list[Any]:
    config = content.config_records.get(CONFIG) or ConfigRecord()
    result = config.get(LEFT_OUT, [])
    return result if isinstance(result, list) else [result]


# Combined ---------------------------------------------------------------------------------------


Arrays = ArrayRecord | Mapping[str, NDArray[np.generic]]
Combined = Arrays | Mapping[int, Arrays] | None


def checked_model(arrays: Arrays, model: ArrayRecord, what: str) -> ArrayRecord:
    """Check arrays that ``combine`` returned, and return them with the types of the model."""
    if arrays.keys() != model.keys():
        raise ValueError(f"{what}: arrays {list(arrays)!s:.80}, expected {list(model)!s:.80}")
    record = ArrayRecord()
    for name, wanted in model.items():
        held: Any = arrays[name]
        values = held.numpy() if isinstance(arrays, ArrayRecord) else np.asarray(held)
        if values.shape != tuple(wanted.shape):
            shape = tuple(wanted.shape)
            raise ValueError(f"{what}: {name} has shape {values.shape}, expected {shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"{what}: {name} has NaN or infinite values")
        dtype = np.dtype(wanted.dtype)
        # A mean of counters is no whole number.
        rounded = np.rint(values) if dtype.kind in "iu" and values.dtype.kind == "f" else values
        record[name] = encode_array(name, np.asarray(rounded, dtype))
    return record


# So far -----------------------------------------------------------------------------------------


@dataclass
class RoundSoFar:
    """The messages and figures of the current round."""

    number: int = 0
    started: float = field(default_factory=time.perf_counter)
    sent: list[Message] = field(default_factory=list)  # of the current exchange
    measured: list[Message] = field(default_factory=list)  # the answers to ``evaluate``
    used: set[int] = field(default_factory=set)  # clients whose training counted
    failed: dict[int, str] = field(default_factory=dict)  # for single clients: why it did not
    unnamed: int = 0  # SuperNodes that name no clients and whose training counted
    trained: MetricRecord = field(default_factory=MetricRecord)
    evaluated: MetricRecord = field(default_factory=MetricRecord)
    is_averaged: bool = False  # whether ``combine`` called Flower's average
    skipped: str = ""
    saves: bool = False  # whether the round gets a checkpoint
    report: RoundReport | None = None

    def note_training(self, checked: Checked) -> None:
        """Record the clients whose training counts, and those that failed."""
        none = f"none of {len(self.sent)} SuperNodes gave a usable answer to train"
        self.skipped = "" if checked.usable else none
        self.failed |= checked.failed
        self.used |= {client for reply in checked.usable for client in reply.clients}
        # A SuperNode that names no clients is one
        self.unnamed += sum(not reply.clients for reply in checked.usable)

    def to_report(self, session: Session, figures: Mapping[str, object]) -> RoundReport:
        """Return the round's report, with a method's own ``figures``."""
        members = session.members
        gone = {NOT_CONNECTED: np.array(sorted(members.absent), np.int64)}
        used = self.used - self.failed.keys()
        return session.report(
            self.number,
            session.participation(used, failed=self.failed, left_out=gone),
            asked=sum(len(local) or 1 for local in session.asked.values()),
            answered=len(used) + self.unnamed,
            bytes=session.ledger.payload,
            seconds=time.perf_counter() - self.started,
            skipped=self.skipped,
            **figures,
        )

    def not_saved(self) -> dict[int, str]:
        """Return the SuperNodes that did not save the round when they measured it, and why."""
        replies = {reply.metadata.src_node_id: reply for reply in self.measured}
        said = {n: no_content(one) or read_not_saved(one.content) for n, one in replies.items()}
        return unsaved([message.metadata.dst_node_id for message in self.sent], said)
