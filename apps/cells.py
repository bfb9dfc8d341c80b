"""Cells of a paper's table: one config, several seeds, run over the machine's cores, kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flower_graph.apps.runner import simulate
from flower_graph.config import load_config
from flower_graph.files import write_json

# Memory, not cores, is the limit on large machines: a GAT on PubMed holds 1.5 GB of weights.
MAX_WORKERS = 8


# Trains a config's network in one piece and gives, for every epoch, an object with
# ``cross_entropy``, ``val_accuracy`` and ``test_accuracy``. A function of a module, since workers
# import it by its name.
TrainCentralised = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Cell:
    """One method on one data set with one model.

    Attributes
    ----------
    data, model, method : str
        Names as the table has them.
    config : str
        Shipped config to start from.
    overrides : tuple of str
        Settings laid over it.
    centralised : bool
        Whether the network is trained in one piece.
    """

    data: str
    model: str
    method: str
    config: str
    overrides: tuple[str, ...]
    centralised: bool = False


@dataclass
class Curves:
    """What one run gave, round by round."""

    cross_entropy: list[float]
    val_accuracy: list[float]
    test_accuracy: list[float]
    bytes_up: dict[str, int] = field(default_factory=dict)

    @property
    def best_round(self) -> int:
        """Index of the first round with the best validation accuracy."""
        return self.val_accuracy.index(max(self.val_accuracy))

    @property
    def best_val(self) -> float:
        """Best validation accuracy."""
        return max(self.val_accuracy)

    @property
    def test_at_best_val(self) -> float:
        """Test accuracy at the best validation accuracy."""
        return self.test_accuracy[self.best_round]


Runs = dict[Cell, dict[int, Curves]]


def run_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    rounds: int,
    folder: Path,
    centralised: TrainCentralised,
    echo: Callable[[str], None] = print,
) -> Runs:
    """Run every cell with every seed, as many at a time as there are cores.

    Parameters
    ----------
    cells : sequence of Cell
        What to run.
    seeds : sequence of int
        One run for each.
    rounds : int
        Rounds of every run.
    folder : Path
        Where runs are kept; those that are there already are read, not run.
    centralised, echo : callable
        Runs the cells that are ``centralised``; is told of every run that ends.

    Returns
    -------
    dict
        Curves by cell and seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(cell, seed) for cell in cells for seed in seeds]
    missing = [job for job in wanted if not _path(folder, *job, rounds).exists()]
    workers = max(1, min(os.cpu_count() or 1, len(missing), MAX_WORKERS))
    if missing:
        with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_one_thread) as pool:
            futures = {
                pool.submit(_run, *job, rounds, _path(folder, *job, rounds), centralised): job
                for job in missing
            }
            for number, future in enumerate(as_completed(futures), start=1):
                best = future.result()
                cell, seed = futures[future]
                name = f"{cell.data} {cell.model} {cell.method} seed {seed}"
                echo(f"{number}/{len(missing)}  {name}  test at best validation {best:.3f}")
    runs: Runs = {}
    for cell, seed in wanted:
        stored = json.loads(_path(folder, cell, seed, rounds).read_text())
        runs.setdefault(cell, {})[seed] = Curves(**stored["curves"])
    return runs


def _path(folder: Path, cell: Cell, seed: int, rounds: int) -> Path:
    text = json.dumps([asdict(cell), seed, rounds])
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"


def _one_thread() -> None:
    """Give each worker one core: two runs side by side beat one run on two threads."""
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def _run(cell: Cell, seed: int, rounds: int, path: Path, centralised: TrainCentralised) -> float:
    config = load_config(cell.config, [*cell.overrides, f"seed={seed}", f"rounds={rounds}"])
    if cell.centralised:
        curves = _curves(centralised(config), {})
    else:
        reports = simulate(config)
        curves = _curves(reports, reports[-1].bytes.get("up", {}))
    stored = {"cell": asdict(cell), "seed": seed, "rounds": rounds, "curves": asdict(curves)}
    write_json(path, stored)
    return curves.test_at_best_val


def _curves(reports: Sequence[Any], bytes_up: dict[str, int]) -> Curves:
    return Curves(
        [report.cross_entropy for report in reports],
        [report.val_accuracy for report in reports],
        [report.test_accuracy for report in reports],
        dict(bytes_up),
    )


def row(
    table: str,
    cell: Cell,
    metric: str,
    values: Sequence[float],
    seeds: Sequence[int],
    rounds: int,
    paper: float | None = None,
) -> dict[str, Any]:
    """Make one row of ``table.json``; every paper's table has this form."""
    return {
        "table": table,
        "data": cell.data,
        "model": cell.model,
        "method": cell.method,
        "metric": metric,
        "paper": paper,
        "mean": fmean(values),
        "std": stdev(values) if len(values) > 1 else 0.0,
        "values": list(values),
        "seeds": list(seeds),
        "settings": {
            "config": cell.config,
            "overrides": list(cell.overrides),
            "rounds": rounds,
            "centralised": cell.centralised,
        },
    }
