"""Experiments of a paper's table: one config, several seeds, run over the machine's cores, kept."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from flower_graph.apps.reproduce.curves import Curves, curves_of, plain_curves, read_curves
from flower_graph.apps.run import simulate_whole
from flower_graph.config.common import RunConfig
from flower_graph.config.load import load_config, to_dict
from flower_graph.engine.memory import peak_memory
from flower_graph.storage.files import write_json

# Memory, not cores, is the limit on large machines: a GAT on PubMed holds 1.5 GB of weights.
MAX_WORKERS = 8


# Trains a config's network in one piece and gives, for every epoch, an object with
# ``cross_entropy``, ``val_accuracy`` and ``test_accuracy``. A function of a module, since workers
# import it by its name.
TrainCentralised = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Experiment:
    """One method on one data set with one model."""

    data: str  # Names as the table has them
    model: str
    method: str
    config: str  # Shipped config to start from
    overrides: tuple[str, ...]  # Settings laid over it
    centralised: bool = False  # Whether the network is trained in one piece


class Run(NamedTuple):
    """One run of an experiment."""

    cell: Experiment
    seed: int
    rounds: int


Cell = Experiment
Job = Run
Runs = dict[Experiment, dict[int, Curves]]


def run_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    rounds: int,
    folder: Path,
    centralised: TrainCentralised,
    echo: Callable[[str], None] = print,
) -> Runs:
    """Run every cell with every seed; see ``run_jobs``."""
    jobs = [Job(cell, seed, rounds) for cell in cells for seed in seeds]
    return run_jobs(jobs, folder, centralised, echo)


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    centralised: TrainCentralised | None = None,
    echo: Callable[[str], None] = print,
    *,
    fresh: bool = True,
) -> Runs:
    """Run the jobs, as many at a time as there are cores."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = missing_jobs(jobs, folder)
    if missing:
        with ProcessPoolExecutor(
            workers_for(missing),
            get_context("spawn"),
            initializer=one_thread,
            max_tasks_per_child=1 if fresh else None,
        ) as pool:
            futures = {
                pool.submit(_run, job, _path(folder, job), centralised, fresh): job
                for job in missing
            }
            try:
                for number, future in enumerate(as_completed(futures), start=1):
                    best = future.result()
                    cell, seed, _ = futures[future]
                    name = f"{cell.data} {cell.model} {cell.method} seed {seed}"
                    echo(f"{number}/{len(missing)}  {name}  test at best validation {best:.3f}")
            except BaseException:
                # What has not begun would run on for minutes before anybody saw the error.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return _read_runs(jobs, folder)


def run_stages(
    stages: Sequence[Sequence[Job]],
    folder: Path,
    after: Callable[[], None],
    centralised: TrainCentralised | None = None,
    *,
    fresh: bool = False,
) -> None:
    """Run one stage after the other, in processes that run several jobs, unless `fresh`."""
    # A run may take less time than a fresh process needs for its imports.
    todo = [stage for stage in stages if missing_jobs(stage, folder)]
    for stage in todo or [[]]:
        try:
            run_jobs(stage, folder, centralised, fresh=fresh)
        finally:
            after()


def kept_runs(jobs: Sequence[Job], folder: Path) -> Runs:
    """Read those of the jobs that the folder has a run of; nothing is run."""
    return _read_runs([job for job in jobs if _is_kept(_path(folder, job), job)], folder)


def _read_runs(jobs: Sequence[Job], folder: Path) -> Runs:
    runs: Runs = {}
    for job in jobs:
        stored = json.loads(_path(folder, job).read_text())
        runs.setdefault(job.cell, {})[job.seed] = read_curves(stored["curves"])
    return runs


def missing_jobs(jobs: Sequence[Job], folder: Path) -> list[Job]:
    """List the jobs that the folder has no run of, or one with other settings, each once."""
    return [job for job in dict.fromkeys(jobs) if not _is_kept(_path(folder, job), job)]


def workers_for(jobs: Sequence[Job]) -> int:
    """Say how many processes run these jobs."""
    return max(1, min(os.cpu_count() or 1, len(jobs), MAX_WORKERS))


def _path(folder: Path, job: Job) -> Path:
    text = json.dumps([asdict(job.cell), job.seed, job.rounds])
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"


def _is_kept(path: Path, job: Job) -> bool:
    """Say whether a run is there, and of today's shipped config."""
    if not path.exists():
        return False
    return is_same(json.loads(path.read_text()).get("settings", {}), settings_of(_config(job)))


def is_same(kept: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Say whether a kept run had today's settings."""
    # A setting that the run's file does not have is newer than the run: it changed nothing then.
    return all(now.get(key) == value for key, value in kept.items())


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Give a run's settings by dotted key, without those that say where it runs."""
    settings = flat(to_dict(config))
    return {key: value for key, value in settings.items() if key not in ("device", "data.root")}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write settings by dotted key."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        inner = value if isinstance(value, dict) else {"": value}
        result |= {f"{key}.{name}".rstrip("."): item for name, item in inner.items()}
    return result


def _config(job: Job) -> Any:
    cell, seed, rounds = job
    config = replace(loaded(cell.config, cell.overrides), seed=seed, rounds=rounds)
    config.validate()
    return config


@lru_cache(maxsize=256)
def loaded(config: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Load a config once: every row of a table asks for its settings, and so does every run."""
    return load_config(config, overrides)


def one_thread() -> None:
    """Give each worker one core: two runs side by side beat one run on two threads."""
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("flwr").setLevel(logging.WARNING)  # Flower's FedAvg tells every round


def _run(job: Job, path: Path, centralised: TrainCentralised | None, fresh: bool) -> float:
    config, started = _config(job), time.perf_counter()
    if job.cell.centralised:
        assert centralised is not None, "cells that are centralised need somebody to train them"
        curves = plain_curves(centralised(config))
        curves.seconds_per_round = (time.perf_counter() - started) / job.rounds
    else:
        curves = curves_of(*simulate_whole(config))
    curves.run_seconds = time.perf_counter() - started
    curves.peak_bytes = peak_memory() if fresh else math.nan
    stored = {"cell": asdict(job.cell), "seed": job.seed, "rounds": job.rounds}
    write_json(path, stored | {"settings": settings_of(config), "curves": asdict(curves)})
    return curves.test_at_best_val
