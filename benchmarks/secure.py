"""Secure sum: a round of 100 clients at two SuperNodes, with the server's part."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measure import Table, say, spread, table
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import MaskedReply, SumTerms
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import SumServer

TERMS = SumTerms("benchmark", None)
LIMIT = 64.0
STEPS = {32: 2.0**-16, 64: 2.0**-24}  # resolutions that need words of so many bits
ROUND, QUICK_ROUND = (100, 99_000, 12), (20, 1_000, 3)  # clients, numbers, rounds
WARM_UP = 2
SUPERNODES = 2


class Sum:
    """A server and its hosts, with as many clients each; adds up the cost of every step."""

    def __init__(self, clients: int, length: int, word: int) -> None:
        self.server, self.length = SumServer(), length
        self.ring = Ring.fit(clients, LIMIT, STEPS[word])
        self.hosts = {
            node: SumClient(self.server.run_id, range(node, clients, SUPERNODES))
            for node in range(SUPERNODES)
        }
        for node, host in self.hosts.items():
            self.server.enroll(node, host.keys())
        self.vector = self.ring.encode(np.random.default_rng(0).uniform(-1, 1, length))
        self.seconds: dict[str, float] = {}

    def round(self, number: int) -> None:
        self.seconds = {}
        server, clients = self.server, self.server.clients
        opened = self._timed("server", lambda: server.open_round(number, clients))
        self._stage(opened, SumClient.prepare)
        length, word = self.length, self.ring.word
        asked = self._timed("server", lambda: server.mask_requests(number, length, word, TERMS))
        self._stage(asked, self._mask)
        shares = self._timed("server", lambda: server.unmask_requests(number))
        self._stage(shares, SumClient.unmask)
        result = self._timed("server", lambda: server.result(number))
        if isinstance(result, Skipped):
            raise RuntimeError(str(result.reason))
        expected = self.vector * self.vector.dtype.type(len(clients))
        if not np.array_equal(result.total, expected):
            raise RuntimeError("the sum is wrong")

    def restart(self, number: int) -> float:
        node, request = next(iter(self.server.open_round(number, self.server.clients).items()))
        self.hosts[node].prepare(request)
        started = time.perf_counter()
        self.hosts[node] = SumClient.from_bytes(self.hosts[node].to_bytes())
        return time.perf_counter() - started

    def _mask(self, host: SumClient, request: Any) -> MaskedReply:
        present = request.clients.tolist()
        total = self.vector * self.vector.dtype.type(len(present))
        return host.mask(host.receive(request, TERMS.ring), present, total, TERMS)

    def _stage(self, requests: dict[int, Any], answer: Callable[[SumClient, Any], Any]) -> None:
        for node, request in requests.items():
            reply = self._timed("host", lambda n=node, r=request: answer(self.hosts[n], r))
            self._timed("server", lambda n=node, r=reply: self.server.take(n, r))

    def _timed(self, who: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        found = call()
        self.seconds[who] = self.seconds.get(who, 0.0) + time.perf_counter() - started
        return found


def round_row(clients: int, length: int, rounds: int, word: int) -> list[str]:
    """Time whole rounds: the SuperNodes' work, the server's part, and a host's restart."""
    whole = Sum(clients, length, word)
    host, server, state = [], [], []
    for number in range(rounds + WARM_UP):
        whole.round(2 * number)
        state.append(whole.restart(2 * number + 1))
        host.append(whole.seconds["host"])
        server.append(whole.seconds["server"])
    times = [spread(one[WARM_UP:]) for one in (host, server, state)]
    say(f"{clients} clients, {whole.ring.word} bits: {times[0]}")
    return [f"{clients:,}", f"{length:,}", str(whole.ring.word), *times]


def round_table(quick: bool) -> Table:
    """Measure sums of 100 clients with words of 32 and of 64 bits."""
    rows = [round_row(*(QUICK_ROUND if quick else ROUND), word) for word in STEPS]
    about = f"""A sum of all clients at {SUPERNODES} SuperNodes under a trusted server. *State* is
        saving a SuperNode's half and loading it again."""
    head = ["clients", "numbers", "bits of a word", "SuperNodes", "server", "state"]
    return table("A secure sum", about, head, rows)
