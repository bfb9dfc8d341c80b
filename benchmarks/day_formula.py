"""What a day of nFedGNN costs by formulas: expected messages and bytes, of any number of users.

A SuperNode's sessions are a Poisson process whose rate ``lambda(t)`` follows the hour, and last an
exponential time of mean ``L``. So it has a Poisson number of open sessions, whose mean ``m(t)``
solves ``m' = lambda - m / L``; of those open at ``t`` a share ``exp(-d / L)`` is open at ``t + d``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from benchmarks.day import FEATURES, FIRST_ID, HIDDEN, HOURS, Day, DayGrid, There, layer_copy
from flower_graph.flower_compat import message_to_proto
from flower_graph.strategies.split_gradient_relay.common_layer import CommonSettings
from flower_graph.strategies.split_gradient_relay.common_messages import (
    Advance,
    CommonQuestion,
    CopyRequest,
    GradientRequest,
    LatentRequest,
)
from flower_graph.strategies.split_gradient_relay.messages import EnrolmentRequest, RelayRequest
from flower_graph.strategies.split_gradient_relay.users import UserSettings
from flower_graph.wire.fields import Resume
from flower_graph.wire.ledger import count_bytes

RUN = "0" * 32
OWN = UserSettings(HIDDEN, False, 5e-4, 0, "holders")
COMMON = CommonSettings(HIDDEN, False, 5e-4, 0, 0.5)
JOINED = 4_800  # moments at which newcomers come, for the mean over them
NUMBER = 4  # bytes
MATRICES = {  # arrays [f, h] of float32 that a kind of message has
    "latent+sum down": 1,
    "latent+copy down": 3,
    "latent+both down": 4,
    "add up up": 1,
    "copy up": 3,
}

Floats = NDArray[np.float64]


# Bytes of a message -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Bytes of a kind of message about ``p`` users, at least one: ``fixed + user p``."""

    fixed: int
    user: int
    frame: int  # bytes that Flower's protobuf adds to a message about one user

    def of(self, messages: float, users: float) -> float:
        """Return the bytes of so many messages about so many users together."""
        return self.fixed * messages + self.user * users


