"""The workers of a run on Ray: actors that the driver creates, and that end with it.

The driver is the process of the ServerApp. However it ends, Ray ends the actors that it created,
which children of Flower's actors would not outlast. They reserve no CPU: Flower's actors hold them
all, and wait while a worker answers. A worker that dies with its machine is started again by Ray on
another, with empty memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from flwr.app import Context, Message, RecordDict
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flower_graph.client.resident.app import load_app
from flower_graph.client.resident.on_ray import name_of
from flower_graph.engine.machine import keep_freed_memory
from flower_graph.storage.places import IN_PROCESS, STATE_DIR

__all__ = ["RayWorker", "ray_workers", "wait_for_ray"]

POLL = 0.02  # seconds between two looks whether Flower has started Ray


class RayWorker:
    """Keeps the clients of some SuperNodes of one run between messages.

    Parameters
    ----------
    reference : str
        The ClientApp that answers, ``"package.module:attribute"``.
    """

    def __init__(self, reference: str) -> None:
        keep_freed_memory()  # the clients of all rounds share this process
        self._app = load_app(reference)

    def answer(self, message: Message, context: Context) -> tuple[Message, RecordDict]:
        """Answer a message; return the reply and the context's state."""
        context.node_config = {**context.node_config, STATE_DIR: IN_PROCESS}
        return self._app(message, context), context.state


def wait_for_ray() -> None:
    """Wait until Flower, in the main thread, has started Ray or joined a cluster."""
    while not ray.is_initialized():
        if not threading.main_thread().is_alive():
            raise RuntimeError("Ray has not started; the log above says why")
        time.sleep(POLL)


@contextmanager
def ray_workers(run_id: int, reference: str, supernodes: int) -> Iterator[None]:
    """Have a run's workers as long as the block lasts: one a core, and no more than SuperNodes.

    Parameters
    ----------
    run_id : int
        Flower's number of the run.
    reference : str
        The ClientApp that answers, ``"package.module:attribute"``.
    supernodes : int
        How many SuperNodes there are.
    """
    actor: Any = ray.remote(RayWorker)  # Ray gives its methods no types
    workers = []
    for number, machine in enumerate(_places()[:supernodes]):
        options = actor.options(
            name=name_of(run_id, number),
            namespace=name_of(run_id),
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=True),
        )
        workers.append(options.remote(reference))
    try:
        yield
    finally:
        for worker in workers:
            ray.kill(worker)


def _places() -> list[str]:
    """Return the machines of the workers that there can be, one of each machine in turn."""
    machines = [one for one in ray.nodes() if one["Alive"]]  # type: ignore[no-untyped-call]
    cores = {one["NodeID"]: int(one["Resources"].get("CPU", 0)) for one in machines}
    turns = range(max(cores.values()))
    return [name for turn in turns for name, count in cores.items() if turn < count]
