"""Time and memory of 10^4, 10^5 and 10^6 users, each size in a process of its own.

Run alone: ``python -m benchmarks.scale [--quick]``; with ``--users N --rounds R`` it measures one
size in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Context

from benchmarks.measure import exponent, peak_bytes, run_part, say, summary
from flower_graph import NodeClient, SplitGradientRelay
from flower_graph.client.adaptor import make_client_app
from flower_graph.data.sources.generators import SparseGraph, csbm_sparse
from flower_graph.models import build_server_model
from flower_graph.ops.graph import gcn_adjacency
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid

CLASSES, DEGREE, FEATURES, ACTIVE, HIDDEN = 7, 10.0, 512, 32, 16
WARM_UP = 2  # rounds that are not counted: the first has no step, the second touches new memory
SIZES = ((10_000, 22), (100_000, 12), (1_000_000, 7))
QUICK = ((200, 5), (800, 5))
TARGETS = {"exponent": 1.1, "bytes": 16 * 2**30, "seconds": 10.0}


def server_data(graph: SparseGraph, labelled: int = 140) -> SimpleNamespace:
    """Return what the server knows of a graph: no features, and few labels to learn from."""
    node = torch.arange(graph.y.numel())
    train, is_even = node < labelled, node % 2 == 0
    return SimpleNamespace(
        edge_index=graph.edge_index,
        y=graph.y,
        train_mask=train,
        val_mask=~train & is_even,
        test_mask=~train & ~is_even,
    )


def build(users: int) -> tuple[SplitGradientRelay, InProcessGrid]:
    """Generate a graph and set up both halves; the features never become dense."""
    graph = csbm_sparse(users, CLASSES, degree=DEGREE, features=FEATURES, active=ACTIVE)
    model = build_server_model("gcn", hidden=HIDDEN, heads=1, classes=CLASSES, dropout=0.5, seed=0)
    strategy = SplitGradientRelay(server_data(graph), model, latent_size=HIDDEN)
    x = torch.sparse_csr_tensor(
        graph.indptr.int(), graph.indices, graph.values, (users, FEATURES), check_invariants=False
    )
    numbers = torch.arange(users)

    def client_fn(context: Context) -> NodeClient:
        return NodeClient(context, x, numbers)

    return strategy, InProcessGrid(make_client_app(client_fn), num_supernodes=1)


def measure(users: int, rounds: int) -> dict[str, Any]:
    """Time the rounds of one size in this process."""
    started = time.perf_counter()
    strategy, grid = build(users)
    seconds: list[float] = []
    first_ended: list[float] = []

    def on_round(report: RoundReport) -> None:
        seconds.append(report.seconds)
        first_ended.append(time.perf_counter())

    strategy.start(grid, num_rounds=rounds, on_round=on_round)
    times = summary(seconds[WARM_UP:])
    return {
        "users": users,
        "weights": users * ACTIVE * HIDDEN,
        "latent-bytes": users * HIDDEN * 4,
        "round": times,
        # The graph, the server, packing and first weights: all up to the first round's own work
        "setup-seconds": first_ended[0] - started - times["median"],
        "peak-bytes": peak_bytes(),
        "edge-seconds": edge_seconds(strategy, users),
    }


def edge_seconds(strategy: SplitGradientRelay, users: int) -> float:
    """Return what one edge costs in a product of the adjacency and the latent vectors."""
    matrix = gcn_adjacency(strategy.server.edges, users).matrix
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        matrix @ strategy.server.latent
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / matrix.values().numel()


def measure_all(sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Measure every size in a process of its own and fit the growth."""
    load, entries = os.getloadavg()[0], []
    for users, rounds in sizes:
        say(f"scale: {users:,} users")
        entries.append(run_part("scale", ["--users", str(users), "--rounds", str(rounds)]))
    counts = [entry["users"] for entry in entries]
    seconds = [entry["round"]["median"] for entry in entries]
    memory = [entry["peak-bytes"] for entry in entries]
    fits = {
        "seconds": exponent(counts, seconds),
        "memory": exponent(counts, memory),
        "seconds-last-step": exponent(counts[-2:], seconds[-2:]),
        "memory-last-step": exponent(counts[-2:], memory[-2:]),
    }
    return {"load": load, "entries": entries, "exponents": fits, "targets": TARGETS}


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--users", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.users:
        print(json.dumps(measure(given.users, given.rounds)))
    else:
        print(json.dumps(measure_all(QUICK if given.quick else SIZES)))


if __name__ == "__main__":
    main()