def sizes() -> dict[str, Size]:
    """Write a message of each kind about 1, 2 and 1,000 users, have it answered, and count."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for each in (1, 2, 1_000):
        day = Day(1, each, rounds=1)
        grid = DayGrid(day, There(np.ones((1, 1), np.bool_), np.ones((1, 1), np.bool_)))
        for name, (kind, content) in _requests(np.arange(each)).items():
            message = Message(content, FIRST_ID, kind, ttl=1.0, group_id="1")
            (reply,) = grid.pull_messages(grid.push_messages([message]))
            for way, one in (("down", message), ("up", reply)):
                both = count_bytes(one.content), message_to_proto(one).ByteSize()
                found.setdefault(f"{name} {way}", {})[each] = both
    return {name: _line(name, at) for name, at in found.items()}


def _line(name: str, at: Mapping[int, tuple[int, int]]) -> Size:
    """Fit the line, and refuse a message whose size is none."""
    one, two = at[1][0], at[2][0]
    size = Size(2 * one - two, two - one, at[1][1] - one)
    if size.of(1, 1_000) != at[1_000][0]:
        raise RuntimeError(f"{name}: bytes are no line in the number of users: {at}")
    return size


def sketched(size: Mapping[str, Size], features: int) -> dict[str, Size]:
    """Return the sizes of messages where users hash their features into fewer numbers."""
    fewer = NUMBER * HIDDEN * (FEATURES - features)
    return {n: replace(s, fixed=s.fixed - MATRICES.get(n, 0) * fewer) for n, s in size.items()}


def _requests(users: NDArray[np.int64]) -> dict[str, tuple[str, RecordDict]]:
    """Give the type and content of a message of each kind."""
    p, weights = users.size, np.zeros((FEATURES, HIDDEN), np.float32)
    gradient, rounds = np.zeros((p, HIDDEN), np.float32), np.ones(p, np.int64)
    copy = np.frombuffer(layer_copy(COMMON), np.uint8).reshape(-1, 4)
    relay = RelayRequest(2, users, gradient, rounds, 0.1, OWN, run=RUN)
    mean = RelayRequest(2, users, gradient, rounds, 0.1, OWN, weights, 1, True, False, RUN)
    first = RelayRequest(2, users, gradient, rounds, 0.1, OWN, None, 0, True, False, RUN)
    total: dict[str, Any] = {"has_total": True, "total": weights}
    steps = {
        "latent": Advance(2, 1, 0.1),
        "latent+sum": Advance(2, 1, 0.1, **total),
        "latent+copy": Advance(2, 1, 0.1, copy=copy),
        "latent+both": Advance(2, 1, 0.1, **total, copy=copy),
    }
    nobody = np.zeros(0, np.int64)
    idle = LatentRequest(2, nobody, nobody, COMMON, Advance(2, 1, 0.1), trains=False, run=RUN)
    summed = {
        name: ("train", LatentRequest(2, users, nobody, COMMON, step, run=RUN).to_record())
        for name, step in steps.items()
    }
    return {
        "question": ("query", EnrolmentRequest(OWN, Resume(RUN)).to_record()),
        "relay": ("train", relay.to_record()),
        "relay+weights": ("train", first.to_record()),
        "relay+mean": ("train", mean.to_record()),
        "common question": ("query", CommonQuestion(COMMON, Resume(RUN)).to_record()),
        **summed,
        "idle": ("train", idle.to_record()),
        "add up": ("train.add_up", GradientRequest(2, users, gradient, 1, COMMON).to_record()),
        "copy": ("train.copy_layer", CopyRequest(COMMON).to_record()),
    }


# Who is there ------------------------------------------------------------------------------------


class Presence(NamedTuple):
    """Chances of a SuperNode at each round ``[r]``, and of ever being seen."""

    there: Floats
    stays: Floats  # there, and still there when the answer is due
    new: Floats  # there, and not in the round before
    back: Floats  # new, and there in the round before that
    seen: float


def open_sessions(day: Day, t: Floats) -> Floats:
    """Return the mean number of open sessions of a SuperNode that has always been there."""
    omega = 2 * np.pi / HOURS
    lag, angle = omega * day.stay, omega * (t - day.busiest)
    wave: Floats = (np.cos(angle) + lag * np.sin(angle)) / (1 + lag**2)
    return day.visits * day.stay / HOURS * (1 + day.swing * wave)


def presence(day: Day) -> Presence:
    """Work out the chances, over all moments at which newcomers come."""
    t, stay = day.times, day.stay
    joined = (np.arange(JOINED) + 0.5)[:, None] * HOURS / JOINED
    before = open_sessions(day, joined) * np.exp(-np.maximum(t - joined, 0) / stay)
    late = np.where(t >= joined, open_sessions(day, t) - before, 0.0)
    m = np.concatenate([open_sessions(day, t)[None], late])  # [g, r]
    weight = np.full(m.shape[0], day.newcomers / JOINED)
    weight[0] = 1 - day.newcomers
    left = np.exp(-HOURS / day.rounds / stay)
    zero = np.zeros((m.shape[0], 1))
    last = np.concatenate([zero, m[:, :-1]], 1)  # [g, r] open at the round before
    fresh = m - last * left  # of those open now, who were not open then
    earlier = np.concatenate([zero, last[:, :-1]], 1)
    was_fresh = np.concatenate([zero, fresh[:, :-1]], 1)
    off = np.exp(-last)  # not there in the round before; nor in the one before that:
    off_twice = np.exp(-earlier - was_fresh)
    comes = 1 - np.exp(-fresh)
    return Presence(
        weight @ (1 - np.exp(-m)),
        weight @ (1 - np.exp(-m * np.exp(-day.answer / stay))),
        weight @ (off * comes),
        weight @ ((off - off_twice) * comes),
        float(weight @ (1 - np.exp(-fresh.sum(1)))),
    )


# What travels ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Messages by type and direction, bytes by direction, users whose answers were used."""

    messages: dict[str, float]
    bytes: dict[str, float]
    answered: float


def expected(form: str, day: Day, size: Mapping[str, Size]) -> Expected:
    """Return what a day of a form is expected to send."""
    here = presence(day)
    return _summed(day, here, size) if form == "summed" else _relayed(form, day, here, size)


