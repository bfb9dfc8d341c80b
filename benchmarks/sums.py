"""The secure sum: a round, and whole sums with clients that vanish.

python -m benchmarks.sums [--quick]
"""

import json
import sys
import time
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from benchmarks.measure import Table, duration, say, spread, table
from benchmarks.parties import STAGES, World
from flower_graph.records.rounds import format_bytes
from flower_graph.secure.node_config import FEWEST_PARTIES
from flower_graph.secure.ring import WORDS, Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import SumTerms
from flower_graph.secure.sum.partners import plan
from flower_graph.secure.sum.server import Skipped
from flower_graph.wire.ledger import count_bytes

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
COLLUDING = (0.0, 0.1)  # share of all


class EqualVectors(World):
    """All clients have the same vector: adding up is no part of what is measured, nor is state."""

    def host(self, node: int) -> SumClient:
        return self.hosts[node]

    def total(self, present: Any) -> Any:
        return self.words[0] * self.words.dtype.type(len(present))


class Counted(World):
    """Counts the bytes of the first SuperNode's messages."""

    up = down = 0

    def answer(self, stage: str, node: int, request: Any) -> Any:
        reply = super().answer(stage, node, request)
        if node == self.first:
            self.up, self.down = self.up + _size(reply), self.down + _size(request)
        return reply


def _size(message: Any) -> int:
    return count_bytes(RecordDict({"config": ConfigRecord(message.to_config())}))


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
    everyone = set(world.server.available)
    for stage in STAGES:
        for node, request in timed(1, world.requests, stage, number).items():
            reply = timed(0, world.answer, stage, node, request)
            if node not in lost.get(stage, ()):
                timed(1, world.rounds[number].take, node, reply)
            elif stage in ("prepare", "mask"):
                gone |= set(world.hosts[node].clients)
    result = timed(1, world.rounds[number].result)
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
            world = Counted.trusting(own, *given, dropout=DROPOUT, corrupt=corrupt)
            stages, vanishing = ("prepare", "mask", "unmask"), plan(clients, DROPOUT, corrupt)[2]
        else:
            world = Counted.distrusting(own, Path(folder), *given, corrupt=corrupt)
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
        "partners": world.rounds[0].partners.shape[1],
        "threshold": world.rounds[0].threshold,
        "lost": [sorted(lost) for lost in rounds],
        "start-seconds": begun,
        "client-seconds": least[0] / clients,
        "server-seconds": least[1],
        "up": world.up // len(rounds),
        "down": world.down // len(rounds),
    }


def whole_table(quick: bool) -> Table:
    """Measure both settings at all sizes; the largest, once with losses at each stage."""
    rows = []
    for (trusted, fewest), corrupt in product(FEWEST_OF.items(), COLLUDING):
        for clients in (fewest, *(QUICK_SIZES if quick else SIZES)):
            one = measure(clients, corrupt, trusted, clients < APART)
            times = (one["client-seconds"], one["server-seconds"], one["start-seconds"])
            row = [f"{clients:,}", f"{corrupt:.0%}", "trusted" if trusted else "may lie"]
            row += [f"{one['partners']:,}", f"{one['threshold']:,}", str(len(one["lost"]))]
            rows.append(
                [*row, *map(duration, times), format_bytes(one["up"]), format_bytes(one["down"])]
            )
    about = f"""Every client's real code, its state read and written at each message, and the
        server's, with {DROPOUT:.0%} lost at one stage or at all; each sum was compared with the sum
        of the vectors. Processor time; bytes of one client besides its vector."""
    head = ["clients", "collude", "server", "partners", "threshold", "sums", "a client"]
    head += ["server's part", "start, all", "up", "down"]
    return table("Exact sums with clients that vanish", about, head, rows)


def main() -> None:
    """Print the tables as JSON."""
    quick = "--quick" in sys.argv
    print(json.dumps([make(quick) for make in (round_table, whole_table)]))


if __name__ == "__main__":
    main()
