"""Whole secure sums in both settings of trust, with a third of all lost: exact, and their cost.

Every client, or party, is played by its real code, each at a SuperNode of its own; messages are
handed over as they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import parties
from benchmarks.measure import Table, duration, say, table
from benchmarks.secure import TERMS
from flower_graph.secure.node_config import FEWEST_PARTIES
from flower_graph.secure.parties.journal import STATE_BYTES
from flower_graph.secure.ring import WORDS
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import EpochRequest, RevealReply
from flower_graph.secure.sum.partners import plan
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import PartySums, SumServer

LENGTH, DROPOUT, LIMIT = 16, 0.3, 1.0
BEGIN = 100  # parties that begin the epoch by themselves
# Of six a server that may lie can do without one, and then leaves out another, which is too many
SIZES, QUICK_SIZES = (100, 1_000), (10, 20)
APART = 2_000  # of fewer, 30 % are lost at each stage in turn; of more, a part at each in one sum
FEWEST_OF = {True: 2, False: FEWEST_PARTIES}


class Trusted:
    """Sums whose server is trusted to follow the protocol."""

    stages: tuple[str, ...] = ("prepare", "mask", "unmask")

    def __init__(self, clients: int, corrupt: float, folder: Path) -> None:
        server = self.server = SumServer(dropout=DROPOUT, corrupt=corrupt)
        self.hosts = {i: SumClient(server.run_id, [i]) for i in range(clients)}
        for i, host in self.hosts.items():
            server.enroll(i, host.keys())
        self.vanishing = plan(clients, DROPOUT, corrupt)[2]

    def requests(self, stage: str, number: int) -> dict[int, Any]:
        if stage == "prepare":
            return dict(self.server.open_round(number, self.server.clients))
        if stage == "mask":
            return dict(self.server.mask_requests(number, LENGTH, 64, TERMS))
        return dict(self.server.unmask_requests(number))

    def answer(self, stage: str, node: int, request: Any, vector: Any) -> Any:
        host = self.hosts[node]
        if stage == "mask":
            return host.mask(host.receive(request, TERMS.ring), [node], vector, TERMS)
        return host.prepare(request) if stage == "prepare" else host.unmask(request)

    def take(self, stage: str, node: int, reply: Any) -> None:
        self.server.take(node, reply)


class Untrusted:
    """Sums whose server may lie; every client is a party."""

    stages = ("prepare", "mask", "list", "unmask")

    def __init__(self, clients: int, corrupt: float, folder: Path) -> None:
        trusts = parties.make([range(i, i + 1) for i in range(clients)], folder, corrupt, 1)
        trusts[0].registry.write(folder / "registry.json")
        file = folder / "registry.json"
        server = self.server = PartySums(file, dropout=DROPOUT, corrupt=corrupt)
        self.hosts = {i: SumClient(server.run_id, [i], trust) for i, trust in enumerate(trusts)}
        for i, party in self.hosts.items():
            server.take_binding(i, party.keys())
        for i, shown in server.reveal_requests(LIMIT).items():
            party = self.hosts[i]
            if i < BEGIN:
                server.take_seed(i, party.reveal(shown))
            else:
                seed = np.frombuffer(party._seed, np.uint8)
                server.take_seed(i, RevealReply(server.run_id, shown.number, seed))
        for i, request in server.epoch_requests().items():
            if i < BEGIN:
                server.take_epoch(i, self.hosts[i].begin(request))
            else:
                self._adopt(self.hosts[i], request)
        self.vanishing = clients - server.fewest_nodes

    def _adopt(self, party: SumClient, request: EpochRequest) -> None:
        """Let a party adopt the epoch of the first parties: it would check the very same."""
        epoch = self.server.epoch
        assert epoch is not None
        party.epoch, party._keys = epoch, request.channel_keys

    def requests(self, stage: str, number: int) -> dict[int, Any]:
        if stage == "prepare":
            return dict(self.server.open_round(number, self.server.clients))
        if stage == "mask":
            return dict(self.server.mask_requests(number, LENGTH, 64, TERMS))
        ask = self.server.list_requests if stage == "list" else self.server.unmask_requests
        return dict(ask(number))

    def answer(self, stage: str, node: int, request: Any, vector: Any) -> Any:
        party = self.hosts[node]
        if stage == "mask":
            came = party.receive(request, TERMS.ring)
            return party.mask(came, [node], vector, TERMS, [os.urandom(STATE_BYTES)])
        if stage == "list":
            return party.sign_list(request)
        return party.prepare(request) if stage == "prepare" else party.unmask(request)

    def take(self, stage: str, node: int, reply: Any) -> None:
        self.server.take(node, reply)


def play(world: Trusted | Untrusted, number: int, lost: dict[str, Collection[int]]) -> list[float]:
    """Play a round and compare its sum; return the clients' and the server's processor time."""
    spent = [0.0, 0.0]

    def timed(who: int, call: Callable[[], Any]) -> Any:
        started = time.process_time()
        found = call()
        spent[who] += time.process_time() - started
        return found

    draw, n = np.random.default_rng(number), len(world.hosts)
    vectors = draw.integers(0, 1 << 40, (n, LENGTH)).astype(WORDS[64])
    gone: set[int] = set()  # whose vectors are not there
    for stage in world.stages:
        for node, request in timed(1, lambda s=stage: world.requests(s, number)).items():
            reply = timed(0, lambda s=stage, i=node, r=request: world.answer(s, i, r, vectors[i]))
            if node not in lost.get(stage, ()):
                timed(1, lambda s=stage, i=node, r=reply: world.take(s, i, r))
            elif stage in ("prepare", "mask"):
                gone.add(node)
    result = timed(1, lambda: world.server.result(number))
    if isinstance(result, Skipped):
        raise RuntimeError(str(result.reason))
    expected = sorted(set(range(n)) - gone)
    if result.contributors.tolist() != expected:
        raise RuntimeError("others are in the sum than sent their vectors")
    if not np.array_equal(result.total, vectors[expected].sum(0, dtype=vectors.dtype)):
        raise RuntimeError("the sum is wrong")
    return spent


def losses(world: Trusted | Untrusted, *, apart: bool) -> list[dict[str, list[int]]]:
    """Return who is lost in each round: 30 % at one stage after the other, or a part at each."""
    clients, stages = len(world.hosts), world.stages
    order = np.random.default_rng(clients).permutation(clients)
    gone = [int(i) for i in order[: min(int(DROPOUT * clients), world.vanishing)]]
    if apart:
        return [{stage: gone} for stage in stages]
    return [{stage: gone[place :: len(stages)] for place, stage in enumerate(stages)}]


def measure(clients: int, corrupt: float, trusted: bool, apart: bool) -> dict[str, Any]:
    """Measure sums that lose 30 % of the clients."""
    with TemporaryDirectory() as folder:
        started = time.process_time()
        world = (Trusted if trusted else Untrusted)(clients, corrupt, Path(folder))
        begun = time.process_time() - started
        rounds = losses(world, apart=apart)
        spent = [play(world, number, lost) for number, lost in enumerate(rounds)]
    least = [min(each) for each in zip(*spent, strict=True)]
    whom = "trusted" if trusted else "may lie"
    say(f"{clients} clients, server {whom}: {len(rounds)} exact sums, server {least[1]:.2f} s")
    return {
        "clients": clients,
        "corrupt": corrupt,
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
