"""SecureAverage: a secure sum in two lines of any Flower app.

    strategy = SecureAverage(FedAvg())                    # in the ServerApp
    app = ClientApp(mods=[secure_average_mod])            # in the ClientApp

The server learns neither a client's arrays nor its metrics nor its number of examples, but their
sums: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
2017, with the partner graph of Bell et al., CCS 2020 (``docs/secure-sum.md``). A round:

1. server -> client: the message of the wrapped strategy, with the entries of a sum beside it;
2. client: the app's own function answers with arrays ``x_i`` and metrics ``m_i``, among them its
   weight ``w_i``; the mod sends ``(w_i x_i, w_i, w_i m_i)``, in fixed point and under masks;
3. server: opens the sum over the clients that answered, and gives the wrapped strategy one reply:
   ``sum_i w_i x_i / sum_i w_i``, the same mean of each metric, and the weight ``sum_i w_i``.

A strategy that averages makes of this one reply what it makes of all replies. Evaluation goes the
same way. Every number is rounded to ``resolution``; the sum of the rounded numbers is exact. Only
clients that got the same message are in a sum together.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from flower_graph.client.adaptor import action_reply, metric_records
from flower_graph.errors import (
    MalformedReplyError,
    RefusedError,
    StateLostError,
    brief,
    refuse_if,
)
from flower_graph.flower_compat import ClientAppCallable
from flower_graph.secure.parties.registry import TrustSettings
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import MaskingClient
from flower_graph.server.sums import PartySums, SecureSum, SumServer
from flower_graph.wire.arrays import Config
from flower_graph.wire.client_errors import boundary, lost_reply
from flower_graph.wire.exchange import Exchange, Replies
from flower_graph.wire.keys import ARRAYS, CONFIG, MASKED_SUM, METRICS, NUM_EXAMPLES

__all__ = ["SecureAverage", "secure_average_mod"]

LOG = logging.getLogger(__name__)
Floats = NDArray[np.float64]
SUM = "secure-average"  # a sum's purpose, and the name of the record with its entries
STAGE, WEIGHT, NAMES = "stage", "weighted-by", "metric-names"  # entries
APP = "sum_mask"  # the stage that asks for the vector: the app's own function is called
MOST_METRICS = 16  # of a reply: a vector has this many numbers for metrics, used or not
LONGEST = 99  # characters of a metric's name
MOST_WAIT = 3600.0  # seconds, as Flower's
# Classes of Flower's strategies that need each client's reply, or the number of replies
NEEDS_REPLIES = {
    *("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan", "QFedAvg"),
    *("FedXgbBagging", "FedXgbCyclic"),
    *("DifferentialPrivacyFixedClippingBase", "DifferentialPrivacyAdaptiveBase"),
}


# The vector of a reply ----------------------------------------------------------------------------


def vector_of(reply: RecordDict, like: ArrayRecord, weighted_by: str) -> tuple[Floats, list[str]]:
    """Write a client's reply as a vector ``(w x, w, w m)``; return it with the metrics' names.

    Raises
    ------
    ValueError
        If the arrays have not the names and shapes of those in ``like``, the weight is no number
        from 0 on, a metric is a list, or there are more than 16 metrics.
    """
    arrays = {name: one for record in reply.array_records.values() for name, one in record.items()}
    got, expected = shapes_of(arrays), shapes_of(like)
    if got != expected:
        told = f"must be as the server's, at first its initial_arrays: {expected!r:.200}"
        raise ValueError(f"arrays: {got!r:.200}; {told}")
    metrics = {
        name: one for record in reply.metric_records.values() for name, one in record.items()
    }
    weight = metrics.pop(weighted_by, None)
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"{weighted_by}: must be a number from 0 on")
    names = sorted(metrics)
    many = f"{len(names)} metrics; must be at most {MOST_METRICS}"
    refuse_if(len(names) > MOST_METRICS, many, ValueError)
    numbers = np.zeros(1 + MOST_METRICS)
    numbers[0] = 1
    for place, name in enumerate(names, 1):
        is_list = isinstance(metrics[name], list)
        refuse_if(is_list, f"metric {name}: a list; must be a single number", ValueError)
        numbers[place] = metrics[name]
    flat = [arrays[name].numpy().ravel() for name in like]
    vector: Floats = np.concatenate([*flat, numbers], dtype=np.float64)
    return vector * weight, names


def mean_reply(
    total: Floats, like: ArrayRecord, weighted_by: str, names: Sequence[str]
) -> RecordDict:
    """Return the reply of one client whose arrays and metrics are the weighted means of all."""
    end = len(total) - 1 - MOST_METRICS
    weight = float(total[end])
    mean, arrays, start = total / weight, dict[str, Array](), 0
    for name, array in like.items():
        part = mean[start : start + math.prod(array.shape)].reshape(array.shape)
        # The mean of integers is a float, as in Flower's FedAvg
        is_float = np.dtype(array.dtype).kind == "f"
        arrays[name] = Array(part.astype(array.dtype) if is_float else part)
        start += part.size
    metrics = dict(zip(names, mean[end + 1 :].tolist(), strict=False))
    records: dict[str, Any] = {METRICS: MetricRecord({weighted_by: weight, **metrics})}
    return RecordDict(({ARRAYS: ArrayRecord(arrays)} if arrays else {}) | records)


def shapes_of(arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def arrays_asked(message: Message) -> ArrayRecord:
    """Return arrays like those that a message asks for: evaluation asks for none."""
    records = list(message.content.array_records.values())
    is_training = message.metadata.message_type.partition(".")[0] == "train"
    return records[0] if is_training and records else ArrayRecord()


def detail_of(message: Message, weighted_by: str) -> bytes:
    """Hash the whole message of the strategy; server and clients each state it by themselves.

    Clients that got different messages have masks that do not cancel. Otherwise a server that lies
    could send all clients but one a model with which they answer zeros, and read the sum as the
    vector of that one (Pasquini et al., "Eluding Secure Aggregation in Federated Learning via Model
    Inconsistency", CCS 2022).
    """
    content = [
        [name, type(record).__name__, key, stated(one)]
        for name, record in sorted(message.content.items())
        if name != SUM
        for key, one in sorted(record.items())
    ]
    about = message.metadata.message_type, weighted_by, content
    return hashlib.sha256(json.dumps(about, default=bytes.hex).encode()).digest()


# Any: an entry of any of Flower's records
def stated(entry: Any) -> Any:
    """Return what stands for an entry in the hash of a message."""
    if not isinstance(entry, Array):
        return entry
    data = hashlib.sha256(entry.data).hexdigest()
    return [entry.dtype, list(entry.shape), entry.stype, data]


def number_of(node_id: int) -> int:
    """Return a SuperNode's number in sums without a registry: half of Flower's 64 bits."""
    return node_id >> 1


# Server -------------------------------------------------------------------------------------------


class SecureAverage(Strategy):
    """Gives a strategy one reply with the clients' weighted mean in the place of their replies.

    The clients have ``secure_average_mod`` among their mods.

    Parameters
    ----------
    strategy : Strategy
        A strategy that averages replies.
    limit : float
        Largest absolute value of a number times its client's weight. A client with a larger number
        is left out of the round, and its log says so.
    resolution : float
        Step to which numbers times weights are rounded.
    dropout : float
        Share of the clients that may vanish during a sum, below 1/2.
    registry : Path or str, optional
        The registry of the SuperNodes' keys, if the SuperNodes do not trust the server: each has
        ``identity-key`` and ``registry`` in its node config.

    Raises
    ------
    ValueError
        If the strategy needs each client's reply, or a number is impossible.
    IdentityError
        If the registry cannot be read.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        limit: float = 2.0**28,
        resolution: float = 2.0**-20,
        dropout: float = 0.3,
        registry: Path | str | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise TypeError(f"strategy: {strategy!r:.99}; must be a strategy of flwr.serverapp")
        needs = [kind.__name__ for kind in type(strategy).__mro__ if kind.__name__ in NEEDS_REPLIES]
        if needs:
            raise ValueError(f"strategy: {needs[0]} needs each client's reply; a sum has none")
        Ring.fit(2, limit, resolution)  # refuses impossible numbers, as the next line does
        self.strategy, self._limit, self._resolution = strategy, limit, resolution
        self._dropout, self._registry = dropout, registry
        self._server()
        self._sums: tuple[AppExchange, SecureSum] | None = None

    def _server(self) -> SumServer:
        if self._registry is None:
            return SumServer(dropout=self._dropout)
        return PartySums(self._registry, dropout=self._dropout)

    # Any, here and below: arguments as Flower's ``Strategy`` declares them
    def start(self, grid: Grid, *arguments: Any, **named: Any) -> Result:
        """Call the wrapped strategy's ``start`` with a grid on which replies are summed."""
        weighted_by = getattr(self.strategy, "weighted_by_key", NUM_EXAMPLES)
        if self._sums is None or self._sums[0].grid is not grid:
            exchange, server = AppExchange(grid), self._server()
            limit, step = self._limit, self._resolution
            sums = SecureSum(exchange, limit=limit, resolution=step, server=server)
            self._sums = exchange, sums
        # SuperNodes count the sums of a run: a second start goes on with the first one's
        summing: Any = SummingGrid(*self._sums, weighted_by)
        return self.strategy.start(summing, *arguments, **named)

    def configure_train(self, *arguments: Any, **named: Any) -> Iterable[Message]:
        return self.strategy.configure_train(*arguments, **named)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(self, *arguments: Any, **named: Any) -> Iterable[Message]:
        return self.strategy.configure_evaluate(*arguments, **named)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()


class SummingGrid:
    """A grid whose ``send_and_receive`` returns one reply: the weighted mean of all replies."""

    def __init__(self, exchange: "AppExchange", sums: SecureSum, weighted_by: str) -> None:
        self._exchange, self._sums, self._weighted_by = exchange, sums, weighted_by
        self._number = 0  # of the newest sum

    # Any: whatever the wrapped strategy asks of a grid
    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange.grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send equal messages; return one reply with the mean, or none without a sum."""
        exchange, sums, weighted_by = self._exchange, self._sums, self._weighted_by
        exchange.messages = {one.metadata.dst_node_id: one for one in messages}
        exchange.timeout = timeout or MOST_WAIT
        if not exchange.messages:
            return []
        first = next(iter(exchange.messages.values()))
        sent = exchange.messages.values()
        apart = {(id(one.content), one.metadata.message_type): one for one in sent}.values()
        if len(details := {detail_of(one, weighted_by) for one in apart}) > 1:
            raise ValueError("the strategy sends different messages; in a sum all get the same")
        like, detail, number = arrays_asked(first), details.pop(), self._number + 1
        self._number = number
        nodes = {node: [number_of(node)] for node in exchange.grid.get_node_ids()}
        sums.prepare(number, nodes if sums.server.registry is None else list(nodes))
        clients = sums.server.clients
        drawn = sorted(c for node in exchange.messages for c in clients.get(node, ()))
        if sums.clients != drawn:
            sums.ready(number, drawn)
        length = sum(map(math.prod, shapes_of(like).values())) + 1 + MOST_METRICS
        told: dict[int, dict[str, str]] = {node: {WEIGHT: weighted_by} for node in clients}
        found = sums.add(number, told, APP, length, SUM, detail, read=metric_names)
        if not found.replies.values:  # such as of an app without ``evaluate``: nobody is ready
            sums.clients = []
        total = found.numbers()
        if total is None or total[-1 - MOST_METRICS] <= 0:
            why = found.skipped or "all weights are 0"
            LOG.warning("%s: no mean: %s", first.metadata.message_type, why)
            return []
        there, replies = {*found.contributors}, found.replies.values.items()
        names = {tuple(own) for node, own in replies if there.issuperset(found.asked[node])}
        if len(names) > 1:
            LOG.warning("clients answer with different metrics: no mean of metrics")
            names = {()}
        return [Message(mean_reply(total, like, weighted_by, names.pop()), reply_to=first)]


class AppExchange(Exchange):
    """Sends the stages of a sum as messages of a type that the app answers."""

    messages: Mapping[int, Message]  # of the wrapped strategy, by SuperNode
    timeout = MOST_WAIT

    # Any: as of the parent
    def send(
        self,
        requests: Mapping[int, RecordDict],
        *,
        message_type: str = "train",
        timeout: float,
        **how: Any,
    ) -> Replies[Any]:
        """Send a stage in a record of its own; the app's message goes with the stage ``APP``."""
        stage = message_type.rpartition(".")[2]
        contents = {}
        for node, request in requests.items():
            entries = ConfigRecord({**request.config_records[CONFIG], STAGE: stage})
            app = self.messages[node].content if stage == APP else {}
            contents[node] = RecordDict({**app, SUM: entries})
        how["message_type"] = next(iter(self.messages.values())).metadata.message_type
        return super().send(contents, timeout=self.timeout, **how)


def metric_names(node: int, content: RecordDict) -> list[str]:
    """Read the names of the metrics in a masked vector."""
    names = content.config_records[CONFIG].get(NAMES, [])
    found = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if found != names or len(found) > MOST_METRICS or max(map(len, found), default=0) > LONGEST:
        raise MalformedReplyError(f"{NAMES}: {names!r:.99}; must be at most {MOST_METRICS} names")
    return found


# Client -------------------------------------------------------------------------------------------


class SumParty(MaskingClient):
    """A SuperNode as one client of the sums."""

    def __init__(self, context: Context) -> None:
        trust = TrustSettings.of(context.node_config, context.run_id)
        own = number_of(context.node_id)
        if trust is not None:
            own = trust.registry.parties[trust.identity.party].clients[0][0]
        self.client = own
        super().__init__(context, [own], trust)


def secure_average_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer the stages of a sum; send what the app answers as a masked vector.

    A mod of Flower's ``ClientApp``. It refuses all messages that are part of no sum, except
    ``query``: the app would answer them in the clear. The text of an error stays in the SuperNode's
    log, as it may quote numbers.
    """
    record = message.content.config_records.get(SUM)
    kind = message.metadata.message_type
    if record is None:
        if kind.partition(".")[0] == "query":
            return call_next(message, context)
        raise RefusedError(f"a {kind} message without a secure sum; the server needs SecureAverage")
    entries: Config = {key: one for key, one in record.items() if not isinstance(one, list)}
    try:
        with boundary(context):
            party = SumParty(context)
            if (stage := entries.pop(STAGE, None)) == APP:
                return masked_answer(message, context, call_next, party, entries)
            refuse_if(stage not in party.actions, f"{STAGE}: {brief(stage)}; is no stage of a sum")
            return action_reply(str(stage), party, message)
    except StateLostError as error:
        return lost_reply(error, message)


def masked_answer(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    party: SumParty,
    entries: Config,
) -> Message:
    """Have the app answer, and mask its answer."""
    weighted_by, like = str(entries[WEIGHT]), arrays_asked(message)
    detail = detail_of(message, weighted_by)
    received = party.received(entries)  # so that a refusal tells nothing about the vector
    del message.content[SUM]
    reply = call_next(message, context)
    if reply.has_error():
        raise RuntimeError(f"the app answers with an error: {reply.error.reason}")
    vector, names = vector_of(reply.content, like, weighted_by)
    masked, told = party.masked(received, {party.client: vector}, SUM, detail)
    records = metric_records({}, told | {NAMES: names})
    total = ArrayRecord({MASKED_SUM: Array(masked.total)})
    return Message(RecordDict({ARRAYS: total, **records}), reply_to=message)