def _asked(day: Day) -> float:
    """Return the chance that a round draws at least one of a SuperNode's users."""
    return float(1 - (1 - day.share) ** day.each)


def _relayed(form: str, day: Day, here: Presence, size: Mapping[str, Size]) -> Expected:
    m, asked, users = day.supernodes, _asked(day), day.each * day.share
    down, up = m * here.there, m * here.stays  # [r]
    kinds = ["relay"] * day.rounds
    if form == "averaged":  # there is no mean before the first round
        kinds = ["relay+weights", *["relay+mean"] * (day.rounds - 1)]
    seen = m * here.seen
    sent = {"down": size["question down"].of(seen, 0), "up": 0.0}
    sent["up"] = size["question up"].of(seen, seen * day.each)
    for kind, asks, answers in zip(kinds, down, up, strict=True):
        sent["down"] += size[f"{kind} down"].of(asks * asked, asks * users)
        sent["up"] += size[f"{kind} up"].of(answers * asked, answers * users)
    messages = {
        "query down": seen,
        "query up": seen,
        "train down": float(down.sum() * asked),
        "train up": float(up.sum() * asked),
    }
    return Expected(messages, sent, float(up.sum() * users))


def _summed(day: Day, here: Presence, size: Mapping[str, Size]) -> Expected:
    """Count where nobody leaves in the middle of a round: else nobody steps."""
    m, asked, users = day.supernodes, _asked(day), day.each * day.share
    seen, adds, whole = m * here.seen, m * here.there.sum() * asked, m * here.there.sum() * users
    trains, copies = _advances(m, here, asked)
    # Of those who are asked ahead some have no user in the round, and send no latent vectors.
    every = float(sum(number.sum() for number in trains.values()))
    idle = float(m * here.there.sum() * (1 - asked))
    vectors = (every - idle) * users / asked
    sent = {
        "down": size["common question down"].of(seen, 0) + size["latent down"].user * vectors,
        "up": size["common question up"].of(seen, seen * day.each) + size["idle up"].of(idle, 0),
    }
    sent["down"] += sum(size[f"{kind} down"].of(n.sum(), 0) for kind, n in trains.items())
    sent["up"] += size["latent up"].of(every - idle, vectors)
    for way in sent:
        sent[way] += size[f"add up {way}"].of(adds, whole) + size[f"copy {way}"].of(copies, 0)
    each = {"query": seen, "train": every, "train.add_up": adds, "train.copy_layer": copies}
    messages = {f"{name} {way}": float(number) for name, number in each.items() for way in sent}
    return Expected(messages, {way: float(size) for way, size in sent.items()}, float(whole))


def _advances(m: int, here: Presence, asked: float) -> tuple[dict[str, Floats], float]:
    """Return how many SuperNodes each round ``[r]`` asks for latent vectors, by what they need.

    Besides, how many copies of the layer are asked for: one for all who need it at once.
    """
    there, new, back = m * here.there, m * here.new, m * here.back
    # Who is new and has users in the round is asked at once: it has the first weights, or lacks one
    # step, or needs a copy. A copy is of whoever is first among those who can go on: if that one
    # lacks the last step, the sum comes along, too.
    first, lacks = np.zeros_like(new), back * asked
    first[0] = new[0] * asked
    lacks[1:2] = new[1:2] * asked
    copied = new * asked - first - lacks
    copied[:2] = 0
    can = there - new + back
    behind = np.divide(back, can, out=np.zeros_like(back), where=can > 0)
    # All who are there are asked for the next round; who is new and was not asked needs a copy,
    # and the last sum.
    late = new * (1 - asked)
    late[0] = 0
    kinds = {
        "latent": first,
        "latent+sum": lacks + there - late,
        "latent+copy": copied * (1 - behind),
        "latent+both": copied * behind + late,
    }
    return kinds, float((1 - np.exp(-copied)).sum() + (1 - np.exp(-late)).sum())


def as_json(size: Mapping[str, Size]) -> dict[str, dict[str, int]]:
    """Write sizes as JSON can hold them."""
    return {name: asdict(one) for name, one in size.items()}
