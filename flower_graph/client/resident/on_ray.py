"""Clients on Ray: the run's own actors keep them, and Flower's actors pass messages on.

Flower gives a message to any free actor, on any machine. The workers are named actors besides;
a SuperNode's worker is its ``partition-id`` modulo their number. Flower's actors import neither
PyTorch nor the engine.
"""

from __future__ import annotations

import logging
import time
from functools import cache, lru_cache
from typing import Any

import ray
from flwr.app import Context, Message, RecordDict
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from flower_graph.errors import StateLostError
from flower_graph.storage.files import PARTITION
from flower_graph.wire.client_errors import lost_reply

LOG = logging.getLogger(__name__)
Actor = Any  # a handle of one of Ray's, which gives its methods no types
RESTART = 60.0  # seconds at most that a worker may take to start again
LOOK = 0.2  # seconds between two looks whether it has
LOST = "the process that keeps its clients died, or its machine did"


class RayHome:
    """Clients that live in one of a run's workers.

    Parameters
    ----------
    workers : int
        The number of the run's workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def answer(self, message: Message, context: Context) -> Message:
        """Have the SuperNode's worker answer. If the worker dies, the clients' state is lost.

        Raises
        ------
        Exception
            The ClientApp's own, taken from the error that has its traceback.
        """
        number = int(str(context.node_config[PARTITION])) % self._workers
        worker = _worker(context.run_id, number)
        try:
            answer: tuple[Message, RecordDict] = ray.get(worker.answer.remote(message, context))
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            LOG.warning("%s: %s", LOST, error)
            why = "" if _starts_again(worker) else f": {error}"
            return lost_reply(StateLostError(LOST + why), message)
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


def _starts_again(worker: Actor) -> bool:
    """Wait until a worker has restarted, so that its SuperNodes miss one message only."""
    end = time.monotonic() + RESTART
    while time.monotonic() < end:
        try:
            ray.get(worker.__ray_ready__.remote(), timeout=RESTART)
            return True
        except (ActorUnavailableError, GetTimeoutError):
            time.sleep(LOOK)
        except RayActorError:  # it cannot be started
            break
    return False


@cache
def _worker(run_id: int, number: int) -> Actor:
    return ray.get_actor(name_of(run_id, number), name_of(run_id))
