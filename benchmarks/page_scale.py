"""Writes ``docs/scale.md``: what a hundred million users of one node each would cost.

Figures are formulas of what ``population``, ``trust`` and ``sums`` of ``results.json`` measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.day import FEATURES, HIDDEN, HOURS, Day
from benchmarks.day_formula import NUMBER, Expected, Size, expected, presence, sketched
from benchmarks.layout import table
from benchmarks.page_levels import levels_section
from flower_graph.records.rounds import format_bytes
from flower_graph.strategies.split_gradient_relay.config import StrategyConfig
from flower_graph.strategies.split_gradient_relay.masked_client import LEAST_FRACTION_BITS

Part = dict[str, Any]
USERS = 100_000_000
COHORTS = (1, 100, 1_000, 10_000)  # users of a SuperNode
SKETCHES = (64, 256)
HOUR = 3_600.0
# What one server is taken to have: no measurement, but what the walls are told for
MEMORY, CORE_DAY, LINE = 2.0**40, HOURS * HOUR, 10e9 / 8 * HOURS * HOUR

HEAD = """\
# A hundred million users, on paper

What nFedGNN would cost with 10⁸ users of one node each. `make bench` writes this page from
`benchmarks/results.json`; do not edit it. No such run was made: each figure is a formula, and the
constants in it were measured on one machine ([performance.md](reference/performance.md)). Days of
{users:,} users, simulated message by message, show that the formulas count right.
"""


@dataclass(frozen=True)
class Constants:
    """What was measured, by the letters that the page has."""

    size: Mapping[str, Size]
    message: float  # t_m: server's seconds of a message and its answer
    keep: float  # t_k: its seconds of a user in a round, besides the model
    model: float  # t_s: seconds of a user's node in the server's step and evaluation
    part: Part

    @classmethod
    def of(cls, part: Part) -> Constants:
        """Work out seconds of a message and of a user from two days that differ in both."""
        (one, sent, held), (other, fewer, kept) = (_seconds(e) for e in part["days"][:2])
        whole = sent * kept - fewer * held
        message, keep = (one * kept - other * held) / whole, (other * sent - one * fewer) / whole
        server = part["server"]
        model = server["step-seconds"] + server["judge-seconds"]
        size = {name: Size(**entry) for name, entry in part["sizes"].items()}
        return cls(size, message, keep, model, part)


def _seconds(entry: Part) -> tuple[float, float, float]:
    """Give the server's seconds of a simulated day, its messages down, and users times rounds."""
    counted, day = entry["counted"], Day(**entry["day"])
    asked = sum(n for name, n in counted["messages"].items() if name.endswith(" down"))
    return counted["seconds"], asked, float(day.users * day.rounds)


def scale_page(parts: dict[str, Part]) -> str:
    """Write the page; nothing where its parts were not measured."""
    if not {"population", "trust", "sums"} <= parts.keys():
        return ""
    known = Constants.of(parts["population"])
    users = max(Day(**entry["day"]).users for entry in known.part["days"])
    blocks = [HEAD.format(users=users).strip()]
    for section in (_constants, _days, _bytes, _time, _memory, _walls, _tree):
        blocks += section(known)
    supernodes = USERS // COHORTS[2]
    blocks += levels_section(supernodes, known.part["parties"], parts["trust"], parts["sums"])
    return "\n\n".join(blocks) + "\n"


# What was measured -------------------------------------------------------------------------------


def _constants(known: Constants) -> Iterator[str]:
    day, part, size = day_of(1), known.part, known.size
    here = presence(day)
    yield "## The day, and what was measured"
    yield (
        f"A day has *R* = {day.rounds} rounds; each asks a share *q* = {day.share:g} of the users, "
        f"of whom those answer who are there. A SuperNode opens {day.visits:g} sessions a day of "
        f"{day.stay:g} hours on average, most around {day.busiest:.0f}:00; a share of "
        f"{day.newcomers:g} opens its first one that day. On the mean of the rounds "
        f"*a* = {here.there.mean():.3f} are there, and of these *d* = {_leaves():.4f} leave within "
        f"the {day.answer * 60:.0f} minute that an answer takes. *N* users, *k* to a SuperNode; "
        f"*h* = {HIDDEN} latent numbers; *f* = {FEATURES} features."
    )
    ask, answer = size["relay down"], size["relay up"]
    users, opened = part["users"], part["open"]
    rows = [
        ("b↓", "request about p users", f"{ask.fixed} + {ask.user} p bytes"),
        ("b↑", "answer of p users", f"{answer.fixed} + {answer.user} p bytes"),
        ("b_F", "what Flower's protobuf adds to both", f"{ask.frame + answer.frame} bytes"),
        ("t_m", "server: a message and its answer", _micro(known.message)),
        ("t_k", "server: a user in a round, asked or not", _micro(known.keep)),
        ("t_s", "server: a node in the step and evaluation, degree 10", _micro(known.model)),
        ("t_u", "user: step and forward, 32 features active", _micro(users["seconds"])),
        ("m_n", "server: a SuperNode that is enrolled", _b(opened["supernode"])),
        ("m_v", "server: where a user is hosted", _b(opened["user"])),
        ("m_o", "server: a message that is open", _b(opened["message"])),
        ("m_r", "server: a user in a round that is open", _b(opened["user-in-round"])),
    ]
    rows += [("m_s", f"server: {name}, a user", _b(n)) for name, n in _server_bytes(known)]
    rows += [("m_u", f"user: {name}", _b(n)) for name, n in users["bytes"].items()]
    yield table(("", "constant", "measured"), rows)
    yield (
        "Bytes are those of messages as the server's ledger counts them; seconds are of one "
        "processor core, of the server without users' work. *t_m* and *t_k* solve the first two "
        "rows of the next table."
    )


