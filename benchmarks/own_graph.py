"""Tries every ``<method>/own-graph`` on graphs of many kinds, over one grid.

``nice python -m benchmarks.own_graph`` does the missing runs, and may be stopped at any time;
``--part 1/2`` and ``--part 2/2`` share the work between two processes. After the grid, ``--judge``
judges the shipped settings. ``python -m benchmarks.own_graph_page`` writes
``docs/results/own-graph.md`` from all runs, and packs the files of the runs into one.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import say
from benchmarks.own_graph_data import (
    COUNTS,
    KINDS,
    MEASURED,
    SHARES,
    STANDARD,
    WORDS,
    Kind,
    write_graph,
)
from flower_graph.apps.run import simulate
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.storage.files import plain, write_packed, write_text
from flower_graph.storage.reading import read_json, read_packed
from flower_graph.strategies.nfedgnn.central import train_centralised

FOLDER = Path("docs/results/own-graph")
GENERATED = Path("build/own-graph")  # graphs, made where they are not there
GRID_SEED, SEEDS = 10, (0, 1, 2)  # one chooses; on the others is judged what it chose
MOST_NODES = 5000  # of graphs that have all three
PATIENCE = "patience=20"
TO_THE_END = "patience=0"  # where validation stands still for longer at first
FORMS = {  # that make something else of features than they are
    WORDS: ("as-is", "row", "standardise"),
    COUNTS: ("as-is", "row", "presence", "standardise"),
    SHARES: ("as-is", "presence", "standardise"),
    MEASURED: ("as-is", "row", "standardise"),
    STANDARD: ("as-is", "row"),
}
LARGEST_DENSE = 2_000_000  # nodes x features up to which sparse features are made dense
# Graphs that are not generated
SETS = {
    "cora-linqs": Kind(2708, 1433, 0.81, WORDS),
    "CiteSeer": Kind(3327, 3703, 0.74, WORDS),
    "chameleon": Kind(2277, 2325, 0.23, WORDS),
    "PubMed": Kind(19717, 500, 0.80, SHARES),
}
GRAPHS = {**KINDS, **SETS}
RATE, GAT_RATE, WEIGHT = "strategy.learning_rate", "gat.learning_rate", "strategy.reg_weight"
STEPS = {RATE: (0.03, 0.01, 0.003)}
GAT_STEPS = {GAT_RATE: (0.03, 0.01, 0.005)}
SMOOTH = "strategy.reg_weight=1"  # of the forms with layers of each user's own, by validation
RELAY = {RATE: (0.1, 0.03, 0.01), WEIGHT: (1.0, 10.0, 100.0)}
ONE_LAYER = {RATE: (0.1, 0.03, 0.01), WEIGHT: (0.0, 1.0, 10.0)}  # it needs no smoothness


@dataclass(frozen=True)
class Tried:
    """A method or a reference, and the settings that are tried with it."""

    config: str
    settings: tuple[str, ...] = ()
    grid: Mapping[str, Sequence[float]] = field(default_factory=lambda: STEPS, hash=False)
    local: str | None = None  # which of `TRIED` its clients reach alone
    averaged: str | None = None  # and with a plain mean of weights


REGRESSION, CENTRAL = "logistic regression", "centralised GCN"
FED_KNN, LOCAL_KNN = "FedAvg, k-NN where no edges", "local, k-NN where no edges"
FED_GNN, LOCAL_GNN = "FedAvg of communities", "local communities"
FED_EGO, LOCAL_EGO = "FedAvg of ego-networks", "local ego-networks"
LOCAL_GAT, CNFGNN, LOCAL = "local GAT", "CNFGNN", "local training"
OWN, SUMMED = "nFedGNN", "nFedGNN summed"  # a first layer of each user, and one for all
JUDGED_ONCE = ("judge.mlp=false", "judge.every=10")  # by what no figure here is made of
# As exact as masked sums but for fixed point, in a third of the time
PLAIN = ("strategy.aggregation=plain", "strategy.alignment=plain")
EDGES = "graph.graphless_ratio=0"
METHODS = {
    SUMMED: Tried("nfedgnn/own-graph", grid=ONE_LAYER, averaged=CNFGNN),
    OWN: Tried("nfedgnn/own-graph", ("strategy.share=own", SMOOTH), RELAY, averaged=CNFGNN),
    "FedGLS": Tried("fedgls/own-graph", local=LOCAL_KNN, averaged=FED_KNN),
    "FedSCem": Tried("fedscem/own-graph", PLAIN, local=LOCAL_EGO, averaged=FED_EGO),
    "PPFL-GNN": Tried("ppfl/own-graph", JUDGED_ONCE, GAT_STEPS, LOCAL_GAT),
    "FedGTA": Tried("fedgta/own-graph", local=LOCAL_GNN, averaged=FED_GNN),
    "FED-PUB": Tried("fedpub/own-graph", local=LOCAL_GNN, averaged=FED_GNN),
    "FedAvg": Tried("fedavg/own-graph", local=LOCAL),
    "FedProx": Tried("fedprox/own-graph", local=LOCAL),
    "FedProto": Tried("fedproto/own-graph", local=LOCAL),
    "Ditto": Tried("ditto/own-graph", local=LOCAL),
    LOCAL: Tried("local/own-graph"),
}
BASELINES = {
    REGRESSION: Tried("nfedgnn/own-graph", grid={}),
    CENTRAL: Tried("nfedgnn/own-graph"),
    LOCAL_KNN: Tried("fedgls/own-graph", ("strategy.name=local-gnn-knn",)),
    FED_KNN: Tried("fedgls/own-graph", ("strategy.name=fed-gnn-knn",)),
    LOCAL_GNN: Tried("fedgls/own-graph", ("strategy.name=local-gnn-knn", EDGES)),
    FED_GNN: Tried("fedgls/own-graph", ("strategy.name=fed-gnn", EDGES)),
    LOCAL_EGO: Tried("fedscem/own-graph", ("strategy.name=self-training",)),
    FED_EGO: Tried("fedscem/own-graph", ("strategy.name=fedavg", TO_THE_END)),
    LOCAL_GAT: Tried("ppfl/own-graph", ("strategy.name=local", *JUDGED_ONCE), GAT_STEPS),
    CNFGNN: Tried(
        "nfedgnn/own-graph", ("strategy.share=averaged", "strategy.average_every=1", SMOOTH), RELAY
    ),
}
TRIED = {**METHODS, **BASELINES}
CHOSEN = (*METHODS, REGRESSION, CENTRAL)  # of the others there is what ships alone


@dataclass(frozen=True)
class Run:
    """One run; `varied` has only differences from the method's own-graph."""

    graph: str
    name: str
    varied: tuple[str, ...]
    seed: int

    def path(self, folder: Path) -> Path:
        words = [self.graph, self.name, *(one.partition(".")[2] for one in self.varied)]
        return folder / "runs" / f"{'--'.join(words).replace(' ', '-')}--{self.seed}.json"


