"""The corpus of malformed replies, and what each method makes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar

from attacked_runs import CAMPAIGN, SHORT, Attacked, Method
from campaigns import Campaign, campaigns, costly, costly_again, evicted
from hostile_grid import ENVELOPES, ERRORS, Around, Attack, Key, Told
from mutations import by_hand, drawn

from flower_graph.errors import MembershipError

CLEAN = 3  # every so manieth round nobody attacks
LONG = 40  # attacks of a long run
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
    _sort_unnoticed(method, kind, [plan[key] for key in plan.keys() - refused.keys()], tally)
    again = outcome if len(refused) == len(plan) else method.run(refused, rounds)
    absent = method.run(dict.fromkeys(refused), rounds)
    if not again.same(absent, method.atol):
        for one in refused.values():  # which of them it was
            _compare(method, kind, one, tally)
    if evicted(method, outcome) or costly(method, outcome):
        for one in plan.values():
            _judge_trace(method, lambda one=one: _alone(method, kind, one), one.name, tally)


def _alone(method: Method, kind: str, one: Attack | None, rounds: int = SHORT) -> Attacked:
    return method.run({(kind, method.first(kind) + 1): one}, rounds)


def _judge_trace(
    method: Method,
    run: Callable[[], Attacked],
    name: str,
    tally: Tally,
    first: Attacked | None = None,
) -> None:
    """Say whether honest clients are gone after an attack, and whether it cost too much."""
    outcome = first or run()
    if outcome.error is not None:
        return
    if gone := evicted(method, outcome):
        tally.evicted[name] = gone
    if costly(method, outcome) and (cost := costly_again(method, run)):
        tally.costly[name] = cost


def _sort_unnoticed(method: Method, kind: str, attacks: list[Attack], tally: Tally) -> None:
    """Say of attacks that nobody noticed which changed anything: most did not, all together."""
    start = method.first(kind) + 1
    plan: dict[Key, Attack | None] = {(kind, start + n): one for n, one in enumerate(attacks)}
    if len(plan) > 1:
        rounds = method.round_of((kind, start + len(plan))) + 1
        outcome = method.run(plan, rounds)
        quiet = outcome.error is None and not outcome.named and not outcome.grid.failed
        if quiet and outcome.same(method.run({}, rounds), method.atol):
            tally.harmless += [one.name for one in attacks]
            return
        if len(plan) > 3:
            half = len(attacks) // 2
            _sort_unnoticed(method, kind, attacks[:half], tally)
            _sort_unnoticed(method, kind, attacks[half:], tally)
            return
    for one in attacks:
        _judge_alone(method, kind, one, tally)


def _judge_alone(method: Method, kind: str, one: Attack, tally: Tally) -> None:
    """Say whether an attack that nobody noticed changed anything."""
    alone = _alone(method, kind, one)
    assert not alone.grid.failed, one.name
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
    rounds = SHORT + 2  # what comes out a round later ends one more round
    alone = _alone(method, kind, one, rounds)
    if alone.grid.failed:
        return  # this round's reply has no such entry: it was refused where it has
    without = _alone(method, kind, None, rounds), method.run({}, rounds)
    if not any(alone.same(other, method.atol) for other in without):
        (tally.proven if alone.excluded else tally.differs).append(one.name)


def try_setup(method: Method, kind: str, attacks: Sequence[Attack]) -> Tally:
    """Attack what is asked once, each attack in a run of its own."""
    tally = Tally(tried=len(attacks))
    absent = method.run({(kind, 1): None}, SHORT)
    assert absent.error is None, absent.error
    for one in attacks:
        run = partial(method.run, {(kind, 1): one}, SHORT)
        outcome = run()
        if not _sort_run(method, outcome, one.name, method.clean, tally):
            continue
        _judge_trace(method, run, one.name, tally, outcome)
        same = [outcome.same(other, method.atol) for other in (absent, method.clean)]
        if one.name in tally.refused and not any(same):
            if one.name.startswith(INVENTED) and not outcome.excluded:
                # Who makes clients up is in the run with its own, and they are named as silent.
                del tally.refused[one.name]
                tally.taken.append(one.name)
            else:
                (tally.proven if outcome.excluded else tally.differs).append(one.name)
    return tally


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
    if isinstance(outcome.error, MembershipError) and not outcome.reports:
        tally.refused[name] = str(outcome.error)  # nothing says whose a client is: before round 1
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
            found[f"{kind}, first"] = try_setup(method, kind, some_of(attacks, part))
        if kind in method.rounds:
            attacks = attacks_on(method, kind, count)
            found[kind] = try_rounds(method, kind, some_of(attacks, part))
        those = [one for one in campaigns(method) if one.where == kind]
        found[f"{kind}, each time"] = try_campaigns(method, some_of(those, part))
    return found
