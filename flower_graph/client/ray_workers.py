"""The workers of a run on Ray: actors that the driver creates, and that end with it.

Flower gives a message to any free actor of its own, on any machine. That actor passes the message
on to the worker that keeps the SuperNode's clients (`RayHome`), and imports neither PyTorch nor the
engine. A SuperNode's worker is its ``partition-id`` modulo the number of workers.

The driver is the process of the ServerApp. Ray ends its actors however the driver ends. The workers
reserve no CPU: Flower's actors hold all CPUs, and wait while a worker answers. If a machine dies,
Ray restarts its workers elsewhere with empty memory.
"""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import ray
from flwr.app import Context, Message, RecordDict
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flower_graph.client.home import Home
from flower_graph.config.common import CHECKPOINTS
from flower_graph.errors import ConfigError, StateLostError
from flower_graph.handed import take_over
from flower_graph.records.warned import counted_warnings
from flower_graph.storage import files
from flower_graph.storage.reading import MOST_TENSORS, read_bytes
from flower_graph.wire.client_errors import lost_reply

LOG = logging.getLogger(__name__)
Actor = Any  # a handle of one of Ray's, which gives its methods no types
GPUS = "resident-num-gpus"  # of the run config
OUT = "output-dir"  # of the run config
POLL = 0.02  # seconds between two looks whether Flower has started Ray
RESTART = 60.0  # seconds at most that a worker may take to start again
LOST = "the process that keeps its clients died, or its machine did"


@dataclass(frozen=True)
class OnRay:
    """A run whose clients live on Ray."""

    run_id: int
    reference: str  # the ClientApp that answers, ``"package.module:attribute"``
    supernodes: int
    out: Path  # the run's output folder, on the driver's machine
    gpus: float = 0.0  # of a worker, or a part of one; 0: a worker for each core instead

    def state(self, base: Path) -> Path:
        return base / f"run-{self.run_id}"


class RayWorker:
    """Keeps the clients of some SuperNodes of one run between messages."""

    # made: settings and data from the driver; base: its folder of state of all runs; machine: Ray's
    # name of its machine; folders: an actor that is its `Folders`, if there are other machines
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
        os.environ[files.STATE_VARIABLE] = str(base)
        self._home = Home(run.reference)

    def answer(self, message: Message, context: Context) -> tuple[Message, RecordDict]:
        context.node_config = {**context.node_config, files.STATE_DIR: files.IN_PROCESS}
        context.run_config = {**context.run_config, OUT: str(self._out)}
        name, answer = files.node_name(context), partial(self._home, message, context)
        reply = answer() if self._mirror is None else self._mirror.during(name, answer)
        return reply, context.state


@dataclass
class RayHome:
    """Clients that live in one of so many workers of a run."""

    workers: int

    def __call__(self, message: Message, context: Context) -> Message:
        """Have the SuperNode's worker answer. If the worker dies, the clients' state is lost.

        Raises
        ------
        Exception
            The ClientApp's own, taken from the error that has its traceback.
        """
        number = int(str(context.node_config[files.PARTITION])) % self.workers
        worker = _worker(context.run_id, number)
        answer: tuple[Message, RecordDict]
        try:
            answer = ray.get(worker.answer.remote(message, context))
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            LOG.warning("%s: %s", LOST, error)
            # Its SuperNodes miss one message only: the next one finds it started again. The message
            # is not repeated, since a worker that was out of reach may have answered it.
            there = worker.__ray_ready__.options(max_task_retries=-1).remote()
            ray.wait([there], timeout=RESTART)
            return lost_reply(StateLostError(LOST), message)
        reply, context.state = answer
        return reply


def name_of(run_id: int, worker: int | None = None) -> str:
    """Return the namespace of a run's workers, or the name of one worker."""
    return f"flower-graph-{run_id}" + ("" if worker is None else f"-{worker}")


