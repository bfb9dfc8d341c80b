"""The whole of FedSCem, alignment and masks included: in process beside a plain loop, and on Ray.

After every round the plain loop of ``benchmarks.ego`` takes one over the same clients, with each
number of threads, so that all meet the same state of the machine.
Run alone: ``python -m benchmarks.fedscem [--quick]``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

import torch

from benchmarks import engines
from benchmarks.ego import PlainClient, plain_round, timed
from benchmarks.ego_round import Overlap
from benchmarks.measure import peak_bytes, run_part, say, summary
from flower_graph.apps.run import client_app
from flower_graph.data import load_data
from flower_graph.errors import DataError
from flower_graph.method.load import load_config
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.masked_embedding_averaging.method import METHOD
from flower_graph.strategies.masked_embedding_averaging.strategy import MaskedEmbeddingAveraging

# Seconds a round, in parts of the loop's round, and above the in-process round; of the set-up; of a
# round with several SuperNodes, in rounds with one, or seconds
TARGETS = {"round": 0.2, "ratio": 0.15, "flwr": 0.3, "setup": 2.0, "bytes": 8 * 2**30}
TARGETS |= {"two": 1.7, "hundred": 0.6}
WARM_UP = 2  # rounds that are not counted: packing, first touch of memory
THREADS = (1, 2)  # of the plain loop
CORA, LINQS, PUBMED = "fedscem/cora", "fedscem/cora-linqs", "fedscem/pubmed"
PAPER = ["model.projection=32", "strategy.mu=5", "strategy.tau=10"]  # for those of fedscem/cora
PLAIN = ["strategy.aggregation=plain"]
FLWR_ROUNDS = 22

# What it is, settings, SuperNodes, rounds, whether the loop goes beside it
Case = tuple[str, list[str], int, int, bool]
CASES: tuple[Case, ...] = (
    ("as shipped", [], 1, 14, True),
    ("as shipped, plain sums", PLAIN, 1, 14, False),
    ("as shipped", [], 2, 14, False),
    ("as shipped, plain sums", PLAIN, 2, 14, False),
    ("paper's head and losses", PAPER, 1, 14, True),
    ("paper's head and losses, plain sums", PAPER + PLAIN, 1, 14, False),
    ("paper's head and losses", PAPER, 2, 14, False),
    ("paper's head and losses", PAPER, 100, 8, False),
    ("paper's head and losses, plain sums", PAPER + PLAIN, 100, 8, False),
)
QUICK: tuple[Case, ...] = (
    ("tiny", ["partition.clients=8"], 1, 5, True),
    ("tiny", ["partition.clients=8"], 2, 5, False),
)


def measure(
    name: str, what: str, settings: list[str], supernodes: int, rounds: int, *, loop: bool
) -> dict[str, Any]:
    """Time a run in process."""
    config = load_config(name, [f"rounds={rounds}", "device=cpu", *settings])
    say(f"fedscem: {name}, {what}, {supernodes} SuperNodes")
    strategy, egos = METHOD.build_strategy(config, None), METHOD.graphs(config)
    assert isinstance(strategy, MaskedEmbeddingAveraging)
    clients = [PlainClient(ego, strategy.session.settings) for ego in egos] if loop else []
    overlap, before = Overlap(egos), torch.get_num_threads()
    reports: list[RoundReport] = []
    loops: dict[int, list[float]] = {threads: [] for threads in THREADS if loop}

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        for threads, seconds in loops.items():
            torch.set_num_threads(threads)
            seconds.append(timed(lambda: plain_round(clients, overlap)))
        torch.set_num_threads(before)

    grid = InProcessGrid(client_app(config, None), num_supernodes=supernodes, seed=config.seed)
    strategy.start(grid, num_rounds=rounds, on_round=on_round)
    counted = reports[WARM_UP:-1]  # the last pass only measures
    round_ = summary([report.seconds for report in counted])
    entry = {
        "config": name,
        "what": what,
        "data": config.data.name,
        "clients": len(egos),
        "nodes": sum(ego.nodes.numel() for ego in egos),
        "slots": strategy.session.num_slots,
        "supernodes": supernodes,
        "setup-seconds": strategy.session.setup_seconds,
        "round": round_,
        "parts": _parts(counted),
        "peak-bytes": peak_bytes(),
    }
    if loop:
        entry["loops"] = {threads: summary(times[WARM_UP:]) for threads, times in loops.items()}
        entry["ratio"] = round_["median"] / min(t["median"] for t in entry["loops"].values())
    return entry


def _parts(reports: list[RoundReport]) -> dict[str, float]:
    """Return the median seconds of each part of a round."""
    names = sorted({name for report in reports for name in report.parts})
    return {name: statistics.median(r.parts.get(name, 0.0) for r in reports) for name in names}


def _apart(name: str, case: Case) -> dict[str, Any]:
    """Measure a case in a process of its own."""
    return run_part("fedscem", ["--case", json.dumps([name, *case])])  # type: ignore[no-any-return]


def _is_here(name: str) -> bool:
    config = load_config(name, [])
    try:
        load_data(config.data, seed=config.seed, download=False)
    except DataError:
        return False
    return True


def _on_ray(name: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Time ``flwr run`` with two SuperNodes; beside it the same assignment in process."""
    found = engines.measure(name, 2, FLWR_ROUNDS, single=False)
    same = next(e for e in entries if e["supernodes"] == 2 and e["config"] == name)
    above = found["round"]["median"] - same["round"]["median"]
    return {"config": name, "supernodes": 2, "round": found["round"], "above": above}


def main() -> None:
    """Print the result as JSON; each case is measured in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        name, what, settings, supernodes, rounds, loop = json.loads(given.case)
        print(json.dumps(measure(name, what, settings, supernodes, rounds, loop=loop)))
        return
    load = os.getloadavg()[0]
    name = CORA if not given.quick and _is_here(CORA) else LINQS
    entries = [_apart(name, case) for case in (QUICK if given.quick else CASES)]
    skipped = []
    if not given.quick:
        if _is_here(PUBMED):
            entries.append(_apart(PUBMED, ("as shipped", [], 1, 6, False)))
        else:
            skipped.append(PUBMED)
    flwr = None if given.quick else _on_ray(name, entries)
    found = {"entries": entries, "skipped": skipped, "flwr": flwr, "targets": TARGETS}
    print(json.dumps(found | {"load": load, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
