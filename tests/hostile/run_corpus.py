"""Try the whole corpus of malformed replies and write what became of it.

``python tests/hostile/run_corpus.py --out docs/results/hostile.json`` takes some 20
minutes of two cores; ``--only`` tries some forms of methods anew and keeps what the file has of the
others. The sums go into the table of the page beside it. The tests try a part of it.
"""

# ruff: noqa: E402

import argparse
import json
import logging
import math
import platform
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import lru_cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

sys.path[:0] = [
    str(Path(__file__).resolve().parents[up] / part)
    for up, part in ((1, "strategies"), (1, "."), (2, "."))
]

import flwr
import hypothesis
import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from hostile_grid import (
    CAMPAIGN,
    CORPUS,
    ENVELOPES,
    ERRORS,
    NASTY,
    SHORT,
    Attacked,
    Key,
    Method,
    Mutation,
    accusing,
    around,
    by_hand,
    copied,
    drawn,
    invented,
    leaving_out,
    replaced,
    withholding,
)

import flower_graph
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


class Campaign(NamedTuple):
    """What a SuperNode does in a whole run."""

    where: str
    what: str
    plan: Mapping[Key, Mutation]
    new_id: bool = False  # it comes back under another id whenever it has attacked

    @property
    def name(self) -> str:
        return f"{self.where}: {self.what}" + ", and back under another id" * self.new_id


def always(kind: str, what: str, *attacks: Mutation, new_id: bool = False) -> Campaign:
    """Attack each message of a type, in turn."""
    plan = {(kind, n + 1): attacks[n % len(attacks)] for n in range(OFTEN)}
    return Campaign(kind, what, plan, new_id)


def told(code: int, reason: str) -> Mutation:
    return Mutation("error", reason[:20], error=(code, reason))


def campaigns(method: Method) -> list[Campaign]:
    kinds: dict[str, list[Key]] = {}
    for key in method.clean.grid.examples:
        kinds.setdefault(key[0], []).append(key)
    found: list[Campaign] = []
    for kind, keys in kinds.items():
        lost = {what: told(STATE_LOST, reason) for what, reason in LOST.items()}
        found += [always(kind, f"{what}, each time", one) for what, one in lost.items()]
        error = told(7, "KeyError: 'x'")
        found.append(always(kind, "an error each time", error, new_id=True))
        found.append(always(kind, "lost, each time", lost["lost"], new_id=True))
        huge = told(7, "\u202e" * (4 << 20))
        found.append(Campaign(kind, "an error of 4 M signs", {(kind, 1): huge}))
        for way in ("500 times", "a replay", "another's content", "another's name", "no content"):
            found.append(always(kind, f"{way}, each time", around(way)))
        for key in keys:
            found += _claims(method, key)
    return [*{one.name: one for one in found}.values()]


def _claims(method: Method, key: Key) -> Iterator[Campaign]:
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
    cheats = [
        Mutation("/".join(place), "wrong", replaced(*place, lambda d: bytes(b ^ 1 for b in d)))
        for place in held
        if place[1] in CHEATS
    ]
    for change in [*changes, *cheats]:
        with suppress(KeyError):  # it has no such entry
            change.apply(copied(example))  # type: ignore[misc]
            yield always(kind, f"{change.name}, each time", change)
    lost = told(STATE_LOST, LOST["lost"])
    for change, new_id in product(cheats, (False, True)):
        yield always(kind, f"{change.name}, then lost", change, lost, new_id=new_id)


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
    claims = max((one.claims for one in outcome.grid.plan.values() if one), default=0)
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
# What may become of an attack. Refused and harmless: the result is as without it, or as if the
# reply had never come. Taken: it is well-formed, so that nobody can tell. Proven: it is refused
# when the lie comes out in a later message; that sum is given up and the client excluded, so the
# result differs. Differs: so does the result, and nothing is proven. Unnamed: only the log has it.
# Evicted: honest clients are gone, or had no part in the last two rounds. Costly: it cost more than
# twice what an honest reply of the allowed size does. Crashed: the run ended.
VERDICTS = (
    *("refused", "proven", "harmless", "taken", "differs"),
    *("crashed", "evicted", "costly", "unnamed"),
)
COUNTS = ("tried", *VERDICTS)

