"""The workers of a run on Ray: actors that the driver creates, and that end with it.

The driver is the process of the ServerApp. Ray ends its actors however the driver ends. The workers
reserve no CPU: Flower's actors hold all CPUs, and wait while a worker answers. If a machine dies,
Ray restarts its workers elsewhere with empty memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from flwr.app import Context, Message, RecordDict
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flower_graph.client.resident.app import load_app
from flower_graph.client.resident.mirror import Folders, Mirror, TemporaryFolder
from flower_graph.client.resident.on_ray import Actor, name_of
from flower_graph.errors import ConfigError
from flower_graph.handed import take_over
from flower_graph.records.warned import counted_warnings
from flower_graph.storage.files import STATE_VARIABLE, default_folder
from flower_graph.storage.places import IN_PROCESS, STATE_DIR, node_name

__all__ = ["GPUS", "OnRay", "RayWorker", "ray_workers", "wait_for_ray"]

GPUS = "resident-num-gpus"  # of the run config
OUT = "output-dir"  # of the run config
POLL = 0.02  # seconds between two looks whether Flower has started Ray


@dataclass(frozen=True)
class OnRay:
    """A run whose clients live on Ray.

    Attributes
    ----------
    run_id : int
        Flower's number of the run.
    reference : str
        The ClientApp that answers, ``"package.module:attribute"``.
    supernodes : int
        Number of SuperNodes.
    out : Path
        The run's output folder, on the driver's machine.
    gpus : float
        GPUs of a worker, or a part of one; 0: a worker for each core instead.
    """

    run_id: int
    reference: str
    supernodes: int
    out: Path
    gpus: float = 0.0

    def state(self, base: Path) -> Path:
        """Return the run's folder of client state, in the folder of all runs."""
        return base / f"run-{self.run_id}"


class RayWorker:
    """Keeps the clients of some SuperNodes of one run between messages.

    Parameters
    ----------
    run : OnRay
        The run.
    made : Mapping[str, object]
        Settings and data from the driver.
    base : Path
        The driver's folder of state of all runs.
    machine : str
        Ray's name of the driver's machine.
    folders : ActorHandle or None
        An actor that is the driver's `Folders`, if there are other machines.
    """

    def __init__(
        self, run: OnRay, made: Mapping[str, object], base: Path, machine: str, folders: Actor
    ) -> None:
        # Not at the top: Flower's actors load this class to call it, and need no PyTorch
        from flower_graph.engine.machine import keep_freed_memory

        keep_freed_memory()  # the clients of all rounds share this process
        take_over(made)
        # Ray ends this process without a word: the first warnings are told, the server counts
        self._warned = ExitStack()
        self._warned.enter_context(counted_warnings())
        self._out, self._mirror = run.out, None
        if ray.get_runtime_context().get_node_id() != machine:
            self._folder = TemporaryFolder()
            base, self._out = self._folder.path / "state", self._folder.path / "out"
            self._mirror = Mirror(Folders(self._out, run.state(base)), folders)
        os.environ[STATE_VARIABLE] = str(base)
        self._app = load_app(run.reference)

    def answer(self, message: Message, context: Context) -> tuple[Message, RecordDict]:
        context.node_config = {**context.node_config, STATE_DIR: IN_PROCESS}
        context.run_config = {**context.run_config, OUT: str(self._out)}
        if self._mirror is None:
            return self._app(message, context), context.state
        supernode = node_name(context)
        reply = self._mirror.during(supernode, lambda: self._app(message, context))
        if reply.has_error():
            self._mirror.forget(supernode)
        return reply, context.state


def wait_for_ray() -> None:
    """Wait until Flower, in the main thread, has started Ray or joined a cluster."""
    while not ray.is_initialized():
        if not threading.main_thread().is_alive():
            raise RuntimeError("Ray has not started; the log above says why")
        time.sleep(POLL)


@contextmanager
def ray_workers(run: OnRay, made: Mapping[str, object]) -> Iterator[None]:
    """Create a run's workers for the duration of the block: at most one a SuperNode.

    Parameters
    ----------
    run : OnRay
        The run.
    made : Mapping[str, object]
        Settings and data; each machine gets them once.

    Raises
    ------
    ConfigError
        If no machine has the GPUs that a worker needs.
    """
    base, machine = default_folder(), ray.get_runtime_context().get_node_id()
    things, workers, places = ray.put(made), [], _places(run.gpus)[: run.supernodes]
    folders = None
    if len(_machines()) > 1:  # else nobody asks for them
        folders = _actor(Folders, machine, False).remote(run.out, run.state(base))
    for number, place in enumerate(places):
        name = {"name": name_of(run.run_id, number), "namespace": name_of(run.run_id)}
        options = _actor(RayWorker, place, num_gpus=run.gpus, **name)
        workers.append(options.remote(run, things, base, machine, folders))
    try:
        yield
    finally:
        # Whoever calls Ray after Flower has ended it starts another
        for actor in filter(None, (*workers, folders) if ray.is_initialized() else ()):
            ray.kill(actor)


def _actor(kind: type, machine: str, soft: bool = True, /, **more: object) -> Actor:
    """Make the class of an actor for a machine; ``soft``: another machine if that one is dead."""
    placed = NodeAffinitySchedulingStrategy(machine, soft=soft)
    actor: Actor = ray.remote(kind)
    # Ray draws the machine of an actor that asks for nothing: so each asks for a byte of memory
    return actor.options(num_cpus=0, memory=1, max_restarts=-1, scheduling_strategy=placed, **more)


def _places(gpus: float) -> list[str]:
    """Return the machine of each possible worker, the machines in turn."""
    of, each = ("GPU", gpus) if gpus else ("CPU", 1.0)
    counts = {name: int(has.get(of, 0) / each) for name, has in _machines().items()}
    if not any(counts.values()):
        raise ConfigError(f"{GPUS}: {gpus:g}; no machine of the Ray cluster has as many")
    turns = range(max(counts.values()))
    return [name for turn in turns for name, count in counts.items() if turn < count]


def _machines() -> dict[str, dict[str, float]]:
    there = [one for one in ray.nodes() if one["Alive"]]  # type: ignore[no-untyped-call]
    return {one["NodeID"]: one["Resources"] for one in there}
