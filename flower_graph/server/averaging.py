"""Flower's FedAvg, or another averaging strategy, with checked replies and a report a round.

The averaging is Flower's, of ``FedAvg`` or of another strategy: ``class Mine(ReportedFedAvg,
FedProx)``. Nodes are waited for with a time limit, and asked which clients they host. The server
draws clients, not SuperNodes, and combines one answer of each client. If the strategy needs no more
(`ReportedFedAvg.weighted_sum`), a SuperNode sends its clients' weighted mean. Bad replies are left
out and reported.

All clients measure a round's model and save their state. Then the server reports the round, and
completes the checkpoint if all clients have saved.
"""

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from numpy.typing import NDArray

from flower_graph.config import common
from flower_graph.config.common import RobustSection, StrategySection
from flower_graph.errors import MalformedReplyError, brief, one_line
from flower_graph.privacy.noise import CentralNoise
from flower_graph.records.participation import NOT_CONNECTED
from flower_graph.records.rounds import BestRound, RoundReport
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import BOUND, RoundLoop, Session, unsaved
from flower_graph.storage.reading import StateDict
from flower_graph.wire import keys
from flower_graph.wire.arrays import decode_array, encode_array, own_records, read_array
from flower_graph.wire.averaging import LEFT_OUT, Asked, RowsBeside
from flower_graph.wire.client_errors import no_content
from flower_graph.wire.codec import NOT_WRITTEN, read_entry
from flower_graph.wire.counts import added, counts_size, read_counts
from flower_graph.wire.exchange import (
    Rejected,
    log_rejected,
    read_replies,
    require_content,
    unreadable,
)
from flower_graph.wire.ledger import reply_bytes

LOG = logging.getLogger(__name__)
# Flower's, of which the next model depends on nothing but the clients' weighted mean
OF_THE_MEAN = {flower.Strategy, flower.FedAvg, flower.FedAvgM}
OF_THE_MEAN |= {flower.FedAdagrad, flower.FedAdam, flower.FedYogi}
# Measurements from 0 to 1, whose sum cannot exceed their number
RATIOS = frozenset(("train", "val", "test", "precision", "recall", "homophily", "true-homophily"))
ROUNDING = 1e-5  # rounding error allowed in such a sum
UNUSABLE = "SuperNodes gave a usable answer to train"
NO_ROW = "its SuperNode's answer has no row of it"

Arrays = ArrayRecord | Mapping[str, NDArray[np.generic]]
Combined = Arrays | Mapping[int, Arrays] | None
Form = frozenset[tuple[str, int]]  # Flower averages metrics of the same names and sizes only
# Attributes that no checkpoint needs, or that it has elsewhere
NOT_SAVED = {"arrays", "own_arrays", "means", "counts", "_number", "_is_averaged", "_sent"}
NOT_SAVED |= {"_usable", "_failed", "_unsaved", "_warned", "_keeping", "_started"}
MUTABLE = (list, dict, np.ndarray, ArrayRecord)


class Wanted(NamedTuple):
    """What a reply must have."""

    model: ArrayRecord | None  # whose names and shapes its arrays have; None: it measures
    extras: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # shapes of further arrays
    counted: tuple[int, str] = (0, "")  # number of classes, and the kind of counts
    rows: bool = False  # of each client that was asked, where a SuperNode has several


