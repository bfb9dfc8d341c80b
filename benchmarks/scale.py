"""Time and memory of up to 10^7 users, each size in a process of its own.

Up to 10^6 users, each round asks all of them, with their rows in memory. Up to 10^7, a round asks
one in a hundred, with rows in a file or one layer for all, and every tenth round is evaluated. All
users answer once before that, so that gradients wait for all and the whole graph counts.

Run alone: ``python -m benchmarks.scale [--quick]``; with ``--users N --rounds R`` it measures one
size in this process, ``--form file`` or ``summed`` with few users asked. 10^7 users take about 19
GiB of memory and some GB on the disk where temporary files are.
"""

import argparse
import json
import statistics
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Context

from benchmarks.measure import duration, exponent, run_module, say, spread, table
from flower_graph import NodeClient, SplitGradientRelay
from flower_graph.client.adaptor import make_client_app
from flower_graph.data import Graph, csbm
from flower_graph.engine.machine import peak_memory
from flower_graph.models import build_server_model
from flower_graph.records.rounds import RoundReport, format_bytes
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.nfedgnn.client import CommonLayerClient

CLASSES, DEGREE, FEATURES, ACTIVE, HIDDEN = 7, 10.0, 512, 32, 16
WARM_UP = 2  # rounds that are not counted: the first has no step, the second touches new memory
SIZES = ((10_000, 22), (100_000, 12), (1_000_000, 7))
QUICK = ((200, 5), (800, 5))
MEMORY, FILE, SUMMED = FORMS = ("memory", "file", "summed")
ASKED, EVALUATED = 0.01, 10  # share of the users, and every how many rounds, of the larger runs
LARGE = ((100_000, 10), (1_000_000, 10))
QUICK_LARGE = ((1_000, 10), (4_000, 10))


def server_data(graph: Graph, labelled: int = 140) -> SimpleNamespace:
    """Return the server's data of a graph: no features, and few labels to learn from."""
    node = torch.arange(graph.y.numel())
    train, is_even = node < labelled, node % 2 == 0
    return SimpleNamespace(
        edge_index=graph.edge_index,
        y=graph.y,
        train_mask=train,
        val_mask=~train & is_even,
        test_mask=~train & ~is_even,
    )


def build(
    users: int, form: str, rows: Path | None = None
) -> tuple[SplitGradientRelay, InProcessGrid]:
    """Generate a graph and set up both halves; the features never become dense."""
    sizes = {"features": FEATURES, "active": ACTIVE}
    graph = csbm(users, CLASSES, degree=DEGREE, **sizes, sparse=True)
    model = build_server_model("gcn", hidden=HIDDEN, heads=1, classes=CLASSES, dropout=0.5, seed=0)
    every = 1 if form == MEMORY else EVALUATED
    more: dict[str, Any] = {"latent_size": HIDDEN, "evaluate_every": every}
    if form == SUMMED:
        more |= {"share": SUMMED, "feature_dropout": 0.5, "learning_rate": 0.03}
    strategy = SplitGradientRelay(server_data(graph), model, **more)
    x, numbers = graph.x, torch.arange(users)

    def client_fn(context: Context) -> NodeClient | CommonLayerClient:
        if form == SUMMED:
            return CommonLayerClient(context, x, numbers)
        return NodeClient(context, x, numbers, rows_dir=rows)

    return strategy, InProcessGrid(make_client_app(client_fn), num_supernodes=1)


class EnoughError(Exception):
    """Ends a run before its last message, which would bring each user the gradient that waits."""


def measure(users: int, rounds: int, form: str = MEMORY) -> dict[str, Any]:
    """Time the rounds of one size in this process."""
    with TemporaryDirectory() as folder:
        started = time.perf_counter()
        strategy, grid = build(users, form, Path(folder) / "rows" if form == FILE else None)
        seconds: list[float] = []
        first_ended: list[float] = []

        def on_round(report: RoundReport) -> None:
            seconds.append(report.seconds)
            first_ended.append(time.perf_counter())
            say(f"scale: round {report.round}: {report.seconds:.2f} s, loss {report.loss:.4g}")
            if form != MEMORY:
                strategy.session.share = ASKED  # from the second round on
            if form == FILE and report.round == rounds:
                raise EnoughError

        with suppress(EnoughError):
            strategy.start(grid, num_rounds=rounds, on_round=on_round)
        disk = sum(one.stat().st_blocks * 512 for one in Path(folder).rglob("*") if one.is_file())
    last = len(seconds) if form == MEMORY else rounds - 1  # which is evaluated
    times = seconds[WARM_UP:last]
    return {
        "users": users,
        "seconds": statistics.median(times),
        "round": spread(times),
        # The graph, the server, packing and first weights: all up to the first round's own work
        "setup": first_ended[0] - started - statistics.median(times),
        "peak": peak_memory(),
        "disk": disk,
    }


def measured(form: str, sizes: tuple[tuple[int, int], ...]) -> list[list[str]]:
    """Measure sizes of one form, each in its own process, and fit the growth."""
    entries = []
    for users, rounds in sizes:
        say(f"scale: {users:,} users, {form}")
        asked = ["--users", str(users), "--rounds", str(rounds), "--form", form]
        entries.append(run_module("scale", asked))
    counts = [entry["users"] for entry in entries]
    rows = [
        [
            form,
            f"{e['users']:,}",
            e["round"],
            duration(e["setup"]),
            format_bytes(e["peak"]),
            format_bytes(e["disk"]),
        ]
        for e in entries
    ]
    fits = [f"{exponent(counts, [e[key] for e in entries]):.2f}" for key in ("seconds", "peak")]
    return [*rows, [form, "exponent", fits[0], "", fits[1], ""]]


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--users", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--form", choices=FORMS, default=MEMORY)
    given = parser.parse_args()
    if given.users:
        print(json.dumps(measure(given.users, given.rounds, given.form)))
    else:
        large = QUICK_LARGE if given.quick else LARGE
        rows = measured(MEMORY, QUICK if given.quick else SIZES)
        rows += [row for form in (FILE, SUMMED) for row in measured(form, large)]
        about = f"""Rounds of nFedGNN on generated graphs of degree {DEGREE:g}, {ACTIVE} active of
            {FEATURES} features, all users asked in form *memory*, one in a hundred in the others.
            Peak memory is of the whole process."""
        head = ["form", "users", "a round", "until the first", "peak memory", "disk"]
        print(json.dumps([table("Many users", about, head, rows)]))


if __name__ == "__main__":
    main()
