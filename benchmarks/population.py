"""What ``docs/scale.md`` is made of: bytes, seconds and memory of one user, one message, one edge.

Beside them stand days with users who come and go, simulated message by message, and what the
formulas of ``day_formula`` say of the same days. Run alone: ``python -m benchmarks.population
[--quick]``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import scale
from benchmarks.day import Day, DayGrid, There, drawn, simulate, strategy_of
from benchmarks.day_formula import as_json, expected, sizes
from benchmarks.measure import part_main, peak_bytes, run_part, say
from flower_graph.data.sources.generators import csbm_sparse
from flower_graph.ops.active_rows import pack_csr
from flower_graph.ops.graph import SortedEdges
from flower_graph.secure.ring import Ring
from flower_graph.strategies.split_gradient_relay.config import StrategyConfig
from flower_graph.strategies.split_gradient_relay.masked_client import LEAST_FRACTION_BITS
from flower_graph.strategies.split_gradient_relay.users import LinearCohort, UserSettings

SEED, TIMES = 0, 3
# Forms, SuperNodes and users of each. Who steps with one sum must all stay: there nobody leaves
# between two exchanges of a round.
DAYS = (
    ("own", 1_000_000, 1),
    ("own", 10_000, 100),
    ("averaged", 10_000, 100),
    ("summed", 10_000, 100),
)
QUICK_DAYS = (("own", 3_000, 1), ("own", 300, 10), ("averaged", 300, 10), ("summed", 300, 10))
SERVER_USERS, CLIENT_USERS, ENROLLED = 1_000_000, 100_000, 20_000
QUICK_USERS, MANY = 2_000, 10  # users of a SuperNode, beside those with one


def day_of(form: str, supernodes: int, each: int) -> Day:
    """Return the day on which a form is simulated."""
    return Day(supernodes, each, answer=0.0) if form == "summed" else Day(supernodes, each)


def measure_day(form: str, supernodes: int, each: int) -> dict[str, Any]:
    """Simulate a day, and work it out."""
    logging.disable(logging.WARNING)  # a line for each round with users that have left
    torch.set_num_threads(1)
    day = day_of(form, supernodes, each)
    there = drawn(day, SEED)
    rounds = there.begins.sum(0)  # of each SuperNode
    counted, formula = simulate(form, day, there), expected(form, day, sizes())
    return {
        "form": form,
        "day": asdict(day),
        "counted": asdict(counted),
        "expected": asdict(formula),
        # of the mean number of rounds in which a SuperNode is there
        "standard-error": float(rounds.std() / rounds.mean() / np.sqrt(supernodes)),
        "peak-bytes": peak_bytes(),
    }


def measure_server(users: int) -> dict[str, Any]:
    """Time the server's own work in a round, and weigh what it keeps, by parts."""
    torch.set_num_threads(1)
    strategy, _ = scale.build(users, scale.MEMORY)
    strategy.server.receive(torch.arange(users), torch.randn(users, scale.HIDDEN))
    server, book = strategy.server, strategy.users
    graph = server.graph
    assert isinstance(graph, SortedEdges), "what is generated is in order"
    parts = {
        "latent vectors and labels": _held(server),
        "edges": graph.ptr.nbytes + graph.other.nbytes,
        "what waits for users": _held(book) + _held(book.roster),
    }
    before = _resident_alone()
    step = _least(lambda number: server.step(number, 0.1))
    judge = _least(lambda _: server.accuracy())
    parts["work of a step"] = _status("VmHWM") - before
    return {
        "users": users,
        "edges": graph.other.numel(),
        "step-seconds": step / users,
        "judge-seconds": judge / users,
        "bytes": {name: size / users for name, size in parts.items()},
    }


def _held(thing: object) -> int:
    """Add up the bytes of an object's tensors and arrays."""
    found = {id(value): value for value in vars(thing).values()}
    found |= {id(value): value for value in getattr(thing, "masks", {}).values()}
    tensors = [value for value in found.values() if isinstance(value, (Tensor, np.ndarray))]
    return sum(value.nbytes for value in tensors)