@dataclass(frozen=True)
class ClientReply:
    """A client's answer to ``train`` that passed the checks, or a mean where that is enough.

    Attributes
    ----------
    clients : tuple of int
        Its client numbers, ascending; empty if its SuperNode does not say. More than one only if
        the strategy needs no more than the weighted sum.
    message : Message
        Flower's message, as Flower's own averaging takes it: of this answer alone.
    beside : ArrayRecord
        The arrays of ``ReportedFedAvg.extras``, as they came.
    """

    clients: tuple[int, ...]
    message: Message
    beside: ArrayRecord = field(default_factory=ArrayRecord)

    @property
    def client(self) -> int:
        """The number of the reply's only client; ``ValueError`` if it has several."""
        if len(self.clients) != 1:
            raise ValueError(f"the reply is of clients {list(self.clients)!s:.60}, not of one")
        return self.clients[0]

    @property
    def num_examples(self) -> int | float:
        (record,) = self.message.content.metric_records.values()
        weight = record[keys.NUM_EXAMPLES]
        assert isinstance(weight, (int, float))
        return weight

    @cached_property
    def metrics(self) -> dict[str, object]:
        """Numbers, and lists of numbers, that the client measured, by name."""
        (record,) = self.message.content.metric_records.values()
        return {name: value for name, value in record.items() if name != keys.NUM_EXAMPLES}

    @cached_property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The client's model: name to array, in the model's order; the caller may change it."""
        return _decoded(self.message.content.array_records[keys.ARRAYS])

    @cached_property
    def extras(self) -> dict[str, NDArray[np.generic]]:
        """The arrays of ``ReportedFedAvg.extras``: name to array; the caller may change them."""
        return _decoded(self.beside)


class ReportedFedAvg(RoundLoop, flower.FedAvg):
    """Flower's ``FedAvg`` with a report a round.

    A subclass defines the entries of a report (``report_fields``) and may define the first model
    (``first_arrays``). ``start`` runs the rounds; Flower's wrappers can too, without reports.
    ``ValueError`` if an argument is impossible.

    Parameters
    ----------
    participation : float
        Share of the clients asked to train each round, above 0 and at most 1. All measure.
    min_nodes : int
        SuperNodes to wait for before an exchange, at least 1.
    seed : int
        Seed of the choice of clients.
    checkpoint_dir, checkpoint_every : Path or None, int
        Folder of checkpoints, and the rounds between two checkpoints; 0 for never.
    **more
        Arguments of the strategy that a subclass uses instead of ``FedAvg``.

    Attributes
    ----------
    weighted_sum : bool
        A class that overrides ``combine`` sets it in its own body if the weighted sum of the
        clients' arrays is all that it needs. Each SuperNode then sends its clients' mean.
    arrays : ArrayRecord
        The model that was sent last.
    best : BestRound
        The first round of the highest validation accuracy so far.
    own_arrays : dict of int to ArrayRecord
        With ``personal``: the model that each client got last.
    """

    _warned = 0  # answers at the last warning that they are too few for a robust average
    personal: bool = False  # whether ``combine`` gives each client arrays of its own
    weighted_sum: bool = True  # of ``combine`` as it is here; a class with another says it anew

    def __init__(
        self,
        *,
        participation: float = 1.0,
        min_nodes: int = 1,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        **more: Any,  # arguments of the Flower strategy that a subclass adds
    ) -> None:
        # This class decides which nodes to wait for and to ask; Flower takes all that it is given.
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **more)
        if checkpoint_every and self.fraction_evaluate < 1:
            raise ValueError("fraction_evaluate: must be 1 with checkpoint_every")
        section = StrategySection(participation=participation, min_nodes=min_nodes)
        members = Membership(named=self.personal)
        self.session = Session(members, section, seed, checkpoint_dir, checkpoint_every)
        self.central_noise: CentralNoise | None = None  # see ``flower_graph.privacy.noise``
        self.robust: RobustSection | None = None  # see ``make_robust``
        self.arrays, self.own_arrays = ArrayRecord(), dict[int, ArrayRecord]()
        self.best = BestRound()
        self._number = 0  # of the round
        self._is_averaged = False  # whether ``combine`` called Flower's average
        self._sent: dict[int, Message] = {}  # of the current exchange, by SuperNode
        self._usable: list[ClientReply] = []  # answers to ``train``
        self._failed: dict[int, str] = {}  # clients whose training does not count, and why
        self._unsaved: dict[int, str] = {}  # SuperNodes that saved no checkpoint, and why

    # What a method says

    def first_arrays(self) -> ArrayRecord:
        raise ValueError("initial_arrays: a run needs a model to start from")

    def fixed_settings(self) -> dict[str, object]:
        """Return the settings that must not change on resume; a subclass adds its own."""
        return {"strategy": type(self).__name__, "seed": self.session.seed}

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, object]:
        """Turn Flower's weighted means of the replies' metrics into fields of ``RoundReport``.

        ``trained`` and ``evaluated`` are the means of the round's two exchanges, empty without a
        usable reply. The result has at least losses, regulariser and accuracies.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its reports hold")

    def extras(self) -> Mapping[str, tuple[int, ...]]:
        """Declare further arrays that clients send: name to shape, ``()`` for a number.

        Clients send them in the record ``extras``: a ``NumPyClient`` names them ``"extras/<name>"``
        in its metrics' ``array-names``. A reply with a missing array, another shape or numbers that
        are not finite is left out.
        """
        return {}

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Make the next model, or one for each client, from the replies that passed the checks.

        By default Flower's average, or that of the strategy that a subclass puts beside this one.

        Parameters
        ----------
        replies : sequence of ClientReply
            At least one, one a client in the order of their numbers; with ``weighted_sum`` one mean
            a SuperNode. The method may change them.

        Returns
        -------
        ArrayRecord, or dict of str to ndarray
            The model for all, with the names and shapes of the model that was sent.
        dict of int to such a model
            With ``personal``, by client. A client keeps its model until it gets another, also for
            measuring. A client without a model of its own has the first model.
        None
            The models stay as they are.
        """
        messages, noise = [reply.message for reply in replies], self.central_noise
        self._is_averaged = True
        if noise is not None:
            noise.clip(self.arrays, messages)
        arrays, trained = super().aggregate_train(self._number, messages)
        if noise is not None and arrays is not None:
            noise.blur(arrays, len(messages))
        self.means = trained or MetricRecord(), MetricRecord()
        return arrays

    # Any: of the model's types
    def average(self, replies: Sequence[ClientReply]) -> dict[str, NDArray[Any]]:
        """Return the default of ``combine`` by name, for a method that goes on from it."""
        arrays = ReportedFedAvg.combine(self, replies)
        assert isinstance(arrays, ArrayRecord)
        return _decoded(arrays)

    def prepare(self, server_round: int) -> None:
        """Exchange messages with the connected SuperNodes before a round; by default none."""

    def told(self, node: int) -> Mapping[str, bool]:
        """Return further entries of a SuperNode's messages; by default none."""
        return {}

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the largest weight that a SuperNode's reply can have, if that is known."""
        return self.session.members.most_examples(node, training=training)

    # What a run leaves

    def weights(self) -> dict[str, NDArray[Any]]:  # of the model's types
        """Return the server's model after the last round, named as in ``first_arrays``.

        With personal models: each client's arrays, as ``"client-<number>.<name>"``.
        """
        own = {f"client-{one}.": arrays for one, arrays in sorted(self.own_arrays.items())}
        models = own if self.personal else {"": self.arrays}
        return {start + n: a.numpy() for start, one in models.items() for n, a in one.items()}

    def learnt(self) -> ArrayRecord:
        return self.arrays

    # The loop

    def begin(self, initial_arrays: ArrayRecord | None) -> None:
        self.arrays = self.first_arrays() if initial_arrays is None else initial_arrays
        own = vars(self).items()
        self._started = {n: copy.deepcopy(v) if isinstance(v, MUTABLE) else v for n, v in own}
        self.summary()

    def round(self, server_round: int) -> RoundReport:
        session = self.session
        grid, config = session.exchange.grid, ConfigRecord(dict(self._config))
        messages = self.configure_train(server_round, self.arrays, config, grid)
        self.arrays = self.aggregate_train(server_round, self._relayed(messages))[0] or self.arrays
        config = ConfigRecord({keys.COUNTING: self.counting} if self.counting else {})
        config.update(self._evaluate_config)
        if session.is_due(server_round):
            config[keys.CHECKPOINT], config[keys.RUN_TOKEN] = True, session.run
        messages = self.configure_evaluate(server_round, self.arrays, config, grid)
        self.aggregate_evaluate(server_round, self._relayed(messages))
        gone = {NOT_CONNECTED: np.array(sorted(session.members.absent), np.int64)}
        used = {client for reply in self._usable for client in reply.clients} - self._failed.keys()
        fields: dict[str, Any] = self.report_fields(*self.means)
        return self.report(
            server_round,
            session.participation(used, failed=self._failed, left_out=gone),
            asked=sum(len(local) or 1 for local in session.asked.values()),
            # A SuperNode that names no clients is one
            answered=len(used) + sum(not reply.clients for reply in self._usable),
            skipped="" if self._usable else f"none of {len(session.asked)} {UNUSABLE}",
            **fields,
        )

    def _relayed(self, messages: Iterable[Message]) -> Iterable[Message]:
        exchange, timeout = self.session.exchange, self.session.timeout
        return exchange.relay(messages, server_round=self._number, timeout=timeout).values()

    # Flower's round, step by step: a wrapper of Flower's calls these in a loop of its own

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        session = self.session
        self._number, self._is_averaged, self.arrays = server_round, False, arrays
        self.means = MetricRecord(), MetricRecord()
        if server_round == 1:
            self.own_arrays = {}
        if not session.is_open or session.exchange.grid is not grid:
            session.open(grid, session.timeout, session.rounds)
        session.gather(server_round, "no SuperNode can take part")
        self.prepare(server_round)
        drawn = session.participants(server_round, session.hosted())
        messages = super().configure_train(server_round, arrays, config, grid_of([*drawn]))
        self._sent = self._written(messages, drawn, wants_rows=not self.is_weighted_sum)
        session.asked = {node: drawn[node] for node in self._sent}
        return [*self._sent.values()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the usable replies. Without any, the model stays as it was."""
        asked = {node: [*local] for node, local in self.session.asked.items()}
        self._usable, self._failed = self._checked(self._came(replies), self.arrays, asked)
        self._count()
        return (self._combined(self._usable), self.means[0]) if self._usable else (None, None)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.arrays, session = arrays, self.session
        nodes = session.exchange.nodes(session.min_nodes, session.timeout)
        present, messages = session.members.present(nodes), list[Message]()
        if present:  # Flower would wait for one without an end
            grid = grid_of([*present])
            messages = [*super().configure_evaluate(server_round, arrays, config, grid)]
        self._sent = self._written(messages, present)
        return [*self._sent.values()]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        came = self._came(replies)
        said = {
            n: no_content(one) or read_entry(NOT_WRITTEN, one.content) for n, one in came.items()
        }
        self._unsaved = unsaved(self._sent, said)
        usable = [reply.message for reply in self._checked(came, None)[0]]
        measured = super().aggregate_evaluate(server_round, usable) if usable else None
        self.means = self.means[0], measured or MetricRecord()
        self.counts = added(read_counts(reply.content, *self.counted) for reply in usable)
        return measured

    def summary(self) -> None:
        super().summary()
        how = self.session.min_nodes, self.session.share, self.session.seed
        LOG.info("wait for %d SuperNodes; %g of the clients train, drawn by seed %d", *how)

    # Checkpoints

    def clients_save(self, server_round: int) -> dict[int, str]:
        return self._unsaved

    def state(self) -> dict[str, object]:
        # Flower's strategies, such as FedAdam with its moments, have no checkpoint method
        return {
            "strategy": {
                name: value
                for name, value in vars(self).items()
                if name not in NOT_SAVED and not _same(value, self._started.get(name))
            },
            "arrays": self.arrays,
            "own-arrays": self.own_arrays,
        }

    def load_state(self, state: StateDict) -> None:
        vars(self).update(state["strategy"])
        # Averaging may have changed their type: FedAdam's is wider than the first model's.
        forms = [(name, tuple(array.shape)) for name, array in self.arrays.items()]
        for saved in (state["arrays"], *state["own-arrays"].values()):
            if (shapes := [(name, tuple(array.shape)) for name, array in saved.items()]) != forms:
                raise ValueError(f"its arrays are {shapes}, this run's are {forms}")
        self.arrays, self.own_arrays = state["arrays"], state["own-arrays"]
        self.session.members.absent |= set(state[BOUND])

    # Helpers

    def _combined(self, replies: list[ClientReply]) -> ArrayRecord | None:
        why = "" if self.robust is None else too_few(self.robust, len(replies))
        if why and len(replies) != self._warned:
            self._warned = len(replies)
            LOG.warning("round %d: no protection from hostile clients: %s", self._number, why)
        combined = self.combine(replies)
        if not self._is_averaged:
            for what, unused in (("central_noise", self.central_noise), ("average", self.robust)):
                if unused is not None:
                    made = f"{type(self).__name__}.combine without ReportedFedAvg.combine"
                    raise ValueError(f"{what} has no effect with {made}")
            contents = [reply.message.content for reply in replies]
            trained = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
            self.means = trained, MetricRecord()
        if combined is None or isinstance(combined, ArrayRecord):
            return combined
        if not combined or not all(isinstance(key, int) for key in combined):
            return checked_model(cast(Arrays, combined), self.arrays, "combine")
        if not self.personal:
            raise ValueError("combine gives arrays by client: it needs personal = True")
        by_client = cast(Mapping[int, Arrays], combined)
        if strangers := sorted(by_client.keys() - self.session.members.bound.keys()):
            raise ValueError(f"combine: arrays for clients {strangers!s:.60}, unknown here")
        self.own_arrays |= {
            client: checked_model(arrays, self.arrays, f"combine: client {client}")
            for client, arrays in by_client.items()
        }
        return None

    @property
    def is_weighted_sum(self) -> bool:
        """Whether the method needs only the weighted sum of the clients' arrays."""
        # Each class on the way must say so: what a subclass overrides needs what its author says
        makers = [c for c in type(self).__mro__ if vars(c).keys() & {"combine", "aggregate_train"}]
        sums = all(vars(c).get("weighted_sum", c in OF_THE_MEAN) for c in makers)
        return sums and not self.personal and self.central_noise is None

    def _written(
        self,
        messages: Iterable[Message],
        asked: Mapping[int, Sequence[int]],
        *,
        wants_rows: bool = False,
    ) -> dict[int, Message]:
        """Write each message's clients, and order them, so that sums are reproducible."""
        members, sent = self.session.members, dict[int, Message]()
        for message in sorted(messages, key=lambda one: members.place(one.metadata.dst_node_id)):
            node = message.metadata.dst_node_id
            clients = asked.get(node, ())
            has_own = any(client in self.own_arrays for client in clients)
            has_rows = has_own and len(clients) > 1
            own = [self.own_arrays.get(client, self.arrays) for client in clients]
            # Flower builds all messages of a round around one content: what is changed for one
            # client would be changed for all.
            message.content = content = own_records(message.content)
            if has_own:
                content[self.arrayrecord_key] = stacked(own) if has_rows else own[0]
            are_some = len(clients) < len(members.clients.get(node, ()))
            request = Asked(
                np.array(clients, np.int64) if are_some else None,
                has_rows=has_rows or None,
                wants_rows=(wants_rows and len(clients) > 1) or None,
            )
            entries = {**request.to_config(), **self.told(node)}
            message.content.config_records[self.configrecord_key].update(entries)
            sent[node] = message
        return sent

    def _came(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Return each SuperNode's first reply."""
        nodes = {message.metadata.message_id: node for node, message in self._sent.items()}
        came = dict[int, Message]()
        for reply in replies:
            # An error that the grid writes for a lost node comes from the grid's own id.
            sender = reply.metadata.src_node_id
            node = nodes.get(reply.metadata.reply_to_message_id, sender)
            if reply.has_error() or node == sender:
                came.setdefault(node, reply)
        return came

    def _count(self) -> None:
        """Count arrays both ways, as if each client had a SuperNode of its own."""
        # A SuperNode that names no clients is one
        count, asked = self.session.ledger.count, self.session.asked.values()
        count("down", "weights", sum(len(own) or 1 for own in asked) * self.arrays.count_bytes())
        for reply in self._usable:
            clients, model = len(reply.clients) or 1, reply.message.content[keys.ARRAYS]
            count("up", "weights", clients * model.count_bytes())
            if reply.beside:
                count("up", keys.EXTRAS, clients * reply.beside.count_bytes())

    def _checked(
        self,
        replies: Mapping[int, Message],
        model: ArrayRecord | None,
        asked: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> tuple[list[ClientReply], dict[int, str]]:
        """Check the replies; note and log every node and client that is left out."""
        most = partial(self.most_examples, training=model is not None)
        rows, timeout = model is not None and not self.is_weighted_sum, self.session.timeout
        wanted = Wanted(model, self.extras(), self.counted, rows)
        where = "evaluate: " if model is None else ""
        usable, rejected, failed = check_replies(self._sent, replies, wanted, timeout, most, asked)
        named = [replace(entry, reason=where + entry.reason) for entry in rejected]
        self.session.leave_out(named)
        log_rejected(LOG, self._number, "left out", named)
        return usable, failed


# Checks of replies, and of what ``combine`` returns ----------------------------------------------

# Flower trusts its clients: a reply without a key ends the run, one NaN spoils the model,
# and a first array of half precision makes the mean half precision.


def check_replies(
    sent: Iterable[int],
    replies: Mapping[int, Message],
    wanted: Wanted,
    timeout: float,
    most_examples: Callable[[int], int | None] = lambda node: None,
    asked: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> tuple[list[ClientReply], list[Rejected], dict[int, str]]:
    """Leave out replies that cannot be averaged; ``asked`` has the clients of each SuperNode.

    Returned are the usable ones, in the order of the clients, else in that of ``sent``; the nodes
    and clients that are left out; and why the training of clients that were asked does not count.
    """
    failed = dict[int, str]()
    said = dict[int, dict[Any, str]]()  # by node: the clients left out, None for the whole answer

    def read(node: int, reply: Message) -> dict[Any, tuple[Message, Form]]:
        """Return each client's part of an answer, and its form; one mean is a part of None."""
        clients: Sequence[Any] = (asked.get(node) if wanted.rows else None) or [None]
        _check_whole(reply, wanted, len(clients))
        named, unfit = read_entry(LEFT_OUT, reply.content), dict[Any, str]()
        parts = split_reply(reply, clients) if len(clients) > 1 else {clients[0]: reply}
        good = dict[Any, tuple[Message, Form]]()
        weight: float = 0
        for client in clients:
            try:
                if client not in parts:
                    raise MalformedReplyError(NO_ROW)
                size, form = _check_part(parts[client], wanted)
                good[client], weight = (parts[client], form), weight + size
            except Exception as error:  # whatever its content causes
                unfit[client] = unreadable(error)
        if (most := most_examples(node)) is not None and weight > most:
            raise MalformedReplyError(f"{keys.NUM_EXAMPLES} is {weight}, its SuperNode has {most}")
        said[node] = unfit | named
        return good

    late = dict.fromkeys(sent, f"no reply within {timeout:g} s")
    whole = read_replies(late, replies.items(), read)
    forms = Counter(form for own in whole.values.values() for _, form in own.values())
    common = max(forms, key=forms.__getitem__, default=frozenset())
    found, rejected = list[ClientReply](), whole.rejected
    for node, own in whole.values.items():
        hosted = dict.fromkeys(asked.get(node, ()))  # a set in their order
        for client, (part, form) in own.items():
            if form != common:
                odd = brief(sorted({name for name, _ in common ^ form}), 80)
                why = f"metrics are not as in the other replies: {odd}"
                said[node].setdefault(client, why)
                continue
            beside = part.content.get(keys.EXTRAS)
            if isinstance(beside, ArrayRecord):
                del part.content[keys.EXTRAS]  # Flower averages one record of arrays
            else:
                beside = ArrayRecord()
            found.append(ClientReply(tuple(hosted) if client is None else (client,), part, beside))
        for client, why in said[node].items():
            line = why if client is None else f"client {client}: {why}"
            rejected.append(Rejected(node, one_line(line)))
            if client in hosted:  # a SuperNode may name its own clients only
                failed[client] = why
    if wanted.rows:
        found.sort(key=lambda reply: (not reply.clients, reply.clients))
    return found, rejected, failed


def _check_whole(reply: Message, wanted: Wanted, clients: int) -> None:
    numbers = sum(map(math.prod, wanted.extras.values())) + counts_size(*wanted.counted)
    # float64 where float32 would do
    model = 0 if wanted.model is None else 2 * wanted.model.count_bytes()
    require_content(reply, clients * (reply_bytes(numbers) + model))
    if clients > 1 and keys.ROWS not in (reply.content.config_records.get(keys.CONFIG) or ()):
        raise MalformedReplyError(f"one mean for {clients} clients, expected a row of each")
    if wanted.model is None:
        return
    records, extras = reply.content.array_records, wanted.extras
    _require_names(
        "array records", sorted(records), [keys.ARRAYS, keys.EXTRAS] if extras else [keys.ARRAYS]
    )
    if extras:
        _require_names("extras", sorted(records[keys.EXTRAS]), sorted(extras))
    # Clients read arrays by position, and the first reply's order would become the mean's.
    _require_names("arrays", list(records[keys.ARRAYS]), list(wanted.model))


def _require_names(what: str, found: list[str], expected: list[str]) -> None:
    if found != expected:
        raise MalformedReplyError(f"{what} {brief(found, 80)}, expected {expected!s:.80}")


def _check_part(reply: Message, wanted: Wanted) -> tuple[float, Form]:
    """Check one client's answer, or a mean; return its weight, and its metrics' names and sizes."""
    content = reply.content
    if len(content.metric_records) != 1:
        raise MalformedReplyError(f"{len(content.metric_records)} metric records, expected 1")
    ((record, metrics),) = content.metric_records.items()
    weight = metrics.get(keys.NUM_EXAMPLES)
    if not (isinstance(weight, (int, float)) and 0 < weight <= keys.MAX_WEIGHT):
        raise MalformedReplyError(f"{keys.NUM_EXAMPLES} is {brief(weight, 40)}, must be positive")
    clients = metrics.get(keys.CLIENTS, 1)
    if wanted.rows and isinstance(clients, int) and clients > 1:
        raise MalformedReplyError(f"it speaks for {brief(clients, 20)} clients; one was asked")
    for name, value in metrics.items():
        share = metrics.get(f"has-{name}")
        if wanted.model is None and not np.isfinite(np.asarray(value, np.float64)).all():
            raise MalformedReplyError(f"{name} is {brief(value, 40)}")
        if isinstance(share, (int, float)) and isinstance(value, (int, float)):
            _require_within(f"has-{name}", share, 0, 1)
            _require_within(
                name,
                value,
                *((0, share) if name in RATIOS else (-keys.MAX_NUMBER, keys.MAX_NUMBER)),
            )
    if wanted.model is None:
        read_counts(content, *wanted.counted)
    else:
        for name, shape in wanted.extras.items():
            read_array(content, keys.EXTRAS, name, shape)
        for name, array in wanted.model.items():
            values = read_array(content, keys.ARRAYS, name, tuple(array.shape))
            if not np.can_cast(np.dtype(array.dtype), values.dtype):
                raise MalformedReplyError(f"{name} has type {values.dtype}, expected {array.dtype}")
    sizes = [(name, len(v) if isinstance(v, list) else -1) for name, v in metrics.items()]
    return weight, frozenset([*sizes, (record, -2)])  # no metric has this size


def _require_within(name: str, value: float, least: float, most: float) -> None:
    # A number that is not finite is named by the client, or refused as a measurement.
    if math.isfinite(value) and not least - ROUNDING <= value <= most + ROUNDING:
        allowed = f"must be from {least:g} to {most:g}"
        raise MalformedReplyError(f"{name} is {value:g}, {allowed}")


def checked_model(arrays: Arrays, model: ArrayRecord, what: str) -> ArrayRecord:
    """Check arrays that ``combine`` returned, and return them with the types of the model."""
    if arrays.keys() != model.keys():
        raise ValueError(f"{what}: arrays {list(arrays)!s:.80}, expected {list(model)!s:.80}")
    record = ArrayRecord()
    for name, wanted in model.items():
        held: Any = arrays[name]
        values = held.numpy() if isinstance(arrays, ArrayRecord) else np.asarray(held)
        if values.shape != tuple(wanted.shape):
            raise ValueError(f"{what}: {name} has shape {values.shape}, expected {wanted.shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"{what}: {name} has NaN or infinite values")
        dtype = np.dtype(wanted.dtype)
        # A mean of counters is no whole number.
        rounded = np.rint(values) if dtype.kind in "iu" and values.dtype.kind == "f" else values
        record[name] = encode_array(name, np.asarray(rounded, dtype))
    return record


# Averages that a few hostile clients cannot move far ----------------------------------------------

# Each client's answer counts once, whatever its weight or SuperNode: SuperNodes send a row for each
# client. A hostile SuperNode counts as many hostile clients as it hosts.

S = TypeVar("S", bound=ReportedFedAvg)
AVERAGES: dict[str, type[flower.FedAvg]] = {
    common.KRUM: flower.Krum,
    common.TRIMMED_MEAN: flower.FedTrimmedAvg,
    common.MEDIAN: flower.FedMedian,
}


# Any: each kind has options of its own
def make_robust(kind: type[S], how: RobustSection, *args: object, **options: Any) -> S:
    """Build a strategy with another average."""
    if how.robust == common.NO_DEFENCE:
        return kind(*args, **options)
    average = AVERAGES[how.robust]
    made: type[S] = type(f"{kind.__name__}With{average.__name__}", (kind, average), {})
    strategy: Any = made(*args, **options)
    strategy.robust = how
    # Set here, since not every base class passes on unknown arguments.
    strategy.num_malicious_nodes, strategy.beta = how.num_malicious, how.beta
    result: S = strategy
    return result


def too_few(how: RobustSection, answers: int) -> str:
    """Return why an average of so few answers protects nobody, or an empty string."""
    if how.robust == common.KRUM and answers < (needed := 2 * how.num_malicious + 3):
        named = f"strategy.num_malicious={how.num_malicious}"
        return f"krum with {named} needs {needed} clients, {answers} answered"
    if how.robust == common.TRIMMED_MEAN and not int(how.beta * answers):
        return f"strategy.beta={how.beta:g} leaves out none of {answers} clients"
    if how.robust == common.MEDIAN and answers < 3:
        return f"the median of {answers} clients is their mean"
    return ""


def _same(one: object, other: object) -> bool:
    if isinstance(one, MUTABLE) and type(one) is type(other):
        with suppress(Exception):  # of what cannot be compared
            np.testing.assert_equal(one, other)
            return True
    return one is other


# A client's answer ------------------------------------------------------------------------------


def _decoded(record: ArrayRecord) -> dict[str, NDArray[np.generic]]:
    return {name: decode_array(name, array, copy=True) for name, array in record.items()}


def split_reply(reply: Message, asked: Sequence[int]) -> dict[int, Message]:
    """Return each client's answer as the message that it would have sent alone."""
    numbers: list[int] = RowsBeside.read(reply.content).rows.tolist()
    if strangers := sorted(set(numbers) - set(asked)):
        raise MalformedReplyError(f"{keys.ROWS}: clients {brief(strangers, 60)} were not asked")
    contents = [RecordDict() for _ in numbers]
    for name, record in reply.content.items():
        if isinstance(record, ArrayRecord | MetricRecord):
            for content in contents:
                content[name] = type(record)()
            for key, value in record.items():
                rows = _rows(f"{name}/{key}", value, len(numbers))
                for content, row in zip(contents, rows, strict=True):
                    content[name][key] = row
    result = {client: copy.copy(reply) for client in numbers}
    for message, content in zip(result.values(), contents, strict=True):
        message.content = content
    return result


# Any: an array, a number or a list of numbers, as each of the rows
def _rows(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, Array):
        rows = decode_array(name, value)
        if rows.shape[:1] != (count,):
            raise MalformedReplyError(f"{name} has shape {rows.shape}, expected {count} rows")
        return [encode_array(name, np.asarray(row)) for row in rows]
    values = value if isinstance(value, list) else [value]
    size, rest = divmod(len(values), count)
    if rest or not size:
        raise MalformedReplyError(f"{name}: {len(values)} numbers for {count} clients")
    return values if size == 1 else [values[at : at + size] for at in range(0, len(values), size)]


def stacked(models: Sequence[ArrayRecord]) -> ArrayRecord:
    """Concatenate models, a row each."""
    # A model that many rows have is read once: a SuperNode that claims thousands of clients, which
    # all start from the common model, would else cost the server minutes.
    distinct, record = {id(model): model for model in models}, ArrayRecord()
    place = {key: row for row, key in enumerate(distinct)}
    rows = np.array([place[id(model)] for model in models])
    for name in models[0]:
        each = np.stack([decode_array(name, one[name]) for one in distinct.values()])
        record[name] = encode_array(name, each[rows])
    return record


def grid_of(nodes: list[int]) -> Grid:
    """Return a grid of these SuperNodes only, for Flower to choose from."""
    return cast("Grid", SimpleNamespace(get_node_ids=lambda: nodes))


def client_means(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Average the clients' measurements, for ``evaluate_metrics_aggr_fn`` of Flower's strategies.

    Flower's own mean of ``test`` also counts clients without test nodes, as 0. This mean is over
    the clients that have some; NaN if there are none. ``weighted_by`` is the weight's key in the
    replies; the result has no shares ``has-<name>``.
    """
    # Any: Flower's records hold numbers and lists of them
    records: list[Any] = [next(iter(reply.metric_records.values())) for reply in replies]
    weights = [one[weighted_by] for one in records]
    means = {
        name: np.average([one[name] for one in records], 0, weights)
        for name in records[0]
        if name != weighted_by
    }
    result = MetricRecord()
    for name in (name for name in means if not name.startswith("has-")):
        with np.errstate(invalid="ignore"):
            result[name] = (means[name] / means.get(f"has-{name}", 1.0)).tolist()
    return result
