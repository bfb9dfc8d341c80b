"""A day of nFedGNN with users who come and go: every message is written and counted, none trained.

The server, its session, its exchange and all messages are the project's own; only the users answer
zeros, and the grid knows who is there. Beside what is counted stands what ``day_formula`` expects.
Run alone: ``python -m benchmarks.population --case '["day", "own", 1000000, 1]'``.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from numpy.typing import NDArray
from safetensors.torch import save

from flower_graph import SplitGradientRelay
from flower_graph.client.adaptor import make_client_app
from flower_graph.flower_compat import ErrorCode, NumPyClient
from flower_graph.models import build_server_model
from flower_graph.ops.active_rows import pack
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.split_gradient_relay.common_layer import (
    CommonLayer,
    CommonSettings,
    LinearLayer,
)
from flower_graph.strategies.split_gradient_relay.common_messages import (
    CommonEnrolment,
    CopyReply,
    CopyRequest,
    GradientRequest,
    LatentReply,
    LatentRequest,
    SumReply,
)
from flower_graph.strategies.split_gradient_relay.messages import (
    EnrolmentReply,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.split_gradient_relay.summed import SummedGradientRelay
from flower_graph.wire.arrays import pack_integers, record_of
from flower_graph.wire.keys import CONFIG, USERS
from flower_graph.wire.numpy_client import Answer, Config, Parameters

HOURS = 24.0
FEATURES, HIDDEN, CLASSES = 512, 16, 7
FORMS = ("own", "averaged", "summed")
FIRST_ID = 1 << 32  # of the SuperNodes; Flower's own parts have low numbers
LABELLED = 140


@dataclass(frozen=True)
class Day:
    """Who is there when: SuperNodes open sessions at random, most of them in the evening."""

    supernodes: int
    each: int = 1  # users of a SuperNode
    rounds: int = 24  # in equal steps, the first half a step after midnight
    share: float = 0.1  # of all users that a round asks
    visits: float = 4.0  # sessions that a SuperNode opens in a day, on average
    stay: float = 1.5  # mean hours of a session, exponential
    swing: float = 0.8  # how much more often than on average at the busiest hour
    busiest: float = 20.0  # hour
    answer: float = 1 / 60  # hours that an answer takes: whose sessions end before are lost
    newcomers: float = 0.1  # share of the SuperNodes that open their first session today

    @property
    def users(self) -> int:
        """Count the users."""
        return self.supernodes * self.each

    @property
    def times(self) -> NDArray[np.float64]:
        """Give the hours at which rounds begin, ``[r]``."""
        return (np.arange(self.rounds) + 0.5) * HOURS / self.rounds


class There(NamedTuple):
    """Which SuperNodes are there when a round begins, and which of them when answers are due."""

    begins: NDArray[np.bool_]  # [r, m]
    answers: NDArray[np.bool_]  # [r, m]


def drawn(day: Day, seed: int) -> There:
    """Draw all sessions of a day, and look who has one at each round's begin and end."""
    rng = np.random.default_rng(seed)
    m, before = day.supernodes, 20 * day.stay  # sessions that began earlier have ended
    since = np.where(rng.random(m) < day.newcomers, rng.uniform(0, HOURS, m), -before)
    most = day.visits / HOURS * (1 + day.swing)  # at the busiest hour; thinned below
    count = rng.poisson(most * (HOURS + before), m)
    host = np.repeat(np.arange(m), count)
    start = rng.uniform(-before, HOURS, host.size)
    often = 1 + day.swing * np.cos(2 * np.pi * (start - day.busiest) / HOURS)
    kept = (rng.random(host.size) * (1 + day.swing) < often) & (start >= since[host])
    host, start = host[kept], start[kept]
    end = start + rng.exponential(day.stay, host.size)
    begins = np.zeros((day.rounds, m), np.bool_)
    answers = begins.copy()
    for number, now in enumerate(day.times):
        is_on = (start <= now) & (end > now)
        begins[number, host[is_on]] = True
        answers[number, host[is_on & (end > now + day.answer)]] = True
    return There(begins, answers)


