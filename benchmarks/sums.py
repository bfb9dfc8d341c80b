"""The secure sum: a round, one client of many, and whole sums with clients that vanish.

python -m benchmarks.sums [--quick]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.measure import Table, duration, say, spread, table
from benchmarks.parties import STAGES, World
from benchmarks.secure_clients import client_table
from flower_graph.secure.node_config import FEWEST_PARTIES
from flower_graph.secure.ring import WORDS, Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import SumTerms
from flower_graph.secure.sum.partners import plan
from flower_graph.secure.sum.round import Skipped

TERMS = SumTerms("benchmark", None)
LIMIT = 64.0
STEPS = {32: 2.0**-16, 64: 2.0**-24}  # resolutions that need words of so many bits
ROUND, QUICK_ROUND = (100, 99_000, 12), (20, 1_000, 3)  # clients, numbers, rounds
WARM_UP = 2
SUPERNODES = 2
LENGTH, DROPOUT = 16, 0.3  # of whole sums
BEGIN = 100  # parties that begin the epoch by themselves
# Of six a server that may lie can do without one, and then leaves out another, which is too many
SIZES, QUICK_SIZES = (100, 1_000), (10, 20)
APART = 2_000  # of fewer, 30 % are lost at each stage in turn; of more, a part at each in one sum
FEWEST_OF = {True: 2, False: FEWEST_PARTIES}


class EqualVectors(World):
    """All clients have the same vector: adding up is no part of what is measured."""

    def total(self, present: Any) -> Any:
        return self.words[0] * self.words.dtype.type(len(present))


def play(
    world: World,
    number: int,
    lost: dict[str, Collection[int]],
    clock: Callable[[], float] = time.process_time,
) -> tuple[float, float]:
    """Play a round and compare its sum; return the clients' and the server's time."""
    spent = [0.0, 0.0]

    def timed(who: int, call: Callable[..., Any], *given: Any) -> Any:
        started = clock()
        found = call(*given)
        spent[who] += clock() - started
        return found

    gone: set[int] = set()  # whose vectors are not there
    everyone = set(world.server.clients)
    for stage in STAGES:
        for node, request in timed(1, world.requests, stage, number).items():
            reply = timed(0, world.answer, stage, node, request)
            if node not in lost.get(stage, ()):
                timed(1, world.server.take, node, reply)
            elif stage in ("prepare", "mask"):
                gone |= set(world.hosts[node].clients)
    result = timed(1, world.server.result, number)
    if isinstance(result, Skipped):
        raise RuntimeError(str(result.reason))
    expected = sorted(everyone - gone)
    if result.contributors.tolist() != expected:
        raise RuntimeError("others are in the sum than sent their vectors")
    if not np.array_equal(result.total, world.total(expected)):
        raise RuntimeError("the sum is wrong")
    return spent[0], spent[1]


def restart(world: World, number: int) -> float:
    """Time how long a SuperNode's half takes to be saved and loaded again."""
    node, request = next(iter(world.requests("prepare", number).items()))
    world.answer("prepare", node, request)
    started = time.perf_counter()
    world.hosts[node] = SumClient.from_bytes(world.hosts[node].to_bytes())
    return time.perf_counter() - started


def round_row(clients: int, length: int, rounds: int, word: int) -> list[str]:
    """Time whole rounds: the SuperNodes' work, the server's part, and a host's restart."""
    vector = np.random.default_rng(0).uniform(-1, 1, (1, length))
    words = Ring.fit(clients, LIMIT, STEPS[word]).encode(vector)
    hosted = [range(node, clients, SUPERNODES) for node in range(SUPERNODES)]
    world, times = EqualVectors.trusting(hosted, words, TERMS), []
    for number in range(rounds + WARM_UP):
        spent = play(world, 2 * number, {}, time.perf_counter)
        times.append([*spent, restart(world, 2 * number + 1)])
    spreads = [spread(list(one[WARM_UP:])) for one in zip(*times, strict=True)]
    say(f"{clients} clients, {word} bits: {spreads[0]}")
    return [f"{clients:,}", f"{length:,}", str(word), *spreads]


def round_table(quick: bool) -> Table:
    """Measure sums of 100 clients with words of 32 and of 64 bits."""
    rows = [round_row(*(QUICK_ROUND if quick else ROUND), word) for word in STEPS]
    about = f"""A sum of all clients at {SUPERNODES} SuperNodes under a trusted server. *State* is
        saving a SuperNode's half and loading it again."""
    head = ["clients", "numbers", "bits of a word", "SuperNodes", "server", "state"]
    return table("A secure sum", about, head, rows)


def losses(world: World, stages: tuple[str, ...], vanishing: int, *, apart: bool) -> list[Any]:
    """Return who is lost in each round: 30 % at one stage after the other, or a part at each."""
    clients = len(world.hosts)
    order = np.random.default_rng(clients).permutation(clients)
    gone = [int(i) for i in order[: min(int(DROPOUT * clients), vanishing)]]
    if apart:
        return [{stage: gone} for stage in stages]
    return [{stage: gone[place :: len(stages)] for place, stage in enumerate(stages)}]


def measure(clients: int, corrupt: float, trusted: bool, apart: bool) -> dict[str, Any]:
    """Measure sums that lose 30 % of the clients, each at a SuperNode of its own."""
    words = np.random.default_rng(clients).integers(0, 1 << 40, (clients, LENGTH))
    own, started = [range(i, i + 1) for i in range(clients)], time.process_time()
    with TemporaryDirectory() as folder:
        given = words.astype(WORDS[64]), TERMS
        if trusted:
            world = World.trusting(own, *given, dropout=DROPOUT, corrupt=corrupt)
            stages, vanishing = ("prepare", "mask", "unmask"), plan(clients, DROPOUT, corrupt)[2]
        else:
            world = World.distrusting(own, Path(folder), *given, corrupt=corrupt)
            world.begin(most=BEGIN)
            stages, vanishing = STAGES, clients - world.server.fewest_nodes
        begun = time.process_time() - started
        rounds = losses(world, stages, vanishing, apart=apart)
        spent = [play(world, number, lost) for number, lost in enumerate(rounds)]
    least = [min(each) for each in zip(*spent, strict=True)]
    whom = "trusted" if trusted else "may lie"
    say(f"{clients} clients, server {whom}: {len(rounds)} exact sums, server {least[1]:.2f} s")
    return {
        "clients": clients,
        "trusted": trusted,
        "lost": [sorted(lost) for lost in rounds],
        "start-seconds": begun,
        "client-seconds": least[0] / clients,
        "server-seconds": least[1],
    }


def whole_table(quick: bool) -> Table:
    """Measure both settings at all sizes; the largest, once with losses at each stage."""
    rows = []
    for trusted, fewest in FEWEST_OF.items():
        for clients in (fewest, *(QUICK_SIZES if quick else SIZES)):
            one = measure(clients, 0.0, trusted, clients < APART)
            times = (one["client-seconds"], one["server-seconds"], one["start-seconds"])
            whom = "trusted" if trusted else "may lie"
            rows.append([f"{clients:,}", whom, str(len(one["lost"])), *map(duration, times)])
    about = f"""Every client's real code and the server's, with {DROPOUT:.0%} lost at one stage or
        at all; each sum was compared with the sum of the vectors. Processor time."""
    head = ["clients", "server", "sums", "a client", "server's part", "start, all"]
    return table("Exact sums with clients that vanish", about, head, rows)


def main() -> None:
    """Print the tables as JSON."""
    quick = "--quick" in sys.argv
    print(json.dumps([make(quick) for make in (round_table, client_table, whole_table)]))


if __name__ == "__main__":
    main()