def _server_bytes(known: Constants) -> list[tuple[str, float]]:
    return list(known.part["server"]["bytes"].items())


def _days(known: Constants) -> Iterator[str]:
    yield "## Formulas and a simulated day"
    yield (
        "Sessions begin at random, at a rate λ(t) by the hour, and last an exponential time of "
        "mean *L*: a SuperNode has a Poisson number of open sessions of mean *m(t)*, "
        "*m' = λ − m / L*; it is there with chance *1 − exp(−m)*, and still there after the time "
        "*δ* of an answer with *1 − exp(−m exp(−δ / L))*. A message goes to each SuperNode that is "
        "there and has a user whom the round draws. In the simulation the server, its session, its "
        "exchange and all messages are the real ones, the users answer zeros, and sessions are "
        "drawn one by one. Everybody enrols when first seen. *Chance* is the standard error of how "
        "often SuperNodes are there."
    )
    head = ("form", "users", "k", "messages", "by formula", "", "bytes", "by formula", "", "chance")
    yield table(head, (_day_row(entry) for entry in known.part["days"]))


def _day_row(entry: Part) -> Sequence[str]:
    counted, formula, day = entry["counted"], entry["expected"], Day(**entry["day"])
    messages, said = (sum(one["messages"].values()) for one in (counted, formula))
    size, told = (sum(one["bytes"].values()) for one in (counted, formula))
    return (
        entry["form"],
        f"{day.users:,}",
        f"{day.each:,}",
        f"{messages:,}",
        f"{said:,.0f}",
        f"{messages / said - 1:+.2%}",
        format_bytes(size),
        format_bytes(told),
        f"{size / told - 1:+.2%}",
        f"{entry['standard-error']:.2%}",
    )


# What 10⁸ users cost -----------------------------------------------------------------------------