class DayGrid(InProcessGrid):
    """SuperNodes that are there in some rounds only; who leaves in the middle does not train."""

    def __init__(self, day: Day, there: There, *, shares: bool = True) -> None:
        layers: dict[int, int] = {}
        self._each, self._shares = day.each, shares  # shares: whether equal answers are made once
        self._answers: dict[tuple[object, ...], RecordDict] = {}
        app = make_client_app(lambda context: Quiet(context, day.each, layers))
        super().__init__(app, num_supernodes=1)
        self._there = there
        self.round = 0  # of the day, from 0
        self.messages: Counter[str] = Counter()  # with content, by type and direction
        self.client_seconds = 0.0

    def get_node_ids(self) -> list[int]:
        """Give the SuperNodes that are there as the round begins."""
        found: list[int] = (FIRST_ID + np.flatnonzero(self._there.begins[self.round])).tolist()
        if not found:  # the server would wait for somebody to come
            raise ValueError(f"round {self.round + 1}: nobody is there; take more SuperNodes")
        return found

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Have those answer that are still there; count what is sent both ways."""
        ids = []
        for message in messages:
            ids.append(self._number(message))
            reply = self._answered(message)
            self._count("down", message)
            self._count("up", reply)
            self._number(reply)
            self._replies[ids[-1]] = reply
        return ids

    def _answered(self, message: Message) -> Message:
        number = message.metadata.dst_node_id - FIRST_ID
        leaves = not self._there.answers[self.round, number]
        if leaves and message.metadata.message_type.startswith("train"):
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "it has left"), reply_to=message)
        started = time.process_time()
        asked = self._asked(message)
        if asked in self._answers:
            reply = Message(self._answer(asked, number), reply_to=message)
        else:
            context = Context(self.run.run_id, number, {}, RecordDict(), {})
            reply = self._handle(message, context)
            if reply.has_error():  # of this file: it is to end the run
                raise RuntimeError(reply.error.reason)
            if asked:
                self._answers[asked] = reply.content
        self.client_seconds += time.process_time() - started
        return reply

    def _asked(self, message: Message) -> tuple[object, ...]:
        """Return what an answer depends on, but for its users' numbers; nothing if on more."""
        kind = message.metadata.message_type
        config = record_of(message.content, CONFIG, ConfigRecord) or ConfigRecord()
        if not self._shares or "measured" in config or kind not in ("query", "train"):
            return ()
        if kind == "query":
            return (kind,)
        users = config[USERS]
        assert isinstance(users, bytes)
        return kind, message.metadata.group_id, len(users), config["send-weights"]

    def _answer(self, asked: tuple[object, ...], number: int) -> RecordDict:
        """Give the answer that others gave; an enrolment has the SuperNode's own users."""
        content = self._answers[asked]
        if asked != ("query",):
            return content
        users = np.arange(number * self._each, (number + 1) * self._each)
        record = record_of(content, CONFIG, ConfigRecord) or ConfigRecord()
        given = dict(record) | {USERS: pack_integers(users)}
        return RecordDict({CONFIG: ConfigRecord(given)})

    def _count(self, direction: str, message: Message) -> None:
        if message.has_content():
            self.messages[f"{message.metadata.message_type} {direction}"] += 1


