"""SuperNodes that attack once or all the time, and what each method makes of it."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from random import Random
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from hostile_grid import (
    CAMPAIGN,
    ENVELOPES,
    ERRORS,
    SHORT,
    Around,
    Attack,
    Attacked,
    Key,
    Method,
    Told,
    copied,
)
from mutations import (
    Mutation,
    accusing,
    by_hand,
    drawn,
    invented,
    leaving_out,
    replaced,
    withholding,
)

from flower_graph.errors import AlignmentError, MembershipError, StateLostError
from flower_graph.wire.arrays import read_array
from flower_graph.wire.client_errors import STATE_LOST
from flower_graph.wire.ledger import count_bytes, reply_bytes

OFTEN = 60  # messages of a type that are attacked
LOST = {
    "lost": f"{StateLostError.__name__}: there are no keys for the secure sum: enrol first",
    "lost, in 2 MB": f"{StateLostError.__name__} " + "x" * (2 << 20),
    "lost, after 2 MB": "x\n" * (1 << 20) + StateLostError.__name__,
}
# Claims that are well-formed and whose proof comes later
CHEATS = (
    *("prepare-seed-commitments", "prepare-share-commitments", "prepare-packets"),
    *("prepare-round-keys", "unmask-shares", "align-points"),
)
NUMBERS = (("few", 4, 10**6), ("many", 1000, 10**6), ("17,000", 17_000, 10**6), ("huge", 3, 2**62))


@dataclass(frozen=True)
class Campaign:
    """What a SuperNode does in a whole run."""

    where: str
    what: str
    plan: dict[Key, Attack | None] = field(repr=False)
    new_id: bool = False  # it comes back under another id whenever it has attacked

    @property
    def name(self) -> str:
        return f"{self.where}: {self.what}{', and back under another id' * self.new_id}"


def always(kind: str, *attacks: Attack) -> dict[Key, Attack | None]:
    """Attack every message of a type, in turn."""
    return {(kind, n + 1): attacks[n % len(attacks)] for n in range(OFTEN)}


def kinds_of(method: Method) -> dict[str, list[Key]]:
    """Give the types of messages of a run, each with its examples."""
    found: dict[str, list[Key]] = {}
    for key in method.clean.grid.examples:
        found.setdefault(key[0], []).append(key)
    return found


def campaigns(method: Method) -> list[Campaign]:
    """Give every campaign against a method, in the same order each time."""
    found: list[Campaign] = []
    for kind, keys in kinds_of(method).items():
        found += _errors(kind)
        found += _envelopes(kind)
        for key in keys:
            found += _claims(method, key)
    unique = {one.name: one for one in found}
    return [one for name, one in unique.items() if name]


def _errors(kind: str) -> Iterator[Campaign]:
    error = Told("an error", 7, "KeyError: 'x'")
    for what, reason in LOST.items():
        yield Campaign(kind, f"{what}, each time", always(kind, Told(what, STATE_LOST, reason)))
    yield Campaign(kind, "an error each time", always(kind, error), new_id=True)
    lost = Told("lost", STATE_LOST, LOST["lost"])
    yield Campaign(kind, "lost, each time", always(kind, lost), new_id=True)
    huge = Told("4 MB", 7, "\u202e" * (4 << 20))
    yield Campaign(kind, "an error of 4 M signs", {(kind, 1): huge})


def _envelopes(kind: str) -> Iterator[Campaign]:
    for way in ("500 times", "a replay", "another's content", "another's name", "no content"):
        yield Campaign(kind, f"{way}, each time", always(kind, Around(way)))


def _claims(method: Method, key: Key) -> Iterator[Campaign]:
    """Give what is done to a reply's entries, each time that it has them."""
    kind, example = key[0], method.clean.grid.examples[key]
    others, own = sorted(method.honest), method.clean.clients[0]
    changes: list[Mutation] = [invented(*how) for how in NUMBERS]
    changes += [invented("another's", 1, others[0])]
    changes += [invented("another's", 1, others[0], instead=True)]
    changes += [invented("17,000", 17_000, instead=True)]
    changes += [accusing(own, others), accusing(own, others[:1]), accusing(own, others, 9000)]
    changes += [accusing(own, [own, *others], 1), leaving_out(others)]
    changes += [Mutation("config/unmask-shares", "withheld", withholding)]
    held = [(record, name) for record in example for name in example[record]]
    cheats = [_spoilt(*place) for place in held if place[1] in CHEATS]
    lost = Told("lost", STATE_LOST, LOST["lost"])
    for change in [one for one in [*changes, *cheats] if _fits(one, method, key)]:
        yield Campaign(kind, f"{change.name}, each time", always(kind, change))
    for change in cheats:
        for new_id in (False, True):
            yield Campaign(kind, f"{change.name}, then lost", always(kind, change, lost), new_id)


def _spoilt(record: str, name: str) -> Mutation:
    wrong = replaced(record, name, lambda data: bytes(byte ^ 1 for byte in data))
    return Mutation(f"{record}/{name}", "wrong", wrong)


