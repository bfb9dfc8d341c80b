"""What it costs that two processes take turns with one cohort's state, as Ray's actors do.

The same messages go to three clients of the size of PubMed, one after another: one keeps its state
in its process, one in a mapped file that it alone uses, and one in a mapped file that two
processes use in turns. Run alone: ``python -m benchmarks.state [--quick]``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from benchmarks.measure import say, summary
from flower_graph.client.state import forget_run
from flower_graph.data.sources.generators import csbm_sparse
from flower_graph.strategies.split_gradient_relay.cohort_client import NodeClient
from flower_graph.strategies.split_gradient_relay.messages import RelayRequest
from flower_graph.strategies.split_gradient_relay.users import UserSettings
from flower_graph.wire.keys import CONFIG

SETTINGS = UserSettings(16, False, 5e-4, 0, "holders")
FEATURES, ACTIVE = 500, 50  # as PubMed
WARM_UP = 3  # messages to each process that are not counted
TARGET = 0.1  # of the computation


def serve(pipe: Connection, users: int) -> None:
    """Answer messages, as an actor does: a new client for each, with the context it is given."""
    graph = csbm_sparse(users, 3, features=FEATURES, active=ACTIVE)
    parts = graph.indptr.int(), graph.indices, graph.values
    x = torch.sparse_csr_tensor(*parts, (users, FEATURES), check_invariants=False)
    numbers = torch.arange(users)
    pipe.send(None)  # ready
    while (message := pipe.recv()) is not None:
        context, gradient, config = message
        started = time.perf_counter()
        client = NodeClient(context, x, numbers)
        client.fit([gradient], config)
        pipe.send((context, time.perf_counter() - started))


def make_context(node: int, folder: str) -> Context:
    """Make the context of a client; ``folder`` is ``":memory:"``, or empty for a mapped file."""
    config: dict[str, Any] = {"partition-id": 0, "num-partitions": 1, "state-dir": folder}
    return Context(os.getpid(), node, config, RecordDict(), {})


def alternate(users: int, messages: int) -> dict[str, Any]:
    """Send the same messages to the three clients and time them."""
    ways = {"process": ":memory:", "file": "", "file-in-turns": ""}
    contexts = {way: make_context(i, where) for i, (way, where) in enumerate(ways.items())}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gradient = np.random.default_rng(0).standard_normal((users, 16), np.float32)
    with Workers(users) as workers:
        for number in range(1, messages + 1):
            config = request_config(users, gradient, number)
            for way in ways:
                pipe = workers.pipes[number % 2 if way == "file-in-turns" else 0]
                pipe.send((contexts[way], gradient, config))
                contexts[way], taken = pipe.recv()
                seconds[way].append(taken)
    times = {way: summary(taken[2 * WARM_UP :]) for way, taken in seconds.items()}
    return {"seconds": times, "context-bytes": len(pickle.dumps(contexts["file-in-turns"]))}


def request_config(users: int, gradient: np.ndarray[Any, Any], number: int) -> dict[str, Any]:
    """Return the config entries of the message with this number."""
    rounds = np.full(users, number - 1)  # the first message brings no gradient
    request = RelayRequest(number, np.arange(users), gradient, rounds, 0.1, SETTINGS)
    return dict(request.to_record().config_records[CONFIG])


class Workers:
    """Two processes that answer messages."""

    def __init__(self, users: int) -> None:
        self.pipes: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, users), daemon=True)
            process.start()
            self.pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Workers:
        """Wait until both are ready."""
        for pipe in self.pipes:
            pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        """End both."""
        for pipe, process in zip(self.pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


def main() -> None:
    """Print the result as JSON."""
    quick = "--quick" in sys.argv
    users, messages = (400, 8) if quick else (19_717, 46)
    say(f"state: {users:,} users")
    load = os.getloadavg()[0]
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        result = alternate(users, messages)
    finally:
        forget_run(os.getpid())
    medians = {way: times["median"] for way, times in result["seconds"].items()}
    result |= {
        "users": users,
        "state-bytes": users * ACTIVE * 16 * 4 * 3,
        "shared-memory": shared is not None,
        "load": load,
        "target": TARGET,
        "cost-file": medians["file"] / medians["process"] - 1,
        "cost-in-turns": medians["file-in-turns"] / medians["process"] - 1,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