T = TypeVar("T", Mutation, Campaign)


class Tally(dict[str, dict[str, str]]):
    """What became of the attacks on one type of message: by verdict their names, each with why."""

    def __init__(self, tried: int) -> None:
        super().__init__({verdict: {} for verdict in VERDICTS})
        self.tried = tried

    def summary(self) -> dict[str, Any]:
        counts = {"tried": self.tried} | {name: len(found) for name, found in self.items()}
        reasons = ("crashed", "evicted", "costly")
        found = {name: one if name in reasons else [*one] for name, one in self.items() if one}
        return {"counts": counts} | found


def attacks_on(method: Method, kind: str, count: int, *, setup: bool = False) -> list[Mutation]:
    """Draw attacks on a type of message: those made by hand, around it, and by hypothesis."""
    place = 1 if setup else method.first(kind) + 1
    example = method.clean.grid.examples[kind, place]
    found: list[Mutation] = []
    # What is around a reply is looked at before it is known what the reply is for.
    if not setup or kind == method.setup[0]:
        found.append(Mutation("envelope", "an error", error=(7, NASTY)))
        found += [*map(around, ENVELOPES), *ERRORS]
    found += by_hand(example)
    names = {attack.name for attack in found}
    return found + [one for one in drawn(example, count) if one.name not in names]


def try_each(
    method: Method, kind: str, attacks: Sequence[Mutation], *, setup: bool = False
) -> Tally:
    """Attack one message of a type, each attack in a run of its own."""
    # What comes out a round later ends one more round
    place, rounds = (1, SHORT) if setup else (method.first(kind) + 1, SHORT + 2)
    tally = Tally(len(attacks))
    absent, clean = method.run({(kind, place): None}, rounds), method.run({}, rounds)
    assert absent.error is None, absent.error
    for one in attacks:
        run = partial(method.run, {(kind, place): one}, rounds)
        outcome = judge(method, run, one.name, clean, tally)
        if outcome is None:
            continue
        assert not outcome.grid.failed, one.name
        same = [outcome.same(other, method.atol) for other in (absent, clean)]
        if one.name in tally["refused"] and not any(same):
            if one.name.startswith(INVENTED) and not outcome.excluded:
                # Who makes clients up is in the run with its own, and they are named as silent.
                tally["taken"][one.name] = tally["refused"].pop(one.name)
            else:
                tally["proven" if outcome.excluded else "differs"][one.name] = ""
    return tally


def try_campaigns(method: Method, chosen: Sequence[Campaign]) -> Tally:
    tally = Tally(len(chosen))
    for one in chosen:
        run = partial(method.run, one.plan, CAMPAIGN, new_id=one.new_id)
        judge(method, run, one.name, method.reference, tally)
    return tally


def judge(
    method: Method, run: Callable[[], Attacked], name: str, clean: Attacked, tally: Tally
) -> Attacked | None:
    """Say what became of an attack in a run of its own; give the run if it went on."""
    outcome = run()
    if isinstance(outcome.error, MembershipError | AlignmentError) and not outcome.reports:
        # Before round 1: nothing says whose a client is, or who spoils the union
        tally["refused"][name] = str(outcome.error)
        return None
    if outcome.error is not None:
        tally["crashed"][name] = f"{type(outcome.error).__name__}: {outcome.error}"[:300]
        return None
    named = [why for found in outcome.named.values() for why in found]
    if named or outcome.logged:  # those of the last message are in the log only
        tally["refused"][name] = "; ".join(list(dict.fromkeys(named or outcome.logged))[:5])
        if not named:
            tally["unnamed"][name] = ""
    else:
        tally["harmless" if outcome.same(clean, method.atol) else "taken"][name] = ""
    if gone := evicted(method, outcome):
        tally["evicted"][name] = gone
    if costly(method, outcome) and (cost := costly_again(method, run)):
        tally["costly"][name] = cost
    return outcome


