"""Communities as clients: FedAvg beside a plain PyG loop, FedGLS beside Fed-GNN, and how both grow.

What is compared meets the same state of the machine: the two sides take turns, round by round or a
few rounds at a time. Every part is measured in a process of its own.
Run alone: ``python -m benchmarks.fedgls [--quick]``.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.ego import timed
from benchmarks.fedgls_loop import PlainLoop
from benchmarks.fedgls_sizes import measure_clients, measure_learner
from benchmarks.fedgls_start import measure_start
from benchmarks.measure import exponent, part_main, run_part, say, summary
from flower_graph.apps.run import client_app
from flower_graph.client.state import forget_run
from flower_graph.data import load_data
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import DataError
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.ops.grouped import one_thread
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.structure_fedavg.cohort import StructureCohort
from flower_graph.strategies.structure_fedavg.config import FedGLSConfig
from flower_graph.strategies.structure_fedavg.method import METHOD, structure_settings
from flower_graph.strategies.structure_fedavg.networks import initial_models

# Rounds in parts of the loop's and of Fed-GNN's; seconds and bytes to the first round; growth
TARGETS = {"loop": 1 / 3, "fedgls": 2.0, "start": 5.0, "bytes": 700e6, "exponent": 1.0}
CORA, LINQS = "fedgls/cora", "fedgls/cora-linqs"
# FedAvg of a GCN; without weight decay and dropout, the loop's weights must be the same.
FEDAVG = [
    *("strategy.name=fed-gnn", "strategy.local_epochs=3", "strategy.weight_decay=0"),
    *("strategy.learning_rate=0.01", "strategy.optimiser=keep", "graph.graphless_ratio=0"),
    *("partition.clients=10", "model.hidden=64", "model.dropout=0", "model.input_dropout=0"),
]
METHODS = ("fed-gnn", "structure-fedavg")
THREADS = (1, 2)
WARM_UP = 2  # rounds that are not counted: packing, first touch of memory
COMPARED = 5  # rounds after which the weights are compared
COUNTS = {"fedavg": 40, "methods": 5, "start": 5}  # rounds, turns, processes
TURN = 6  # rounds that a method takes before it is the other's turn
LEARNER_SIZES, CLIENT_SIZES = (1_000, 10_000, 50_000), (8, 80, 800)
QUICK_LEARNER, QUICK_CLIENTS = (100, 200), (4, 8)


class Engine:
    """The batched engine without Flower: what a SuperNode with all clients computes."""

    def __init__(self, config: FedGLSConfig) -> None:
        self.settings = structure_settings(config)
        self.cohort = StructureCohort(METHOD.graphs(config), self.settings)
        self.models, self.rounds = initial_models(self.settings), 0

    def round(self) -> None:
        """Train all clients, average, and measure the mean at every client."""
        self.rounds += 1
        self.cohort.start_from(self.models)
        trained = self.cohort.train(self.rounds)
        self.models, _, _ = self.cohort.mean_models(trained.diverged)
        self.cohort.start_from(self.models)
        self.cohort.evaluate()


def flower_rounds(
    config: FedGLSConfig, rounds: int, between: Callable[[], None] = lambda: None
) -> tuple[list[float], Sequence[Any]]:
    """Run a configuration in process with one SuperNode."""
    seconds: list[float] = []

    def on_round(report: RoundReport) -> None:
        nonlocal ended
        seconds.append(time.perf_counter() - ended)
        between()
        ended = time.perf_counter()

    grid = InProcessGrid(client_app(config, None), num_supernodes=1, seed=config.seed)
    strategy = method_of(config).build_strategy(config, None)
    logging.getLogger("flwr").setLevel(logging.WARNING)  # as in `flower-graph run`
    ended = time.perf_counter()
    result = strategy.start(grid, num_rounds=rounds, on_round=on_round)
    forget_run(grid.run.run_id)
    return seconds, [array.numpy() for array in result.arrays.values()]


def measure_fedavg(name: str, rounds: int) -> dict[str, Any]:
    """Compare FedAvg over communities with the plain loop: weights, then time."""
    say(f"fedgls: {name}, FedAvg beside a loop")
    config = _config(name, FEDAVG)
    graphs, settings = METHOD.graphs(config), structure_settings(config)
    loops = {
        layout: PlainLoop(graphs, settings, sparse=layout == "sparse")
        for layout in ("dense", "sparse")
    }
    engine, runs = Engine(config), []
    for _ in range(COMPARED):
        engine.round()
        loops["dense"].round()
    _, arrays = flower_rounds(config, COMPARED)
    goal = loops["dense"].model()
    model = ModelWeights(*(torch.from_numpy(array.copy()) for array in arrays))
    apart = {"round": _apart(model, goal), "engine": _apart(engine.models[0], goal)}
    for threads in THREADS:
        torch.set_num_threads(threads)
        works = {"engine": engine.round} | {key: loop.round for key, loop in loops.items()}
        times: dict[str, list[float]] = {key: [] for key in works}

        def between() -> None:
            for key, work in works.items():  # noqa: B023 - called within this turn
                times[key].append(timed(work))  # noqa: B023

        times["round"], _ = flower_rounds(config, WARM_UP + rounds, between)
        runs.append({"threads": threads, **{k: summary(t[WARM_UP:]) for k, t in times.items()}})
    nodes = sum(graph.y.numel() for graph in graphs)
    sizes = {"data": config.data.name, "clients": len(graphs), "nodes": nodes}
    return {**sizes, "compared": COMPARED, "apart": apart, "runs": runs}


def measure_methods(name: str, turns: int) -> dict[str, Any]:
    """Compare a round of FedGLS with one of Fed-GNN, both as shipped, in turns."""
    say(f"fedgls: {name}, FedGLS beside Fed-GNN")
    configs = {method: _config(name, [f"strategy.name={method}"]) for method in METHODS}
    runs = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        for _ in range(turns):
            for method, config in configs.items():
                seconds, _ = flower_rounds(config, 1 + TURN)
                times[method] += seconds[1:]
        sides = {key: summary(t) for key, t in times.items()}
        learner = summary(_learner_seconds(configs[METHODS[1]], turns * TURN))
        runs.append({"threads": threads, **sides, "learner": learner})
    return {"data": configs[METHODS[0]].data.name, "runs": runs}


def _learner_seconds(config: FedGLSConfig, rounds: int) -> list[float]:
    """Time what of each round is the graph learners': their step, and the graphs it makes."""
    engine, seconds = Engine(config), []
    learners = engine.cohort.learners
    assert learners is not None
    for _ in range(1 + rounds):
        engine.round()
        with one_thread(True):  # as in a round of so few nodes
            seconds.append(timed(lambda: (engine.cohort.learn_structure(), learners.edges())))
    return seconds[1:]