def _resident_alone() -> int:
    """Give freed memory back, forget the peak so far, and return what the process holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _status(name: str) -> int:
    """Read a size from what Linux says of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _least(work: Callable[[int], object]) -> float:
    seconds = []
    for number in range(1, TIMES + 1):
        started = time.process_time()
        work(number)
        seconds.append(time.process_time() - started)
    return min(seconds)


def measure_users(users: int) -> dict[str, Any]:
    """Time a user's step and forward, and weigh its weights, one of many at a SuperNode."""
    torch.set_num_threads(1)
    graph = csbm_sparse(
        users, scale.CLASSES, degree=scale.DEGREE, features=scale.FEATURES, active=scale.ACTIVE
    )
    rows = pack_csr(graph.indptr.int(), graph.indices, graph.values, scale.FEATURES, bias=False)
    cohort = LinearCohort(rows, UserSettings(scale.HIDDEN, False, 5e-4, 0, "holders"))
    gradient = torch.randn(users, scale.HIDDEN)

    def turn(_: int) -> None:
        cohort.step(None, gradient, 0.1)
        cohort.forward(None)

    return {
        "users": users,
        "seconds": _least(turn) / users,
        "bytes": {
            "weights and moments": sum(t.nbytes for t in cohort.tensors().values()) / users,
            "features": sum(t.nbytes for t in rows if isinstance(t, Tensor)) / users,
        },
    }


def measure_open(supernodes: int, each: int) -> list[float]:
    """Return the bytes of SuperNodes that are enrolled, and what a round with all users adds."""
    logging.disable(logging.WARNING)
    day = Day(supernodes, each, rounds=1, share=1.0)
    everybody: NDArray[np.bool_] = np.ones((1, supernodes), np.bool_)
    grid = DayGrid(day, There(everybody, everybody), shares=False)  # each message's own memory
    strategy = strategy_of("own", day)
    tracemalloc.start()
    strategy.session.open(grid, 600.0, 1)
    strategy.session.gather(1)
    gc.collect()
    enrolled, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    strategy.round(1)
    _, most = tracemalloc.get_traced_memory()
    return [enrolled, most - enrolled]


def measure_both(users: int) -> dict[str, Any]:
    """Take apart what a SuperNode or its message weighs, and what one of its users does."""
    counts = np.array([(users, users), (users // MANY, users)])
    found = np.array([_case("open", users, 1), _case("open", users // MANY, MANY)])
    (supernode, message), (user, asked) = np.linalg.solve(counts, found).tolist()
    return {
        "users": users,
        "supernode": supernode,
        "user": user,
        "message": message,
        "user-in-round": asked,
    }


def most_parties() -> int:
    """Return the largest power of two SuperNodes whose sum of gradients has room in a word."""
    parties = 2
    while _has_room(2 * parties):
        parties *= 2
    return parties


def _has_room(parties: int) -> bool:
    try:
        Ring.fit(parties, StrategyConfig.limit, 2.0**-LEAST_FRACTION_BITS, guard=True)
    except ValueError:
        return False
    return True


CASES = {
    "day": measure_day,
    "server": measure_server,
    "users": measure_users,
    "open": measure_open,
}


def measure_all(quick: bool) -> dict[str, Any]:
    """Measure each case in a process of its own."""
    load = os.getloadavg()[0]
    found: dict[str, Any] = {"load": load, "sizes": as_json(sizes()), "parties": most_parties()}
    for name, users in (("server", SERVER_USERS), ("users", CLIENT_USERS)):
        say(f"population: {name}")
        found[name] = _case(name, QUICK_USERS if quick else users)
    say("population: what is open")
    found["open"] = measure_both(QUICK_USERS if quick else ENROLLED)
    found["days"] = []
    for form, supernodes, each in QUICK_DAYS if quick else DAYS:
        say(f"population: a day, {form}, {supernodes:,} SuperNodes of {each}")
        found["days"].append(_case("day", form, supernodes, each))
    return found


def _case(*case: object) -> Any:  # Any: whatever the case gives
    return run_part("population", ["--case", json.dumps(case)])


if __name__ == "__main__":
    part_main(CASES, measure_all)
