"""The corpus of malformed replies, and what each method makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attacked_runs import SHORT, Attacked, Method
from hostile_grid import ENVELOPES, Around, Attack, Key
from mutations import by_hand, drawn

CLEAN = 3  # every so manieth round nobody attacks
LONG = 40  # attacks of a long run


@dataclass
class Tally:
    """What became of the attacks on one type of message.

    ``refused`` and ``harmless`` (the result is as without the attack) by name with the reason;
    ``taken``: well-formed, so that nobody can tell; ``crashed``: the run ended. ``proven`` are
    among the refused: a lie that comes out in a later message, in which the client takes part as
    if all were well. That sum is given up and the client excluded, so the result is not that of a
    run in which one reply never came.
    """

    tried: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    proven: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    crashed: dict[str, str] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        names = ("refused", "proven", "harmless", "taken", "differs")
        found = {name: len(getattr(self, name)) for name in names}
        return {"tried": self.tried, "crashes": len(self.crashed)} | found

    def summary(self) -> dict[str, Any]:
        where = Counter(name.partition(": ")[0] for name in self.taken)
        others = {"proven-which": self.proven, "crashed": self.crashed}
        return self.counts | {"taken-where": dict(where), "differs": self.differs} | others


def attacks_on(method: Method, kind: str, count: int, *, setup: bool = False) -> list[Attack]:
    """Draw attacks on a type of message: those made by hand, around it, and by hypothesis."""
    place = 1 if setup else method.first(kind) + 1
    example = method.clean.grid.examples[kind, place]
    around: list[Attack] = [Around(way) for way in ENVELOPES]
    found = [*around, *by_hand(example)]
    names = {attack.name for attack in found}
    return found + [one for one in drawn(example, count) if one.name not in names]


def try_rounds(method: Method, kind: str, attacks: Sequence[Attack]) -> Tally:
    """Attack replies that come in every round, one after another in long runs."""
    tally, left = Tally(tried=len(attacks)), list(attacks)
    while left:
        batch = left[:LONG]
        start = method.first(kind) + 1
        places = [start + n + n // (CLEAN - 1) for n in range(len(batch))]
        plan: dict[Key, Attack | None] = {
            (kind, place): one for place, one in zip(places, batch, strict=True)
        }
        rounds = method.round_of((kind, places[-1])) + 2
        outcome = method.run(plan, rounds)
        done = [key for key in plan if key[1] <= outcome.grid.counts[kind]]
        # Where an attack is proven, its client takes part no more: what follows was not tried.
        left = left[len(done) :]
        if outcome.error is not None:
            culprit = plan[done[-1]]
            assert culprit is not None
            tally.crashed[culprit.name] = f"{type(outcome.error).__name__}: {outcome.error}"
            left = [plan[key] for key in done[:-1]] + left  # type: ignore[misc]
            left = [one for one in left if one.name not in tally.crashed]
            continue
        _sort(method, kind, {key: plan[key] for key in done}, rounds, outcome, tally)  # type: ignore[misc]
    return tally


def _sort(
    method: Method,
    kind: str,
    plan: dict[Key, Attack],
    rounds: int,
    outcome: Attacked,
    tally: Tally,
) -> None:
    named = outcome.named
    missed = outcome.grid.failed
    refused = {
        k: one for k, one in plan.items() if named.get(method.round_of(k)) and k not in missed
    }
    for key, one in refused.items():
        tally.refused[one.name] = "; ".join(named[method.round_of(key)])
    for key in plan.keys() - refused.keys():
        _judge_alone(method, kind, plan[key], tally)
    again = outcome if len(refused) == len(plan) else method.run(refused, rounds)
    absent = method.run(dict.fromkeys(refused), rounds)
    if not again.same(absent, method.atol):
        for one in refused.values():  # which of them it was
            _compare(method, kind, one, tally)


def _judge_alone(method: Method, kind: str, one: Attack, tally: Tally) -> None:
    """Say whether an attack that nobody noticed changed anything."""
    key = (kind, method.first(kind) + 1)
    alone = method.run({key: one}, SHORT)
    assert key not in alone.grid.failed, one.name
    if alone.error is not None:
        tally.crashed[one.name] = f"{type(alone.error).__name__}: {alone.error}"
    elif alone.named:  # found out later, or in a message that the long run did not have
        tally.refused[one.name] = "; ".join(why for found in alone.named.values() for why in found)
        _compare(method, kind, one, tally)
    else:
        is_same = alone.same(method.clean, method.atol)
        (tally.harmless if is_same else tally.taken).append(one.name)


def _compare(method: Method, kind: str, one: Attack, tally: Tally) -> None:
    """Hold a run with one refused attack against those without the reply, and without attacks."""
    key = (kind, method.first(kind) + 1)
    rounds = SHORT + 2  # what comes out a round later ends one more round
    alone = method.run({key: one}, rounds)
    if key in alone.grid.failed:
        return  # this round's reply has no such entry: it was refused where it has
    without = method.run({key: None}, rounds), method.run({}, rounds)
    if not any(alone.same(other, method.atol) for other in without):
        (tally.proven if alone.excluded else tally.differs).append(one.name)


def try_setup(method: Method, kind: str, attacks: Sequence[Attack]) -> Tally:
    """Attack what is asked once, each attack in a run of its own."""
    tally = Tally(tried=len(attacks))
    absent = method.run({(kind, 1): None}, SHORT)
    assert absent.error is None, absent.error
    for one in attacks:
        outcome = method.run({(kind, 1): one}, SHORT)
        if outcome.error is not None:
            tally.crashed[one.name] = f"{type(outcome.error).__name__}: {outcome.error}"
            continue
        named = [why for found in outcome.named.values() for why in found]
        if named or outcome.logged:  # those of the last message are in the log only
            tally.refused[one.name] = "; ".join(named or outcome.logged)
            if not named:
                tally.unnamed.append(one.name)
            if not outcome.same(absent, method.atol) and not outcome.same(
                method.clean, method.atol
            ):
                (tally.proven if outcome.excluded else tally.differs).append(one.name)
        elif outcome.same(method.clean, method.atol):
            tally.harmless.append(one.name)
        else:
            tally.taken.append(one.name)
    return tally


def try_all(method: Method, count: int, part: int = 1) -> dict[str, Tally]:
    """Try a part of many drawn attacks, and those made by hand, on every type of message."""
    found = {}
    for kind in method.setup:
        attacks = attacks_on(method, kind, count, setup=True)[::part]
        found[f"{kind}, first"] = try_setup(method, kind, attacks)
    for kind in method.rounds:
        found[kind] = try_rounds(method, kind, attacks_on(method, kind, count)[::part])
    return found