def _fits(change: Mutation, method: Method, key: Key) -> bool:
    """Whether a reply has what is changed."""
    try:
        change.apply(copied(method.clean.grid.examples[key]))
    except KeyError:
        return False
    return True


# Verdicts ----------------------------------------------------------------------------------------


def evicted(method: Method, outcome: Attacked) -> str:
    """Say which honest clients are gone, or had no part in the last two rounds; empty if none."""
    gone = sorted(method.honest - outcome.members), sorted(method.honest & outcome.excluded)
    idle = sorted(method.honest - outcome.answered)
    names = ("not known", "excluded", "without part in the last two rounds")
    found = [f"{name}: {who}" for name, who in zip(names, (*gone, idle), strict=True) if who]
    return "; ".join(found)


FACTOR = 2  # times what an honest reply of the allowed size costs
SLACK = 0.05  # seconds: a timer's and a collector's share
# Seconds and bytes: a client that a SuperNode may host stands in some ten tables. An honest one
# with 800 public nodes costs 1.7 ms.
EACH = 1e-4, 512


@lru_cache
def reading(size: int) -> tuple[float, int]:
    """Return seconds and bytes that an array of so many bytes costs a server that reads it."""
    array = Array(np.zeros(max(1, size // 4), np.float32))
    content = RecordDict({"arrays": ArrayRecord({"x": array})})
    best = math.inf
    tracemalloc.start()
    for _ in range(3):
        begun = time.process_time()
        count_bytes(content)
        np.array(read_array(content, "arrays", "x", tuple(array.shape)))
        best = min(best, time.process_time() - begun)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return best, peak


def costly(method: Method, outcome: Attacked, honest: Attacked | None = None) -> str:
    """Say what cost the server more than it may; empty if nothing did.

    Between two exchanges it may take twice the time and memory that it takes where nobody attacks
    and for an array of the most bytes that one of the replies that were attacked may have; and for
    as many clients as a reply says are here, as honest ones might be.
    """
    reference, found = (honest or method.reference).grid, list[str]()
    attacked = {kind for kind, _ in outcome.grid.plan}
    seconds, size = reading(max(reply_bytes(), *(reference.limits.get(k, 0) for k in attacked)))
    claims = max((getattr(one, "claims", 0) for one in outcome.grid.plan.values()), default=0)
    seconds, size = seconds + claims * EACH[0], size + claims * EACH[1]
    for kind, peak in outcome.grid.peaks.items():
        memory = FACTOR * (reference.peaks.get(kind, 0) + size)
        if peak > memory:
            found.append(f"{kind}: {peak >> 10} KiB, at most {memory >> 10}")
        allowed = FACTOR * (reference.seconds.get(kind, 0) + seconds) + SLACK
        if (spent := outcome.grid.seconds[kind]) > allowed:
            found.append(f"{kind}: {spent:.2f} s, at most {allowed:.2f}")
    return "; ".join(found)


def costly_again(method: Method, run: Callable[[], Attacked]) -> str:
    """Say what costs too much each time of five, in turns with runs that nobody attacks.

    Other work on the machine takes time, too, and makes both slower.
    """
    found = ""
    for _ in range(5):
        reading.cache_clear()
        honest = method.run({}, CAMPAIGN)
        if not (found := costly(method, run(), honest)):
            break
    return found


# Ends of names of what once evicted honest clients, or cost most
HARDEST = (
    *("prepare-packets: wrong, each time", "prepare-share-commitments: wrong, each time"),
    "17,000, each time",
)
INVENTED = "clients: "  # how attacks are called that claim clients whom nobody has
COUNTS = (
    *("tried", "refused", "proven", "harmless", "taken", "differs"),
    *("crashed", "evicted", "costly", "unnamed"),
)

T = TypeVar("T", Attack, Campaign)


@dataclass
class Tally:
    """What became of the attacks on one type of message.

    ``refused`` and ``harmless`` (the result is as without the attack) by name with the reason;
    ``taken``: well-formed, so that nobody can tell; ``crashed``: the run ended. ``proven`` are
    among the refused: a lie that comes out in a later message, in which the client takes part as
    if all were well. That sum is given up and the client excluded, so the result is not that of a
    run in which one reply never came. ``evicted``: honest clients are gone, or had no part in the
    last two rounds; ``costly``: it cost more than twice what an honest reply of the allowed size
    does.
    """

    tried: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    proven: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    crashed: dict[str, str] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    evicted: dict[str, str] = field(default_factory=dict)
    costly: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        return {"tried": self.tried} | {name: len(getattr(self, name)) for name in COUNTS[1:]}

    def summary(self) -> dict[str, Any]:
        """Give the verdicts, by attack; why something was refused is left out."""
        found = {name: getattr(self, name) for name in COUNTS[1:]} | {"refused": [*self.refused]}
        return {"counts": self.counts} | {name: which for name, which in found.items() if which}


def attacks_on(method: Method, kind: str, count: int, *, setup: bool = False) -> list[Attack]:
    """Draw attacks on a type of message: those made by hand, around it, and by hypothesis."""
    place = 1 if setup else method.first(kind) + 1
    example = method.clean.grid.examples[kind, place]
    found: list[Attack] = []
    # What is around a reply is looked at before it is known what the reply is for.
    if not setup or kind == method.setup[0]:
        found += [Around(way) for way in ENVELOPES]
        found += [Told(what, *error) for what, error in ERRORS.items()]
    found += by_hand(example)
    names = {attack.name for attack in found}
    return found + [one for one in drawn(example, count) if one.name not in names]


def try_each(method: Method, kind: str, attacks: Sequence[Attack], *, setup: bool = False) -> Tally:
    """Attack one message of a type, each attack in a run of its own."""
    # What comes out a round later ends one more round
    place, rounds = (1, SHORT) if setup else (method.first(kind) + 1, SHORT + 2)
    tally = Tally(tried=len(attacks))
    absent, clean = method.run({(kind, place): None}, rounds), method.run({}, rounds)
    assert absent.error is None, absent.error
    for one in attacks:
        run = partial(method.run, {(kind, place): one}, rounds)
        outcome = run()
        assert not outcome.grid.failed, one.name
        if not _sort_run(method, outcome, one.name, clean, tally):
            continue
        _judge_trace(method, run, one.name, tally, outcome)
        same = [outcome.same(other, method.atol) for other in (absent, clean)]
        if one.name in tally.refused and not any(same):
            if one.name.startswith(INVENTED) and not outcome.excluded:
                # Who makes clients up is in the run with its own, and they are named as silent.
                del tally.refused[one.name]
                tally.taken.append(one.name)
            else:
                (tally.proven if outcome.excluded else tally.differs).append(one.name)
    return tally


def _judge_trace(
    method: Method,
    run: Callable[[], Attacked],
    name: str,
    tally: Tally,
    outcome: Attacked,
) -> None:
    """Say whether honest clients are gone after an attack, and whether it cost too much."""
    if gone := evicted(method, outcome):
        tally.evicted[name] = gone
    if costly(method, outcome) and (cost := costly_again(method, run)):
        tally.costly[name] = cost


def try_campaigns(method: Method, chosen: Sequence[Campaign]) -> Tally:
    """Try SuperNodes that attack all the time."""
    tally = Tally(tried=len(chosen))
    for one in chosen:
        run = partial(method.run, one.plan, CAMPAIGN, new_id=one.new_id)
        outcome = run()
        if _sort_run(method, outcome, one.name, method.reference, tally):
            _judge_trace(method, run, one.name, tally, outcome)
    return tally


def _sort_run(method: Method, outcome: Attacked, name: str, clean: Attacked, tally: Tally) -> bool:
    """Say what became of an attack in a run of its own; whether the run went on."""
    if isinstance(outcome.error, MembershipError | AlignmentError) and not outcome.reports:
        # Before round 1: nothing says whose a client is, or who spoils the union
        tally.refused[name] = str(outcome.error)
        return False
    if outcome.error is not None:
        tally.crashed[name] = f"{type(outcome.error).__name__}: {outcome.error}"[:300]
        return False
    named = [why for found in outcome.named.values() for why in found]
    if named or outcome.logged:  # those of the last message are in the log only
        tally.refused[name] = "; ".join(list(dict.fromkeys(named or outcome.logged))[:5])
        if not named:
            tally.unnamed.append(name)
    elif outcome.same(clean, method.atol):
        tally.harmless.append(name)
    else:
        tally.taken.append(name)
    return True


def some_of(attacks: Sequence[T], part: int, seed: int = 0) -> list[T]:
    """Draw one of so many, and take what was hardest; all if ``part`` is 1."""
    drawn = Random(seed).sample(range(len(attacks)), -(-len(attacks) // part))
    hard = {n for n, one in enumerate(attacks) if one.name.endswith(HARDEST)}
    return [attacks[n] for n in sorted(hard.union(drawn))]


def kinds_tried(method: Method) -> list[str]:
    """Give all types of messages of a run."""
    return list(dict.fromkeys(kind for kind, _ in method.clean.grid.examples))


def try_all(
    method: Method, count: int, part: int = 1, kinds: Collection[str] = ()
) -> dict[str, Tally]:
    """Try a part of many drawn attacks, and those made by hand, on types of messages, or all."""
    found = {}
    for kind in kinds or kinds_tried(method):
        if kind in method.setup:
            attacks = attacks_on(method, kind, count, setup=True)
            found[f"{kind}, first"] = try_each(method, kind, some_of(attacks, part), setup=True)
        if kind in method.rounds:
            attacks = attacks_on(method, kind, count)
            found[kind] = try_each(method, kind, some_of(attacks, part))
        those = [one for one in campaigns(method) if one.where == kind]
        found[f"{kind}, each time"] = try_campaigns(method, some_of(those, part))
    return found