def _config(name: str, settings: list[str]) -> FedGLSConfig:
    config = load_config(name, [*settings, "device=cpu"])
    return config


def _apart(one: ModelWeights, other: ModelWeights) -> float:
    """Return the largest difference of two models' weights."""
    pairs = (one.first, other.first), (one.rest, other.rest)
    return max(float((a - b).abs().max()) for a, b in pairs)


def _data_name() -> str:
    config = load_config(CORA, [])
    try:
        load_data(config.data, seed=config.seed, download=False)
    except DataError:
        return LINQS
    return CORA


CASES: dict[str, Callable[..., Any]] = {
    "fedavg": measure_fedavg,
    "methods": measure_methods,
    "start": lambda name, repeats: measure_start([name, *FEDAVG], repeats),
    "learner": measure_learner,
    "clients": measure_clients,
}


def _part(case: str, *arguments: object) -> Any:
    """Measure a case in a process of its own."""
    return run_part("fedgls", ["--case", json.dumps([case, *arguments])])


def measure_all(quick: bool) -> dict[str, Any]:
    """Measure everything."""
    load, name = os.getloadavg()[0], LINQS if quick else _data_name()
    many = dict.fromkeys(COUNTS, 1) if quick else COUNTS
    found = {case: _part(case, name, count) for case, count in many.items()}
    found["learner"] = [_part("learner", n) for n in (QUICK_LEARNER if quick else LEARNER_SIZES)]
    sizes = QUICK_CLIENTS if quick else CLIENT_SIZES
    found["clients"] = {m: [_part("clients", m, n) for n in sizes] for m in METHODS}
    fits = {}
    for method, entries in found["clients"].items():
        seconds = [entry["round"]["median"] for entry in entries]
        fits[method] = {
            "all": exponent(sizes, seconds),
            "last-step": exponent(sizes[-2:], seconds[-2:]),
        }
    return {"config": name, "load": load, **found, "exponents": fits, "targets": TARGETS}


if __name__ == "__main__":
    part_main(CASES, measure_all)