def forms(graph: str) -> tuple[str, ...]:
    """List the forms of features that are tried on a graph."""
    kind = GRAPHS[graph]
    is_sparse = kind.form in (WORDS, COUNTS, SHARES)
    too_large = is_sparse and kind.nodes * kind.features > LARGEST_DENSE
    return tuple(one for one in FORMS[kind.form] if not (too_large and one == "standardise"))


def grid(graph: str, name: str) -> list[tuple[str, ...]]:
    """List what is tried: the form of the features, learning rates, and weights if any."""
    axes = [[f"data.features={one}" for one in forms(graph)]]
    axes += [[f"{key}={value:g}" for value in values] for key, values in TRIED[name].grid.items()]
    return list(product(*axes))


def seeds(graph: str) -> tuple[int, ...]:
    """Return the seeds on which the chosen settings are judged."""
    return SEEDS if GRAPHS[graph].nodes <= MOST_NODES else SEEDS[:1]


def best(folder: Path, graph: str, name: str) -> dict[str, Any] | None:
    """Read the grid's run that validates best, the first of equals; None without any."""
    kept = [read(folder, Run(graph, name, one, GRID_SEED)) for one in grid(graph, name)]
    known = [one for one in kept if one is not None and not math.isnan(one["val"])]
    return max(known, key=lambda one: one["val"], default=None)


def grid_runs(names: Sequence[str], graphs: Sequence[str]) -> Iterator[Run]:
    """List all runs that a choice looks at."""
    for name, graph in product((one for one in names if one in CHOSEN), graphs):
        for varied in grid(graph, name):
            yield Run(graph, name, varied, GRID_SEED)


def final_runs(folder: Path, names: Sequence[str], graphs: Sequence[str]) -> Iterator[Run]:
    """List the runs to judge: as shipped, on the grid's and other seeds; and the grid's best."""
    for name, graph in product(names, graphs):
        yield Run(graph, name, (), GRID_SEED)
    for name, graph in product(names, graphs):
        taken = best(folder, graph, name) if name in METHODS else None
        for seed in seeds(graph):
            yield Run(graph, name, (), seed)
            if taken is not None:
                yield Run(graph, name, tuple(taken["varied"]), seed)


