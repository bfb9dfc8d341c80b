"""Many runs on all cores: single-threaded processes, and settings that tell runs apart."""

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import TypeVar

from flower_graph.config.common import RunConfig
from flower_graph.config.schema import flatten
from flower_graph.method.load import load_config, to_dict
from flower_graph.method.registry import give_file

# Memory, not cores, is the limit on large machines: a GAT on PubMed holds 1.5 GB of weights.
MAX_WORKERS = 8

T = TypeVar("T", bound=tuple[object, ...])
R = TypeVar("R")


def in_parallel(
    work: Callable[..., R], tasks: Sequence[T], apps: Sequence[Path] = ()
) -> Iterator[tuple[T, R, str, str]]:
    """Call a function with each tuple of arguments, in a process for each core with one thread.

    As each call ends, yields its arguments, its result, how many have ended, as ``3/12``, and how
    long the others may take.
    ``apps`` are files with methods of the user's own.
    """
    began = time.perf_counter()
    workers, spawn = workers_for(tasks), get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=_prepare_worker, initargs=(apps,)) as pool:
        running = {pool.submit(work, *task): task for task in tasks}
        try:
            for number, future in enumerate(as_completed(running), start=1):
                left = (time.perf_counter() - began) / number * (len(tasks) - number)
                ended = f"{number}/{len(tasks)}"
                yield running[future], future.result(), ended, time_left(left)
        except BaseException:  # what the others find would reach nobody
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise


def workers_for(tasks: Sequence[object]) -> int:
    """Return how many processes to start for these tasks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, len(tasks), MAX_WORKERS))


def _prepare_worker(apps: Sequence[Path]) -> None:
    # Two runs at a time beat one run on two threads
    import torch

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("flwr").setLevel(logging.WARNING)  # Flower's FedAvg tells every round
    for file in apps:
        give_file(file)

    def end_with_parent() -> None:  # a killed command cannot end this process
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def time_left(seconds: float) -> str:
    """Write a duration in words."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"


@lru_cache(maxsize=1024)  # a grid has hundreds
def loaded(config: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Load a config once, since many rows and runs need it."""
    return load_config(config, overrides)


def settings_of(config: RunConfig) -> dict[str, object]:
    """Return a run's settings by dotted key, without the device and the data folder."""
    settings = flatten(to_dict(config))
    return {key: value for key, value in settings if key not in ("device", "data.root")}