def some_of(attacks: Sequence[T], part: int, seed: int = 0) -> list[T]:
    """Draw one of so many, and take what was hardest; all if ``part`` is 1."""
    drawn = Random(seed).sample(range(len(attacks)), -(-len(attacks) // part))
    hard = {n for n, one in enumerate(attacks) if one.name.endswith(HARDEST)}
    return [attacks[n] for n in sorted(hard.union(drawn))]


def kinds_tried(method: Method) -> list[str]:
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


# By form of a method: its row on the page, how many attacks hypothesis draws for each type of
# message besides those made by hand, and the types of messages, all if none is named
FORMS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "nfedgnn": ("nFedGNN", 50, ()),
    "nfedgnn, averaged": ("nFedGNN", 50, ("train",)),
    "fedscem": ("FedSCem", 10, ()),
    "fedscem, plain alignment": ("FedSCem", 10, ("train.align",)),
    "fedscem, plain": ("FedSCem", 10, ("train",)),
    "fedgls": ("FedGLS", 30, ()),
    "gat": ("PPFL-GNN", 50, ()),
    "deepwalk, secure": ("PPFL-GNN", 10, ()),
    "fedgta": ("FedGTA", 20, ()),
    "fedpub": ("FED-PUB", 20, ()),
}


def run(name: str, part: int = 1, kinds: Collection[str] = ()) -> dict[str, Any]:
    """Try everything against one form, or one case of so many: verdicts by type of message."""
    logging.disable(logging.INFO)
    _, draws, own = FORMS[name]
    tried = try_all(CORPUS[name], draws, part, kinds or own)
    return {kind: tally.summary() for kind, tally in tried.items()}


def kinds_of(name: str) -> list[str]:
    return list(FORMS[name][2]) or kinds_tried(CORPUS[name])


def totals(methods: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Add verdicts up by the rows of the page."""
    found = {row: dict.fromkeys(COUNTS, 0) for row in [*(one[0] for one in FORMS.values()), "all"]}
    for name, kinds in methods.items():
        for kind, row, count in product(kinds.values(), (FORMS[name][0], "all"), COUNTS):
            found[row][count] += kind["counts"][count]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=FORMS, nargs="+", help="the file keeps all others")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args()
    out, started = given.out, time.perf_counter()
    known = json.loads(out.read_text("utf-8"))["methods"] if out.exists() else {}
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        forms = given.only or list(FORMS)
        work = [
            (n, k) for n, kinds in zip(forms, pool.map(kinds_of, forms), strict=True) for k in kinds
        ]
        open_ = {pool.submit(run, name, 1, [kind]): (name, kind) for name, kind in work}
        for done in as_completed(open_):
            name, kind = open_[done]
            print(name, kind, f"{time.perf_counter() - started:.0f} s", flush=True)
            known[name] = known.get(name, {}) | done.result()
    methods = {one: dict(sorted(known[one].items())) for one in FORMS if one in known}
    packages = {"flower-graph": flower_graph, "flwr": flwr, "hypothesis": hypothesis}
    versions = {name: module.__version__ for name, module in packages.items()}
    versions["python"] = platform.python_version()
    written = {"totals": totals(methods), "versions": versions, "methods": methods}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    rows = [["method", *COUNTS], ["---"] * (1 + len(COUNTS))]
    rows += [[n, *(f"{c:,}" for c in one.values())] for n, one in written["totals"].items()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    if (page := out.with_suffix(".md")).exists():  # the sums go into its table
        text = page.read_text("utf-8")
        page.write_text(re.sub(r"\| method \|(.+\n)+", lambda _: table, text), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
