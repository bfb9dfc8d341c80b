"""Secure sum: a round of 100 clients at one SuperNode, and cost against the number of clients.

For the growth, a sample of clients have SuperNodes of their own, as in a deployment, with all their
partners elsewhere; the others share one SuperNode, which is not measured. Everything is computed
for real but the server's handing on of packets between clients that were not sampled.
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
from flwr.app import ConfigRecord, RecordDict

from benchmarks.measure import exponent, say, summary
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import MaskedReply
from flower_graph.secure.sum.partners import plan
from flower_graph.secure.sum.server import Skipped, SumServer
from flower_graph.server.ledger import count_bytes

LIMIT = 64.0
STEPS = {32: 2.0**-16, 64: 2.0**-24}  # resolutions that need words of so many bits
ROUND, QUICK_ROUND = (100, 99_000, 12), (20, 1_000, 3)  # clients, numbers, rounds
SIZES, QUICK_SIZES = (100, 1_000, 10_000), (30, 60)
LENGTH, SAMPLE, WARM_UP = 10_000, 20, 2
TARGETS = {"round": 0.09, "state": 0.003, "exponent": 0.5}
REST = -1  # the SuperNode of the clients that are not sampled


class Sum:
    """A server and its hosts; adds up what every step costs, by SuperNode."""

    def __init__(self, hosted: dict[int, range], length: int, word: int) -> None:
        self.server, self.length = SumServer(), length
        self.ring = Ring.fit(sum(map(len, hosted.values())), LIMIT, STEPS[word])
        self.hosts = {node: SumClient(self.server.run_id, own) for node, own in hosted.items()}
        for node, host in self.hosts.items():
            self.server.enroll(node, host.keys())
        self.vector = self.ring.encode(np.random.default_rng(0).uniform(-1, 1, length))
        self.seconds: dict[Any, float] = {}
        self.bytes_up: dict[int, int] = {}
        self.bytes_down: dict[int, int] = {}

    def round(self, number: int) -> None:
        """Run one round and check its sum."""
        self.seconds, self.bytes_up, self.bytes_down = {}, {}, {}
        server, clients = self.server, self.server.clients
        self._stage(
            self._timed("server", lambda: server.open_round(number, clients)),
            lambda host, request: host.prepare(request),
            server.take,
        )
        word = self.ring.word
        self._stage(
            self._timed("server", lambda: server.mask_requests(number, self.length, word)),
            self._mask,
            server.take,
        )
        self._stage(
            self._timed("server", lambda: server.unmask_requests(number)),
            lambda host, request: host.unmask(request),
            server.take,
        )
        result = self._timed("server", lambda: server.result(number))
        if isinstance(result, Skipped):
            raise RuntimeError(result.reason)
        expected = self.vector * self.vector.dtype.type(len(clients))
        if not np.array_equal(result.total, expected):
            raise RuntimeError("the sum is wrong")

    def restart(self, node: int, number: int) -> float:
        """Prepare a round, so that the state is full; time saving the host and loading it."""
        requests = self.server.open_round(number, self.server.clients)
        self.hosts[node].prepare(requests[node])
        started = time.perf_counter()
        self.hosts[node] = SumClient.from_bytes(self.hosts[node].to_bytes())
        return time.perf_counter() - started

    def _mask(self, host: SumClient, request: Any) -> MaskedReply:
        present = request.clients.tolist()
        return host.mask(request, present, self.vector * self.vector.dtype.type(len(present)))

    def _stage(
        self,
        requests: dict[int, Any],
        answer: Callable[[SumClient, Any], Any],
        take: Callable[[int, Any], None],
    ) -> None:
        for node, request in requests.items():
            reply = self._timed(node, lambda n=node, r=request: answer(self.hosts[n], r))
            self._timed("server", lambda n=node, r=reply: take(n, r))
            self.bytes_down[node] = self.bytes_down.get(node, 0) + wire_bytes(request)
            self.bytes_up[node] = self.bytes_up.get(node, 0) + wire_bytes(reply)

    def _timed(self, who: Any, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        found = call()
        self.seconds[who] = self.seconds.get(who, 0.0) + time.perf_counter() - started
        return found


def wire_bytes(message: Any) -> int:
    """Count what a message adds to a Flower message, the masked sum included."""
    size = count_bytes(RecordDict({"config": ConfigRecord(message.to_config())}))
    return size + (message.total.nbytes if isinstance(message, MaskedReply) else 0)


def measure_round(clients: int, length: int, rounds: int, word: int) -> dict[str, Any]:
    """Time whole rounds of one SuperNode with all clients."""
    whole = Sum({0: range(clients)}, length, word)
    host, server, state = [], [], []
    for number in range(rounds + WARM_UP):
        whole.round(2 * number)
        state.append(whole.restart(0, 2 * number + 1))
        host.append(whole.seconds[0])
        server.append(whole.seconds["server"])
    both = [one + other for one, other in zip(host, server, strict=True)]
    say(f"{clients} clients at one SuperNode, {whole.ring.word} bits: {min(both) * 1e3:.1f} ms")
    return {
        "clients": clients,
        "length": length,
        "word": whole.ring.word,
        "round": summary(both[WARM_UP:]),
        "host": summary(host[WARM_UP:]),
        "server": summary(server[WARM_UP:]),
        "state": summary(state[WARM_UP:]),
    }


def measure_size(clients: int, length: int, sample: int) -> dict[str, Any]:
    """Measure what a round costs a client that is alone at its SuperNode, and the server."""
    hosted = {node: range(node, node + 1) for node in range(sample)}
    many = Sum(hosted | {REST: range(sample, clients)}, length, 32)
    many.round(0)
    k, threshold, _ = plan(clients, many.server.dropout, many.server.corrupt)
    say(f"{clients} clients: {many.seconds[0] * 1e3:.1f} ms a client, {k} partners")
    return {
        "clients": clients,
        "length": length,
        "partners": k,
        "threshold": threshold,
        "client": summary([many.seconds[node] for node in range(sample)]),
        "bytes-up": many.bytes_up[0],
        "bytes-down": many.bytes_down[0],
        "vector-bytes": many.vector.nbytes,
        "server-seconds": many.seconds["server"],
    }


def main() -> None:
    """Print the result as JSON."""
    quick = "--quick" in sys.argv
    load = os.getloadavg()[0]
    rounds = [measure_round(*(QUICK_ROUND if quick else ROUND), word) for word in STEPS]
    sizes, sample = (QUICK_SIZES, 5) if quick else (SIZES, SAMPLE)
    entries = [measure_size(size, LENGTH, sample) for size in sizes]
    m = [entry["clients"] for entry in entries]
    extra = [e["bytes-up"] + e["bytes-down"] - e["vector-bytes"] for e in entries]
    exponents = {
        "seconds": exponent(m, [entry["client"]["median"] for entry in entries]),
        "bytes": exponent(m, extra),
    }
    found = {"rounds": rounds, "entries": entries, "exponents": exponents, "targets": TARGETS}
    print(json.dumps(found | {"load": load}))


if __name__ == "__main__":
    main()