@lru_cache(maxsize=1)  # a worker that is lost is started again, so their number stays
def workers_of(run_id: int) -> int:
    """Count a run's workers; 0 if the ServerApp is not this project's."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sum(one["namespace"] == name_of(run_id) for one in actors)


@cache
def _worker(run_id: int, number: int) -> Actor:
    return ray.get_actor(name_of(run_id, number), name_of(run_id))


def wait_for_ray() -> None:
    """Wait until Flower, in the main thread, has started Ray or joined a cluster."""
    while not ray.is_initialized():
        if not threading.main_thread().is_alive():
            raise RuntimeError("Ray has not started; the log above says why")
        time.sleep(POLL)


@contextmanager
def ray_workers(run: OnRay, made: Mapping[str, object]) -> Iterator[None]:
    """Create a run's workers for the duration of the block: at most one a SuperNode.

    ``made`` are settings and data; each machine gets them once. ``ConfigError`` if no machine has
    the GPUs that a worker needs.
    """
    base, machine = files.default_folder(), ray.get_runtime_context().get_node_id()
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


# Files of a SuperNode on another machine ----------------------------------------------------------

# The run's folders are on the driver's machine. A worker on another machine fetches a SuperNode's
# files before its first message, and sends the changed files back before each reply.

# What a SuperNode has in the run's outputs, and its keys where it does not trust the server
NEEDED = {
    "out": ("clients/{0}/**/*", CHECKPOINTS + "/round-*/client-{0}.safetensors"),
    "state": ("parties/{0}", "parties/{0}.*", "parties/registry.json"),
}
Name = tuple[str, str]  # of a file: the folder that it is in, and its path there
Files = dict[Name, bytes | None]  # whole files; None: removed
Stamps = dict[Name, tuple[int, int, int]]  # inode, size, time of change


class Folders:
    """The folders of a run on one machine: its outputs, and its clients' further state."""

    def __init__(self, out: Path, state: Path) -> None:
        self.out, self._roots = out, {"out": out, "state": state}

    def needed(self, supernode: str) -> Files:
        """Return the files that a SuperNode begins with."""
        return self.read(
            (folder, str(path.relative_to(root)))
            for folder, root in self._roots.items()
            for pattern in NEEDED[folder]
            for path in root.glob(pattern.format(supernode))
            if path.is_file()
        )

    def read(self, names: Iterable[Name]) -> Files:
        return {name: read_bytes(self._roots[name[0]] / name[1], MOST_TENSORS) for name in names}

    def write(self, changes: Files) -> None:
        for (folder, name), data in changes.items():
            path = files.inside(self._roots[folder], name)
            if data is None:
                files.remove(path)
            else:
                with files.replaced(path) as stream:
                    stream.write(data)

    def stamps(self) -> Stamps:
        """Return a stamp for each file, which changes when the file does."""
        result = Stamps()
        for folder, root in self._roots.items():
            for path in filter(Path.is_file, root.rglob("*")):
                status = path.stat()
                stamp = status.st_ino, status.st_size, status.st_mtime_ns
                result[folder, str(path.relative_to(root))] = stamp
        return result


class Mirror:
    """Keeps SuperNodes' files on this machine equal to those in the driver's folders."""

    def __init__(self, here: Folders, there: Actor) -> None:
        self._here, self._there = here, there
        self._known = set[str]()  # SuperNodes whose files here are as there

    def during(self, supernode: str, answer: Callable[[], Message]) -> Message:
        """Answer a message of a SuperNode: fetch its files before, send changes after."""
        if supernode not in self._known:
            self._here.write(ray.get(self._there.needed.remote(supernode)))
        before = self._here.stamps()
        self._known.discard(supernode)  # if it fails, what it has changed counts for nothing
        reply = answer()
        now = self._here.stamps()
        changed = self._here.read(name for name in now if now[name] != before.get(name))
        if changed or before.keys() - now.keys():
            gone = dict.fromkeys(before.keys() - now.keys())
            ray.get(self._there.write.remote(gone | changed))
        # A client that has lost its state asks for its checkpoint: then they are fetched again
        with suppress(OSError):
            files.remove_folder(self._here.out / CHECKPOINTS)
        if not reply.has_error():
            self._known.add(supernode)
        return reply


class TemporaryFolder:
    """A folder that is removed when this process ends, even if it is killed."""

    def __init__(self) -> None:
        self.path = files.temporary_folder()
        # Python runs nothing any more in a process that is killed. A shell sees that its pipe is
        # closed; a grandchild, because Ray kills the children of a worker with it.
        waiting = 'exec 3<&0; (cat <&3 > /dev/null; rm -rf "$0") &'
        command = ["/bin/sh", "-c", waiting, str(self.path)]
        self._shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._shell.wait()
