"""The corpus of malformed replies, and what each method makes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar

from attacked_runs import CAMPAIGN, SHORT, Attacked, Method
from campaigns import Campaign, campaigns, costly, costly_again, evicted
from hostile_grid import ENVELOPES, ERRORS, Around, Attack, Told
from mutations import by_hand, drawn

from flower_graph.errors import AlignmentError, MembershipError

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