def read(folder: Path, run: Run) -> dict[str, Any] | None:
    """Read a run's result, null as NaN; None if it was not run."""
    path = run.path(folder)
    kept = read_json(path) if path.is_file() else packed(folder).get(path.name)
    if kept is None:
        return None
    return {key: math.nan if value is None else value for key, value in kept.items()}


@cache
def packed(folder: Path) -> dict[str, Any]:
    """Read the runs that were put into one file, by the names that their files had."""
    path = folder / "runs.json.xz"
    return read_packed(path) if path.is_file() else {}


def pack(folder: Path) -> None:
    """Put the files of runs into one."""
    files = [*(folder / "runs").glob("*.json")]
    runs = packed(folder) | {path.name: read_json(path) for path in files}
    write_packed(folder / "runs.json.xz", dict(sorted(runs.items())))
    packed.cache_clear()
    for path in files:
        path.unlink()


def measure(folder: Path, run: Run) -> None:
    """Run it and write its file; a refusal is written too."""
    tried, started = TRIED[run.name], time.perf_counter()
    data = str(write_graph(run.graph, GENERATED)) if run.graph in KINDS else run.graph
    words = [f"data.name={data}", PATIENCE, f"seed={run.seed}", "device=cpu"]
    found: dict[str, Any] = {"val": math.nan, "test": math.nan}
    try:
        config = load_config(tried.config, [*words, *tried.settings, *run.varied])
        found |= _trained(run.name, config)
    except (ConfigError, DataError) as error:
        found["refused"] = str(error).replace(data, run.graph)
    found |= {"graph": run.graph, "name": run.name, "varied": run.varied, "seed": run.seed}
    found["seconds"] = round(time.perf_counter() - started, 2)
    write_text(run.path(folder), json.dumps(plain(found)) + "\n")


def _trained(name: str, config: Any) -> dict[str, Any]:
    if name == REGRESSION:
        figures = method_of(config).baselines(config)["logistic-regression"]
        return {role: figures[role] for role in ("val", "test")}
    epochs: Sequence[Any] = train_centralised(config) if name == CENTRAL else simulate(config)
    losses = [getattr(one, "loss", one.cross_entropy) for one in epochs]
    values = [-1.0 if math.isnan(one.val_accuracy) else one.val_accuracy for one in epochs]
    place = values.index(max(values))
    return {
        "val": epochs[place].val_accuracy,
        "test": epochs[place].test_accuracy,
        "best-round": place + 1,
        "rounds": len(epochs),
        "losses": [losses[0], max(losses), losses[-1]],
    }


def comes_late(run: Run) -> bool:
    """Return whether a run is of the costliest forms: a page may be written before it."""
    return "data.features=standardise" in run.varied and GRAPHS[run.graph].form != MEASURED


def run_all(folder: Path, runs: Sequence[Run], part: tuple[int, int]) -> None:
    """Do the missing runs of a part."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    mine = [run for run in dict.fromkeys(runs) if read(folder, run) is None]
    mine = [run for run in mine if hash_of(run) % part[1] == part[0] - 1]
    say(f"{len(mine)} runs")
    for number, run in enumerate(mine, start=1):
        measure(folder, run)
        if number % 50 == 0:
            say(f"{number}/{len(mine)}  {run.graph}  {run.name}")


def hash_of(run: Run) -> int:
    """Return a number that is the same in all processes."""
    return sum(run.path(Path()).name.encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """Do the missing runs, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the runs")
    parser.add_argument("--graphs", type=lambda text: text.split(","), default=list(GRAPHS))
    parser.add_argument("--names", type=lambda text: text.split(","), default=list(TRIED))
    parser.add_argument("--part", default="1/1", help="which of how many shares of the runs")
    parser.add_argument("--judge", action="store_true", help="what was chosen, on other seeds")
    given = parser.parse_args(arguments)
    one, of = map(int, given.part.split("/"))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("flwr").setLevel(logging.WARNING)
    tried = sorted(grid_runs(given.names, given.graphs), key=comes_late)
    if given.judge:
        tried = [*final_runs(given.out, given.names, given.graphs)]
    run_all(given.out, tried, (one, of))


if __name__ == "__main__":
    main()
