"""Secure sum: a round of 100 clients at two SuperNodes, with the server's part.

Cost against the number of clients is in ``secure_clients``, whole sums of many in ``secure_whole``.
Run alone: ``python -m benchmarks.secure [--quick]``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measure import say, summary
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import MaskedReply
from flower_graph.secure.sum.results import Skipped
from flower_graph.secure.sum.server import SumServer
from flower_graph.secure.sum.terms import SumTerms

TERMS = SumTerms("benchmark", None)
LIMIT = 64.0
STEPS = {32: 2.0**-16, 64: 2.0**-24}  # resolutions that need words of so many bits
ROUND, QUICK_ROUND = (100, 99_000, 12), (20, 1_000, 3)  # clients, numbers, rounds
WARM_UP = 2
TARGETS = {"round": 0.09, "state": 0.003}
SUPERNODES = 2


class Sum:
    """A server and its hosts, with as many clients each; adds up what every step costs."""

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
        """Run one round and check its sum."""
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
        """Prepare a round, so that the state is full; time saving a host and loading it."""
        node, request = next(iter(self.server.open_round(number, self.server.clients).items()))
        self.hosts[node].prepare(request)
        started = time.perf_counter()
        self.hosts[node] = SumClient.from_bytes(self.hosts[node].to_bytes())
        return time.perf_counter() - started

    def _mask(self, host: SumClient, request: Any) -> MaskedReply:
        present = request.clients.tolist()
        total = self.vector * self.vector.dtype.type(len(present))
        return host.mask(request, present, total, TERMS)

    def _stage(self, requests: dict[int, Any], answer: Callable[[SumClient, Any], Any]) -> None:
        for node, request in requests.items():
            reply = self._timed("host", lambda n=node, r=request: answer(self.hosts[n], r))
            self._timed("server", lambda n=node, r=reply: self.server.take(n, r))

    def _timed(self, who: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        found = call()
        self.seconds[who] = self.seconds.get(who, 0.0) + time.perf_counter() - started
        return found


def measure_round(clients: int, length: int, rounds: int, word: int) -> dict[str, Any]:
    """Time whole rounds: all that the SuperNodes do, and the server's part."""
    whole = Sum(clients, length, word)
    host, server, state = [], [], []
    for number in range(rounds + WARM_UP):
        whole.round(2 * number)
        state.append(whole.restart(2 * number + 1))
        host.append(whole.seconds["host"])
        server.append(whole.seconds["server"])
    both = [one + other for one, other in zip(host, server, strict=True)]
    say(f"{clients} clients, {whole.ring.word} bits: {min(both) * 1e3:.1f} ms")
    return {
        "clients": clients,
        "supernodes": SUPERNODES,
        "length": length,
        "word": whole.ring.word,
        "round": summary(both[WARM_UP:]),
        "host": summary(host[WARM_UP:]),
        "server": summary(server[WARM_UP:]),
        "state": summary(state[WARM_UP:]),
    }


def main() -> None:
    """Print the result as JSON."""
    quick = "--quick" in sys.argv
    load = os.getloadavg()[0]
    rounds = [measure_round(*(QUICK_ROUND if quick else ROUND), word) for word in STEPS]
    print(json.dumps({"rounds": rounds, "targets": TARGETS, "load": load}))


if __name__ == "__main__":
    main()