def day_of(each: int, form: str = "own") -> Day:
    """Return the day of all users, so many of them to a SuperNode."""
    day = Day(USERS // each, each)
    return replace(day, answer=0.0) if form == "summed" else day


def _connected() -> float:
    """Return how many SuperNodes of one user are there on the mean of the rounds."""
    return float(USERS * presence(day_of(1)).there.mean())


def _leaves() -> float:
    """Return the share of those who are there that leaves before the answer is due."""
    here = presence(day_of(1))
    return float(1 - here.stays.sum() / here.there.sum())


def _forms(known: Constants) -> dict[str, tuple[str, Mapping[str, Size], str]]:
    """Give each form with the sizes of its messages, and what of them is the same for all users."""
    matrix = f"{NUMBER} f h"
    forms = {
        "own": ("own", known.size, "nothing"),
        "averaged, in each round": ("averaged", known.size, f"{matrix} up and down"),
        "summed": ("summed", known.size, f"{matrix} up and down, 3 · {matrix} for who was away"),
    }
    for few in SKETCHES:
        what = f"the same, f = {few}"
        forms[f"summed, sketch {few}"] = "summed", sketched(known.size, few), what
    return forms


def _bytes(known: Constants) -> Iterator[str]:
    yield "## Bytes a user and day"
    yield (
        "Up and down together, at SuperNodes of *k* users; per user *(M b) / N*, with *M* messages "
        "of each kind as above and *b* their bytes. With *k* = 1 the heads of messages weigh more "
        "than what they carry, and a matrix of *f h* numbers goes to each user; with many users at "
        "a SuperNode `own` has its *2 · 4 h* bytes for each answer and little else. With "
        "`average_every` = K answers have weights in each K-th round alone; a request has the mean "
        "where a user lacks the last one."
    )
    head = ("form", "a SuperNode's share of a message", *(f"k = {k:,}" for k in COHORTS))
    rows = []
    for name, (form, size, what) in _forms(known).items():
        days = [expected(form, day_of(k, form), size) for k in COHORTS]
        rows.append((name, what, *(_b(sum(day.bytes.values()) / USERS) for day in days)))
    yield table(head, rows)
    one = expected("own", day_of(1), known.size)
    ask, answer = (known.size[f"relay {way}"].of(1, 1) for way in ("down", "up"))
    asked, answered = one.messages["train down"] / USERS, one.answered / USERS
    seen = one.messages["query down"] / USERS
    yield (
        f"`own`, *k* = 1: R q a = {asked:.3f} requests of {ask:.0f} bytes a user, {answered:.3f} "
        f"answers of {answer:.0f} bytes, and an enrolment of "
        f"{known.size['question down'].of(1, 1) + known.size['question up'].of(1, 1):.0f} bytes "
        f"for the {seen:.0%} who are seen. A user's device computes {asked:.3f} · t_u = "
        f"{asked * known.part['users']['seconds'] * 1e6:.1f} µs a day, besides starting."
    )


def _asked(day: Expected) -> float:
    return sum(number for name, number in day.messages.items() if name.endswith(" down"))


def seconds(known: Constants, form: str, each: int) -> tuple[float, float, float]:
    """Return the server's seconds in a day: of messages, of users, of the model."""
    day = day_of(each, form)
    messages = _asked(expected(form, day, known.size))
    whole = USERS * day.rounds
    return known.message * messages, known.keep * whole, known.model * whole


def _time(known: Constants) -> Iterator[str]:
    yield "## Processor time at the server"
    yield (
        "Hours of one core in a day: *t_m M + t_k R N + t_s R N*, with *M* messages down. The "
        "first part is Python, message by message in one thread; the last is PyTorch on all cores."
    )
    head = ("form", "k", "messages a day", "of messages", "of users", "of the model", "cores")
    rows = []
    for form in ("own", "summed"):
        for k in COHORTS:
            spent = seconds(known, form, k)
            messages = _asked(expected(form, day_of(k, form), known.size))
            hours = (f"{one / HOUR:,.1f} h" for one in spent)
            rows.append(
                (form, f"{k:,}", f"{messages:,.0f}", *hours, f"{sum(spent) / CORE_DAY:.2f}")
            )
    yield table(head, rows)


def _memory(known: Constants) -> Iterator[str]:
    yield "## Memory by part"
    yield (
        "The server's, in the busiest round: *m_s N* and *m_v N* whatever *k* is, *m_n N / k* for "
        "SuperNodes, *m_o M_r* for the *M_r* messages that are open at once, and *m_r N* for the "
        "lists of who was asked and answered, which is of a round that asks all."
    )
    opened = known.part["open"]
    alike = [*_server_bytes(known), ("where users are hosted", opened["user"])]
    alike.append(("lists of a round", opened["user-in-round"]))
    rows = [
        (name, f"{_b(one)} N", *[format_bytes(one * USERS)] * len(COHORTS)) for name, one in alike
    ]
    enrolled = (format_bytes(opened["supernode"] * USERS / k) for k in COHORTS)
    rows.append(("SuperNodes", "m_n N / k", *enrolled))
    rows.append(("open messages", "m_o M_r", *(format_bytes(_open(known, k)) for k in COHORTS)))
    yield table(("part", "formula", *(f"k = {k:,}" for k in COHORTS)), rows)
    weights = sum(known.part["users"]["bytes"].values())
    yield (
        f"The users' own {format_bytes(weights)} each (weights, Adam's moments, features) are on "
        f"{USERS:,} devices; in a simulation on one machine they would be "
        f"{format_bytes(weights * USERS)}. With `summed` a SuperNode has one matrix and its "
        f"two moments for all its users, {format_bytes(3 * NUMBER * FEATURES * HIDDEN)}."
    )


def _open(known: Constants, each: int) -> float:
    """Return the bytes of the messages that are open at once, in the busiest round."""
    day = day_of(each)
    messages = presence(day).there.max() * day.supernodes * (1 - (1 - day.share) ** each)
    return float(known.part["open"]["message"] * messages)


# Walls -------------------------------------------------------------------------------------------


def walls(known: Constants, each: int) -> list[tuple[str, str, float]]:
    """Return resources of one server with the users at which each is spent, the first first."""
    day = day_of(each)
    one = expected("own", day, known.size)
    per_message = _asked(one) / USERS * known.message
    memory = sum(size for _, size in _server_bytes(known))
    opened = known.part["open"]
    memory += opened["user"] + opened["user-in-round"]
    memory += opened["supernode"] / each + _open(known, each) / USERS
    wire = max(one.bytes.values()) / USERS
    frames = (known.size["relay down"].frame) * _asked(one) / USERS
    per_user = day.rounds * (known.keep + known.model)
    found = [
        (
            "a day of one core for messages",
            f"{CORE_DAY:,.0f} s / (t_m M / N)",
            CORE_DAY / per_message,
        ),
        ("1 TiB of memory", "2⁴⁰ / (m_s + m_v + m_r + m_n / k + m_o M_r / N)", MEMORY / memory),
        (
            "a day of one core for users and model",
            "86,400 s / (R (t_k + t_s))",
            CORE_DAY / per_user,
        ),
        ("10 Gbit/s in one direction, all day", "1.08 · 10¹⁴ / (b M / N)", LINE / (wire + frames)),
    ]
    return sorted(found, key=lambda wall: wall[2])


def _walls(known: Constants) -> Iterator[str]:
    yield "## Where the first wall is"
    yield (
        "Users at which one server has spent what it has, in the form `own`. What a server has is "
        "an assumption: 1 TiB, a line of 10 Gbit/s, one core for each of the two kinds of work. "
        "Flower's SuperLink is not among the rows, since it was not measured with so many: at "
        f"*k* = 1 {_connected():,.0f} SuperNodes are connected to it at once, and each asks it "
        "for messages every few seconds."
    )
    for each in (COHORTS[0], COHORTS[2]):
        found = walls(known, each)
        yield f"With *k* = {each:,} users at a SuperNode the first wall is **{found[0][0]}**:"
        rows = ((what, formula, f"{users:.2g}") for what, formula, users in found)
        yield table(("what", "users =", "users"), rows)
    leaves = _leaves()
    most = math.log(2) / leaves
    asked = _connected() * day_of(1).share
    yield (
        "**`summed` has a wall of its own, long before these**: a SuperNode that has sent latent "
        "vectors and not its sum voids the step for all. With *A* SuperNodes in a round of which a "
        "share *d* leaves, a round counts with chance *(1 − d)^A*: at this *d* half of the rounds "
        f"with *A* = ln 2 / d = {most:.0f}, and none with the {asked:,.0f} that a round would ask "
        "at *k* = 1. It is for few SuperNodes that stay, each with many users."
    )
    yield (
        f"`summed` with masks: {known.part['parties']:,} parties are the most whose sums have room "
        f"in 64-bit words with {LEAST_FRACTION_BITS} fraction bits, pads and numbers up to "
        f"{StrategyConfig.limit:g} (`Ring.fit`). A SuperNode counts as two, so each would have to "
        f"host {2 * USERS // known.part['parties']:,} users; as one with keys of its own, half."
    )


def _tree(known: Constants) -> Iterator[str]:
    yield "## What a tree changes"
    yield (
        "One level of it is there: a SuperNode answers for all its users in one message, and sums "
        "what can be summed. From *k* = 1 to many users this happens to a day:"
    )
    head = ("k", "SuperNodes", "own: messages", "server, a day", "own: bytes", "summed: bytes")
    rows = []
    for k in COHORTS:
        own = expected("own", day_of(k), known.size)
        common = expected("summed", day_of(k, "summed"), known.size)
        rows.append(
            (
                f"{k:,}",
                f"{USERS // k:,}",
                f"{sum(own.messages.values()):,.0f}",
                f"{sum(seconds(known, 'own', k)) / HOUR:,.1f} h",
                format_bytes(sum(own.bytes.values())),
                format_bytes(sum(common.bytes.values())),
            )
        )
    yield table(head, rows)
    yield (
        "Heads of messages and the time that each takes fall as *1 / k*. Latent vectors and their "
        "gradients do not: the server's network needs each user's, so *2 · 4 h R q a N* bytes pass "
        "it whatever stands between; a second level would bundle them, and save nothing but "
        "messages. Sums are what a tree saves: with `summed` and `averaged` a matrix goes once to "
        "each SuperNode, and with further levels would go once to each of the uppermost alone. "
        "Further levels are not built."
    )


def _micro(value: float) -> str:
    return f"{value * 1e6:.2f} µs"


def _b(value: float) -> str:
    """Write bytes of one user, which may be few."""
    return f"{value:.0f} B" if value < 1024 else format_bytes(value)