class Quiet(NumPyClient):
    """Users of a SuperNode who answer zeros of the right shape."""

    actions = ("add_up", "copy_layer", "finish")

    def __init__(self, context: Context, each: int, layers: dict[int, int]) -> None:
        self._number, self._layers = context.node_id, layers  # the round of each SuperNode's layer
        self.users = np.arange(self._number * each, (self._number + 1) * each)

    def get_properties(self, config: Config) -> Config:
        """Say which users are here."""
        entries = self.users, [FEATURES, HIDDEN], 0
        # Only where all have one layer the request says what is dropped of it.
        if "dropout" in config:
            return CommonEnrolment(*entries).to_config()
        return EnrolmentReply(*entries).to_config()

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Answer with latent vectors, and weights where they are asked for."""
        if "measured" in config:
            return self._common(LatentRequest.from_numpy(parameters, config))
        request = RelayRequest.from_numpy(parameters, config)
        reply = RelayReply(request.server_round, np.zeros_like(request.gradient))
        if request.send_weights:
            reply.weight_sum = np.zeros((FEATURES, HIDDEN), np.float32)
            reply.holders = np.zeros(FEATURES, np.int64)
        return reply.to_numpy()

    def _common(self, request: LatentRequest) -> Answer:
        self._layers[self._number] = request.advance.layer_round
        reply = LatentReply(request.server_round, request.advance.layer_round)
        if request.trains:
            reply.latent = np.zeros((request.users.size, HIDDEN), np.float32)
        if request.measured.size:
            reply.measured = np.zeros((request.measured.size, HIDDEN), np.float32)
        return reply.to_numpy(request.users.size)

    def add_up(self, parameters: Parameters, config: Config) -> Answer:
        """Answer with a sum of gradients."""
        request = GradientRequest.from_numpy(parameters, config)
        total = np.zeros((FEATURES, HIDDEN), np.float32)
        return SumReply(request.server_round, total).to_numpy(request.users.size)

    def copy_layer(self, parameters: Parameters, config: Config) -> Answer:
        """Answer with a layer and its optimiser."""
        settings = CopyRequest.from_config(config).settings
        data = np.frombuffer(layer_copy(settings), np.uint8)
        return CopyReply(self._layers[self._number], data.reshape(-1, 4)).to_numpy()

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        """Forget nothing."""
        return [], 1, {}


@lru_cache
def layer_copy(settings: CommonSettings) -> bytes:
    """Write a layer and its optimiser as a SuperNode sends them."""
    rows = pack(torch.ones(1, FEATURES), bias=settings.bias)
    layer = LinearLayer(rows, torch.zeros(1, dtype=torch.int64), settings)
    return save(CommonLayer.start(layer, settings))


@dataclass
class Counted:
    """What a day's messages were."""

    messages: dict[str, int]  # by type and direction
    bytes: dict[str, int]  # by direction, as the server's exchange counts them
    answered: int  # users that a round used, added up
    voided: int  # rounds in which nobody stepped
    seconds: float  # the processor's, of the server and the exchange


def strategy_of(form: str, day: Day) -> SplitGradientRelay | SummedGradientRelay:
    """Make the server of a form, for a graph without edges: nothing is to be learnt."""
    node = torch.arange(day.users)
    data = SimpleNamespace(
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=node % CLASSES,
        train_mask=node < LABELLED,
    )
    model = build_server_model("gcn", hidden=HIDDEN, heads=1, classes=CLASSES, dropout=0.0, seed=0)
    if form == "summed":
        more: dict[str, Any] = {"evaluate_every": day.rounds + 2}
        return SummedGradientRelay(
            data, model, latent_size=HIDDEN, participation=day.share, feature_dropout=0.5, **more
        )
    every = int(form == "averaged")
    return SplitGradientRelay(
        data, model, latent_size=HIDDEN, participation=day.share, average_every=every
    )


def simulate(form: str, day: Day, there: There) -> Counted:
    """Run a day's rounds, and count until the last has ended."""
    grid, strategy = DayGrid(day, there), strategy_of(form, day)
    reports, started = list[RoundReport](), time.process_time()
    ended: list[Counted] = []

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        gc.collect()
        grid.round = min(report.round, day.rounds - 1)
        if report.round == day.rounds:
            answered = sum(one.answered for one in reports)
            voided = sum(bool(one.skipped) for one in reports)
            spent = time.process_time() - started - grid.client_seconds
            wire = strategy.session.ledger.wire
            ended.append(Counted(dict(grid.messages), wire, answered, voided, spent))

    gc.freeze()
    gc.disable()  # within a round, where each collection would look at all open messages
    # One round more, so that the last of the day is one like the others.
    strategy.start(
        grid,
        num_rounds=day.rounds + 1,
        on_round=on_round,
        should_stop=lambda number, _: number >= day.rounds,
    )
    gc.enable()
    return ended[0]
