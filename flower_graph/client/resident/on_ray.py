"""Clients on Ray: actors of the run's own keep them, and Flower's actors hand each message on.

Flower gives a message to whichever of its actors is free, on any machine. The workers are named
actors beside those; a SuperNode's is that with its ``partition-id`` modulo their number. Flower's
actors import neither PyTorch nor the engine.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import ray
from flwr.app import Context, Message, RecordDict
from ray.exceptions import RayActorError, RayTaskError

from flower_graph.errors import WorkerLostError, told
from flower_graph.storage.places import PARTITION

if TYPE_CHECKING:
    from ray.actor import ActorHandle

__all__ = ["RayHome", "name_of", "workers_of"]

LOST = "the process that keeps its clients died, or its machine did"


class RayHome:
    """Clients that live in one of a run's workers.

    Parameters
    ----------
    workers : int
        How many the run has.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def answer(self, message: Message, context: Context) -> Message:
        """Have the SuperNode's worker answer a message.

        Raises
        ------
        WorkerLostError
            If it dies over the message; Ray starts another, without what the clients kept.
        Exception
            What the ClientApp raised, from the error that has its traceback.
        """
        number = int(str(context.node_config[PARTITION])) % self._workers
        try:
            asked: Any = _worker(context.run_id, number).answer.remote(message, context)
            answer: tuple[Message, RecordDict] = ray.get(asked)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise told(WorkerLostError(f"{LOST}: {error}"), LOST) from error
        reply, context.state = answer
        return reply


def name_of(run_id: int, worker: int | None = None) -> str:
    """Return the namespace of a run's workers, or the name of one of them."""
    return f"flower-graph-{run_id}" + ("" if worker is None else f"-{worker}")


@lru_cache(maxsize=1)  # a worker that is lost is started again, so their number stays
def workers_of(run_id: int) -> int:
    """Count a run's workers; none where the ServerApp is not this project's."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sum(one["namespace"] == name_of(run_id) for one in actors)


# Any: Ray gives an actor's methods no types
@cache
def _worker(run_id: int, number: int) -> ActorHandle[Any]:
    return ray.get_actor(name_of(run_id, number), name_of(run_id))
