"""Alignments: of identities, blinded and verified, and of PPFL-GNN's embeddings at the server.

    python -m benchmarks.alignment [--quick]

For identities the measurement runs from the first message to the published slots, without the
secure sum: tables are added up in the clear. In the verified form every SuperNode is a party.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import parties
from benchmarks.measure import duration, say, spread, table
from flower_graph.ops import align_pairs, consensus
from flower_graph.rng import generator
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.server import AlignmentServer

RUN, SEED = b"run", b"the epoch's seed"
# SuperNodes, clients of each, identities of each client
SIZES = ((20, 1, 20), (50, 1, 50), (5, 60, 5), (5, 2, 250))
QUICK_SIZES = ((5, 1, 3), (5, 2, 3))
TIMES = 2
FORMS: dict[str, Callable[[Tensor], Any]] = {"pairs": align_pairs, "consensus": consensus}
COUNTS = {"pairs": (10, 100, 300), "consensus": (10, 100, 1_000, 10_000)}
QUICK_COUNTS = dict.fromkeys(FORMS, (4,))


class Aligning:
    """One alignment; ``seconds`` is the processor time of each side's steps."""

    # Verified where there is a folder, for the parties' journals

    def __init__(self, nodes: int, each: int, identities: int, folder: Path | None) -> None:
        self.clients = {n: list(range(n * each, n * each + each)) for n in range(nodes)}
        draw, total = np.random.default_rng(0), nodes * each
        # As many identities as that each is held by three clients
        pool = max(identities, total * identities // 3)
        held = {c: draw.choice(pool, identities, replace=False).tolist() for c in range(total)}
        own = {n: {c: held[c] for c in local} for n, local in self.clients.items()}
        self.seconds: dict[str, float] = {}
        self.hosts: Mapping[int, Any]
        if folder is None:
            self.hosts = {n: AlignmentClient(RUN, data) for n, data in own.items()}
            self.server = AlignmentServer()
        else:
            self._verified(own, folder)

    def _verified(self, own: dict[int, Any], folder: Path) -> None:
        points = [AlignmentClient(RUN, data).points for data in own.values()]
        declared = {client: size for one in points for client, size in one.items()}
        grants = [range(min(data), max(data) + 1) for data in own.values()]
        trusts = parties.make(grants, folder, 0.0, max(declared.values()))
        self.server = server = AlignmentServer(registry=trusts[0].registry, run_id=RUN)
        server.begin(SEED, self.clients, trusts[0].registry)
        self.hosts = {n: AlignmentClient(RUN, own[n], trusts[n]) for n in own}
        for host in self.hosts.values():
            host.begin(SEED, self.clients, declared)

    def run(self) -> float:
        server = self.server
        for node, local in self.clients.items():
            server.enroll(node, local)
        while requests := self._timed("server", server.requests):
            for node, request in requests.items():
                reply = self._answer(node, request)
                self._timed("server", partial(server.take, node, reply))
        while server.waits():
            self._unite()
        for node, message in server.publications().items():
            self._answer(node, message)
        if server.blamed or not server.aligned:
            raise RuntimeError(f"not all are aligned: {server.blamed}")
        return sum(self.seconds.values())

    def _unite(self) -> None:
        total, everybody = np.uint64(0), [c for local in self.clients.values() for c in local]
        for node, request in self._timed("server", self.server.union_requests).items():
            self._answer(node, request)
            host, local = self.hosts[node], self.clients[node]
            total = total + self._timed("tables", partial(host.sketch, request.cells, local))
        self._timed("server", partial(self.server.take_union, total, everybody))

    def _answer(self, node: int, request: Any) -> dict[str, Any]:
        config = request.to_config()
        stage = type(request).__name__
        found: dict[str, Any] = self._timed(stage, partial(self.hosts[node].answer, config))
        return found

    def _timed(self, who: str, call: Callable[[], Any]) -> Any:
        started = time.process_time()
        found = call()
        self.seconds[who] = self.seconds.get(who, 0.0) + time.process_time() - started
        return found


def identity_row(nodes: int, each: int, identities: int) -> list[str]:
    """Measure both forms in turns; return the least time of each."""
    blinded, verified = math.inf, math.inf
    for _ in range(TIMES):
        aligning = Aligning(nodes, each, identities, None)
        points = sum(sum(host.points.values()) for host in aligning.hosts.values())
        blinded = min(blinded, aligning.run())
        with TemporaryDirectory() as folder:
            verified = min(verified, Aligning(nodes, each, identities, Path(folder)).run())
    row = [str(nodes), str(nodes * each), str(identities), f"{points:,}", duration(blinded)]
    say(f"{nodes} x {each} clients with {identities} identities: {verified / blinded:.2f} times")
    return [*row, duration(verified), f"{verified / blinded:.2f}"]


def embeddings(clients: int, nodes: int = 1_000, dimension: int = 16) -> Tensor:
    """Draw embeddings of the same nodes at several clients: rotated, and with noise."""
    draw = generator(0, "alignment", clients)
    own = torch.randn(clients, nodes, dimension, generator=draw)
    turns = torch.linalg.qr(torch.randn(clients, dimension, dimension, generator=draw)).Q
    common = torch.randn(nodes, dimension, generator=draw)
    return own.baddbmm_(common.expand(clients, -1, -1), turns)


def embedding_row(form: str, clients: int) -> list[str]:
    """Time the server's alignment of embeddings."""
    x, seconds = embeddings(clients), []
    for _ in range(1 + TIMES):
        started = time.perf_counter()
        FORMS[form](x)
        seconds.append(time.perf_counter() - started)
    say(f"alignment: {form} of {clients}")
    return [form, f"{clients:,}", spread(seconds[1:])]


def main() -> None:
    """Print the tables as JSON."""
    quick = "--quick" in sys.argv
    about = """Processor time of all SuperNodes and the server together, blinded as a trusted server
        has it, and verified. *Points* are the identities and what fills blocks up."""
    head = ["SuperNodes", "clients", "identities of each", "points", "blinded", "verified", "times"]
    rows = [identity_row(*one) for one in (QUICK_SIZES if quick else SIZES)]
    identities = table("Alignment by blinded identities", about, head, rows)
    about = f"""1,000 public nodes with 16 numbers, {torch.get_num_threads()} threads. *Pairs* grow
        with the square of the clients."""
    rows = [
        embedding_row(form, clients)
        for form, counts in (QUICK_COUNTS if quick else COUNTS).items()
        for clients in counts
    ]
    server = table("PPFL-GNN's alignment at the server", about, ["form", "clients", "time"], rows)
    print(json.dumps([identities, server]))


if __name__ == "__main__":
    main()
