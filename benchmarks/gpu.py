"""The same rounds on the CPU and on a GPU: equal losses, and times.

``python -m benchmarks.gpu [--quick]`` runs each method on generated graphs, in this process, on one
device after the other. Without a GPU it runs on the CPU only and says so. Dropout is off, because
the two devices draw different random numbers, and nothing is masked.
"""

import argparse
import json
import math
import statistics
import sys
from typing import Any

import torch

from benchmarks.measure import say
from flower_graph.apps.run import simulate
from flower_graph.method.load import load_config

ROUNDS, WARM_UP = 10, 2
# Adam divides by the root of a gradient's square, so rounding shows where a gradient is near zero
TOLERANCE = 1e-4
GRAPH = ["data.name=csbm", "data.classes=7", "data.num_features=512", "data.active=32"]
GRAPH += ["data.split=random", "data.num_val=100", "data.num_test=200"]
PLAIN = ["strategy.alignment=plain", "strategy.aggregation=plain"]
# By config: its settings, and nodes and clients of each size; those of `--quick` come first
CASES: dict[str, tuple[list[str], list[tuple[int, int | None]]]] = {
    "nfedgnn/cora-linqs": (["model.dropout=0"], [(600, None), (19_717, None), (100_000, None)]),
    "fedscem/cora-linqs": (
        ["strategy.dropout=0", *PLAIN],
        [(600, 6), (5_000, 100), (20_000, 1000)],
    ),
    "fedgls/cora-linqs": (["model.dropout=0"], [(600, 4), (10_000, 100), (40_000, 400)]),
    "ppfl/cora-linqs-gat": (["gat.dropout=0", "judge.mlp=false"], [(600, 2), (5_000, 10)]),
}


def run(name: str, size: tuple[int, int | None], device: str) -> tuple[list[float], float]:
    """Run rounds on one device; return losses, and a round's median seconds."""
    (settings, _), (nodes, clients) = CASES[name], size
    settings = [*GRAPH, f"data.nodes={nodes}", *settings, f"rounds={ROUNDS}", f"device={device}"]
    reports = simulate(
        load_config(name, settings + ([f"partition.clients={clients}"] if clients else []))
    )
    seconds = [report.seconds for report in reports[WARM_UP:]]
    return [report.loss for report in reports], statistics.median(seconds)


def compare(name: str, size: tuple[int, int | None], gpu: str | None) -> dict[str, Any]:
    """Run one size on the CPU and, where there is one, on the GPU."""
    say(f"{name}, {size}")
    losses, seconds = run(name, size, "cpu")
    entry: dict[str, Any] = {"config": name, "size": size, "cpu-seconds": seconds}
    if gpu is None:
        return entry
    others, quick = run(name, size, gpu)
    pairs = zip(losses, others, strict=True)
    apart = max(abs(one - other) / abs(one) for one, other in pairs if math.isfinite(one))
    entry |= {"gpu-seconds": quick, "times-as-fast": seconds / quick}
    return entry | {"equal": apart <= TOLERANCE, "loss-difference": apart}


def main() -> int:
    """Print the result as JSON; the exit code is 1 if CPU and GPU differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    is_quick = parser.parse_args().quick
    gpu = "cuda" if torch.cuda.is_available() else None
    if gpu is None:
        say("No CUDA GPU was found: CPU only, nothing to compare")
    entries = [
        compare(name, size, gpu)
        for name, (_, sizes) in CASES.items()
        for size in (sizes[:1] if is_quick else sizes[1:])
    ]
    card = None if gpu is None else torch.cuda.get_device_name(gpu)
    print(json.dumps({"gpu": card, "rounds": ROUNDS, "tolerance": TOLERANCE, "entries": entries}))
    return int(not all(entry.get("equal", True) for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
