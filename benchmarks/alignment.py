"""Alignments: of identities, blinded and verified, and of PPFL-GNN's embeddings at the server.

    python -m benchmarks.alignment [--quick]

For identities the measurement runs from the first message to the published slots, without the
secure sum: tables are added up in the clear. In the verified form every SuperNode is a party.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import parties
from benchmarks.measure import duration, say, spread, table
from flower_graph.ops.procrustes import align_pairs, consensus
from flower_graph.rng import generator
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.secure.node_config import MOST_BLOCK
from flower_graph.secure.parties.registry import TrustSettings

RUN, SEED = b"run", b"the epoch's seed"
# SuperNodes, clients of each, identities of each client
SIZES = ((20, 1, 20), (50, 1, 50), (5, 60, 5), (5, 2, 250))
QUICK_SIZES = ((5, 1, 3), (5, 2, 3))
TIMES = 2
FORMS: dict[str, Callable[[Tensor], Any]] = {"pairs": align_pairs, "consensus": consensus}
COUNTS = {"pairs": (10, 100, 300), "consensus": (10, 100, 1_000, 10_000)}
QUICK_COUNTS = dict.fromkeys(FORMS, (4,))

Data = Mapping[int, Sequence[object]]
Answer = Callable[[int, dict[str, Any]], dict[str, Any] | None]


class Alignment:
    """Clients assigned to nodes, and a server that leads them, in one process.

    With ``trusts`` of parties, by node, it is the verified form.
    """

    def __init__(
        self,
        data: Data,
        nodes: Mapping[int, Sequence[int]],
        run_id: bytes = RUN,
        form: str = "psi",
        trusts: Sequence[TrustSettings] = (),
    ) -> None:
        self.run, self.is_plain = run_id, form == "plain"
        self.data, self.nodes, self.trusts = dict(data), dict(nodes), trusts
        self.server = AlignmentServer(plain=self.is_plain)
        self.declared: dict[int, int] = {}
        if trusts:
            registry = trusts[0].registry
            self.server = AlignmentServer(registry=registry, run_id=run_id)
            self.server.begin(SEED, self.nodes, registry)
            for node in self.nodes:
                self.declared |= AlignmentClient(run_id, self.own(node)).points
        self.hosts = {node: self.host(node) for node in self.nodes}
        self.received: list[dict[str, Any]] = []
        self.totals: list[Any] = []

    def own(self, node: int) -> dict[int, Sequence[object]]:
        """Return the identities of a node's clients."""
        return {client: self.data[client] for client in self.nodes[node]}

    def host(self, node: int, state: bytes | None = None) -> Any:
        """Make a node's host, new or from its state."""
        own = self.run, self.own(node), *self.trusts[node : node + 1]
        if state is None:
            host = AlignmentClient(*own, plain=self.is_plain)
        else:
            host = AlignmentClient.from_bytes(state, *own)
        if self.trusts:
            host.begin(SEED, self.nodes, self.declared)
        return host

    def reply(self, node: int, config: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.hosts[node].answer(config)
        return found

    def exchange(self, answer: Answer | None = None) -> dict[int, Any]:
        """Run one stage; return its requests.

        ``answer(node, config)`` stands between server and host: it may change what a host says, or
        return None for silence.
        """
        requests: dict[int, Any] = self.server.requests()
        for node, request in requests.items():
            reply = (answer or self.reply)(node, request.to_config())
            if reply is not None:
                self.received.append(reply)
                self.server.take(node, reply)
        return requests

    def union(self, absent: Iterable[int] = ()) -> None:
        """Add up the tables of all clients that have tokens, but for the absent."""
        while self.server.waits():
            total, present = np.uint64(0), []
            for node, request in self.server.union_requests().items():
                assert self.reply(node, request.to_config()) == {}
                clients = sorted(set(self.hosts[node].finished) - set(absent))
                total = total + self.hosts[node].sketch(request.cells, clients)
                present += clients
            self.totals.append(total)
            self.server.take_union(total, present)

    def align(self, answer: Answer | None = None, *nodes: int, absent: Iterable[int] = ()) -> None:
        """Enrol some nodes, by default all, and align whoever is enrolled, to the end."""
        for node in nodes or self.nodes:
            self.server.enroll(node, self.nodes[node])
        while self.exchange(answer):
            pass
        self.union(absent)
        for node, message in self.server.publications().items():
            self.reply(node, message.to_config())


def drawn(nodes: int, each: int, identities: int, folder: Path | None = None) -> Alignment:
    """Draw what clients hold; with a folder, for the parties' journals, in the verified form."""
    grants = [range(n * each, n * each + each) for n in range(nodes)]
    draw, total = np.random.default_rng(0), nodes * each
    # As many identities as that each is held by three clients
    pool = max(identities, total * identities // 3)
    held = {c: draw.choice(pool, identities, replace=False).tolist() for c in range(total)}
    trusts = [] if folder is None else parties.make(grants, folder, 0.0, MOST_BLOCK)
    return Alignment(held, dict(enumerate(grants)), trusts=trusts)


def seconds(alignment: Alignment) -> float:
    """Return the processor time of an alignment of all."""
    started = time.process_time()
    alignment.align()
    if alignment.server.blamed or not alignment.server.aligned:
        raise RuntimeError(f"not all are aligned: {alignment.server.blamed}")
    return time.process_time() - started


def identity_row(nodes: int, each: int, identities: int) -> list[str]:
    """Measure both forms in turns; return the least time of each."""
    blinded, verified = math.inf, math.inf
    for _ in range(TIMES):
        trusting = drawn(nodes, each, identities)
        points = sum(sum(host.points.values()) for host in trusting.hosts.values())
        blinded = min(blinded, seconds(trusting))
        with TemporaryDirectory() as folder:
            verified = min(verified, seconds(drawn(nodes, each, identities, Path(folder))))
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
